"""DDP's side of gradient sync: gradients sorted from buckets into flat units, and the futures that DDP waits for.

DDP rebuilds its buckets after the first step; units stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.gradient_sync.units import FlatUnit


class BucketFuture:
    """DDP's future of one bucket, done when the last unit with a parameter in it is reduced."""

    def __init__(self, buffer: Tensor) -> None:
        self.future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buffer, self._holders = buffer, 1
        self._lock = threading.Lock()  # units end in several threads

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            is_free = self._holders == 0
        if is_free:
            self.future.set_result(self._buffer)


class UnitGradients:
    """Gradients of one unit in this step, and the buckets that wait for their mean."""

    def __init__(self, unit: FlatUnit) -> None:
        self.unit = unit
        self.by_name: dict[str, Tensor] = {}
        self._futures: list[BucketFuture] = []

    @property
    def is_complete(self) -> bool:
        return len(self.by_name) == len(self.unit.entries)

    def add(self, name: str, gradient: Tensor, bucket: BucketFuture) -> None:
        self.by_name[name] = gradient
        if bucket not in self._futures:
            bucket.hold()
            self._futures.append(bucket)

    def release(self) -> None:
        """Release the buckets; DDP continues with those that no other unit holds."""
        for bucket in self._futures:
            bucket.release()


class UnitCollector:
    """Collects the gradients of a step until their units are complete."""

    def __init__(self, units: Sequence[FlatUnit], parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._units = units
        self._unit_of = {entry.name: unit for unit in units for entry in unit.entries}
        self._names = {id(parameter): name for name, parameter in parameters}
        self._incomplete: dict[int, UnitGradients] = {}

    @property
    def is_within_step(self) -> bool:
        """Whether some gradients of a step are ready and others are not."""
        return bool(self._incomplete)

    @property
    def incomplete_units(self) -> list[FlatUnit]:
        """Units of this step whose gradients are not all ready."""
        return [collected.unit for collected in list(self._incomplete.values())]

    def names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        return [self._names[id(parameter)] for parameter in parameters]

    def collect(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], bucket: BucketFuture
    ) -> list[UnitGradients]:
        """Sort a bucket's gradients into their units. Returns: the units that this bucket completes, in their order."""
        if not self._incomplete:
            self._incomplete = {unit.index: UnitGradients(unit) for unit in self._units}
        complete = []
        for name, gradient in zip(self.names_of(parameters), gradients, strict=True):
            collected = self._incomplete[self._unit_of[name].index]
            collected.add(name, gradient, bucket)
            if collected.is_complete:
                complete.append(collected)
        complete.sort(key=lambda collected: collected.unit.index)
        for collected in complete:
            del self._incomplete[collected.unit.index]
        return complete


def attach_hook(ddp: DistributedDataParallel, on_bucket: Callable[[GradBucket], torch.futures.Future[Tensor]]) -> None:
    """Register `on_bucket` as DDP's communication hook."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, which here are strings
        return on_bucket(bucket)

    ddp.register_comm_hook(None, hook)


def after_backward(check: Callable[[], None]) -> None:
    """Call `check` when the current backward pass has ended; it may raise.

    The autograd engine re-raises an error of its own callback unchanged. It reports an error in a DDP future as a
    RuntimeError about a cast.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(check)
