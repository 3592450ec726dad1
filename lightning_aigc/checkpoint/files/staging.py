"""Staging of a snapshot in host memory: copies before training continues, and copies during training.

`torch.distributed.checkpoint.staging` has the same purpose for whole state_dicts; here the memory is laid out as the
file will be, is reused by the next snapshot, and tensors that no step writes soon are copied during training.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from lightning_aigc._lightning import LightningModule, Trainer
from lightning_aigc.devices import accelerator_module
from lightning_aigc.errors import SnapshotError
from lightning_aigc.host_state import host_bytes
from lightning_aigc.sharding.local_parts import local_part

SLAB = 64 * 2**20
"""bytes. A power of two: torch rounds pinned memory up to one, so that a single block could be twice the state."""
SMALLEST_SLAB = 2**16
NICE = 10
"""With no core to spare, training kept 0.84 of its speed during a write, and 0.50 without this."""


@runtime_checkable
class HasDeferredSnapshotKeys(Protocol):
    """Lists checkpoint keys whose tensors change only in `optimizer_step` or later, not in forward or backward.

    A snapshot copies these during the next batch instead of before it.
    """

    deferred_snapshot_keys: Sequence[str]


class HostBuffer:
    """Host memory for the data of one file, in slabs; a tensor may span two of them."""

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._starts: list[int] = []
        self._size = 0
        self._pinned = False

    def reserve(self, size: int, *, pinned: bool) -> None:
        """Allocate room for `size` bytes, page-locked if asked and available.

        Raises: SnapshotError if there is no host memory of either kind.
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
        """Copy a tensor to this offset, a multiple of its element size; copies from a device are asynchronous."""
        flat_N = source.reshape(-1)
        if source.device.type == "cpu":
            # As bytes: numpy's copy takes one thread, where torch's would start its own pool next to training's.
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
        """Yield the first `size` bytes in order."""
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


Copy: TypeAlias = tuple[HostBuffer, Tensor, int]
"""Destination, source, and the offset in the destination."""


class StagingCopies:
    """The copies of one snapshot: started on construction, complete after `finish`.

    CPU tensors are copied on construction, deferred ones by `finish`. Device tensors are copied on a side stream; work
    that is queued on the device later waits for those copies, except for the deferred ones.

    Args: deferred: `data_ptr`s of the tensors whose copy may run during training.
    """

    def __init__(self, copies: Iterable[Copy], deferred: Container[int]) -> None:
        self._deferred: list[Copy] = []
        self._events: list[Any] = []
        self._sources: list[Tensor] = []  # keeps their memory from being reused before the device has read it
        on_devices: dict[torch.device, tuple[list[Copy], list[Copy]]] = {}
        for copy in copies:
            buffer, source, offset = copy
            is_deferred = deferred and source.data_ptr() in deferred
            if not source.is_cpu:
                on_devices.setdefault(source.device, ([], []))[bool(is_deferred)].append(copy)
            elif is_deferred:
                self._deferred.append(copy)
            else:
                buffer.copy_from(source, offset)
        for device, (now, later) in on_devices.items():
            self._on_device(device, now, later)

    def finish(self) -> None:
        for buffer, source, offset in self._deferred:
            buffer.copy_from(source, offset)
        for event in self._events:
            event.synchronize()
        self._deferred, self._events, self._sources = [], [], []

    def _on_device(self, device: torch.device, now: list[Copy], later: list[Copy]) -> None:
        module: Any = accelerator_module(device)
        training, beside = module.current_stream(device), module.Stream(device)
        beside.wait_stream(training)
        for copies in (now, later):
            with module.stream(beside):
                for buffer, source, offset in copies:
                    buffer.copy_from(source, offset)
                    self._sources.append(source)
            event = module.Event(blocking=True)  # the thread sleeps until then
            event.record(beside)
            self._events.append(event)
            if copies is now:
                training.wait_event(event)


class DeferredCopies:
    """The tensors that nothing should write before the next optimizer step: trained parameters and optimizer state.

    There are none in manual optimization, where only the module knows when it steps. Averaged weights are included only
    if the module declares `deferred_snapshot_keys`: some modules update theirs in forward, through `.data`, which no
    version counter sees.

    Args: checkpoint: what Lightning would save now.
    """

    def __init__(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        self._found: dict[int, tuple[Tensor, int]] = {}
        if trainer.lightning_module.automatic_optimization:
            groups = [group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
            states = [list(optimizer.state.values()) for optimizer in trainer.optimizers]
            also = [checkpoint.get(key) for key in _deferred_keys(trainer.lightning_module)]
            self._add([groups, states, also])

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor):
            value = local_part(value.detach())
            if value.numel():
                self._found[value.data_ptr()] = value, value._version
        elif isinstance(value, (dict, list, tuple)):
            for item in value.values() if isinstance(value, dict) else value:
                self._add(item)

    @property
    def addresses(self) -> Collection[int]:
        return self._found.keys()

    def were_written(self) -> bool:
        """Whether any of them was written in place since."""
        return any(tensor._version != version for tensor, version in self._found.values())


def _deferred_keys(trained: LightningModule) -> Sequence[str]:
    former: Sequence[str] | None = getattr(trained, "late_snapshot_keys", None)
    if former is not None:
        warnings.warn("late_snapshot_keys is now deferred_snapshot_keys", FutureWarning, stacklevel=2)
        return former
    return trained.deferred_snapshot_keys if isinstance(trained, HasDeferredSnapshotKeys) else ()


def lower_priority() -> None:
    """Lower the priority of the calling thread permanently, so that training goes first."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own, and its id may be a process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
