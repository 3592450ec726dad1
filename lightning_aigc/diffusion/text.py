"""Encode prompts to the embeddings that condition a denoiser, as diffusers' pipelines do.

Legend: B batch, T tokens, D width, P pooled width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_aigc.devices import float32_region
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.families import FAMILIES


def encode_prompts(parts: Components, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
    """Encode to `prompt_embeds` [B, T, D], and `pooled_prompt_embeds` [B, P] but for SD 1.x and 2.x; truncates at T."""
    if parts.family in FAMILIES:
        return FAMILIES[parts.family].encode_prompts(parts, prompts, device)
    hidden_states, pooled = [], None
    for tokenizer, encoder in zip(parts.tokenizers, parts.text_encoders, strict=True):
        encoder = encoder.to(device)
        tokens = tokenizer(
            prompts, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
        )
        mask = tokens.attention_mask.to(device) if getattr(encoder.config, "use_attention_mask", False) else None
        is_trained = any(p.requires_grad for p in encoder.parameters())
        # A trained encoder holds fp32 LoRA weights on a half-precision base and needs the Trainer's autocast.
        with torch.enable_grad() if is_trained and torch.is_grad_enabled() else float32_region(device):
            output = encoder(
                tokens.input_ids.to(device), attention_mask=mask, output_hidden_states=parts.family == "sdxl"
            )
        if parts.family == "sdxl":
            hidden_states.append(output.hidden_states[-2])
            pooled = output[0]  # the last encoder's projection
        else:
            hidden_states.append(output[0])
    embeddings = {"prompt_embeds": torch.cat(hidden_states, dim=-1)}
    if parts.family == "sdxl":
        assert pooled is not None
        embeddings["pooled_prompt_embeds"] = pooled
    return embeddings
