"""Outputs of a denoiser by which packing its base is judged: for the run's own pictures, at all parts of the schedule.

Legend: N pictures, C channels, H and W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.diffusion.evaluation import SeededNoise
from lightning_aigc.diffusion.sampling import TimeLimit, generate
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.protocols import HasExampleBatch

PICTURES = 8
OWN_PROMPTS = ("a photograph", "a drawing of an animal")
OWN_STEPS = 20


def outputs_to_judge(module: Any, datamodule: Any) -> Iterator[Tensor]:
    """The denoiser's output for `PICTURES` pictures, one after the other, each at another part of the noise schedule.

    The pictures are the data module's, or where there is none, pictures that the model draws itself. Noise and
    timesteps come from fixed seeds.

    Args: module: a `DenoiserTraining` with its components.
    """
    if isinstance(datamodule, HasExampleBatch):
        batch = datamodule.example_batch(PICTURES)
        latents_NCHW = module.encoders.latents(batch, SeededNoise(range(len(batch["captions"]))).normal_like)
    else:
        latents_NCHW, batch = _sampled(module)
    condition = module.encoders.condition(batch, with_gradients=False)
    pictures = len(latents_NCHW)
    for part in range(PICTURES):
        row = slice(part % pictures, part % pictures + 1)
        one = {key: value[row] for key, value in batch.items() if isinstance(value, (Tensor, list))}
        noisy, timesteps, _ = module.noised(latents_NCHW[row], SeededNoise([part]), part, PICTURES)
        dtype = module.frozen_dtype()  # a ControlNet that is trained whole is float32 beside it
        autocast = torch.autocast(module.device.type, dtype=dtype, enabled=dtype != torch.float32)
        with evaluating(module), torch.enable_grad(), autocast:
            yield module.predict(noisy, timesteps, {key: value[row] for key, value in condition.items()}, one)


def _sampled(module: Any) -> tuple[Tensor, dict[str, Any]]:
    """Latents of images that the model generates for `OWN_PROMPTS`, [N, C, H, W], and their batch."""
    count = len(OWN_PROMPTS)
    images_N3HW = generate(
        module.loaded(), module.sampling_config(), list(OWN_PROMPTS), list(range(count)), device=module.device,
        num_inference_steps=OWN_STEPS, guidance_scale=1.0, time_limit=TimeLimit(math.inf),
        resolution=module.args.get("sample_resolution"),
    )  # fmt: skip
    size = torch.tensor([list(images_N3HW.shape[-2:])] * count)
    batch = {
        "pixel_values": images_N3HW * 2 - 1, "captions": list(OWN_PROMPTS), "original_size": size,
        "target_size": size, "crop_top_left": size * 0,
    }  # fmt: skip
    return module.encoders.latents(batch, SeededNoise(range(count)).normal_like), batch
