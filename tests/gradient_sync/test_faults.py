"""Faults of ranks and links: gradient sync goes on to the same bits, or every rank ends with an error in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.processes import network
from fakes.processes.given_gradients import Given, Training, make_gradients, refusal
from fakes.processes.ranks import run_ranks
from lightning_aigc.gradient_sync import SyncError
from lightning_aigc.gradient_sync.watch.replica_check import check_equal

SHAPES = {"first": (512, 384), "second": (512, 384), "third": (512, 384), "bias": (384,)}
"""590 000 values: a step takes a slow link a moment, so that a fault falls into it."""
RATE, LOW_RATE = "20mbit", "10mbit"
SMALL_BURST = "16kb"
"""Burst of a link: with this little, a step of 200 kB and more cannot be over before the link is cut."""
STEPS, AT = 5, 2
"""Steps of a run, and the one in which the fault begins."""
AT_FAULT = {"die": 1, "cut_for_good": 0, "pause": 1}
"""The rank that brings a fault about."""
LONG_ENOUGH = timedelta(seconds=60)
SHORT = timedelta(seconds=4)
MARGIN_S = 3.0
GOES_ON = ["int3", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("dense", "sparse", "local"))]
ENDS = ["int3", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("dense", "local"))]
Fault = Callable[[int, float], None]


def training(mode: str, timeout: timedelta) -> Training:
    options: dict[str, Any] = {"mode": mode, "bucket_mb": 0.5, "timeout": timeout, "stall_after_s": 0}
    if mode == "local":
        options |= {"local_steps": 1, "average": "int3"}
    return Training({"bucket_cap_mb": 0.5}, module=Given(SHAPES), **options)


def steps_with(
    fault: Fault | None, rank: int, mode: str, timeout: timedelta, seconds: float
) -> tuple[list[torch.Tensor], int]:
    """Parameters after each step of a run with a fault in the middle, and how many packets TCP had to send again."""
    run, after = training(mode, timeout), []
    before = network.packets_sent_again()
    for number in range(STEPS):
        if number == AT and fault is not None:
            fault(rank, seconds)
        run.step(make_gradients(number, rank, SHAPES))
        after.append(run.flat())
    check_equal(list(run.module.named_parameters()))
    sent_again = (network.packets_sent_again() - before).total()
    run.compressor.close()
    return after, sent_again


# Faults --------------------------------------------------------------------------------------------------------------


def soon(seconds: float, *command: object) -> None:
    """Run a command later, in a process of its own: this one may be stopped then."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; {' '.join(map(str, command))}"])


def pause(rank: int, seconds: float) -> None:
    """Stop rank 1 as a debugger or a full machine does."""
    if rank == 1:
        soon(seconds, "kill", "-CONT", os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)


def cut_for_a_while(rank: int, seconds: float) -> None:
    """Cut the link once the step has begun to send."""
    host, before = os.environ["HOST"], network.bytes_sent()

    def cut_and_mend() -> None:
        while network.bytes_sent() - before < 50_000:
            time.sleep(0.002)
        network.cut(host)
        time.sleep(seconds)
        network.mend(host)

    if rank == 0:
        threading.Thread(target=cut_and_mend, daemon=True).start()


def lose_packets(rank: int, share: float) -> None:
    assert network.lose_packets(share) >= 2  # of the default group and of gradient sync


def crowd_one_core(rank: int, seconds: float) -> None:
    """Run both ranks on one core, one of them with the least right to it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if rank == 1:
        os.nice(15)


# Runs that go on -----------------------------------------------------------------------------------------------------


def compared(rank: int, name: str, mode: str, seconds: float) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """The same run without the fault and with it, and how many packets had to be sent again in the latter."""
    fault: Fault = globals()[name]
    without, _ = steps_with(None, rank, mode, LONG_ENOUGH, seconds)
    return without, *steps_with(fault, rank, mode, LONG_ENOUGH, seconds)


def assert_equal_bits(of_ranks: list[Any]) -> None:
    (without, with_it, _), (_, of_other, _) = of_ranks
    for undisturbed, here, there in zip(without, with_it, of_other, strict=True):
        assert torch.equal(here, there), "the ranks have diverged"
        assert torch.equal(here, undisturbed), "the fault has changed the training"
    assert not torch.equal(with_it[AT], with_it[-1])


@pytest.mark.parametrize("mode", GOES_ON)
@pytest.mark.parametrize(("name", "seconds"), [("pause", 2.0), ("crowd_one_core", 0.0)])
def test_a_rank_that_stands_still_or_is_slow_changes_nothing(
    name: str, seconds: float, mode: str, tmp_path: Path
) -> None:
    assert_equal_bits(run_ranks(compared, 2, tmp_path, name, mode, seconds))


@pytest.mark.long
def test_a_rank_that_stands_still_for_half_a_minute_changes_nothing(tmp_path: Path) -> None:
    assert_equal_bits(run_ranks(compared, 2, tmp_path, "pause", "int3", 30.0))


@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.parametrize("mode", GOES_ON)
def test_a_link_that_is_cut_for_a_while_changes_nothing(mode: str, tmp_path: Path) -> None:
    with network.two_hosts(RATE if mode == "dense" else LOW_RATE, SMALL_BURST) as link:
        here = {"HOST": link.hosts[0]}
        of_ranks = run_ranks(
            compared, 2, tmp_path, "cut_for_a_while", mode, 2.0, hosts=link.hosts, environment=here
        )  # fmt: skip
    assert_equal_bits(of_ranks)
    assert sum(again for *_, again in of_ranks) > 0, "nothing was on the link when it was cut"


@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.parametrize("mode", GOES_ON)
def test_a_link_that_loses_one_packet_in_twenty_changes_nothing(mode: str, tmp_path: Path) -> None:
    with network.two_hosts(RATE, SMALL_BURST) as link:  # larger packets are few enough for one in twenty to be none
        of_ranks = run_ranks(compared, 2, tmp_path, "lose_packets", mode, 0.05, hosts=link.hosts)
    assert_equal_bits(of_ranks)
    assert sum(again for *_, again in of_ranks) > 0, "no packet was lost"


# Runs that end -------------------------------------------------------------------------------------------------------


def die(rank: int, seconds: float) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def cut_for_good(rank: int, seconds: float) -> None:
    if rank == 0:
        network.cut(os.environ["HOST"])


def ending(rank: int, name: str, mode: str, seconds: float, moment: str) -> tuple[str, float]:
    """The end of this rank, and its time on the ranks' common clock; the rank at fault writes its moment to a file."""

    def note_and_act(rank: int, seconds: float) -> None:
        if rank == AT_FAULT[name]:
            Path(moment).write_text(repr(time.monotonic()), encoding="utf-8")
        globals()[name](rank, seconds)

    return refusal(lambda: steps_with(note_and_act, rank, mode, SHORT, seconds)), time.monotonic()


def endings(name: str, mode: str, seconds: float, folder: Path, **options: Any) -> list[tuple[str, float] | None]:
    """The end of each rank, and how many seconds after the fault; None for one that died."""
    moment = folder / "moment"
    ends = run_ranks(ending, 2, folder, name, mode, seconds, str(moment), **options)
    return [end and (end[0], end[1] - float(moment.read_text())) for end in ends]


def assert_ends(end: tuple[str, float] | None, rank: int, before: float) -> None:
    assert end is not None
    said, seconds = end
    # A rank may be a step behind the one that brings the fault about.
    sentence = rf"{SyncError.__name__}: rank {rank} of 2 could not add up gradients in step [{AT - 1}{AT}]: "
    assert re.match(sentence, said), said
    assert "look at its log first" in said and "\n" not in said
    assert seconds < before


@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.parametrize("mode", ENDS)
def test_a_rank_that_is_killed_ends_the_other_at_once(mode: str, tmp_path: Path) -> None:
    with network.two_hosts(RATE) as link:
        left, _ = endings("die", mode, 0.0, tmp_path, hosts=link.hosts, may_die=[1])
    assert_ends(left, 0, before=SHORT.total_seconds())  # its end closes the connection


@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.parametrize("mode", ENDS)
def test_a_link_that_stays_cut_ends_both_ranks_at_the_timeout(mode: str, tmp_path: Path) -> None:
    with network.two_hosts(RATE) as link:
        here = {"HOST": link.hosts[0]}
        ends = endings("cut_for_good", mode, 0.0, tmp_path, hosts=link.hosts, environment=here)
    for rank, end in enumerate(ends):
        assert_ends(end, rank, before=SHORT.total_seconds() + MARGIN_S)


@pytest.mark.parametrize("mode", ENDS)
def test_a_rank_that_stands_still_beyond_the_timeout_finds_itself_alone(mode: str, tmp_path: Path) -> None:
    pause_s = SHORT.total_seconds() + 2
    other, paused = endings("pause", mode, pause_s, tmp_path)
    assert_ends(other, 0, before=SHORT.total_seconds() + MARGIN_S)
    assert_ends(paused, 1, before=pause_s + SHORT.total_seconds() + MARGIN_S)
