"""Outputs of the denoiser on calibration images, over all parts of the noise schedule, for choosing a base's bits.

Legend: N images, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_aigc.diffusion.objectives import SeededNoise
from lightning_aigc.diffusion.pipeline.encoders import FrozenEncoders
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.protocols import HasExampleBatch

IMAGES = 8
OWN_PROMPTS = ("a photograph", "a drawing of an animal")
OWN_STEPS = 20

Noised = Callable[[Tensor, SeededNoise, int, int], tuple[Tensor, Tensor, Tensor]]
Predict = Callable[[Tensor, Tensor, dict[str, Tensor], dict[str, Any]], Tensor]


def calibration_outputs(
    network: nn.Module,
    encoders: FrozenEncoders,
    datamodule: object,
    generate: Callable[[Sequence[str], Sequence[int]], Tensor],
    noised: Noised,
    predict: Predict,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """The denoiser's output for `IMAGES` images in turn, each at another part of the noise schedule.

    The images are the data module's; without one, the model generates them. Noise and timesteps come from fixed seeds.

    Args:
        network: The module that is trained, set to eval mode meanwhile.
        generate: Generates images, float32 [N, 3, H, W] in 0..1, from prompts and seeds.
        noised: Noisy latents, their timesteps and target, from latents, noise, part and number of parts.
        predict: The denoiser's output for noisy latents, timesteps, condition and batch.
        dtype: Of the frozen denoiser; a ControlNet with full training is float32 next to it.
    """
    if isinstance(datamodule, HasExampleBatch):
        batch = datamodule.example_batch(IMAGES)
        latents_NCHW = encoders.latents(batch, SeededNoise(range(len(batch["captions"]))).normal_like)
    else:
        batch = _generated_batch(generate)
        latents_NCHW = encoders.latents(batch, SeededNoise(range(len(OWN_PROMPTS))).normal_like)
    condition = encoders.condition(batch, with_gradients=False)
    images = len(latents_NCHW)
    for part in range(IMAGES):
        row = slice(part % images, part % images + 1)
        example = {key: value[row] for key, value in batch.items() if isinstance(value, (Tensor, list))}
        noisy, timesteps, _ = noised(latents_NCHW[row], SeededNoise([part]), part, IMAGES)
        autocast = torch.autocast(encoders.device.type, dtype=dtype, enabled=dtype != torch.float32)
        with evaluating(network), torch.enable_grad(), autocast:
            yield predict(noisy, timesteps, {key: value[row] for key, value in condition.items()}, example)


def _generated_batch(generate: Callable[[Sequence[str], Sequence[int]], Tensor]) -> dict[str, Any]:
    """A batch of images that the model generates for `OWN_PROMPTS`."""
    count = len(OWN_PROMPTS)
    images_N3HW = generate(OWN_PROMPTS, range(count))
    size = torch.tensor([list(images_N3HW.shape[-2:])] * count)
    return {
        "pixel_values": images_N3HW * 2 - 1, "captions": list(OWN_PROMPTS), "original_size": size,
        "target_size": size, "crop_top_left": size * 0,
    }  # fmt: skip
