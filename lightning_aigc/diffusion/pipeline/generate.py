"""Generate images during training with a diffusers pipeline around the trained modules."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lightning_aigc.devices import float32_region
from lightning_aigc.diffusion.families import Components
from lightning_aigc.diffusion.pipeline.edits import Edit, check_edit, edit_arguments
from lightning_aigc.errors import SamplingTooSlow
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.rng import isolate_rng

LATENT_PIXELS_AT_ONCE = 4 * 64 * 64  # four images of 512 px, one of 1024 px


IMAGE_REMEDIES = {
    "not finite": "the training diverged: lower model.init_args.learning_rate",
    "black": "look at the image of step 0: if it is black too, copy the base's vae/ again; otherwise the training "
    "diverged: lower model.init_args.learning_rate",
    "constant": "the training diverged or the latents are wrongly scaled: lower model.init_args.learning_rate and look "
    "at the image of step 0",
}
"""Remedies for broken images."""


class TimeLimit:
    """Stops sampling that would exceed a time limit: after two denoising steps, the next time before the first."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.seconds_per_picture: float | None = None
        self._pictures = self._batch_size = self._steps = 0
        self._ends: list[float] = []

    def begin(self, pictures: int, batch_size: int, steps: int) -> None:
        """Start sampling. Raises: SamplingTooSlow if these would pass the limit at the speed of earlier images."""
        self._pictures, self._batch_size, self._steps, self._ends = pictures, min(batch_size, pictures), steps, []
        self._check()

    def __call__(self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Diffusers' `callback_on_step_end`."""
        self._ends.append(time.perf_counter())
        if len(self._ends) == 2:  # the first step includes warm-up
            self.seconds_per_picture = (self._ends[1] - self._ends[0]) * self._steps / self._batch_size
            self._check()
        return tensors

    def _check(self) -> None:
        expected_s = (self.seconds_per_picture or 0.0) * self._pictures
        if expected_s > self.limit_s:
            raise SamplingTooSlow(
                f"{self._pictures} sample images would take about {math.ceil(expected_s / 60)} minutes here, so"
                f" there are none; ask for fewer, or raise model.init_args.sample_time_limit_s ({self.limit_s:g})"
            )


class SamplingBar(TimeLimit):
    """No limit, and a progress bar of the denoising steps of all batches."""

    def __init__(self, label: str) -> None:
        super().__init__(math.inf)
        self._bar: tqdm[Any] = tqdm(desc=label, unit="step")

    def begin(self, pictures: int, batch_size: int, steps: int) -> None:
        self._bar.reset(total=-(-pictures // batch_size) * steps)
        super().begin(pictures, batch_size, steps)

    def __call__(self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        self._bar.update()
        if self._bar.n == self._bar.total:
            self._bar.close()
        return super().__call__(pipeline, step, timestep, tensors)


@contextlib.contextmanager
def on_device(device: torch.device, *modules: nn.Module) -> Iterator[None]:
    """Move the modules to `device` for the block, then back."""
    homes = [next(module.parameters()).device for module in modules]
    for module in modules:
        module.to(device)
    try:
        yield
    finally:
        for module, home in zip(modules, homes, strict=True):
            module.to(home)


@dataclass(frozen=True)
class Control:
    """A ControlNet, and what it is shown."""

    controlnet: nn.Module
    """diffusers' ControlNet of the pipeline's family."""
    conditions: Tensor
    """One for each image, [N, C, H, W] in 0..1, of the image's size."""
    scale: float = 1.0
    """Weight of its residuals; validate at 1, what it was trained with."""


def make_pipeline(
    components: Components, schedule_config: Mapping[str, Any], controlnet: nn.Module | None = None
) -> Any:
    """Diffusers' pipeline around these components, with the family's scheduler."""
    family = components.family
    return family.make_pipeline(components, family.make_scheduler(schedule_config), controlnet)


def generate(
    components: Components,
    schedule_config: Mapping[str, Any],
    prompts: list[str],
    seeds: list[int],
    *,
    device: torch.device,
    num_inference_steps: int,
    guidance_scale: float,
    time_limit: TimeLimit,
    batch_size: int | None = None,
    negative_prompt: str | None = None,
    control: Control | None = None,
    edit: Edit | None = None,
    resolution: int | None = None,
) -> Tensor:
    """Generate images, float32 [N, 3, H, W] in 0..1 on the CPU; CPU generators make seeds device-independent.

    resolution: pixels to a side; unset is the pipeline's own. A ControlNet's images have their condition's size, and
    those of an edit the sizes that it gives; where these differ, smaller images are padded with white.
    Raises: ModelError for sources that the family does not take, or without those that it needs; SamplingTooSlow once
        the first steps show that sampling would take longer than `time_limit`.
    """
    networks = [components.denoiser, *components.text_encoders] + ([control.controlnet] if control is not None else [])
    pipeline = make_pipeline(components, schedule_config, control.controlnet if control is not None else None)
    dtypes = {p.dtype for m in networks for p in m.parameters() if p.is_floating_point()}
    family = components.family
    pixels_per_latent = family.pixels_per_latent(components.vae)
    side = resolution or family.sample_size(components.denoiser) * pixels_per_latent
    pixels = (side, side) if control is None else tuple(control.conditions.shape[-2:])
    height, width = (each // pixels_per_latent for each in pixels)
    check_edit(family, edit)
    if edit is not None:
        width, height = (max(sides) // pixels_per_latent for sides in zip(*edit.sizes, strict=True))
    if batch_size is None:
        batch_size = max(1, min(32, LATENT_PIXELS_AT_ONCE // (height * width)))
    if edit is not None and not family.edits_in_batches:
        batch_size = 1
    groups = [list(range(len(prompts)))] if edit is None else list(edit.kinds().values())
    batches = [group[at : at + batch_size] for group in groups for at in range(0, len(group), batch_size)]
    time_limit.begin(len(prompts), batch_size, num_inference_steps)
    pictures: dict[int, Tensor] = {}
    modules_used = (components.vae, *networks)
    with on_device(device, *modules_used), evaluating(*modules_used):
        for rows in batches:
            generators = [torch.Generator("cpu").manual_seed(seeds[row]) for row in rows]
            chosen = [prompts[row] for row in rows]
            negative = None if negative_prompt is None else [negative_prompt] * len(chosen)
            seen = [edit.sources[row] for row in rows] if edit is not None and family.text_sees_sources else None
            extra = family.sampling_arguments(components, chosen, negative, guidance_scale, device, seen)
            # Stored embeddings keep their dtype where their text encoders are gone.
            texts = {
                v.dtype for k, v in extra.items() if "embeds" in k and isinstance(v, Tensor) and v.is_floating_point()
            }
            narrowest = min(dtypes | texts, key=lambda dtype: dtype.itemsize)
            autocast = torch.autocast(device.type, dtype=narrowest, enabled=len(dtypes | texts) > 1)
            if edit is not None:
                extra |= edit_arguments(pipeline, components, edit, rows, device)
                height, width = (int(extra[name]) // pixels_per_latent for name in ("height", "width"))
            elif control is None:
                extra |= {"height": side, "width": side}
            else:
                shown = control.conditions[rows[0] : rows[-1] + 1].to(device)
                assert family.control is not None
                extra |= family.control.sampling_arguments(components, shown, control.scale)
            with autocast, isolate_rng(device):
                torch.manual_seed(seeds[rows[0]])  # SD 3's pipeline draws a condition's latents from torch's own state
                sampled = pipeline(
                    generator=generators, output_type="latent",
                    num_inference_steps=num_inference_steps, callback_on_step_end=time_limit, **extra,
                ).images  # fmt: skip
            # The pipeline would decode under autocast in half precision, which gives black images.
            with float32_region(device):
                unscaled = family.unscale(components.vae, sampled, height, width)
                decoded = family.decode(components.vae, unscaled.to(components.vae.dtype))
            pictures.update(zip(rows, decoded.float().div(2).add(0.5).clamp(0, 1).cpu(), strict=True))
    return stacked([pictures[row] for row in range(len(prompts))])


def stacked(pictures: Sequence[Tensor]) -> Tensor:
    """[N, 3, H, W]; smaller images get white at the right and below."""
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (1, 2))
    pad = torch.nn.functional.pad
    return torch.stack([pad(p, (0, width - p.shape[2], 0, height - p.shape[1]), value=1.0) for p in pictures])
