"""The largest magnitudes of each row, zeros in the place of the rest."""

from lightning_aigc_kernels.keep_largest.op import keep_largest, keep_largest_per_head

__all__ = ["keep_largest", "keep_largest_per_head"]
