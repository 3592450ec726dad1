"""Krea 2: one stream of text and image tokens, a text of several layers' hidden states, Qwen-Image's autoencoder.

Legend: B batch, C channels, H and W latent height and width, N image tokens, T text tokens, L layers, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.families import packed_latents, qwen_autoencoder
from lightning_aigc.diffusion.families.family import StepMemory
from lightning_aigc.diffusion.families.flux import positions
from lightning_aigc.diffusion.families.qwen_image import text_mask
from lightning_aigc.diffusion.families.tokens import pack, pad_texts
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily

ATTENTION = {"wq": "to_q", "wk": "to_k", "wv": "to_v", "gate": "to_gate", "wo": "to_out.0"}
FEED_FORWARD = ("gate", "up", "down")
TEXT_TOKENS = 512
"""Tokens of every text in the pipeline, with its padding."""


class Krea2(TransformerFamily):
    """Hidden states of several layers of Qwen3-VL, of each caption's own length: tokens of a text have no positions.

    Its pipeline's guidance is conditional + scale x (conditional - negative), so that a scale of 4.5 here is 5.5 in
    other families, and 0 is none.
    """

    name = "krea2"
    title = "Krea 2"
    base = "krea/Krea-2-Raw"
    name_pattern = r"krea.?2"
    header_patterns: ClassVar[Mapping[str, str]] = {"krea2": r"krea2"}
    pipeline = "Krea2Pipeline"
    folders = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    pipeline_options = ("text_encoder_select_layers", "is_distilled", "patch_size")
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention": tuple(f"transformer_blocks.*.attn.{layer}" for layer in ATTENTION.values()),
        "feed_forward": tuple(f"transformer_blocks.*.ff.{layer}" for layer in FEED_FORWARD),
    }
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{f"blocks.{{}}.attn.{own}": (f"transformer_blocks.{{}}.attn.{layer}",) for own, layer in ATTENTION.items()},
        **{f"blocks.{{}}.mlp.{layer}": (f"transformer_blocks.{{}}.ff.{layer}",) for layer in FEED_FORWARD},
    }
    shipped_config = "qwen_image_qlora.yaml"
    step_memory = StepMemory("Krea 2", {None: 27.1, "int8": 15.9, "nf4": 10.0}, tokens=4200)
    few_step_guidance = 0.0
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = frozenset({(6144, 28)})
    caption_tokens: ClassVar[Mapping[str, int]] = {"tokenizer": 507}  # 512 with the template's end
    modelspec = "krea-2"

    pixels_per_latent = qwen_autoencoder.pixels_per_latent
    encode = qwen_autoencoder.encode
    decode = qwen_autoencoder.decode
    scale = qwen_autoencoder.scale
    unscale = qwen_autoencoder.unscale
    tokens = packed_latents.tokens
    latents_of = packed_latents.latents_of
    channels_read = qwen_autoencoder.channels_read
    patch_size = packed_latents.patch_size

    def encode_with(self, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        # Masked padding stands between a caption and the template's end; without positions it changes no other token.
        embeddings_BTLD, mask_BT = pipeline.encode_prompt(prompts, device=device)
        return pad_texts([text[mask] for text, mask in zip(embeddings_BTLD, mask_BT, strict=True)])

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
        lengths = condition["prompt_lengths"].tolist()
        embeddings_BTLD = condition["prompt_embeds"][:, : max(lengths)].to(dtype)
        image_ids = positions(height // 2, width // 2, noisy_BCHW.new_zeros((), dtype=torch.float32))
        return {
            "hidden_states": pack(noisy_BCHW).to(dtype),
            "timestep": timesteps_B / 1000,
            "encoder_hidden_states": embeddings_BTLD,
            "position_ids": torch.cat([image_ids.new_zeros(max(lengths), 3), image_ids]),
            "encoder_attention_mask": None
            if min(lengths) == max(lengths)
            else text_mask(max(lengths), condition["prompt_lengths"]).bool(),
        }

    def embedding_arguments(self, condition: Mapping[str, Tensor]) -> dict[str, Any]:
        # Of one length, for the pipeline's positions are those of the prompt and of the negative prompt.
        embeddings_BTLD = condition["prompt_embeds"]
        missing = TEXT_TOKENS - embeddings_BTLD.shape[1]
        mask_BT = text_mask(TEXT_TOKENS, condition["prompt_lengths"]).bool()
        return {
            "prompt_embeds": nn.functional.pad(embeddings_BTLD, (0, 0, 0, 0, 0, missing)),
            "prompt_embeds_mask": mask_BT,
        }

    def is_distilled(
        self, index: Mapping[str, Any], transformer: Mapping[str, Any], scheduler: Mapping[str, Any]
    ) -> bool:
        return bool(index.get("is_distilled"))
