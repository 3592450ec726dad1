"""Host memory that a snapshot is copied to, laid out as its file will be and used again by the next snapshot."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_aigc.errors import SnapshotError

SLAB = 64 * 2**20
"""bytes. A power of two: torch rounds pinned memory up to one, so that a single block could be twice the state."""
SMALLEST_SLAB = 2**16


class HostBuffer:
    """Slabs that together are the data of one file; a tensor may lie across the border of two."""

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._starts: list[int] = []
        self._size = 0
        self._pinned = False

    def reserve(self, size: int, *, pinned: bool) -> None:
        """Have room for `size` bytes, page-locked if asked and if the machine has it to give.

        Raises: SnapshotError if it has none of either kind.
        """
        if pinned != self._pinned:
            self._slabs, self._starts, self._size, self._pinned = [], [], 0, pinned
        while self._size < size:
            missing = max(size - self._size, SMALLEST_SLAB)
            try:
                slab = host_bytes(min(SLAB, 1 << (missing - 1).bit_length()), pinned=pinned)
            except RuntimeError as error:
                raise SnapshotError(f"no host memory for the {size / 2**20:.0f} MiB of a snapshot: {error}") from error
            self._slabs.append(slab)
            self._starts.append(self._size)
            self._size += len(slab)

    def copy_from(self, source: Tensor, offset: int) -> None:
        """Put a tensor's values at this offset, a multiple of its element's size; from a device without waiting."""
        flat_N = source.reshape(-1)
        if source.device.type == "cpu":
            # As bytes: numpy's copy takes one thread, where torch's would start its whole pool beside training's.
            bytes_N, start = flat_N.view(torch.uint8).numpy(), 0
            for piece in self._pieces(offset, offset + source.nbytes):
                piece.numpy()[:] = bytes_N[start : start + len(piece)]
                start += len(piece)
            return
        start = 0
        for piece in self._pieces(offset, offset + source.nbytes):
            part = piece.view(source.dtype)
            part.copy_(flat_N[start : start + len(part)], non_blocking=True)
            start += len(part)

    def chunks(self, size: int, chunk: int) -> Iterator[memoryview]:
        """The first `size` bytes, in order."""
        for slab in self._pieces(0, size):
            memory = slab.numpy().data
            for start in range(0, len(memory), chunk):
                yield memory[start : start + chunk]

    def _pieces(self, start: int, end: int) -> Iterator[Tensor]:
        place = bisect_right(self._starts, start) - 1
        while start < end:
            slab, begin = self._slabs[place], self._starts[place]
            stop = min(end, begin + len(slab))
            yield slab[start - begin : stop - begin]
            start, place = stop, place + 1


def host_bytes(size: int, *, pinned: bool) -> Tensor:
    """New memory, page-locked where asked and possible."""
    if pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # the limit of locked memory; an ordinary copy is slower and as good
            pass
    return torch.empty(size, dtype=torch.uint8)
