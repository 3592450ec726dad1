"""FLUX.1: latents packed to tokens of 2 x 2 pixels, and guidance as an input of the model.

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
from lightning_aigc.diffusion.families.tokens import pack_with_sources, sources_of
from lightning_aigc.diffusion.families.transformer_control import TransformerControl
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily


def encode_with_pooled(self: Any, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
    """T5's hidden states and CLIP's pooled state, from the pipeline."""
    embeddings, pooled, _ = pipeline.encode_prompt(prompts, device=device)
    return {"prompt_embeds": embeddings, "pooled_prompt_embeds": pooled}


def flux_inputs(
    self: Any,
    network: nn.Module,
    noisy_BCHW: Tensor,
    timesteps_B: Tensor,
    condition: Mapping[str, Tensor],
    guidance: float,
) -> dict[str, Any]:
    """The arguments of FLUX.1's transformer, with the tokens of an edit's sources behind the noisy ones."""
    dtype = weights_dtype(network)
    embeddings_BTD = condition["prompt_embeds"].to(dtype)
    has_guidance = network.config.guidance_embeds  # type: ignore[union-attr]
    sizes = [each.shape[-2:] for each in (noisy_BCHW, *sources_of(condition))]
    ids = [positions(height // 2, width // 2, embeddings_BTD, number) for number, (height, width) in enumerate(sizes)]
    return {
        "hidden_states": pack_with_sources(noisy_BCHW, condition).to(dtype),
        "timestep": timesteps_B / 1000,
        "guidance": torch.full_like(timesteps_B, guidance) if has_guidance else None,
        "pooled_projections": condition["pooled_prompt_embeds"].to(dtype),
        "encoder_hidden_states": embeddings_BTD,
        "txt_ids": embeddings_BTD.new_zeros(embeddings_BTD.shape[1], 3),
        "img_ids": torch.cat(ids),
    }


class Flux(TransformerFamily):
    """T5's hidden states, 512 tokens for every caption, and CLIP's pooled state."""

    name = "flux"
    title = "FLUX.1"
    base = "black-forest-labs/FLUX.1-dev"
    name_pattern = r"^(?!.*(qwen.?image|(?<![a-z])z.?image|klein|kontext)).*flux(?!.?2(?!\d))"
    header_patterns: ClassVar[Mapping[str, str]] = {"flux": r"flux(?!2|.*kontext)"}
    pipeline = "FluxPipeline"
    folders = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
    optional_folders = ("image_encoder", "feature_extractor")
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention": (
            "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
            "attn.add_v_proj", "attn.to_add_out", "single_transformer_blocks.*.proj_out",
        ),
        "feed_forward": (
            "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
            "single_transformer_blocks.*.proj_mlp",
        ),
    }  # fmt: skip
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        f"double_blocks.{{}}.{original}": tuple(f"transformer_blocks.{{}}.{layer}" for layer in layers)
        for original, layers in {
            "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "img_attn.proj": ("attn.to_out.0",),
            "txt_attn.proj": ("attn.to_add_out",),
            "img_mlp.0": ("ff.net.0.proj",),
            "img_mlp.2": ("ff.net.2",),
            "txt_mlp.0": ("ff_context.net.0.proj",),
            "txt_mlp.2": ("ff_context.net.2",),
            "img_mod.lin": ("norm1.linear",),
            "txt_mod.lin": ("norm1_context.linear",),
        }.items()
    } | {
        "single_blocks.{}.modulation.lin": ("single_transformer_blocks.{}.norm.linear",),
        "single_blocks.{}.linear1": tuple(
            f"single_transformer_blocks.{{}}.{layer}" for layer in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
        ),
        "single_blocks.{}.linear2": ("single_transformer_blocks.{}.proj_out",),
    }
    widening: ClassVar[Mapping[str, int]] = {
        "proj_mlp": 4, "ff.net.0.proj": 4, "ff_context.net.0.proj": 4, "norm1.linear": 6, "norm1_context.linear": 6,
        ".norm.linear": 3,
    }  # fmt: skip
    control = TransformerControl(
        "FluxControlNetModel",
        "FluxControlNetPipeline",
        layers={"num_layers": 4, "num_single_layers": 4},
        path=("controlnet_x_embedder", "controlnet_blocks", "controlnet_single_blocks"),
    )
    training_adapters = "ostris/FLUX.1-schnell-training-adapter"
    few_steps = 4
    shipped_config = "flux_qlora_12gb.yaml"
    step_memory = StepMemory("FLUX.1 dev", {None: 25.7, "int8": 15.3, "nf4": 9.8}, tokens=3340)
    negative_prompt = None
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = frozenset({(3072, 19)})
    caption_tokens: ClassVar[Mapping[str, int]] = {"tokenizer": 75, "tokenizer_2": 511}
    modelspec = "flux-1-dev"

    tokens = packed_latents.tokens
    latents_of = packed_latents.latents_of
    unscale = packed_latents.unscale
    channels_read = packed_latents.channels_read
    patch_size = packed_latents.patch_size
    encode_with = encode_with_pooled
    inputs = flux_inputs

    def is_distilled(
        self, index: Mapping[str, Any], transformer: Mapping[str, Any], scheduler: Mapping[str, Any]
    ) -> bool:
        # schnell: its four steps have no dynamic shift, and it is told no guidance.
        return transformer.get("guidance_embeds") is False and not scheduler.get("use_dynamic_shifting")


def positions(rows: int, columns: int, like: Tensor, number: int = 0) -> Tensor:
    """Number of the image, row and column of each token, [rows x columns, 3]; the noisy image is number 0."""
    axes = [torch.arange(size, device=like.device) for size in (rows, columns)]
    return torch.cartesian_prod(torch.full((1,), number, device=like.device), *axes).to(like.dtype)
