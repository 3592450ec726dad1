"""LayerNorm and a gated feed-forward in plain torch, with torch's autograd."""

from __future__ import annotations

from torch import Tensor

from lightning_aigc_kernels.geglu import reference as gates
from lightning_aigc_kernels.geglu.op import Activation
from lightning_aigc_kernels.linear_with_lora import LoRAProjection
from lightning_aigc_kernels.normalization import NormParameters
from lightning_aigc_kernels.reference import layer_norm, linear_with_lora


def feed_forward(
    x: Tensor, norm: NormParameters, first: LoRAProjection, second: LoRAProjection, activation: Activation = "gelu"
) -> Tensor:
    """second(geglu(first(norm(x)))) without the residual."""
    gated = gates.geglu if activation == "gelu" else gates.swiglu
    return linear_with_lora(gated(linear_with_lora(layer_norm(x, norm), first)), second)
