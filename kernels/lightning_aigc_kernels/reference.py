"""References in plain torch of the layers that larger ops are built from."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.linear_with_lora import LoRAProjection
from lightning_aigc_kernels.normalization import NormParameters


def linear_with_lora(x: Tensor, layer: LoRAProjection) -> Tensor:
    """x weight^T + bias + scale * (x down^T) up^T."""
    y = F.linear(x, layer.weight, layer.bias)
    if layer.down is None or layer.up is None:
        return y
    return y + F.linear(F.linear(x, layer.down), layer.up) * layer.scale


def layer_norm(x: Tensor, norm: NormParameters) -> Tensor:
    """LayerNorm over the last dimension, or x if the norm is off."""
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps) if norm.on else x
