"""SwiGLU of two tensors as one op."""

from lightning_aigc_kernels.silu_mul.op import silu_mul

__all__ = ["silu_mul"]
