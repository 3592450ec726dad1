"""Precision plugins for Lightning's Trainer."""

from lightning_aigc.precision.plugin import FusedBackwardPrecision

__all__ = ["FusedBackwardPrecision"]
