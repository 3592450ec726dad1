"""LoRA files of small models, and the weights that were trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fakes.models.lora_models import EVERYTHING, adapt
from lightning_aigc.diffusion import save_lora
from lightning_aigc.diffusion.families import TRANSFORMERS

UNETS = ("sd", "sdxl")
FILES: list[tuple[str, Literal["kohya", "diffusers"]]] = [
    *((family, "kohya") for family in UNETS),
    *((name, "kohya" if family.original_layers else "diffusers") for name, family in TRANSFORMERS.items()),
]
"""The file that a LoRA run writes for ComfyUI, by family, and its layout."""


def add_lora(family: str, model: nn.Module, **options: Any) -> nn.Module:
    """Adapt every layer that a LoRA of this family can have, with random weights."""
    if family in UNETS:
        return adapt(model, EVERYTHING, **options)
    known = TRANSFORMERS[family]
    return adapt(model, known.adapted_layers(model, list(known.lora_layers)), **options)


def write(path: Path, family: str, model: nn.Module, **options: Any) -> Path:
    """The LoRA in float32, as a run writes it."""
    denoiser = {"unet" if family in UNETS else "transformer": model}
    metadata = {"base_model": {"sd": "sd1"}.get(family, family)}
    return save_lora(path, **denoiser, metadata=metadata, dtype=torch.float32, **options)


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights without the LoRA, under the names of a model without one."""
    return {
        name.replace(".base_layer", ""): tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights with the LoRA merged by peft."""
    adapted: list[Any] = [
        module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "merge")
    ]
    for module in adapted:
        module.merge()
    state = base_state(model)
    for module in adapted:
        module.unmerge()
    return state


def largest_error(found: dict[str, Tensor], base: dict[str, Tensor], trained: dict[str, Tensor]) -> float:
    """Largest error of a weight over the largest change of it by the LoRA; an unchanged weight must be equal."""
    errors = []
    for name, wanted in trained.items():
        change = (wanted - base[name]).abs().max().item()
        error = (found[name].reshape(wanted.shape) - wanted).abs().max().item()
        errors.append(error / change if change else float(error > 0))
    return max(errors)
