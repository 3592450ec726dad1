"""Write the YAML that A1111 reads next to a checkpoint of Stable Diffusion 1.x or 2.x with v-prediction.

Without it A1111 guesses epsilon for 1.x. SDXL needs none: its `v_pred` tensor is enough.
Source: configs/v1-inference.yaml of CompVis/stable-diffusion, v2-inference-v.yaml of Stability-AI/stablediffusion.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_aigc.atomic_file import atomic_file
from lightning_aigc.diffusion.families import Components

LDM = "ldm.modules"


def write_a1111_config(path: Path, components: Components, schedule: Mapping[str, Any]) -> None:
    """Write the YAML at `path`; nothing for widths that are no multiples of the first, as the original code wants."""
    unet, vae, encoder = components.denoiser.config, components.vae.config, components.text_encoders[0].config
    if any(width % net.block_out_channels[0] for net in (unet, vae) for width in net.block_out_channels):
        return
    is_open_clip = encoder.hidden_act == "gelu"  # type: ignore[union-attr]
    channels, vae_channels = unet.block_out_channels, vae.block_out_channels
    heads = unet.attention_head_dim  # diffusers' name of the number of heads
    shape: dict[str, Any] = {
        "image_size": 32, "in_channels": unet.in_channels, "out_channels": unet.out_channels,
        "model_channels": channels[0], "num_res_blocks": unet.layers_per_block,
        "attention_resolutions": [2**n for n, kind in enumerate(unet.down_block_types) if "CrossAttn" in kind][::-1],
        "channel_mult": [width // channels[0] for width in channels], "use_spatial_transformer": True,
        "transformer_depth": 1, "context_dim": unet.cross_attention_dim, "use_checkpoint": True, "legacy": False,
    }  # fmt: skip
    if isinstance(heads, int):
        shape["num_heads"] = heads
    else:
        shape |= {"num_head_channels": channels[0] // heads[0], "use_linear_in_transformer": True}
    first_stage = {
        "double_z": True, "z_channels": vae.latent_channels, "resolution": 256, "in_channels": 3, "out_ch": 3,
        "ch": vae_channels[0], "ch_mult": [width // vae_channels[0] for width in vae_channels],
        "num_res_blocks": vae.layers_per_block, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    text = {"freeze": True, "layer": "penultimate"} if is_open_clip else {}
    params = {
        "parameterization": "v", "linear_start": schedule["beta_start"], "linear_end": schedule["beta_end"],
        "timesteps": schedule["num_train_timesteps"], "num_timesteps_cond": 1, "log_every_t": 200,
        "first_stage_key": "jpg", "cond_stage_key": "txt", "image_size": unet.sample_size,
        "channels": unet.in_channels, "cond_stage_trainable": False, "conditioning_key": "crossattn",
        "monitor": "val/loss_simple_ema", "scale_factor": vae.scaling_factor, "use_ema": False,
        "unet_config": {"target": f"{LDM}.diffusionmodules.openaimodel.UNetModel", "params": shape},
        "first_stage_config": {
            "target": "ldm.models.autoencoder.AutoencoderKL",
            "params": {"embed_dim": vae.latent_channels, "monitor": "val/rec_loss", "ddconfig": first_stage,
                       "lossconfig": {"target": "torch.nn.Identity"}},
        },
        "cond_stage_config": {
            "target": f"{LDM}.encoders.modules.Frozen{'OpenCLIP' if is_open_clip else 'CLIP'}Embedder", "params": text,
        },
    }  # fmt: skip
    model = {"base_learning_rate": 1.0e-4, "target": "ldm.models.diffusion.ddpm.LatentDiffusion", "params": params}
    with atomic_file(path) as file:
        file.write(yaml.safe_dump({"model": model}, sort_keys=False).encode())
