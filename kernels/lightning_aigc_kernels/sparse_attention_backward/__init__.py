"""Attention whose backward drops the smallest entries of dq, dk and dv: lossy, for experiments."""

from lightning_aigc_kernels.sparse_attention_backward.op import sparse_attention_backward

__all__ = ["sparse_attention_backward"]
