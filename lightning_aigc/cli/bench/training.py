"""A training of a published row: random weights from configs, synthetic batches, and a clock around each step.

Legend: B batch, C channels, H and W latent height and width, T text tokens, D text width.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from lightning_aigc._lightning import Callback, LightningModule, Trainer
from lightning_aigc.cli.bench.architectures import Architecture
from lightning_aigc.cli.bench.published import PublishedRow
from lightning_aigc.devices import accelerator_module, loss_scale, peak_memory_mib, reset_peak_memory
from lightning_aigc.diffusion.families import FAMILIES, Components, Family
from lightning_aigc.diffusion.lora.training import LoRA
from lightning_aigc.diffusion.pipeline.loading import PipelineHalf
from lightning_aigc.diffusion.training.full_fine_tuning import FullFineTuning
from lightning_aigc.diffusion.training.module import DiffusionTraining

TILE = 1 << 20
"""Random numbers that are repeated over a weight, which takes a tenth of the time of drawing all."""


class TimedTraining(DiffusionTraining):
    """The training of a row: the product's module on a base that is built from configs instead of files."""

    def __init__(self, row: PublishedRow, architecture: Architecture) -> None:
        method = LoRA(rank=row.rank) if row.method == "lora" else FullFineTuning()
        self._architecture = architecture
        family = FAMILIES[architecture.family]
        super().__init__(method, family.base, learning_rate=1e-5)

    def _family(self) -> Family:
        return FAMILIES[self._architecture.family]

    def load_half(self, only: PipelineHalf | None) -> Components:
        """The components with random weights, equal on all ranks."""
        return make_components(self._architecture, self.method.denoiser_dtype(self._family(), self.frozen_dtype()))

    def configure_callbacks(self) -> list[Callback]:
        """None: a benchmark leaves no files."""
        return []

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Move the encoders that the batch replaces off the device; the check of the base's images is left out."""
        if batch_idx == 0:
            self.encoders.offload(batch)


def make_components(architecture: Architecture, dtype: torch.dtype) -> Components:
    """Denoiser and autoencoder with random weights of typical scale, on the CPU.

    Texts come encoded, so the text encoders and tokenizers are stand-ins that are never called.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        denoiser = getattr(diffusers, architecture.denoiser)(**architecture.config)
    denoiser = nn.Module.to(denoiser, dtype).to_empty(device="cpu")  # diffusers' own `to` logs a warning
    fill(denoiser)
    autoencoder = getattr(diffusers, architecture.autoencoder)(**architecture.autoencoder_config)
    for network in (denoiser, autoencoder):
        network.requires_grad_(False).eval()
    return Components(
        family=FAMILIES[architecture.family],
        denoiser=denoiser,
        vae=autoencoder,
        text_encoders=_stand_ins() if architecture.pooled_width else (),
        tokenizers=(),
        scheduler_config=dict(architecture.scheduler),
        source=FAMILIES[architecture.family].base,
    )


def _stand_ins() -> tuple[nn.Module, ...]:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        bos_token_id=0,
        eos_token_id=1,
    )
    return tuple(CLIPTextModel(config).requires_grad_(False).eval() for _ in range(2))


def fill(module: nn.Module) -> None:
    """Fill with random weights: norms one, biases zero, others and buffers normal."""
    tile = torch.randn(TILE)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            _repeat(tile * 0.5 * (parameter.numel() / parameter.shape[0]) ** -0.5, parameter.data)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            _repeat(tile, buffer)
        else:
            buffer.zero_()


def _repeat(tile: Tensor, into: Tensor) -> None:
    flat = into.view(-1)
    for start in range(0, flat.numel(), len(tile)):
        part = flat[start : start + len(tile)]
        part.copy_(tile[: len(part)])


def make_batch(row: PublishedRow, architecture: Architecture, pixels: int, batch: int) -> dict[str, Any]:
    """A batch of noise as `data` makes it from caches, or with pixels where the step contains the autoencoder."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels = int(architecture.autoencoder_config.get("latent_channels", 4 if architecture.family == "sdxl" else 32))
    side = pixels // 8
    made: dict[str, Any] = {"prompt_embeds": normal(batch, architecture.text_tokens, architecture.text_width)}
    if architecture.pooled_width:
        made["pooled_prompt_embeds"] = normal(batch, architecture.pooled_width)
    if row.encodes_images:
        made["pixel_values"] = normal(batch, 3, pixels, pixels).clamp(-1, 1)
    else:
        made["latent_moments"] = normal(batch, 2 * channels, side, side)
    if row.sources:
        made["source_latents"] = [normal(batch, channels, side, side) for _ in range(row.sources)]
    if architecture.family == "sdxl":
        size = torch.tensor([[float(pixels)] * 2] * batch)
        made |= {"original_size": size, "crop_top_left": torch.zeros_like(size), "target_size": size}
    return made


class Clock(Callback):
    """Times of the steps after `warm_up`, and the peak memory and loss scale of these steps."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.ends: list[float] = []
        self.peak_mib = 0.0
        self.loss = float("nan")
        self.scales: list[float] = []
        """Loss scale when the warm-up and the training end; empty without loss scaling."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        device = pl_module.device
        device_module: Any = accelerator_module(device)
        if device_module is not None:
            device_module.synchronize(device)
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.warm_up:
            reset_peak_memory(device)
            self._note_scale(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.peak_mib = peak_memory_mib(pl_module.device)
        self.loss = float(trainer.callback_metrics["loss"])
        self._note_scale(trainer)

    def _note_scale(self, trainer: Trainer) -> None:
        scale = loss_scale(trainer.precision_plugin)
        self.scales += [] if scale is None else [float(scale)]

    @property
    def skipped_steps(self) -> bool:
        """Whether the loss scale fell in the timed steps, so that an optimizer step was skipped."""
        return self.scales != [] and self.scales[-1] < self.scales[0]

    def steps_s(self) -> Sequence[float]:
        """Seconds of each step after the warm-up, its data and optimizer included."""
        ends = self.ends[self.warm_up - 1 :]
        return [end - begin for begin, end in itertools.pairwise(ends)]
