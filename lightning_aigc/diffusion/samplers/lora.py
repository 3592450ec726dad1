"""LoRASampler: images of a base model with a LoRA file at any weight, through diffusers' own loading.

Legend: N images.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from lightning_aigc.devices import autocast_dtype, dtype_named
from lightning_aigc.diffusion.families import Components, full_name
from lightning_aigc.diffusion.lora.continued import read_fitting
from lightning_aigc.diffusion.lora.file import convert, read_lora
from lightning_aigc.diffusion.objectives.ddpm import build_noise_schedule
from lightning_aigc.diffusion.objectives.flow import build_flow_schedule
from lightning_aigc.diffusion.pipeline.edits import Edit
from lightning_aigc.diffusion.pipeline.generate import SamplingBar, TimeLimit, generate, make_pipeline
from lightning_aigc.diffusion.pipeline.loading import load_components

ADAPTER = "lora"


class LoRASampler:
    """The base model of a run's `model.init_args`, loaded as the run did, with a LoRA file's weights.

    Args:
        arguments: The run's `model.init_args`.
        precision: The run's precision, which the frozen weights' dtype follows.
        accelerator: The run's; auto or one that is not here takes what this machine has.
        lora: A file in the kohya or diffusers layout; None for the base model alone.

    Raises: ModelError for a model or LoRA that cannot be loaded, or a LoRA of another base model.

    Example:
        >>> sampler = LoRASampler({"pretrained_model_name_or_path": "embedded:sd"}, "32-true", "cpu", lora=None)
        >>> tuple(sampler.sample([("a red mug", 0)], num_inference_steps=2).shape)
        (1, 3, 64, 64)
    """

    def __init__(self, arguments: Mapping[str, Any], precision: str, accelerator: str, lora: Path | None) -> None:
        self.arguments, self.has_lora = arguments, lora is not None
        self.device = choose_device(accelerator)
        self.components, self.schedule_config = base_of_run(arguments, precision)
        self._pipeline = make_pipeline(self.components, self.schedule_config)
        if lora is not None:
            self._load(lora)
            for part in (self.components.denoiser, *self.components.text_encoders):
                for name, parameter in part.named_parameters():
                    if (
                        "lora_" in name or "lokr_" in name or "hada_" in name
                    ):  # float32, as they were trained; `generate` then uses autocast
                        parameter.data = parameter.data.float()

    def _load(self, path: Path) -> None:
        file = read_lora(path)
        if file.layout == "kohya" and any(name.endswith(".dora_scale") for name in file.state):
            with tempfile.TemporaryDirectory() as folder:  # diffusers ignores the magnitudes of this layout
                self._load(convert(path, Path(folder) / path.name, "diffusers"))
            return
        _, factors = read_fitting(path, self.components)
        if not factors:
            self._pipeline.load_lora_weights(str(path), adapter_name=ADAPTER)
            return
        from lightning_aigc.diffusion.lora.lokr_layers import add_factors

        add_factors(self.components.denoiser, factors, ADAPTER)

    def sample(
        self,
        pairs: Sequence[tuple[str, int]],
        weight: float = 1.0,
        negative_prompt: str | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        label: str | None = None,
        sources: Sequence[Sequence[Image]] | None = None,
        resolution: int | None = None,
    ) -> Tensor:
        """One image for each prompt and seed, float32 [N, 3, H, W] in 0..1; unset settings are the run's.

        Args:
            label: Text of a progress bar; unset shows none.
            sources: For a family that edits, the images that each image starts from; its size is that of the first.
            resolution: Pixels per side.
        """
        if self.has_lora:
            self._pipeline.set_adapters(ADAPTER, weight)
        given = self.arguments
        scale = given.get("guidance_scale", 7.5) if guidance_scale is None else guidance_scale
        return generate(
            self.components,
            self.schedule_config,
            [prompt for prompt, _ in pairs],
            [seed for _, seed in pairs],
            device=self.device,
            num_inference_steps=num_inference_steps or int(given.get("num_inference_steps") or 25),
            guidance_scale=float(scale),
            time_limit=TimeLimit(math.inf) if label is None else SamplingBar(label),
            negative_prompt=negative_prompt,
            edit=None if sources is None else Edit(sources, [images[0].size for images in sources]),
            resolution=resolution or given.get("sample_resolution"),
        )


def base_of_run(arguments: Mapping[str, Any], precision: str) -> tuple[Components, Mapping[str, Any]]:
    """The pipeline's components of a run's `model.init_args`, loaded as the run did, and its noise schedule's config.

    precision: the run's, which the frozen weights' dtype follows.
    Raises: ModelError for a model that cannot be loaded.
    """
    dtype = str(arguments.get("base_dtype") or "auto")
    components = load_components(
        full_name(arguments["pretrained_model_name_or_path"]),
        denoiser_dtype=autocast_dtype(precision) if dtype == "auto" else dtype_named(dtype),
        vae_dtype=dtype_named(str(arguments.get("vae_dtype") or "float32")),
        revision=arguments.get("revision"),
        variant=arguments.get("variant"),
        takes_distilled=arguments.get("training_adapter") is not None,
        denoiser_file=arguments.get("denoiser_file"),
    )
    config = components.scheduler_config
    if components.family.is_flow:
        return components, build_flow_schedule(config, arguments.get("flow_shift") or "auto").config
    terminal, prediction = bool(arguments.get("zero_terminal_snr")), arguments.get("prediction_type")
    return components, build_noise_schedule(config, prediction, zero_terminal_snr=terminal).config


def choose_device(accelerator: str) -> torch.device:
    """The device for a Trainer's accelerator: the CPU where that was asked for, else the accelerator that is here."""
    for kind in () if accelerator == "cpu" else ("npu", "cuda"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            return torch.device(kind)
    return torch.device("cpu")
