"""LayerNorm, projections with LoRA and attention in plain torch, with torch's autograd."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.linear_with_lora import LoRAProjection
from lightning_aigc_kernels.normalization import NormParameters
from lightning_aigc_kernels.reference import layer_norm, linear_with_lora


def lora_attention(
    x: Tensor,
    context: Tensor | None,
    norm: NormParameters,
    query: LoRAProjection,
    key: LoRAProjection,
    value: LoRAProjection,
    out: LoRAProjection,
    heads: int,
) -> Tensor:
    """out(attention(q, k, v)) with q of norm(x), and k and v of the context or norm(x), without the residual."""
    normalized = layer_norm(x, norm)
    source = normalized if context is None else context
    q, k, v = linear_with_lora(normalized, query), linear_with_lora(source, key), linear_with_lora(source, value)
    o = F.scaled_dot_product_attention(_heads_first(q, heads), _heads_first(k, heads), _heads_first(v, heads))
    return linear_with_lora(o.transpose(1, 2).flatten(2), out)


def _heads_first(tokens: Tensor, heads: int) -> Tensor:
    return tokens.view(*tokens.shape[:2], heads, tokens.shape[2] // heads).transpose(1, 2)
