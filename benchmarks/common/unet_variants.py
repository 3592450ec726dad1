"""A diffusion U-Net with random weights from its config, its inputs, and the variants to compare."""
# mypy: no-warn-return-any

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_aigc.precision.swaps import swap_forwards
from lightning_aigc.quantization.layers import FORMATS, frozen_layers
from lightning_aigc_kernels.packed_weight import PackedWeight

LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
SD15 = {"sample_size": 64, "cross_attention_dim": 768, "block_out_channels": (320, 640, 1280, 1280)}
SDXL = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
LEVELS = ("native", "balanced", "lean", "max", "checkpointing", "compile")
VARIANTS = (*LEVELS, *(f"{level}-{kind}" for level in LEVELS[:-1] for kind in FORMATS))
"""Variants by name: `lean` uses the unquantized base, `lean-int8` a quantized one."""


def build(
    model: str, lora_rank: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu", width: float = 1.0
) -> nn.Module:
    """U-Net with random weights: LoRA on its attention, or every weight trained."""
    config: dict[str, Any] = dict(SDXL if model == "sdxl" else SD15)
    config["block_out_channels"] = tuple(round(width * channels) for channels in config["block_out_channels"])
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        unet = UNet2DConditionModel(**config)
    torch.set_default_dtype(torch.float32)
    if lora_rank:
        unet.requires_grad_(False)
        lora = LoraConfig(r=lora_rank, lora_alpha=lora_rank, target_modules=LORA_TARGETS, init_lora_weights=False)
        unet = inject_adapter_in_model(lora, unet)
    return unet.train()


def inputs_of(model: str, batch: int, pixels: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Arguments of one U-Net call."""
    latent, width = pixels // 8, 2048 if model == "sdxl" else 768
    given: dict[str, Any] = {
        "sample": torch.randn(batch, 4, latent, latent, dtype=dtype, device=device),
        "timestep": torch.full((batch,), 500, device=device),
        "encoder_hidden_states": torch.randn(batch, 77, width, dtype=dtype, device=device),
    }
    if model == "sdxl":
        size = torch.tensor([[pixels, pixels, 0, 0, pixels, pixels]] * batch, dtype=dtype, device=device)
        pooled = torch.randn(batch, 1280, dtype=dtype, device=device)
        given["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": size}
    return given


class Variant:
    """Context in which the U-Net runs as one variant; restored on exit."""

    def __init__(self, unet: nn.Module, name: str) -> None:
        self.unet: Any = unet
        self.name: Any
        self.name, _, kind = name.partition("-")
        self.compiled: Callable[..., object] | None = None
        self.whole_and_packed = list(_packed(unet, kind)) if kind else []

    def __enter__(self) -> None:
        for layer, _, packed in self.whole_and_packed:
            layer.weight = packed
        if self.name == "checkpointing":
            # As in diffusers, but without RNG states: a CUDA graph cannot capture them, and nothing here is random.
            again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            self.unet.enable_gradient_checkpointing(again)
        elif self.name == "compile":
            if self.compiled is None:
                self.unet.compile()
                self.compiled = self.unet._compiled_call_impl
            self.unet._compiled_call_impl = self.compiled
        elif self.name != "native":
            self.swapped = swap_forwards(self.unet, memory=self.name)

    def __exit__(self, *error: object) -> None:
        if self.name == "checkpointing":
            self.unet.disable_gradient_checkpointing()
        elif self.name == "compile":
            self.unet._compiled_call_impl = None
        elif self.name != "native":
            self.swapped.restore()
        for layer, whole, _ in self.whole_and_packed:
            layer.weight = whole


def _packed(unet: nn.Module, kind: str) -> Iterator[tuple[Any, nn.Parameter, nn.Parameter]]:
    """Quantized layers, with their original and their quantized weights."""
    linear, convolution = FORMATS[kind]
    for layer in frozen_layers(unet):
        if not layer.skip_reason:
            module: Any = layer.module
            packed = PackedWeight.pack(layer.weight.detach(), linear if layer.is_linear else convolution)
            yield module, module.weight, nn.Parameter(packed, requires_grad=False)
