"""Encode prompts to the embeddings that condition a denoiser, as diffusers' pipelines do.

Legend: B batch, T tokens, D width, P pooled width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.families import FAMILIES


def encode_prompts(parts: Components, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
    """Encode to `prompt_embeds` [B, T, D], for most families `pooled_prompt_embeds` [B, P]; truncates at T."""
    return FAMILIES[parts.family].encode_prompts(parts, prompts, device)
