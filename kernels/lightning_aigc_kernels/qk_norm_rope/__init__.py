"""RMSNorm per head and rotary position embedding of a query or key as one op."""

from lightning_aigc_kernels.qk_norm_rope.norm_rope import rotary_from_complex, rotary_from_repeated
from lightning_aigc_kernels.qk_norm_rope.op import qk_norm_rope

__all__ = ["qk_norm_rope", "rotary_from_complex", "rotary_from_repeated"]
