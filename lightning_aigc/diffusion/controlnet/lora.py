"""ControlNet-LoRA: a ControlNet whose copy of the encoder is frozen under a LoRA, for small data.

The copy can follow few images by few weights; what reads the condition and what writes the residuals begin at nothing
or at zero, so these are trained whole, as in Stability AI's control-lora.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_aigc.diffusion.controlnet.unet import single_file_name
from lightning_aigc.diffusion.families.unet_lora import UNET_LAYERS, unet_lora_config
from lightning_aigc.diffusion.lora.layers import warn_of_rank
from lightning_aigc.diffusion.pipeline.tensor_stream import DeferredTensor, write_tensors

if TYPE_CHECKING:
    from diffusers import ControlNetModel

TRAINED_WHOLE = ("controlnet_cond_embedding", "conv_in", "controlnet_down_blocks", "controlnet_mid_block")
"""Parts of a ControlNet that a LoRA cannot replace: the hint embedding, the first and the zero convolutions."""
ADAPTER = "default"
MARK = "lora_controlnet"
"""The key by which ComfyUI and diffusers know a control-lora file."""


def add_lora(controlnet: ControlNetModel, rank: int) -> None:
    """Freeze the ControlNet, put a LoRA on all layers of its encoder, and let it and `TRAINED_WHOLE` be trained."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(unet_lora_config(list(UNET_LAYERS), rank, float(rank)), controlnet, ADAPTER)
    warn_of_rank(controlnet, rank)
    for name in TRAINED_WHOLE:
        controlnet.get_submodule(name).requires_grad_(True)


def merged_controlnet(controlnet: ControlNetModel) -> ControlNetModel:
    """The ControlNet with its LoRA added to the weights; itself where there is none."""
    lora = _lora_layers(controlnet)
    if not lora:
        return controlnet
    state = _plain_state(controlnet)
    for name, (down, up) in lora.items():
        weight = state[f"{name}.weight"]
        state[f"{name}.weight"] = weight + (up.flatten(1) @ down.flatten(1)).reshape(weight.shape).to(weight)
    with torch.device("meta"):
        made: Any = type(controlnet).from_config(controlnet.config)
    made.load_state_dict(state, assign=True)
    merged: ControlNetModel = made.eval()
    return merged


def control_lora_tensors(controlnet: ControlNetModel) -> dict[str, Tensor]:
    """Trained tensors, named as in Stability AI's control-lora files, which ComfyUI reads with the base model.

    A layer's `up` [out, rank] and `down` [rank, in] are to be multiplied and added to the U-Net's own weight.
    Source: https://huggingface.co/stabilityai/control-lora; ComfyUI, comfy/controlnet.py, class ControlLora.
    """
    layers, hints = int(controlnet.config.layers_per_block), len(controlnet.controlnet_cond_embedding.blocks)
    tensors = {MARK: torch.zeros(0)}
    for name, tensor in _plain_state(controlnet).items():
        if name.startswith(tuple(f"{part}." for part in TRAINED_WHOLE)):
            tensors[single_file_name(name, layers, hints)] = tensor
    for name, (down, up) in _lora_layers(controlnet).items():
        stem = single_file_name(f"{name}.weight", layers, hints).removesuffix(".weight")
        tensors |= {f"{stem}.up": up, f"{stem}.down": down}
    return tensors


def save_control_lora(path: Path, controlnet: ControlNetModel, dtype: torch.dtype | None) -> None:
    """Write `control_lora_tensors` as one `.safetensors` file."""
    tensors = control_lora_tensors(controlnet)
    write_tensors(path, {name: DeferredTensor.of(tensor, dtype) for name, tensor in tensors.items()})


def _lora_layers(controlnet: ControlNetModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Each adapted layer's two matrices, the first [rank, in, ...], the second [out, rank, ...] times the scale."""
    from peft.tuners.lora import LoraLayer

    state = controlnet.state_dict()
    return {
        name: (
            state[f"{name}.lora_A.{ADAPTER}.weight"],
            state[f"{name}.lora_B.{ADAPTER}.weight"] * float(module.scaling[ADAPTER]),
        )
        for name, module in controlnet.named_modules()
        if isinstance(module, LoraLayer)
    }


def _plain_state(controlnet: ControlNetModel) -> dict[str, Tensor]:
    """The ControlNet's weights under the names of one without a LoRA."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in controlnet.state_dict().items()
        if ".lora_" not in name
    }
