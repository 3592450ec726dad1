"""DDP's communication hook: collect the gradients of its buckets until the flat units they belong to are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.gradient_sync.transport.sync_error import SyncError
from lightning_aigc.gradient_sync.units import FlatUnit


class BucketFuture:
    """DDP's future for one bucket, done when the last unit that has a parameter in it is done."""

    def __init__(self, buffer: Tensor) -> None:
        self.future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buffer, self._holders = buffer, 1

    def hold(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self.future.set_result(self._buffer)


class UnitGradients:
    """The gradients of one unit in this step, and the buckets that wait for their sum."""

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
        """Let DDP go on with the buckets that waited for this unit alone."""
        for bucket in self._futures:
            bucket.release()


class StepHandler(Protocol):
    """What the hook tells the sync."""

    def begin_step(self) -> None:
        """The first gradients of a step are ready."""

    def reduce_units(self, complete: Sequence[UnitGradients], *, last: bool) -> None:
        """The gradients of these units are ready; `last` with the last bucket of the step."""

    def end_backward(self) -> None:
        """The backward pass is over. Raise what went wrong."""


class CommunicationHook:
    """Sorts the gradients of DDP's buckets into units, whatever the buckets are: DDP rebuilds them after one step."""

    def __init__(
        self, units: Sequence[FlatUnit], parameters: Sequence[tuple[str, nn.Parameter]], rank: int, handler: StepHandler
    ) -> None:
        self._units, self._rank, self._handler = units, rank, handler
        self._unit_of = {entry.name: unit for unit in units for entry in unit.entries}
        self._names = {id(parameter): name for name, parameter in parameters}
        self._incomplete: dict[int, UnitGradients] = {}
        self._is_closed = False

    @property
    def is_within_step(self) -> bool:
        """Whether some gradients of a step are ready and others are not."""
        return bool(self._incomplete)

    @property
    def incomplete_units(self) -> list[FlatUnit]:
        """Units of this step whose gradients are not all ready."""
        return [collected.unit for collected in list(self._incomplete.values())]

    def attach(self, ddp: DistributedDataParallel) -> None:
        attach_hook(ddp, self.on_bucket)

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket from DDP, and return the future of its sum."""
        if self._is_closed:
            raise SyncError(
                f"rank {self._rank}: this gradient sync is closed, and DDP still calls it. To train on, wrap the "
                "module in a new DistributedDataParallel, and hook that up"
            )
        if len(bucket.gradients()) < len(bucket.parameters()):
            names = ", ".join(self._names[id(parameter)] for parameter in bucket.parameters())
            raise SyncError(
                f"the gradient of {names} is sparse; gradient sync takes dense ones: make the module with sparse=False "
                "(torch.nn.Embedding, EmbeddingBag), or train it under plain ddp"
            )
        future = BucketFuture(bucket.buffer())
        self.gradients_ready(bucket.parameters(), bucket.gradients(), future, last=bucket.is_last())
        future.release()
        if bucket.is_last():
            at_the_end_of_backward(self._handler.end_backward)
        return future.future

    def gradients_ready(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], bucket: BucketFuture, *, last: bool
    ) -> None:
        """Sort in the gradients of a bucket, and hand on the units that are complete with them."""
        if not self._incomplete:
            self._handler.begin_step()
            self._incomplete = {unit.index: UnitGradients(unit) for unit in self._units}
        complete = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = self._names[id(parameter)]
            collected = self._incomplete[self._unit_of[name].index]
            collected.add(name, gradient, bucket)
            if collected.is_complete:
                complete.append(collected)
        complete.sort(key=lambda collected: collected.unit.index)
        for collected in complete:
            del self._incomplete[collected.unit.index]
        self._handler.reduce_units(complete, last=last)

    def close(self) -> None:
        """Make every further bucket an error."""
        self._is_closed = True


def attach_hook(ddp: DistributedDataParallel, on_bucket: Callable[[GradBucket], torch.futures.Future[Tensor]]) -> None:
    """Let DDP call `on_bucket` for each of its buckets."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, which here are strings
        return on_bucket(bucket)

    ddp.register_comm_hook(None, hook)


def at_the_end_of_backward(check: Callable[[], None]) -> None:
    """Call `check` when the current backward pass is over, for it to raise what went wrong.

    An error that a DDP hook's future carries comes out as a RuntimeError about a cast; what the engine's own callback
    raises comes out as it is.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(check)
