"""Executors of reductions: threads on CPUs, where collectives block, and a side stream on accelerators."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_aigc.gradient_sync.transport.process_groups import SyncError

Work = Generator[Any, None, None]
"""Generator that yields each collective it needs; an executor starts it, and resumes the work when it is done."""


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
        """Wait for a collective; one that has not started starts first."""
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
    """Runs works as a pipeline of threads, so that one unit is packed while the collectives of others run.

    Thread k waits for a work's collective k, computes up to its next one, starts that on lane k, and passes the work
    on. Each thread takes the works in the order in which they were submitted, so the order of the collectives of a lane
    is the same on every rank, whichever of them ends first.
    """

    def __init__(self, explain: Callable[[BaseException], SyncError], lanes: int) -> None:
        """Args: lanes: largest number of collectives of a work, for each of which its groups have a lane."""
        super().__init__(explain)
        self._clocks = [Clock() for _ in range(lanes + 1)]
        self._queues: list[queue.Queue[_Running | None]] = [queue.Queue() for _ in self._clocks]
        self._failed: SyncError | None = None
        self._changed = threading.Condition()
        self._running, self._begun_at = 0, 0.0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(stage,), name=f"gradient-sync-{stage}", daemon=True)
            for stage in range(lanes + 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work, done: Callable[[SyncError | None], None], *, last: bool) -> None:
        with self._changed:
            if self._running == 0:
                self._begun_at = time.perf_counter()
            self._running += 1
        self._queues[0].put(_Running(work, done, last))

    def join(self) -> None:
        if not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._running == 0)

    def new_step(self) -> None:
        self._busy_before_s = self._busy_s
        for clock in self._clocks:
            clock.new_step()

    def times(self) -> StepTimes:
        self._clock.packing_s = sum(clock.packing_s for clock in self._clocks)
        self._clock.waiting_s = sum(clock.waiting_s for clock in self._clocks)
        return super().times()

    def close(self) -> bool:
        if not self._closed:
            self._closed = True
            self._queues[0].put(None)
            until = time.monotonic() + 5
            for thread in self._threads:
                thread.join(timeout=max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, stage: int) -> None:
        clock, following = self._clocks[stage], self._queues[stage + 1] if stage + 1 < len(self._queues) else None
        while (running := self._queues[stage].get()) is not None:
            if self._failed is None and self._advance(running, clock, stage):
                assert following is not None
                following.put(running)
            else:  # after a failure the ranks are out of step: every later work fails with the same error
                self._end(running)
            if running.is_last and stage == 0:  # what comes next may need this work's result
                running.ended.wait()
        if following is not None:
            following.put(None)

    def _advance(self, running: _Running, clock: Clock, stage: int) -> bool:
        """Wait for the work's collective and start its next one. Returns: whether there is a next one."""
        try:
            if running.collective is not None:
                clock.wait(running.collective)
            collective = clock.advance(running.work)
            if stage == len(self._queues) - 1:
                raise RuntimeError(f"a unit has more collectives than the {stage} lanes of its process groups")
            running.collective = collective.start(stage)
        except StopIteration:
            return False
        except Exception as error:
            self._failed = self._failed or self._explain(error)
            return False
        return True

    def _end(self, running: _Running) -> None:
        running.done(self._failed)
        running.ended.set()
        with self._changed:
            self._running -= 1
            if self._running == 0:
                self._done_at = time.perf_counter()
                self._busy_s += self._done_at - self._begun_at
                self._changed.notify_all()


@dataclass
class _Running:
    """A work, and the started collective that it waits for."""

    work: Work
    done: Callable[[SyncError | None], None]
    is_last: bool
    collective: Any = None
    ended: threading.Event = field(default_factory=threading.Event)


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
    explain: Callable[[BaseException], SyncError], device: torch.device, *, overlap: bool, lanes: int
) -> InlineExecutor:
    """Return the executor for a device. `explain` turns a collective's error into one that says where to look."""
    if not overlap:
        return InlineExecutor(explain)
    return ThreadExecutor(explain, lanes) if device.type == "cpu" else StreamExecutor(explain, device)


def _run(work: Work, clock: Clock, explain: Callable[[BaseException], SyncError]) -> SyncError | None:
    try:
        clock.run(work)
    except Exception as error:
        return explain(error)
    return None
