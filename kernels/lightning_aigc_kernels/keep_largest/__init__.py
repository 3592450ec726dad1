"""Keep the largest magnitudes of each row and zero the rest."""

from lightning_aigc_kernels.keep_largest.op import keep_largest, keep_largest_per_head

__all__ = ["keep_largest", "keep_largest_per_head"]
