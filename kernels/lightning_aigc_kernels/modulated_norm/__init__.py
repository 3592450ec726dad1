"""A norm with a sample's scale and shift, and the gated residual behind a branch, as ops."""

from lightning_aigc_kernels.modulated_norm.gated_residual import gated_residual
from lightning_aigc_kernels.modulated_norm.modulation import NormKind
from lightning_aigc_kernels.modulated_norm.op import modulated_norm

__all__ = ["NormKind", "gated_residual", "modulated_norm"]
