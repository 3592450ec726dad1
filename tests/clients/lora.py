"""LoRA files of small models, and the weights that were trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fakes.models.lora_models import EVERYTHING, adapt
from lightning_aigc.diffusion import save_lora
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.lora.file import LoRAMetadata, save_lokr
from lightning_aigc.diffusion.lora.lokr_layers import add_lokr

UNETS = ("sd", "sdxl")
FILES: list[tuple[str, Literal["kohya", "diffusers"]]] = [
    *((family, "kohya") for family in UNETS),
    *((name, "kohya" if family.original_layers else "diffusers") for name, family in TRANSFORMERS.items()),
]
"""The file that a LoRA run writes for ComfyUI, by family, and its layout."""
UNKNOWN_TO_COMFYUI = ("krea2",)
"""Families that ComfyUI 0.8 has no model of."""
FOR_COMFYUI = [(family, layout) for family, layout in FILES if family not in UNKNOWN_TO_COMFYUI]


def adapted_layers(family: str, model: nn.Module) -> list[str]:
    """Every layer that an adapter of this family can have."""
    if family not in UNETS:
        known = TRANSFORMERS[family]
        return known.adapted_layers(model, list(known.lora_layers))
    kinds = (nn.Linear, nn.Conv2d)
    return [name for name, m in model.named_modules() if isinstance(m, kinds) and name.endswith(tuple(EVERYTHING))]


def add_lora(family: str, model: nn.Module, **options: Any) -> nn.Module:
    """Adapt every layer that a LoRA of this family can have, with random weights."""
    return adapt(model, adapted_layers(family, model), **options)


def add_random_lokr(family: str, model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Add a LoKr of random weights to every layer that it can have; returns the weights with it, merged by peft."""
    base = base_state(model.requires_grad_(False))
    names = adapted_layers(family, model)
    add_lokr(model, names, rank, 1.5 * rank, 2)  # changes as large as the weights, which a sum would round away
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lokr_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return base | {f"{name}.weight": base[f"{name}.weight"] + lokr_delta(model, name) for name in names}


def lokr_delta(model: nn.Module, name: str) -> Tensor:
    """The change of a layer's weight, by peft."""
    layer: Any = model.get_submodule(name)
    (adapter,) = layer.scaling
    delta: Tensor = layer.get_delta_weight(adapter).detach()
    return delta


def write_lokr(path: Path, family: str, model: nn.Module, **options: Any) -> Path:
    """The LoKr in float32, as a run writes it."""
    described = LoRAMetadata(base_model=None if family in UNETS else family)
    return save_lokr(path, "unet" if family in UNETS else "transformer", model, described, torch.float32, **options)


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
        if ".lora_" not in name and ".lokr_" not in name
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
