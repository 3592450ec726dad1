"""Quantize a frozen base to int8 or NF4 weights that plain layers compute with."""

from lightning_aigc.quantization.frozen import PackedBase, quantize_frozen_
from lightning_aigc.quantization.layers import BaseQuantization, Kind

__all__ = ["BaseQuantization", "Kind", "PackedBase", "quantize_frozen_"]
