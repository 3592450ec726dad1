"""Configs of networks: the published ones of SDXL, Stable Diffusion 3.5 large and FLUX.2 dev, and small ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """A pipeline's denoiser and autoencoder, and the texts that the denoiser reads."""

    family: str
    """Name in `diffusion/families`."""
    denoiser: str
    """diffusers' class."""
    config: Mapping[str, Any]
    autoencoder: str
    autoencoder_config: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    text_tokens: int
    text_width: int
    pooled_width: int = 0
    """0 where the denoiser reads no pooled text."""
    parameters: float = 0.0
    """Number of the denoiser's parameters; 0 for small ones."""
    small: Architecture | None = field(default=None, repr=False)
    """The same family with networks that a CPU trains in seconds."""


SMALL_PIXELS = 64
SMALL_AUTOENCODER: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4,
}  # fmt: skip
AUTOENCODER: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "sample_size": 1024,
}  # fmt: skip
SDXL_UNET: dict[str, Any] = {
    "sample_size": 128, "block_out_channels": (320, 640, 1280), "layers_per_block": 2, "cross_attention_dim": 2048,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
SMALL_SDXL_UNET: dict[str, Any] = SDXL_UNET | {
    "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2), "attention_head_dim": (2, 4), "norm_num_groups": 8,
    "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 6 * 8 + 16,
}  # fmt: skip
SD35_LARGE: dict[str, Any] = {
    "sample_size": 128, "patch_size": 2, "num_layers": 38, "num_attention_heads": 38, "attention_head_dim": 64,
    "in_channels": 16, "out_channels": 16, "caption_projection_dim": 2432, "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048, "pos_embed_max_size": 192, "qk_norm": "rms_norm",
}  # fmt: skip
SMALL_SD35: dict[str, Any] = SD35_LARGE | {
    "sample_size": 8, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4,
    "out_channels": 4, "caption_projection_dim": 32, "joint_attention_dim": 32, "pooled_projection_dim": 16,
    "pos_embed_max_size": 16,
}  # fmt: skip
FLUX2_DEV: dict[str, Any] = {}
"""The defaults of diffusers' Flux2Transformer2DModel."""
SMALL_FLUX2: dict[str, Any] = {
    "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
    "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4, 4),
}  # fmt: skip
DDPM_SCHEDULE: dict[str, Any] = {
    "num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}  # fmt: skip
FLOW_SCHEDULE: dict[str, Any] = {"num_train_timesteps": 1000, "shift": 3.0}
DYNAMIC_SCHEDULE: dict[str, Any] = FLOW_SCHEDULE | {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15,
}  # fmt: skip

SDXL_SCALES = {"scaling_factor": 0.13025}
SD3_SCALES = {"scaling_factor": 1.5305, "shift_factor": 0.0609, "use_quant_conv": False, "use_post_quant_conv": False}

ARCHITECTURES = {
    "SDXL": Architecture(
        "sdxl", "UNet2DConditionModel", SDXL_UNET, "AutoencoderKL", AUTOENCODER | SDXL_SCALES, DDPM_SCHEDULE,
        text_tokens=77, text_width=2048, pooled_width=1280, parameters=2.567e9,
        small=Architecture(
            "sdxl", "UNet2DConditionModel", SMALL_SDXL_UNET, "AutoencoderKL", SMALL_AUTOENCODER | SDXL_SCALES,
            DDPM_SCHEDULE, text_tokens=7, text_width=32, pooled_width=16,
        ),
    ),
    "Stable Diffusion 3.5 large": Architecture(
        "sd3", "SD3Transformer2DModel", SD35_LARGE, "AutoencoderKL",
        AUTOENCODER | SD3_SCALES | {"latent_channels": 16}, FLOW_SCHEDULE,
        text_tokens=154, text_width=4096, pooled_width=2048, parameters=8.057e9,
        small=Architecture(
            "sd3", "SD3Transformer2DModel", SMALL_SD35, "AutoencoderKL", SMALL_AUTOENCODER | SD3_SCALES,
            FLOW_SCHEDULE, text_tokens=14, text_width=32, pooled_width=16,
        ),
    ),
    "FLUX.2 dev": Architecture(
        "flux2_dev", "Flux2Transformer2DModel", FLUX2_DEV, "AutoencoderKLFlux2", {}, DYNAMIC_SCHEDULE,
        text_tokens=512, text_width=15360, parameters=32.22e9,
        small=Architecture(
            "flux2_dev", "Flux2Transformer2DModel", SMALL_FLUX2, "AutoencoderKLFlux2", SMALL_AUTOENCODER,
            DYNAMIC_SCHEDULE, text_tokens=16, text_width=32,
        ),
    ),
}  # fmt: skip
"""By the model's name, with the values of its published config files."""
