"""Precision plugins for Lightning's Trainer."""

from lightning_aigc.precision.fused_backward import FusedBackwardPrecision

__all__ = ["FusedBackwardPrecision"]
