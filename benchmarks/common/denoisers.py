"""Denoisers of the published sizes with random weights, and the arguments of their calls.

U-Nets of Stable Diffusion 1.5 and SDXL; transformers of SD 3.5 medium and large, Z-Image, FLUX.1 dev, FLUX.2 klein 4B
and dev, Qwen-Image, Chroma and Krea 2, with the values of their published configs. Edits of FLUX.2 and Qwen-Image
(2511 is Plus) have one source of the image's size.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    Krea2Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from peft import LoraConfig
from torch import Tensor
from torch.utils._pytree import tree_map_only

from benchmarks.end_to_end.real_size import sdxl_unet
from lightning_aigc.cli.bench.architectures import SD35_LARGE
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.families.unet_lora import unet_lora_config

SD35: dict[str, Any] = {
    "sample_size": 128, "num_layers": 24, "num_attention_heads": 24, "attention_head_dim": 64,
    "caption_projection_dim": 1536, "pos_embed_max_size": 384, "qk_norm": "rms_norm", "in_channels": 16,
    "out_channels": 16, "dual_attention_layers": tuple(range(13)),
}  # fmt: skip
KLEIN: dict[str, Any] = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip
DENOISERS: dict[str, Callable[..., Any]] = {
    "sd15": lambda: UNet2DConditionModel(sample_size=64, cross_attention_dim=768),
    "sdxl": lambda: sdxl_unet(UNet2DConditionModel),
    "sd35": lambda **depth: SD3Transformer2DModel(**(SD35 | depth)),
    "sd35_large": lambda **depth: SD3Transformer2DModel(**(SD35_LARGE | depth)),
    "z_image": ZImageTransformer2DModel,
    "flux": lambda **depth: FluxTransformer2DModel(guidance_embeds=True, **depth),
    "klein": lambda **depth: Flux2Transformer2DModel(**(KLEIN | depth)),
    "flux2_dev": Flux2Transformer2DModel,
    "flux2_dev_edit": Flux2Transformer2DModel,
    "qwen_image": QwenImageTransformer2DModel,
    "qwen_image_edit": QwenImageTransformer2DModel,
    "qwen_image_edit_plus": lambda **depth: QwenImageTransformer2DModel(zero_cond_t=True, **depth),
    "chroma": ChromaTransformer2DModel,
    "krea2": Krea2Transformer2DModel,
}
FAMILY = {"sd35": "sd3", "sd35_large": "sd3", "klein": "flux2", "flux2_dev_edit": "flux2_dev"}
DEPTHS = ("num_layers", "num_single_layers")
"""Config entries with the numbers of a transformer's blocks, by kind."""


def denoiser_on(device: str, model: str, rank: int, **depth: int) -> Any:
    """Return a bf16 denoiser with a LoRA on its attention, or with rank 0 all weights trained.

    Args:
        depth: Numbers of blocks, as in `DEPTHS`.
    """
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        denoiser = DENOISERS[model](**depth)
        torch.set_default_dtype(torch.float32)
        denoiser.requires_grad_(rank == 0)
        if rank == 0:
            return denoiser.train()
        family = TRANSFORMERS.get(FAMILY.get(model, model))
        if family is None:
            denoiser.add_adapter(unet_lora_config(["attention"], rank, rank))
        else:
            denoiser.add_adapter(LoraConfig(r=rank, target_modules=family.adapted_layers(denoiser, ["attention"])))
    return denoiser.train()


def few_blocks(model: str, blocks: int | None) -> dict[str, int]:
    """Return the config entry for this number of blocks, none for the published number."""
    return {} if blocks is None else {"n_layers" if model == "z_image" else "num_layers": blocks}


def inputs_of(config: Any, model: str, batch: int, pixels: int, text: int) -> dict[str, Any]:
    """Return the arguments of a call, with unwritten bf16 latents and texts; a U-Net has 77 text tokens."""
    side = pixels // 8

    def half(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16)

    if model in ("sd15", "sdxl"):
        given = {
            "sample": half(batch, 4, side, side),
            "timestep": torch.zeros(batch, dtype=torch.int64),
            "encoder_hidden_states": half(batch, 77, config.cross_attention_dim),
        }
        added = {"text_embeds": half(batch, 1280), "time_ids": half(batch, 6)}
        return given if model == "sd15" else given | {"added_cond_kwargs": added}
    if model == "z_image":
        captions = [half(text, config.cap_feat_dim) for _ in range(batch)]
        return {"x": [half(16, 1, side, side) for _ in range(batch)], "t": torch.rand(batch), "cap_feats": captions}
    given = {"timestep": torch.rand(batch)}
    if model == "krea2":
        given["encoder_hidden_states"] = half(batch, text, config.num_text_layers, config.text_hidden_dim)
        given["hidden_states"] = half(batch, (side // 2) ** 2, config.in_channels)
        return given | {"position_ids": torch.zeros(text + (side // 2) ** 2, 3)}
    given["encoder_hidden_states"] = half(batch, text, config.joint_attention_dim)
    if model in ("sd35", "sd35_large", "flux"):
        given["pooled_projections"] = half(batch, config.pooled_projection_dim)
    if model.startswith("sd35"):
        return given | {"hidden_states": half(batch, 16, side, side)}
    images = 2 if "edit" in model else 1  # with one source
    given["hidden_states"] = half(batch, images * (side // 2) ** 2, config.in_channels)
    if model.startswith("qwen_image"):
        return given | {"img_shapes": [[(1, side // 2, side // 2)] * images] * batch}
    if model == "chroma":
        ids = {"img_ids": torch.zeros((side // 2) ** 2, 3), "txt_ids": torch.zeros(text, 3)}
        return given | ids | {"attention_mask": half(batch, text + (side // 2) ** 2)}
    if model == "flux":
        ids = {"img_ids": torch.zeros((side // 2) ** 2, 3), "txt_ids": torch.zeros(text, 3)}
        return given | ids | {"guidance": torch.ones(batch)}
    ids = {"img_ids": torch.zeros(batch, images * (side // 2) ** 2, 4), "txt_ids": torch.zeros(batch, text, 4)}
    return given | ids | {"guidance": torch.ones(batch) if config.guidance_embeds else None}


def random_inputs(given: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the arguments on the device, with random latents and texts."""

    def filled(x: Tensor) -> Tensor:
        return (torch.randn_like(x) if x.dtype is torch.bfloat16 else x).to(device)

    result: dict[str, Any] = tree_map_only(Tensor, filled, given)
    return result


def loss_of(denoiser: Any, given: dict[str, Any]) -> Tensor:
    """Return the mean square of a call's result."""
    output = denoiser(**given, return_dict=False)[0]
    return (torch.stack(output) if isinstance(output, list) else output).float().square().mean()
