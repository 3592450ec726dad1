"""Executors of reductions: a thread on CPUs, where collectives block, and a side stream on accelerators."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_aigc.gradient_sync.transport.process_groups import SyncError

Work = Generator[Any, None, None]
"""Generator that yields each collective it starts; the executor resumes it when that collective is done."""


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a finished step's sync; on an accelerator packing and waiting are not measured, and are 0."""

    busy_ms: float
    """Sum over all works, each from its start to its end."""
    exposed_ms: float
    """Wait of the step for its sums."""
    packing_ms: float = 0.0
    """CPU time of the host in the works."""
    waiting_ms: float = 0.0
    """Wait of the works for their collectives."""


class Clock:
    """Runs works and measures, since the step began, the seconds of computing and of waiting."""

    def __init__(self) -> None:
        self.packing_s = self.waiting_s = 0.0

    def new_step(self) -> None:
        self.packing_s = self.waiting_s = 0.0

    def advance(self, work: Work) -> Any:
        start = time.thread_time()
        try:
            return next(work)
        finally:
            self.packing_s += time.thread_time() - start

    def wait(self, collective: Any) -> None:
        start = time.perf_counter()
        collective.wait()
        self.waiting_s += time.perf_counter() - start

    def run(self, work: Work) -> None:
        """Run a work to its end."""
        try:
            while True:
                self.wait(self.advance(work))
        except StopIteration:
            pass


class InlineExecutor:
    """Runs each work to its end at once, for `overlap=False`."""

    def __init__(self, explain: Callable[[BaseException], SyncError]) -> None:
        self._explain = explain
        self._clock = Clock()
        self._busy_s = self._busy_before_s = self._wanted_at = self._done_at = 0.0

    def submit(self, work: Work, done: Callable[[SyncError | None], None], *, last: bool) -> None:
        start = time.perf_counter()
        done(_run(work, self._clock, self._explain))
        self._done_at = time.perf_counter()
        self._busy_s += self._done_at - start

    def join(self) -> None:
        """Wait until all submitted works are done."""

    def new_step(self) -> None:
        """Start to measure the times of a step."""
        self._busy_before_s = self._busy_s
        self._clock.new_step()

    def wanted(self) -> None:
        """Note that the step waits for its sums from now on."""
        self._wanted_at = time.perf_counter()

    def times(self) -> StepTimes:
        """Return the times of a finished step."""
        return StepTimes(
            1e3 * (self._busy_s - self._busy_before_s),
            1e3 * max(0.0, self._done_at - self._wanted_at),
            1e3 * self._clock.packing_s,
            1e3 * self._clock.waiting_s,
        )

    def close(self) -> bool:
        """Accept no more works. Returns: whether all of them have ended. A second call does nothing."""
        return True


class ThreadExecutor(InlineExecutor):
    """Runs all works in one thread, so that one unit is packed while the collectives of others run.

    The order of collectives depends only on the order of the works, never on which collective ends first, so it is the
    same on every rank. Each new work advances all works to their next collective, the new one first; the last work of a
    step runs all to their end. A collective has therefore run for the time of packing a unit when the thread waits for
    it.
    """

    def __init__(self, explain: Callable[[BaseException], SyncError]) -> None:
        super().__init__(explain)
        self._inbox: queue.Queue[tuple[Work, Callable[[SyncError | None], None], bool] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="gradient-sync", daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, work: Work, done: Callable[[SyncError | None], None], *, last: bool) -> None:
        self._inbox.put((work, done, last))

    def join(self) -> None:
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
            running.append(_Running(work, done, self._clock))
            while failed is None and running:
                try:
                    for begun in reversed(list(running)):
                        if begun.advance():
                            running.remove(begun)
                except Exception as error:
                    failed = self._explain(error)
                if not last:
                    break
            if failed is not None:  # the ranks are out of step: every later work fails with the same error
                for begun in running:
                    begun.done(failed)
                running.clear()
            if not running:
                self._done_at = time.perf_counter()
                self._busy_s += self._done_at - start
            self._inbox.task_done()


class _Running:
    """A started work, and the collective that it waits for."""

    def __init__(self, work: Work, done: Callable[[SyncError | None], None], clock: Clock) -> None:
        self._work, self.done, self._clock = work, done, clock
        self._waiting: Any = None

    def advance(self) -> bool:
        """Wait for the current collective and start the next. Returns: whether the work has ended."""
        if self._waiting is not None:
            self._clock.wait(self._waiting)
        try:
            self._waiting = self._clock.advance(self._work)
        except StopIteration:
            self.done(None)
            return True
        return False


class StreamExecutor(InlineExecutor):
    """Queues all works on a side stream of an accelerator, where waiting for a collective does not block the host.

    The stream of the backward pass waits for the side stream after the last work. Events on both streams measure the
    times; they are read when the host has waited for both streams.
    """

    def __init__(self, explain: Callable[[BaseException], SyncError], device: torch.device) -> None:
        super().__init__(explain)
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
            error = _run(work, self._clock, self._explain)
        self._spans.append((start, self._now_on(self._stream)))
        if last:
            current.wait_stream(self._stream)
        done(error)

    def join(self) -> None:
        self._module.current_stream(self._device).wait_stream(self._stream)

    def new_step(self) -> None:
        self._spans = []

    def wanted(self) -> None:
        self._wanted = self._now_on(self._module.current_stream(self._device))

    def times(self) -> StepTimes:
        busy = sum(start.elapsed_time(end) for start, end in self._spans)
        return StepTimes(busy, max(0.0, self._wanted.elapsed_time(self._spans[-1][1])))

    def _now_on(self, stream: Any) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event


def make_executor(
    explain: Callable[[BaseException], SyncError], device: torch.device, *, overlap: bool
) -> InlineExecutor:
    """Return the executor for a device. `explain` turns a collective's error into one that says where to look."""
    if not overlap:
        return InlineExecutor(explain)
    return ThreadExecutor(explain) if device.type == "cpu" else StreamExecutor(explain, device)


def _run(work: Work, clock: Clock, explain: Callable[[BaseException], SyncError]) -> SyncError | None:
    try:
        clock.run(work)
    except Exception as error:
        return explain(error)
    return None
