"""Frozen weights in 4 or 8 bits that plain layers compute with."""

from lightning_aigc_kernels.packed_weight.op import unpack_weight
from lightning_aigc_kernels.packed_weight.reference import Format, packed_bytes
from lightning_aigc_kernels.packed_weight.tensor import PackedWeight, packed_weights, set_packed_

__all__ = ["Format", "PackedWeight", "packed_bytes", "packed_weights", "set_packed_", "unpack_weight"]
