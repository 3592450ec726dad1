"""LayerNorm and a gated feed-forward as one op."""

from lightning_aigc_kernels.feed_forward.op import feed_forward

__all__ = ["feed_forward"]
