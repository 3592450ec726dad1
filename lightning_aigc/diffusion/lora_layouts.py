"""Convert LoRA layers to and from the state dicts of sd-scripts' (kohya) layout and diffusers' layout.

kohya files store alpha beside each layer, diffusers files in the header.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.diffusion import lora_names
from lightning_aigc.diffusion.lora_layers import LoRALayer, canonical_module
from lightning_aigc.diffusion.lora_names import COMPONENTS, DENOISERS
from lightning_aigc.errors import ModelError

ADAPTER_METADATA_KEY = "lora_adapter_metadata"  # diffusers.loaders.lora_base.LORA_ADAPTER_METADATA_KEY


def to_kohya(layers: Iterable[LoRALayer], *, sdxl: bool, layers_per_block: int) -> dict[str, Tensor]:
    """A state dict in sd-scripts' layout; alpha is float32, so that half-precision files keep the exact scale."""
    state = {}
    for layer in layers:
        name = lora_names.to_kohya_name(layer.component, layer.module, sdxl=sdxl, layers_per_block=layers_per_block)
        state[f"{name}.lora_down.weight"] = layer.down
        state[f"{name}.lora_up.weight"] = layer.up
        state[f"{name}.alpha"] = torch.tensor(layer.alpha, dtype=torch.float32)
        if layer.magnitude is not None:
            state[f"{name}.dora_scale"] = layer.magnitude.reshape(-1, *[1] * (layer.down.ndim - 1))
    return state


def from_kohya(state: Mapping[str, Tensor], layers_per_block: int) -> list[LoRALayer]:
    """The layers of a state dict in sd-scripts' layout; a layer without alpha has scale 1, as in sd-scripts."""
    groups: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        name, _, kind = key.partition(".")
        groups.setdefault(name, {})[kind] = value
    layers = []
    for name, parts in groups.items():
        if unknown := set(parts) - {"lora_down.weight", "lora_up.weight", "alpha", "dora_scale"}:
            raise ModelError(
                f"got {name}.{min(unknown)}; wanted plain LoRA or DoRA (LoHa, LoKr and others cannot be converted)"
            )
        component, module = lora_names.from_kohya_name(name, layers_per_block=layers_per_block)
        down, up = _pair(name, parts.get("lora_down.weight"), parts.get("lora_up.weight"))
        magnitude = parts.get("dora_scale")
        if magnitude is not None and magnitude.numel() != up.shape[0]:
            raise ModelError(
                f"got {name}.dora_scale of shape {list(magnitude.shape)}; wanted one value for each of {up.shape[0]} "
                "outputs: diffusers has no DoRA over inputs"
            )
        alpha = float(parts["alpha"].item()) if "alpha" in parts else float(down.shape[0])
        layers.append(LoRALayer(component, module, down, up, alpha, None if magnitude is None else magnitude.flatten()))
    return layers


def to_diffusers(layers: Iterable[LoRALayer]) -> tuple[dict[str, Tensor], str]:
    """A state dict in diffusers' layout, and the JSON for its `lora_adapter_metadata` header entry."""
    state, metadata = {}, {}
    by_component: dict[str, list[LoRALayer]] = {}
    for layer in layers:
        by_component.setdefault(layer.component, []).append(layer)
        name = f"{layer.component}.{layer.module}"
        # Every version of diffusers reads the older names of text encoders, for every choice of layers.
        down, up = (
            ("lora_A", "lora_B") if layer.component in DENOISERS else ("lora_linear_layer.down", "lora_linear_layer.up")
        )
        state[f"{name}.{down}.weight"] = layer.down
        state[f"{name}.{up}.weight"] = layer.up
        if layer.magnitude is not None:
            shape = (-1,) if layer.down.ndim == 2 else (1, -1, *[1] * (layer.down.ndim - 2))
            # transformers 5 needs the suffix that peft drops; without it the magnitude is initialised anew.
            suffix = "" if layer.component in DENOISERS else ".weight"
            state[f"{name}.lora_magnitude_vector{suffix}"] = layer.magnitude.reshape(shape)
    for component, members in by_component.items():
        rank = Counter(layer.rank for layer in members).most_common(1)[0][0]
        alpha = Counter(layer.alpha for layer in members).most_common(1)[0][0]
        # Without `text_model.` a name is a suffix of the module's name in every version of transformers.
        names = {layer.module: layer.module.removeprefix("text_model.") for layer in members}
        config = {
            "r": rank,
            "lora_alpha": alpha,
            "rank_pattern": {names[layer.module]: layer.rank for layer in members if layer.rank != rank},
            "alpha_pattern": {names[layer.module]: layer.alpha for layer in members if layer.alpha != alpha},
            "target_modules": sorted(names.values()),
            "use_dora": any(layer.magnitude is not None for layer in members),
            "use_rslora": False,
            "lora_bias": False,
        }
        metadata.update({f"{component}.{key}": value for key, value in config.items()})
    return state, json.dumps(metadata, indent=2, sort_keys=True)


_DIFFUSERS_KEY = re.compile(
    r"(?P<module>.+?)(?:\.processor)?"
    r"(?:\.to_(?P<old>q|k|v|out)_lora\.(?P<old_side>down|up)\.weight"
    r"|\.(?:lora_(?P<peft_side>[AB])|lora(?:_linear_layer)?\.(?P<side>down|up))\.weight"
    r"|\.(?P<magnitude>lora_magnitude_vector)(?:\.weight)?)"
)


def from_diffusers(state: Mapping[str, Tensor], adapter_metadata: Mapping[str, Any]) -> list[LoRALayer]:
    """The layers of a state dict in diffusers' layout; without header metadata every scale is 1, as in diffusers."""
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, value in state.items():
        component, _, rest = key.partition(".")
        match = _DIFFUSERS_KEY.fullmatch(rest)
        if component not in COMPONENTS or match is None:
            raise ModelError(f"got the entry {key!r}; wanted LoRA weights of {', '.join(COMPONENTS)}")
        module = match["module"]
        if old := match["old"]:
            to_name = {"out": "to_out.0"}.get(old, f"to_{old}") if component in DENOISERS else f"{old}_proj"
            module = f"{module}.{to_name}"
        side = (
            {"A": "down", "B": "up"}.get(match["peft_side"] or "") or match["side"] or match["old_side"] or "magnitude"
        )
        groups.setdefault((component, canonical_module(component, module)), {})[side] = value
    layers = []
    for (component, module), parts in groups.items():
        down, up = _pair(f"{component}.{module}", parts.get("down"), parts.get("up"))
        magnitude = parts.get("magnitude")
        alpha = _alpha_of(component, module, down.shape[0], adapter_metadata)
        layers.append(LoRALayer(component, module, down, up, alpha, None if magnitude is None else magnitude.flatten()))
    return layers


def _alpha_of(component: str, module: str, rank: int, metadata: Mapping[str, Any]) -> float:
    if f"{component}.lora_alpha" not in metadata:
        return float(rank)
    patterns: Mapping[str, float] = metadata.get(f"{component}.alpha_pattern") or {}
    # peft's rule (get_pattern_key): a pattern matches a whole name or a dotted suffix.
    alpha = next(
        (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module)),
        metadata[f"{component}.lora_alpha"],
    )
    return float(alpha) * math.sqrt(rank) if metadata.get(f"{component}.use_rslora") else float(alpha)


def _pair(name: str, down: Tensor | None, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if down is None or up is None:
        raise ModelError(f"got {name} without its {'down' if down is None else 'up'} weight; the file is incomplete")
    if down.ndim not in (2, 4) or up.ndim != down.ndim or up.shape[1] != down.shape[0]:
        raise ModelError(
            f"got {name} with down {list(down.shape)} and up {list(up.shape)}; wanted [rank, in] and [out, rank], "
            "or their convolution forms"
        )
    return down, up
