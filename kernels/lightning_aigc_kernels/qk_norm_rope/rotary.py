"""Rotary position embeddings as real cos and sin [T, D/2] or [N, T, D/2], from the forms that diffusers passes on.

`from_*` give float32 tensors for `qk_norm_rope`; make them once a model's forward, not once a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_from_repeated(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of each pair, from [..., D] with each value twice: FLUX.1 and FLUX.2 (`repeat_interleave_real`).

    Raises: ValueError for unequal shapes or an odd last dimension.
    """
    if cos.shape != sin.shape or cos.dim() < 1 or cos.shape[-1] % 2:
        raise ValueError(f"cos and sin must be [..., D] with an even D, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    return cos[..., ::2].float().contiguous(), sin[..., ::2].float().contiguous()


def rotary_from_complex(freqs_cis: Tensor, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin on `device`, from cos + i sin [..., D/2]: Qwen-Image and Z-Image.

    The parts are taken where `freqs_cis` lies, so that no complex number reaches a device that may not know them.
    Raises: ValueError for a real tensor.
    """
    if not freqs_cis.is_complex():
        raise ValueError(f"freqs_cis must be complex, got {freqs_cis.dtype}; use rotary_from_repeated for cos and sin")
    parts = torch.view_as_real(freqs_cis.resolve_conj())
    cos, sin = (part.to(device=device, dtype=torch.float32).contiguous() for part in parts.unbind(-1))
    return cos, sin
