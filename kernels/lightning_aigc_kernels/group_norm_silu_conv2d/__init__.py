"""GroupNorm, SiLU and convolution as one op."""

from lightning_aigc_kernels.group_norm_silu_conv2d.op import group_norm_silu_conv2d

__all__ = ["group_norm_silu_conv2d"]
