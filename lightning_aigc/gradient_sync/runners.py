"""Who drives the reductions: a thread beside backward where collectives block, a side stream on accelerators."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.gradient_sync.groups import Groups

Work = Generator[Any, None, None]


class SyncError(RuntimeError):
    """Gradients could not be added up: a rank is gone, stuck, or does something else."""


def explain(error: BaseException, groups: Groups, step: int) -> SyncError:
    """The error of a collective in words that say where to look."""
    said = str(error).strip().splitlines() or ["no message"]
    return SyncError(
        f"rank {groups.rank} of {groups.world_size} could not add up gradients in step {step}: "
        f"{type(error).__name__}: {said[0]}. Most often another rank has stopped or hangs: look at its log first; a "
        f"rank that is only slow needs a longer timeout than {groups.timeout}"
    )


def attach_hook(ddp: DistributedDataParallel, on_bucket: Callable[[GradBucket], torch.futures.Future[Tensor]]) -> None:
    """Let DDP call `on_bucket` for each of its buckets."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, which here are strings
        return on_bucket(bucket)

    ddp.register_comm_hook(None, hook)


def at_the_end_of_backward(check: Callable[[], None]) -> None:
    """Call `check` when the backward pass at hand is over, for it to raise what went wrong.

    An error that a DDP hook's future carries comes out as a RuntimeError about a cast; what the engine's own callback
    raises comes out as it is.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(check)


class Inline:
    """Runs each unit to its end on the spot; what `overlap=False` means."""

    def __init__(self, explain: Callable[[BaseException], SyncError]) -> None:
        self._explain = explain
        self._busy_s = self._busy_before_s = self._wanted_at = self._done_at = 0.0

    def submit(self, work: Work, done: Callable[[SyncError | None], None], *, last: bool) -> None:
        start = time.perf_counter()
        done(_run(work, self._explain))
        self._done_at = time.perf_counter()
        self._busy_s += self._done_at - start

    def finish(self) -> None:
        """Wait until everything that was submitted is done."""

    def new_step(self) -> None:
        """Count time from here on."""
        self._busy_before_s = self._busy_s

    def wanted(self) -> None:
        """From here on the step waits for its sums."""
        self._wanted_at = time.perf_counter()

    def times_ms(self) -> tuple[float, float]:
        """Of a step that is finished: milliseconds that its sums took, and those that the step waited for them."""
        return 1e3 * (self._busy_s - self._busy_before_s), 1e3 * max(0.0, self._done_at - self._wanted_at)

    def close(self) -> bool:
        """Take no more; whether everything has ended. A second call does nothing."""
        return True


class Thread(Inline):
    """Drives the units from one thread, so that one is packed while another travels.

    Which collective follows which depends on the order of the units alone, never on what finished first: with each new
    unit every one goes on to its next collective, the new one first, and the last unit drives all to their end. So a
    unit is packed while those before it travel, and each collective has had that time when it is waited for.
    """

    def __init__(self, explain: Callable[[BaseException], SyncError]) -> None:
        super().__init__(explain)
        self._inbox: queue.Queue[tuple[Work, Callable[[SyncError | None], None], bool] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="gradient-sync", daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, work: Work, done: Callable[[SyncError | None], None], *, last: bool) -> None:
        self._inbox.put((work, done, last))

    def finish(self) -> None:
        if not self._closed:
            self._inbox.join()

    def close(self) -> bool:
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
            self._thread.join(timeout=5)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        running: list[_Running] = []
        failed: SyncError | None = None
        start = 0.0
        while (item := self._inbox.get()) is not None:
            work, done, last = item
            if not running:
                start = time.perf_counter()
            running.append(_Running(work, done))
            while failed is None and running:
                try:
                    for unit in reversed(list(running)):
                        if unit.advance():
                            running.remove(unit)
                except Exception as error:
                    failed = self._explain(error)
                if not last:
                    break
            if failed is not None:  # the groups are out of step for good: everything from here on fails alike
                for unit in running:
                    unit.done(failed)
                running.clear()
            if not running:
                self._done_at = time.perf_counter()
                self._busy_s += self._done_at - start
            self._inbox.task_done()


class _Running:
    """A unit on its way, and the collective that it waits for."""

    def __init__(self, work: Work, done: Callable[[SyncError | None], None]) -> None:
        self._work, self.done = work, done
        self._waiting: Any = None

    def advance(self) -> bool:
        """Wait for the collective at hand and go on to the next; whether that was the end."""
        if self._waiting is not None:
            self._waiting.wait()
        try:
            self._waiting = next(self._work)
        except StopIteration:
            self.done(None)
            return True
        return False


class Stream(Inline):
    """Queues everything on a side stream of an accelerator: there, waiting for a collective blocks no one.

    The stream of the backward pass waits for the side stream after the last unit, or where `late`, in `finish`. What
    takes how long is told by events on the two, to be read when the host has waited for both anyway.
    """

    def __init__(self, explain: Callable[[BaseException], SyncError], device: torch.device, *, late: bool) -> None:
        super().__init__(explain)
        self._late = late
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device=device)
        self._spans: list[tuple[Any, Any]] = []
        self._wanted: Any = None

    def submit(self, work: Work, done: Callable[[SyncError | None], None], *, last: bool) -> None:
        current = self._module.current_stream(self._device)
        self._stream.wait_stream(current)
        start = self._now_on(self._stream)
        with self._module.stream(self._stream):
            error = _run(work, self._explain)
        self._spans.append((start, self._now_on(self._stream)))
        if last and not self._late:
            current.wait_stream(self._stream)
        done(error)

    def finish(self) -> None:
        self._module.current_stream(self._device).wait_stream(self._stream)

    def new_step(self) -> None:
        self._spans = []

    def wanted(self) -> None:
        self._wanted = self._now_on(self._module.current_stream(self._device))

    def times_ms(self) -> tuple[float, float]:
        busy = sum(start.elapsed_time(end) for start, end in self._spans)
        return busy, max(0.0, self._wanted.elapsed_time(self._spans[-1][1]))

    def _now_on(self, stream: Any) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event


def _run(work: Work, explain: Callable[[BaseException], SyncError]) -> SyncError | None:
    try:
        for collective in work:
            collective.wait()
    except Exception as error:
        return explain(error)
    return None
