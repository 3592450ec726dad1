"""Z-Image: one stream of text and picture tokens, which reads lists, counts time backwards and answers negated.

Legend: B batch, C channels, F frames (one), H and W latent height and width, T text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily, pad_texts

STACKS = ("layers", "noise_refiner", "context_refiner")


class ZImage(TransformerFamily):
    """Qwen3 hidden states of each caption's own length; FLUX.1's autoencoder."""

    name = "z_image"
    pipeline = "ZImagePipeline"
    folders = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention": ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
        "feed_forward": ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    }
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        f"{stack}.{{}}.{original}": tuple(f"{stack}.{{}}.{layer}" for layer in layers)
        for stack in STACKS
        for original, layers in {
            "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
            "attention.out": ("attention.to_out.0",),
            "feed_forward.w1": ("feed_forward.w1",),
            "feed_forward.w2": ("feed_forward.w2",),
            "feed_forward.w3": ("feed_forward.w3",),
        }.items()
    }
    modelspec = "z-image"
    base = "Tongyi-MAI/Z-Image"
    draws_latents = False

    def encode_with(self, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        texts, _ = pipeline.encode_prompt(prompts, device=device, do_classifier_free_guidance=False)
        return pad_texts(texts)

    def embedding_arguments(self, condition: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"prompt_embeds": _own_lengths(condition["prompt_embeds"], condition)}

    def predict(
        self,
        denoiser: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float = 1.0,
    ) -> Tensor:
        dtype = weights_dtype(denoiser)
        answers_CFHW = denoiser(
            list(noisy_BCHW.to(dtype).unsqueeze(2)),
            (1000 - timesteps_B) / 1000,
            _own_lengths(condition["prompt_embeds"].to(dtype), condition),
            return_dict=False,
        )[0]
        return -torch.stack(answers_CFHW).squeeze(2)

    def patch_size(self, denoiser: Any) -> int:
        return int(denoiser.config.all_patch_size[0])


def _own_lengths(embeddings_BTD: Tensor, condition: Mapping[str, Tensor]) -> list[Tensor]:
    """Each text without its padding."""
    lengths = condition["prompt_lengths"].tolist()
    return [text_TD[:length] for text_TD, length in zip(embeddings_BTD, lengths, strict=True)]
