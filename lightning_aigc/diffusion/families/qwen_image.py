"""Qwen-Image: latents of a video autoencoder packed to tokens, and texts of unequal length under a mask.

Legend: B batch, C channels, H and W latent height and width, N image tokens, T text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.families import packed_latents, qwen_autoencoder
from lightning_aigc.diffusion.families.family import StepMemory
from lightning_aigc.diffusion.families.tokens import pack_with_sources, pad_texts, sources_of
from lightning_aigc.diffusion.families.transformer_control import TransformerControl
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily

ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj",
    "attn.to_add_out",
)  # fmt: skip
FEED_FORWARD = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
MODULATIONS = ("img_mod.1", "txt_mod.1")


def text_mask(tokens: int, lengths_B: Tensor) -> Tensor:
    """1 for text and 0 for padding, int64 [B, T]."""
    return (torch.arange(tokens, device=lengths_B.device) < lengths_B[:, None]).long()


def qwen_inputs(
    self: Any,
    network: nn.Module,
    noisy_BCHW: Tensor,
    timesteps_B: Tensor,
    condition: Mapping[str, Tensor],
    guidance: float,
) -> dict[str, Any]:
    """The arguments of Qwen-Image's transformer, with the tokens of an edit's sources behind the noisy ones."""
    dtype = weights_dtype(network)
    sizes = [each.shape[-2:] for each in (noisy_BCHW, *sources_of(condition))]
    lengths = condition["prompt_lengths"].tolist()
    mask_BT = text_mask(max(lengths), condition["prompt_lengths"])
    has_guidance = getattr(network.config, "guidance_embeds", False)  # which a ControlNet never reads
    return {
        "hidden_states": pack_with_sources(noisy_BCHW, condition).to(dtype),
        "timestep": timesteps_B / 1000,
        **({"guidance": torch.full_like(timesteps_B, guidance)} if has_guidance else {}),
        "encoder_hidden_states": condition["prompt_embeds"][:, : max(lengths)].to(dtype),
        # Attention without a mask is faster.
        "encoder_hidden_states_mask": None if min(lengths) == max(lengths) else mask_BT,
        "img_shapes": [[(1, height // 2, width // 2) for height, width in sizes]] * len(noisy_BCHW),
    }


def text_arguments(self: Any, condition: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The pipelines' arguments for padded embeddings."""
    embeddings_BTD, lengths_B = condition["prompt_embeds"], condition["prompt_lengths"]
    return {"prompt_embeds": embeddings_BTD, "prompt_embeds_mask": text_mask(embeddings_BTD.shape[1], lengths_B)}


class QwenImage(TransformerFamily):
    """Qwen2.5-VL's hidden states of each caption's own length."""

    name = "qwen_image"
    title = "Qwen-Image"
    base = "Qwen/Qwen-Image"
    name_pattern = r"qwen.?image(?!.*edit)"
    header_patterns: ClassVar[Mapping[str, str]] = {"qwen_image": r"qwenimage(?!edit)"}
    pipeline = "QwenImagePipeline"
    folders = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {"attention": ATTENTION, "feed_forward": FEED_FORWARD}
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        name: (name,)
        for name in (f"transformer_blocks.{{}}.{layer}" for layer in (*ATTENTION, *FEED_FORWARD, *MODULATIONS))
    }
    control = TransformerControl(
        "QwenImageControlNetModel",
        "QwenImageControlNetPipeline",
        layers={"num_layers": 5},
        path=("controlnet_x_embedder", "controlnet_blocks"),
    )
    shipped_config = "qwen_image_qlora.yaml"
    step_memory = StepMemory("Qwen-Image", {None: 40.8, "nf4": 13.4}, tokens=2150)
    last_text = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")
    negative_prompt = " "
    guidance_argument = "true_cfg_scale"
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = frozenset({(3072, 60)})
    caption_tokens: ClassVar[Mapping[str, int]] = {"tokenizer": 1024}
    modelspec = "qwen-image"

    pixels_per_latent = qwen_autoencoder.pixels_per_latent
    encode = qwen_autoencoder.encode
    decode = qwen_autoencoder.decode
    scale = qwen_autoencoder.scale
    unscale = qwen_autoencoder.unscale
    tokens = packed_latents.tokens
    latents_of = packed_latents.latents_of
    channels_read = qwen_autoencoder.channels_read
    patch_size = packed_latents.patch_size
    inputs = qwen_inputs
    embedding_arguments = text_arguments

    def encode_with(self, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        embeddings_BTD, mask_BT = pipeline.encode_prompt(prompts, device=device)
        if mask_BT is None:  # all are as long
            return pad_texts(list(embeddings_BTD))
        return {"prompt_embeds": embeddings_BTD, "prompt_lengths": mask_BT.sum(dim=1)}
