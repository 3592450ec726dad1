"""Give DoRA's magnitudes both meanings: peft's, of a trained weight's rows, and ComfyUI's.

peft's weight is magnitude * (W + delta) / |W + delta|, and ComfyUI's dora_scale * (W + delta) / |W|, with norms of
output rows. A file's tensors hold the magnitudes of its layout's reader, and its header the others, so that files
convert without the base model.
Source: comfy/weight_adapter/base.py, weight_decompose with magnitudes of outputs.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_aigc.diffusion.lora.layers import LoRALayer
from lightning_aigc.errors import ModelError

COMFYUI_KEY = "lightning_aigc.comfyui_magnitudes"
"""Header entry of a file in diffusers' layout."""
TRAINED_KEY = "lightning_aigc.trained_magnitudes"
"""Header entry of a file in the kohya layout, whose tensors are ComfyUI's."""


def with_comfyui_magnitude(layer: LoRALayer) -> LoRALayer:
    """The layer with ComfyUI's magnitudes of its DoRA, by the base's weight, which is dropped."""
    if layer.magnitude is None or layer.base is None:
        return layer
    base = layer.base.to(layer.up.device).float().flatten(1)  # a sharded layer is written from host memory
    delta = layer.up.float().flatten(1) @ layer.down.float().flatten(1)
    trained_norm = torch.linalg.vector_norm(base + layer.alpha / layer.rank * delta, dim=1)
    base_norm = torch.linalg.vector_norm(base, dim=1) + torch.finfo(torch.float32).eps  # as ComfyUI
    scale = torch.where(trained_norm > 0, layer.magnitude.float() * base_norm / trained_norm, 0.0)
    return dataclasses.replace(layer, comfyui_magnitude=scale, base=None)


def comfyui_magnitude(layer: LoRALayer) -> Tensor:
    """ComfyUI's magnitudes. Raises: ModelError for a file of another program, which needs its base's weights."""
    if layer.comfyui_magnitude is None:
        raise ModelError(
            f"got a DoRA on {layer.module} without ComfyUI's magnitudes, which need the base model's weights; "
            "merge it: lightning export LORA --merge_into PIPELINE --output FOLDER"
        )
    return layer.comfyui_magnitude


def to_header(layers: Iterable[LoRALayer], layout: Literal["kohya", "diffusers"]) -> dict[str, str]:
    """The header entry with the magnitudes that the tensors of this layout do not hold; empty without DoRA."""
    is_kohya = layout == "kohya"
    others = {
        f"{layer.component}.{layer.module}": layer.magnitude if is_kohya else layer.comfyui_magnitude
        for layer in layers
    }
    packed = {name: _pack(each) for name, each in others.items() if each is not None}
    return {TRAINED_KEY if is_kohya else COMFYUI_KEY: json.dumps(packed, sort_keys=True)} if packed else {}


def from_header(layers: Sequence[LoRALayer], header: Mapping[str, str]) -> list[LoRALayer]:
    """The layers as read from a file's tensors, with both meanings where its header has the other."""
    trained, comfyui = (json.loads(header.get(key) or "{}") for key in (TRAINED_KEY, COMFYUI_KEY))
    found = []
    for layer in layers:
        name = f"{layer.component}.{layer.module}"
        if name in trained:
            layer = dataclasses.replace(layer, magnitude=_unpack(trained[name]), comfyui_magnitude=layer.magnitude)
        elif name in comfyui:
            layer = dataclasses.replace(layer, comfyui_magnitude=_unpack(comfyui[name]))
        found.append(layer)
    return found


def _pack(magnitude: Tensor) -> str:
    return base64.b64encode(magnitude.float().cpu().numpy().astype("<f4").tobytes()).decode()


def _unpack(packed: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(packed), "<f4").astype(np.float32))
