"""Write LoRA layers as the state dicts of sd-scripts' (kohya) layout and diffusers' layout.

kohya files store alpha with each layer, diffusers files in the header.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_aigc.diffusion.lora import names as lora_names
from lightning_aigc.diffusion.lora.dora_magnitudes import comfyui_magnitude
from lightning_aigc.diffusion.lora.layers import LoRALayer
from lightning_aigc.diffusion.lora.names import DENOISERS

ADAPTER_METADATA_KEY = "lora_adapter_metadata"  # diffusers.loaders.lora_base.LORA_ADAPTER_METADATA_KEY


def to_kohya(layers: Iterable[LoRALayer], *, sdxl: bool, layers_per_block: int) -> dict[str, Tensor]:
    """A state dict in sd-scripts' layout; alpha is float32, so that half-precision files keep the exact scale.

    DoRA's magnitudes are those that ComfyUI applies, float32 too: rounded, they would outweigh what was learned.
    """
    state = {}
    for layer in layers:
        name = lora_names.to_kohya_name(layer.component, layer.module, sdxl=sdxl, layers_per_block=layers_per_block)
        state[f"{name}.lora_down.weight"] = layer.down
        state[f"{name}.lora_up.weight"] = layer.up
        state[f"{name}.alpha"] = torch.tensor(layer.alpha, dtype=torch.float32)
        if layer.magnitude is not None:
            state[f"{name}.dora_scale"] = comfyui_magnitude(layer).reshape(-1, *[1] * (layer.down.ndim - 1))
    return state


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
