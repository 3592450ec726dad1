"""One attention over the tokens of several streams, with the norm and rotation of queries and keys, as one op."""

from lightning_aigc_kernels.joint_attention.op import joint_attention
from lightning_aigc_kernels.joint_attention.stream import AttentionStream

__all__ = ["AttentionStream", "joint_attention"]
