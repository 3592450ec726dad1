"""Begin a training with the LoRA or LoKr of a file, whichever program wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_aigc.diffusion.families import Components, TransformerFamily
from lightning_aigc.diffusion.lora.file import read_lora
from lightning_aigc.diffusion.lora.layers import LoRALayer
from lightning_aigc.diffusion.lora.lycoris import FactorLayer
from lightning_aigc.diffusion.lora.names import DENOISERS
from lightning_aigc.errors import ModelError

KEY = "model.init_args.lora_from"


def read_fitting(path: Path, components: Components) -> tuple[list[LoRALayer], list[FactorLayer]]:
    """The layers of a LoRA, or those of a LoKr or LoHa, that fit this pipeline.

    Raises: ModelError for a file that cannot be read, or a LoRA of another base model.
    """
    file, family = read_lora(path), components.family
    name = family.name if family.is_flow else None
    factors = file.factor_layers(name) if file.has_factors else []
    layers = [] if file.has_factors else file.layers(name)
    check_fits(path, [*layers, *factors], components)
    return layers, factors


def check_fits(path: Path, layers: Sequence[LoRALayer | FactorLayer], components: Components) -> None:
    """Raise ModelError for a layer of the denoiser that is not there, or of another size."""
    modules: dict[str, nn.Module] = dict(components.denoiser.named_modules())
    for layer in layers:
        if layer.component not in DENOISERS:
            continue
        weight: Any = getattr(modules.get(layer.module), "weight", None)
        if weight is None or not _fits(layer, weight.shape):
            here = "there is no such layer" if weight is None else f"it is {list(weight.shape[:2])}"
            raise ModelError(
                f"{path} is a LoRA of another base model: its {layer.module} is for {list(layer.shape)}, and in"
                f" {components.source} {here}; use the base that it was trained on"
            )


def _fits(layer: LoRALayer | FactorLayer, shape: torch.Size) -> bool:
    return layer.fits(shape) if isinstance(layer, FactorLayer) else tuple(shape[:2]) == layer.shape


def continue_from(
    path: Path, components: Components, *, lora_type: str, dropout: float, trains_text_encoder: bool
) -> None:
    """Add the file's adapter to the networks; ranks, scales and layers are the file's.

    Raises: ModelError as `read_fitting`, and for a file of another kind than `lora_type`.
    """
    layers, factors = read_fitting(path, components)
    unread: tuple[str, ...] = ()
    if isinstance(components.family, TransformerFamily):
        unread = components.family.unread_layers(components.denoiser)
    if factors:
        if factors[0].kind != "LoKr" or lora_type != "lokr":
            wanted = "a LoRA" if lora_type == "lora" else "a LoKr"
            remedy = "set model.init_args.lora_type: lokr" if factors[0].kind == "LoKr" else "LoHa is read, not trained"
            raise ModelError(f"{KEY}: {path} is a {factors[0].kind}, and the run trains {wanted}; {remedy}")
        from lightning_aigc.diffusion.lora.lokr_layers import add_factors

        add_factors(components.denoiser, [f for f in factors if not f.module.startswith(unread or ("\0",))])
        return
    if lora_type != "lora":
        raise ModelError(f"{KEY}: {path} is a LoRA, and the run trains a LoKr; set model.init_args.lora_type: lora")
    if any(layer.magnitude is not None for layer in layers):
        raise ModelError(f"{KEY}: {path} is a DoRA, whose magnitudes are not continued; use a plain LoRA")
    names = dict(zip(("text_encoder", "text_encoder_2"), components.text_encoders, strict=False))
    networks: dict[str, Any] = {components.family.denoiser_name: components.denoiser} | names
    found: dict[str, dict[str, LoRALayer]] = {}
    for layer in layers:
        if layer.component not in DENOISERS and not trains_text_encoder:
            raise ModelError(f"{KEY}: {path} also adapts a text encoder; set model.init_args.train_text_encoder: true")
        if not (unread and layer.module.startswith(unread)):
            found.setdefault(layer.component, {})[_name_in(networks[layer.component], layer.module)] = layer
    for component, of_network in found.items():
        _add(networks[component], of_network, dropout)


def _name_in(network: Any, module: str) -> str:
    """CLIP has no inner `text_model` in transformers 5."""
    return module if hasattr(network, "text_model") else module.removeprefix("text_model.")


def _add(network: Any, layers: Mapping[str, LoRALayer], dropout: float) -> None:
    from peft import LoraConfig

    patterns = {f"^{re.escape(name)}": layer for name, layer in layers.items()}
    network.add_adapter(
        LoraConfig(
            target_modules=list(layers),
            rank_pattern={pattern: layer.rank for pattern, layer in patterns.items()},
            alpha_pattern={pattern: layer.alpha for pattern, layer in patterns.items()},
            lora_dropout=dropout,
        )
    )
    for name, layer in layers.items():
        module = network.get_submodule(name)
        for held, values in ((module.lora_A["default"], layer.down), (module.lora_B["default"], layer.up)):
            held.weight.data = values.to(held.weight.device).float().reshape(held.weight.shape)
