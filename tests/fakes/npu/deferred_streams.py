"""Simulated accelerator streams on CPU tensors, where work runs as late as allowed, or immediately.

Inside `Device` an operator allocates its result, filled with NaN, and joins the queue of the current stream. A stream
runs when the host reads its result or another stream waits for it; with `side_runs_at_once`, all streams except the
main stream run immediately. An accelerator may do either, so code whose results are correct both ways has all the
synchronisation it needs.

Memory behaves as with a caching allocator: memory that the host frees belongs to the stream that allocated it, whose
next tensor may reuse it while another stream has yet to read it. That read then gives NaN here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

HOST_READS = {"_local_scalar_dense", "equal", "nonzero", "bincount", "_unique2"}
"""Operators whose result the host needs at once: a number, or a tensor of a size that depends on numbers."""


class Device(TorchDispatchMode):
    """Both the mode to be within, and what `torch.get_device_module` has to return."""

    def __init__(self, *, side_runs_at_once: bool) -> None:
        super().__init__()
        self.streams: list[DeferredStream] = []
        self.main = self.current = DeferredStream(self, at_once=False)
        self.Stream = partial(DeferredStream, self, at_once=side_runs_at_once)
        self.Event = DeferredEvent
        self.made_by: dict[int, DeferredStream] = {}
        self.held: Counter[int] = Counter()
        """References that the queues have to each storage."""

    def current_stream(self, device: Any = None) -> DeferredStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: DeferredStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def busy(self, milliseconds: float) -> None:
        """A kernel of this length on the current stream; all others take no time."""
        stream = self.current

        def pass_time() -> None:
            stream.now_ms += milliseconds

        stream.put(pass_time)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op.name().removeprefix("aten::").partition(".")[0]
        if op.is_view or name in ("detach", "lift_fresh"):
            return op(*args, **kwargs)
        by_mask = name == "index" and any(i.dtype == torch.bool for i in args[1] if i is not None)
        if name in HOST_READS or by_mask:
            self.current.run()
            return op(*args, **kwargs)
        written = [
            given
            for argument, given in [*zip(op._schema.arguments, args, strict=False), *_by_name(op, kwargs)]
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            queued_args, queued_kwargs = tree_map(self._hold, (args, kwargs))
            self.current.put(lambda: op(*queued_args, **queued_kwargs), (queued_args, queued_kwargs))
            return written[0] if len(op._schema.returns) == 1 else None
        self._reuse_memory()
        with_meta = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        shapes = op(*tree_map(_on_meta, args), **tree_map(_on_meta, with_meta))
        results = tree_map(self._make, shapes)
        if name in ("empty", "empty_like", "new_empty"):
            return results
        queued_args, queued_kwargs, queued_results = tree_map(self._hold, (args, kwargs, results))

        def work() -> None:
            values = op(*queued_args, **queued_kwargs)
            for place, value in zip(tree_leaves(queued_results), tree_leaves(values), strict=True):
                place.copy_(value)

        self.current.put(work, (queued_args, queued_kwargs, queued_results))
        return results

    def _make(self, like: Any) -> Any:
        if not isinstance(like, Tensor):
            return like
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        _scramble(made)
        self.made_by[_storage(made)] = self.current
        weakref.finalize(made.untyped_storage(), self.made_by.pop, _storage(made))  # the address may serve again
        return made

    def _hold(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self.held[_storage(value)] += 1
        return value.detach()

    def let_go(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self.held[_storage(tensor)] -= 1

    def _reuse_memory(self) -> None:
        """The current stream makes a tensor, where what the host has let go of lies."""
        for stream in self.streams:
            if stream is self.current:
                continue
            for number, (_, tensors) in enumerate(stream.queue, stream.done + 1):
                for tensor in tree_leaves(tensors):
                    if not isinstance(tensor, Tensor) or number <= self.current.waits_for.get(stream, 0):
                        continue
                    at = _storage(tensor)
                    of_host = torch._C._storage_Use_Count(at) - self.held[at] - 1  # one is `_storage`'s own, for good
                    if self.made_by.get(at) is self.current and of_host == 0:
                        self.current.put(partial(_scramble, tensor))


class DeferredStream:
    def __init__(self, owner: Device, device: Any = None, *, at_once: bool) -> None:
        self.owner, self.at_once = owner, at_once
        self.queue: deque[tuple[Callable[[], Any], Any]] = deque()
        self.done = 0
        self.now_ms = 0.0
        self.waits_for: dict[DeferredStream, int] = {}
        """Number of another stream's tasks that come before this stream's next task."""
        owner.streams.append(self)

    def put(self, work: Callable[[], Any], tensors: Any = ()) -> None:
        self.queue.append((work, tensors))
        if self.at_once:
            self.run()

    def run(self, until: int | None = None) -> None:
        """Do what is queued, or the first `until` of all that ever was."""
        until = self.done + len(self.queue) if until is None else until
        with _disable_current_modes():
            while self.done < until:
                work, tensors = self.queue.popleft()
                self.done += 1
                work()
                self.owner.let_go(tensors)

    def wait_stream(self, other: DeferredStream) -> None:
        event = DeferredEvent()
        event.record(other)
        until = self.waits_for[other] = other.done + len(other.queue)

        def wait() -> None:
            other.run(until)
            assert event.at_ms is not None
            self.now_ms = max(self.now_ms, event.at_ms)

        self.put(wait)


class DeferredEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.at_ms: float | None = None

    def record(self, stream: DeferredStream) -> None:
        def now() -> None:
            self.at_ms = stream.now_ms

        stream.put(now)

    def elapsed_time(self, end: DeferredEvent) -> float:
        if self.at_ms is None or end.at_ms is None or not (self.enable_timing and end.enable_timing):
            raise RuntimeError("elapsed_time wants two events with enable_timing=True that the device has come to")
        return end.at_ms - self.at_ms


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _scramble(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else 77 if tensor.dtype != torch.bool else True)


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _by_name(op: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in op._schema.arguments if argument.name in kwargs]
