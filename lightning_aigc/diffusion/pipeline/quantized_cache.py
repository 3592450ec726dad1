"""NF4 weights on disk, so that a large base is packed once: a file for each weight, named by a hash of its content."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from lightning_aigc.data.cache.cache import CorruptEntryError, TensorCache
from lightning_aigc.errors import DataError
from lightning_aigc.quantization.layers import Layer
from lightning_aigc_kernels.packed_weight import Format, PackedWeight

Packing = Callable[[Layer, Format], PackedWeight]
"""Makes a layer's packed weight."""
FORMAT = 1
"""Version of the packed bytes; raise it when the packing of weights changes."""
WORTH_IT = 100_000_000
"""Numbers of a base from which packing takes longer than reading a cache."""


def default_folder() -> Path:
    return Path.home() / ".cache" / "lightning_aigc" / "packed"


class PackedCache:
    """Packs layers, or reads what an earlier run packed of the same numbers.

    Ranks and runs may share the folder: a file appears whole or not at all, and a damaged one is packed again. A folder
    that cannot be written costs a warning and the time to pack.
    """

    def __init__(self, folder: Path) -> None:
        self.cache = TensorCache(folder)
        self.hits = self.misses = 0
        self._is_writable = True

    def pack(self, layer: Layer, kind: Format) -> PackedWeight:
        """The layer's packed weight. Raises: ValueError for NaN or infinity."""
        weight = layer.weight.detach()
        if kind == "int8":  # as quick to pack as to hash
            return PackedWeight.pack(weight, kind)
        key = content_key(weight, kind)
        try:
            entry = self.cache.read(key)
        except CorruptEntryError:
            entry = None
        if entry is not None:
            self.hits += 1
            parts = (entry[name].to(weight.device) for name in ("packed", "scales"))
            return PackedWeight(*parts, kind, weight.shape, (weight.dtype,))
        packed = PackedWeight.pack(weight, kind)
        self.misses += 1
        if self._is_writable:
            try:
                self.cache.write(key, {"packed": packed.packed.cpu(), "scales": packed.scales.cpu()})
            except DataError as error:
                self._is_writable = False
                warnings.warn(f"packed weights are not cached: {error}", stacklevel=2)
        return packed


def content_key(weight: Tensor, kind: Format) -> str:
    """A hash of the weight's numbers, shape and dtype, and of the packed format."""
    digest = sha256(f"{FORMAT} {kind} {tuple(weight.shape)} {weight.dtype}".encode())
    digest.update(weight.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def packing_for(numbers: int, folder: Path | None = None) -> Packing | None:
    """Packing through the cache for a base of `numel` numbers; None where the cache would not be faster."""
    return PackedCache(folder or default_folder()).pack if numbers >= WORTH_IT else None
