"""ControlNetSampler: images of a base model that follow conditions, with a saved ControlNet.

Legend: N images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightning_aigc.data.images.image_file import PictureRejectedError, load_condition, load_picture
from lightning_aigc.diffusion.controlnet import transformer as transformer_controlnet
from lightning_aigc.diffusion.controlnet import unet as controlnet_model
from lightning_aigc.diffusion.controlnet.conditions import find_maker, from_bytes, to_bytes
from lightning_aigc.diffusion.families import Components, TransformerControl
from lightning_aigc.diffusion.pipeline.generate import Control, SamplingBar, TimeLimit, generate
from lightning_aigc.diffusion.samplers.lora import base_of_run, choose_device
from lightning_aigc.errors import ModelError


class ControlNetSampler:
    """The base model and ControlNet of a run's `model.init_args`, loaded as the run did.

    Args:
        arguments: The run's `model.init_args`.
        precision: The run's precision, which the frozen weights' dtype follows.
        accelerator: The run's; auto or one that is not here takes what this machine has.
        controlnet: A ControlNet's folder.

    Raises: ModelError for a model that cannot be loaded, or a ControlNet of another base.

    Example:
        >>> from lightning_aigc.diffusion import DiffusionControlNet
        >>> _ = DiffusionControlNet("embedded:sd").save_model("edges.safetensors")
        >>> arguments = {"pretrained_model_name_or_path": "embedded:sd", "conditions": "canny"}
        >>> sampler = ControlNetSampler(arguments, "32-true", "cpu", Path("edges"))
        >>> tuple(sampler.sample(["a red mug"], [0], torch.zeros(1, 3, 64, 64), num_inference_steps=2).shape)
        (1, 3, 64, 64)
    """

    def __init__(self, arguments: Mapping[str, Any], precision: str, accelerator: str, controlnet: Path) -> None:
        self.arguments, self.device = arguments, choose_device(accelerator)
        self.components, self.schedule_config = base_of_run(arguments, precision)
        self.controlnet, self.channels = _load(self.components, str(controlnet))
        thresholds = arguments.get("canny_thresholds") or (0.1, 0.2)
        self.make = find_maker(str(arguments.get("conditions") or "canny"), thresholds)

    def conditions_of(self, paths: Sequence[Path], resolution: int, *, are_conditions: bool = False) -> Tensor:
        """Conditions made of images, float32 [N, C, H, W] in 0..1, `resolution` on the longer side of the first.

        are_conditions: the files are conditions already, as they always are for a run with `conditions: folder`.
        Raises: ModelError for a file that cannot be read.
        """
        pixels_per_latent = self.components.family.pixels_per_latent(self.components.vae)
        pictures = []
        size: tuple[int, int] | None = None
        make = None if are_conditions else self.make
        for path in paths:
            try:
                picture = load_condition(path) if make is None else load_picture(path)[0]
            except (Exception, PictureRejectedError) as error:
                raise ModelError(f"the condition {path} cannot be read: {error}; give an image") from error
            size = size or _fitting(picture.size, resolution, 8 * pixels_per_latent)
            kind = Image.Resampling.BOX if are_conditions else Image.Resampling.LANCZOS
            pictures.append(torch.from_numpy(np.array(picture.resize(size, kind))).permute(2, 0, 1))
        stacked = torch.stack(pictures)
        if make is not None:
            stacked = to_bytes(make(stacked.float() / 255), stacked.shape, "conditions")
        return from_bytes(stacked, self.channels, [str(path) for path in paths])

    def sample(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        conditions: Tensor,
        scale: float = 1.0,
        negative_prompt: str | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        label: str | None = None,
    ) -> Tensor:
        """One image for each prompt, seed and condition, float32 [N, 3, H, W] in 0..1; unset means the run's.

        label: text of a progress bar; unset shows none.
        """
        given = self.arguments
        guidance = given.get("guidance_scale", 7.5) if guidance_scale is None else guidance_scale
        return generate(
            self.components,
            self.schedule_config,
            list(prompts),
            list(seeds),
            device=self.device,
            num_inference_steps=num_inference_steps or int(given.get("num_inference_steps") or 25),
            guidance_scale=float(guidance),
            time_limit=TimeLimit(math.inf) if label is None else SamplingBar(label),
            negative_prompt=negative_prompt,
            control=Control(self.controlnet, conditions, scale),
        )


def _load(components: Components, folder: str) -> tuple[Any, int]:
    """The ControlNet in the denoiser's dtype, and the channels of a condition."""
    if isinstance(components.family.control, TransformerControl):
        found, channels = transformer_controlnet.make_controlnet(components, folder), transformer_controlnet.CHANNELS
    else:
        found = controlnet_model.make_controlnet(components, folder, None)
        channels = int(found.config.conditioning_channels)
    dtype = components.denoiser.dtype
    return found if found.dtype == dtype else found.to(dtype), channels


def _fitting(size: tuple[int, int], resolution: int, step: int) -> tuple[int, int]:
    """Width and height of about the same shape, the longer `resolution`, both multiples of what the U-Net halves."""
    width, height = size
    factor = resolution / max(width, height)
    return max(step, round(width * factor / step) * step), max(step, round(height * factor / step) * step)
