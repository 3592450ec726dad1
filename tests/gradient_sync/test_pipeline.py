"""Pipeline of threads on a CPU: a lane for each collective of a work, with an order of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lightning_aigc.gradient_sync.executors import ThreadExecutor, Work
from lightning_aigc.gradient_sync.transport.process_groups import SyncError

PATIENCE_S = 10


class Told:
    """Collective that ends when the test lets it."""

    def __init__(self, name: str, started: list[tuple[int, str]], ends: threading.Event) -> None:
        self.name, self.started, self._ends = name, started, ends
        self.has_started = threading.Event()

    def start(self, lane: int) -> Told:
        self.started.append((lane, self.name))
        self.has_started.set()
        return self

    def wait(self) -> None:
        if not self._ends.wait(PATIENCE_S):
            raise TimeoutError(self.name)


def now() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def work(*collectives: Told) -> Work:
    yield from collectives


@pytest.fixture
def executor() -> Iterator[ThreadExecutor]:
    made = ThreadExecutor(lambda error: SyncError(f"explained {error}"), lanes=2)
    yield made
    assert made.close()


def test_a_work_goes_on_without_another_one(executor: ThreadExecutor) -> None:
    started: list[tuple[int, str]] = []
    second = Told("second", started, now())
    executor.submit(work(Told("first", started, now()), second), lambda _: None, last=False)
    assert second.has_started.wait(PATIENCE_S)
    assert started == [(0, "first"), (1, "second")]


def test_a_lane_keeps_the_order_of_the_works_whichever_collective_ends_first(executor: ThreadExecutor) -> None:
    started: list[tuple[int, str]] = []
    early, ended = threading.Event(), []
    later = Told("b1", started, now())
    executor.submit(
        work(Told("a1", started, early), Told("a2", started, now())),
        lambda error: ended.append(("a", error)),
        last=False,
    )
    executor.submit(work(later, Told("b2", started, now())), lambda error: ended.append(("b", error)), last=True)
    assert later.has_started.wait(PATIENCE_S)  # though a1 travels still
    assert started == [(0, "a1"), (0, "b1")]
    early.set()
    executor.join()
    assert [name for lane, name in started if lane == 1] == ["a2", "b2"]
    assert ended == [("a", None), ("b", None)]


def test_what_follows_a_last_work_begins_when_that_one_has_ended(executor: ThreadExecutor) -> None:
    started: list[tuple[int, str]] = []
    ends, results = threading.Event(), []
    executor.submit(work(Told("selection", started, ends)), lambda _: results.append("selected"), last=True)

    def follows() -> Work:
        results.append("begun")
        yield Told("values", started, now())

    executor.submit(follows(), lambda _: None, last=False)
    ends.set()
    executor.join()
    assert results == ["selected", "begun"]


def test_after_a_failure_every_work_ends_with_its_error(executor: ThreadExecutor) -> None:
    started: list[tuple[int, str]] = []
    ended: list[SyncError | None] = []

    class Lost(Told):
        def wait(self) -> None:
            raise RuntimeError("a rank is gone")

    executor.submit(work(Lost("a1", started, now()), Told("a2", started, now())), ended.append, last=False)
    executor.submit(work(Told("b1", started, now()), Told("b2", started, now())), ended.append, last=True)
    executor.join()
    executor.submit(work(Told("c1", started, now())), ended.append, last=True)
    executor.join()
    assert [str(error) for error in ended] == ["explained a rank is gone"] * 3
    assert not {"a2", "b2", "c1"} & {name for _, name in started}


def test_a_work_with_more_collectives_than_lanes_is_an_error_and_no_wait(executor: ThreadExecutor) -> None:
    started: list[tuple[int, str]] = []
    ended: list[SyncError | None] = []
    executor.submit(work(*(Told(name, started, now()) for name in "abc")), ended.append, last=True)
    executor.join()
    assert "more collectives than the 2 lanes" in str(ended[0])


def test_times_are_sums_over_the_threads(executor: ThreadExecutor) -> None:
    executor.new_step()
    executor.submit(work(Told("a1", [], now()), Told("a2", [], now())), lambda _: None, last=True)
    executor.wanted()
    executor.join()
    times = executor.times()
    assert times.busy_ms > 0 and times.waiting_ms > 0 and times.packing_ms > 0
