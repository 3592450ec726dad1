"""GroupNorm, an optional timestep scale and shift, and SiLU as one op."""

from lightning_aigc_kernels.group_norm_silu.op import group_norm_silu

__all__ = ["group_norm_silu"]
