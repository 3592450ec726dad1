"""Chroma: FLUX.1's streams without CLIP and without a guidance input; its attention weighs padding tokens of a text.

Legend: B batch, C channels, H and W latent height and width, N image tokens, T text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.families import packed_latents
from lightning_aigc.diffusion.families.family import StepMemory
from lightning_aigc.diffusion.families.flux import Flux, positions
from lightning_aigc.diffusion.families.tokens import pack
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily


class Chroma(TransformerFamily):
    """T5's hidden states, 512 tokens for every caption, with a mask of the caption and one padding token.

    diffusers adds the mask, 1 or 0, to the attention's logits, so that padding tokens weigh 1 / e of others.
    """

    name = "chroma"
    title = "Chroma"
    base = "lodestones/Chroma1-HD"
    name_pattern = r"(?<![a-z])chroma(?![a-z])"
    header_patterns: ClassVar[Mapping[str, str]] = {"chroma": r"chroma"}
    pipeline = "ChromaPipeline"
    folders = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    optional_folders = ("image_encoder", "feature_extractor")
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = Flux.lora_layers
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = Flux.original_layers
    original_names: ClassVar[Mapping[str, str]] = {
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "distilled_guidance_layer.layers.{}.linear_1": "distilled_guidance_layer.layers.{}.in_layer",
        "distilled_guidance_layer.layers.{}.linear_2": "distilled_guidance_layer.layers.{}.out_layer",
        "distilled_guidance_layer.norms.{}.weight": "distilled_guidance_layer.norms.{}.scale",
        "transformer_blocks.{}.attn.norm_q.weight": "double_blocks.{}.img_attn.norm.query_norm.scale",
        "transformer_blocks.{}.attn.norm_k.weight": "double_blocks.{}.img_attn.norm.key_norm.scale",
        "transformer_blocks.{}.attn.norm_added_q.weight": "double_blocks.{}.txt_attn.norm.query_norm.scale",
        "transformer_blocks.{}.attn.norm_added_k.weight": "double_blocks.{}.txt_attn.norm.key_norm.scale",
        "single_transformer_blocks.{}.attn.norm_q.weight": "single_blocks.{}.norm.query_norm.scale",
        "single_transformer_blocks.{}.attn.norm_k.weight": "single_blocks.{}.norm.key_norm.scale",
        "proj_out": "final_layer.linear",
    }
    widening: ClassVar[Mapping[str, int]] = Flux.widening
    shipped_config = Flux.shipped_config
    step_memory = StepMemory("Chroma", {None: 20.1, "int8": 12.4, "nf4": 8.2}, tokens=3340)
    distilled_name = r"(?i)(?<![a-z])flash(?![a-z])"
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = Flux.published_sizes
    caption_tokens: ClassVar[Mapping[str, int]] = {"tokenizer": 511}
    modelspec = "chroma"
    checkpointing_fault = "its single blocks would run without the text's mask"

    tokens = packed_latents.tokens
    latents_of = packed_latents.latents_of
    unscale = packed_latents.unscale
    channels_read = packed_latents.channels_read
    patch_size = packed_latents.patch_size

    def encode_with(self, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        embeddings_BTD, _, mask_BT, *_ = pipeline.encode_prompt(
            prompts, device=device, do_classifier_free_guidance=False
        )
        return {"prompt_embeds": embeddings_BTD, "prompt_attention_mask": mask_BT}

    def inputs(
        self,
        network: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float,
    ) -> dict[str, Any]:
        dtype = weights_dtype(network)
        height, width = noisy_BCHW.shape[-2:]
        embeddings_BTD = condition["prompt_embeds"].to(dtype)
        mask_BT = condition["prompt_attention_mask"].to(dtype)
        return {
            "hidden_states": pack(noisy_BCHW).to(dtype),
            "timestep": timesteps_B / 1000,
            "encoder_hidden_states": embeddings_BTD,
            "txt_ids": embeddings_BTD.new_zeros(embeddings_BTD.shape[1], 3),
            "img_ids": positions(height // 2, width // 2, embeddings_BTD),
            "attention_mask": nn.functional.pad(mask_BT, (0, height * width // 4), value=1.0),
        }
