"""Stable Diffusion 3 and 3.5: a transformer over text and picture tokens together (MMDiT).

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily
from lightning_aigc.errors import ModelError
from lightning_aigc.tiny.embedded import resolve

if TYPE_CHECKING:
    from lightning_aigc.diffusion.components import Components


class StableDiffusion3(TransformerFamily):
    """Two CLIP encoders and, where the folder has it, T5; without it its tokens are zeros, as in diffusers."""

    name = "sd3"
    pipeline = "StableDiffusion3Pipeline"
    folders = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
    optional_folders = ("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor")
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention": (
            "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
            "attn.add_v_proj", "attn.to_add_out", "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0",
        ),
        "feed_forward": ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    }  # fmt: skip
    modelspec = "stable-diffusion-3"
    base = "stabilityai/stable-diffusion-3.5-medium"

    def make_pipeline(self, parts: Components, scheduler: Any, controlnet: Any = None) -> Any:
        pipeline = super().make_pipeline(parts, scheduler, controlnet)
        if parts.denoiser is None and pipeline.text_encoder_3 is None:
            # The pipeline asks the transformer how wide T5's zeros are.
            config = SD3Transformer2DModel.load_config(str(resolve(parts.source)), subfolder="transformer")
            pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**config))
        return pipeline

    def encode_with(self, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        embeddings, _, pooled, _ = pipeline.encode_prompt(
            prompts, None, None, device=device, do_classifier_free_guidance=False
        )
        return {"prompt_embeds": embeddings, "pooled_prompt_embeds": pooled}

    def predict(
        self,
        denoiser: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float = 1.0,
    ) -> Tensor:
        dtype = weights_dtype(denoiser)
        velocity_BCHW: Tensor = denoiser(
            hidden_states=noisy_BCHW.to(dtype),
            timestep=timesteps_B,
            encoder_hidden_states=condition["prompt_embeds"].to(dtype),
            pooled_projections=condition["pooled_prompt_embeds"].to(dtype),
            return_dict=False,
        )[0]
        return velocity_BCHW

    def check_size(self, denoiser: Any, vae: Any, height: int, width: int) -> None:
        super().check_size(denoiser, vae, height, width)
        config, pixels_per_latent = denoiser.config, self.pixels_per_latent(vae)
        largest = int(config.pos_embed_max_size) * int(config.patch_size)
        if max(height, width) > largest:
            raise ModelError(
                f"pictures of {width * pixels_per_latent} x {height * pixels_per_latent} pixels are larger than this"
                f" transformer has positions for; set data.init_args.resolution and max_bucket_reso so that no side is"
                f" over {largest * pixels_per_latent}"
            )
