"""Generate pictures with a diffusers pipeline built around the modules in training, and leave them as they were."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers import DDIMScheduler
from torch import Tensor, nn

from lightning_aigc.devices import float32_region
from lightning_aigc.diffusion.components import Components
from lightning_aigc.errors import SamplingTooSlow


class TimeLimit:
    """Watches a pipeline's denoising steps and stops it after the second one if all of them would take too long."""

    def __init__(self, limit_s: float, total_steps: int, pictures: int) -> None:
        self.limit_s, self.total_steps, self.pictures = limit_s, total_steps, pictures
        self._ends: list[float] = []

    def __call__(self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Diffusers' `callback_on_step_end`."""
        self._ends.append(time.perf_counter())
        if len(self._ends) == 2:  # the first step pays for warm-up
            expected_s = (self._ends[1] - self._ends[0]) * self.total_steps
            if expected_s > self.limit_s:
                raise SamplingTooSlow(
                    f"{self.pictures} sample pictures would take about {math.ceil(expected_s / 60)} minutes here, so"
                    f" there are none; ask for fewer, or raise model.init_args.sample_time_limit_s ({self.limit_s:g})"
                )
        return tensors


@contextlib.contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Within: eval mode without gradients; afterwards each submodule has its own mode again."""
    training = [m for module in modules for m in module.modules() if m.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def generate(
    parts: Components,
    schedule_config: Mapping[str, Any],
    prompts: list[str],
    seeds: list[int],
    *,
    device: torch.device,
    num_inference_steps: int,
    guidance_scale: float,
    batch_size: int,
    time_limit_s: float = math.inf,
) -> Tensor:
    """Pictures float32 [N, 3, H, W] in 0..1 on the CPU. CPU generators draw the noise: seeds mean the same everywhere.

    Raises: SamplingTooSlow once the first steps show that all of them would take longer than `time_limit_s`.
    """
    modules = {
        "unet": parts.unet,
        "vae": parts.vae,
        "text_encoder": parts.text_encoders[0],
        "tokenizer": parts.tokenizers[0],
    }
    if parts.family == "sdxl":
        modules |= {"text_encoder_2": parts.text_encoders[1], "tokenizer_2": parts.tokenizers[1]}
        extras: dict[str, Any] = {"add_watermarker": False}
    else:
        extras = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipeline = parts.pipeline_class(**modules, scheduler=DDIMScheduler.from_config(schedule_config), **extras)
    pipeline.set_progress_bar_config(disable=True)
    for module in (parts.unet, parts.vae, *parts.text_encoders):
        module.to(device)
    has_mixed_dtypes = len({p.dtype for m in (parts.unet, *parts.text_encoders) for p in m.parameters()}) > 1
    autocast = torch.autocast(device.type, dtype=parts.unet.conv_in.weight.dtype, enabled=has_mixed_dtypes)
    batches = math.ceil(len(prompts) / batch_size)
    watch = TimeLimit(time_limit_s, batches * num_inference_steps, len(prompts))
    pictures = []
    with evaluating(parts.unet, parts.vae, *parts.text_encoders):
        for start in range(0, len(prompts), batch_size):
            generators = [torch.Generator("cpu").manual_seed(s) for s in seeds[start : start + batch_size]]
            with autocast:
                latents = pipeline(
                    prompt=prompts[start : start + batch_size], generator=generators, output_type="latent",
                    num_inference_steps=num_inference_steps, guidance_scale=guidance_scale,
                    callback_on_step_end=watch,
                ).images  # fmt: skip
            # The pipeline would decode under autocast, in half precision: black pictures.
            with float32_region(device):
                decoded = parts.vae.decode((latents / parts.vae.config.scaling_factor).to(parts.vae.dtype)).sample
            pictures.append(decoded.float().div(2).add(0.5).clamp(0, 1).cpu())
    return torch.cat(pictures)
