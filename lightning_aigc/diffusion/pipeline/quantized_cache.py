"""Cache of NF4 weights on disk, so that a large base is quantized once; one file per weight, named by its content."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from lightning_aigc.data.cache.cache import CorruptEntryError, TensorCache
from lightning_aigc.errors import DataError
from lightning_aigc.quantization.layers import Layer, Packing
from lightning_aigc_kernels.packed_weight import Format, PackedWeight

FORMAT = 1
"""Version of the packed bytes; increase it when weights are packed differently."""
MIN_NUMBERS = 100_000_000
"""Numbers of a base from which packing takes longer than reading the cache."""


def default_folder() -> Path:
    return Path.home() / ".cache" / "lightning_aigc" / "packed"


class PackedCache:
    """Packs layers, or reads the weights that an earlier run packed from the same numbers.

    Ranks and runs may share the folder: files are written atomically, and a damaged one is replaced. If the folder
    cannot be written, a warning says so and weights are packed again in each run.
    """

    def __init__(self, folder: Path) -> None:
        self.cache = TensorCache(folder)
        self.hits = self.misses = 0
        self._is_writable = True

    def pack(self, layer: Layer, kind: Format) -> PackedWeight:
        """Return the layer's packed weight. Raises: ValueError for NaN or infinity."""
        weight = layer.weight.detach()
        if kind == "int8":  # packing is as fast as hashing
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
    """Hash the weight's numbers, shape and dtype, and the packed format."""
    digest = sha256(f"{FORMAT} {kind} {tuple(weight.shape)} {weight.dtype}".encode())
    digest.update(weight.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def packing_for(layers: Iterable[Layer]) -> Packing | None:
    """Return the cache's `pack`, or None for layers that are too small for the cache to be faster."""
    numbers = sum(layer.weight.numel() for layer in layers)
    return PackedCache(default_folder()).pack if numbers >= MIN_NUMBERS else None
