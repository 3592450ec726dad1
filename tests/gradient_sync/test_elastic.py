"""Runs that meet for averages: one is killed in an average and comes back, one comes late and ends early."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from fakes.models.small_lightning import Small, make_batches, make_trainer
from fakes.processes.given_gradients import refusal
from fakes.processes.ranks import meeting_point, run_ranks
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.elastic import MeetingPlace, groups, local_sgd, quorum
from lightning_aigc.gradient_sync.elastic.quorum import Meeting, Quorum, Standing
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.transport.process_groups import SyncError
from lightning_aigc.strategies import NPUSparseStrategy

STEPS, EVERY = 30, 3
DIES_AT = 4
"""Average in which run 1 is killed, after the others have started to send."""
OPTIONS: dict[str, Any] = {
    "mode": "local", "local_steps": EVERY, "average": "top_k", "top_k": 1712, "outer_momentum": 0.3,
}  # fmt: skip


class Averages(Callback):
    """Notes each average: its number, the ranks that took part, and the parameters after it."""

    def __init__(self, progress: Path) -> None:
        self.progress, self.seen = progress, []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        sync = trainer.strategy.sync
        self.steps.append(trainer.global_step)
        if not self.seen or self.seen[-1][0] != sync._averages:
            self.seen.append((sync._averages, sync.groups.everyone.size, module.flat()))
            self.progress.write_text(str(sync._averages), encoding="utf-8")
        time.sleep(0.02)


def alone(environment: dict[str, str]) -> str:
    """Make this process a world of its own, and return the address of the store that all share."""
    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    return address


def wait_for(path: Path, averages: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or int(path.read_text(encoding="utf-8") or 0) < averages:
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def one_run(rank: int, folder: str) -> Any:
    warnings.simplefilter("ignore")
    quorum.DEAD_AFTER_S = 2.0
    said: list[str] = []
    local_sgd.print_line = said.append
    address, steps, min_ranks = alone(os.environ), STEPS, 2 if rank < 2 else 1  # type: ignore[arg-type]
    progress = Path(folder, f"progress{rank}")
    first = Path(folder, "progress0")
    if rank == 1:
        all_gather = groups.ElasticGroup.all_gather  # the only collective of two, and the second of three

        def dies(self: Any, *arguments: Any) -> Any:
            if progress.exists() and int(progress.read_text(encoding="utf-8")) == DIES_AT - 1:
                time.sleep(0.3)  # the others have started theirs, and wait
                os.kill(os.getpid(), signal.SIGKILL)
            return all_gather(self, *arguments)

        groups.ElasticGroup.all_gather = dies  # type: ignore[method-assign]
    if rank == 2:
        wait_for(first, 1)
        steps = 4 * EVERY  # and ends before the others
    saved, resumed = Path(folder, "checkpoints"), None
    checkpoints: dict[str, Any] = {}
    if rank == 1:
        save = ModelCheckpoint(saved, every_n_train_steps=EVERY, save_last=True)
        checkpoints = {"enable_checkpointing": True, "callbacks": [save]}
    if rank == 3:  # the killed run comes back, from its last checkpoint
        wait_for(first, DIES_AT)
        resumed = saved / "last.ckpt"
    torch.manual_seed(rank)
    module, averages = Small(), Averages(progress)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter.data, std=0.1)  # other weights than the others'
    strategy = NPUSparseStrategy(
        process_group_backend="gloo", rendezvous=address, min_ranks=min_ranks, timeout=timedelta(seconds=60), **OPTIONS
    )
    callbacks = [averages, *checkpoints.pop("callbacks", [])]
    trainer = make_trainer(strategy=strategy, callbacks=callbacks, max_epochs=-1, max_steps=steps, **checkpoints)
    trainer.fit(module, DataLoader(make_batches(rank, STEPS), batch_size=None), ckpt_path=resumed)
    return {"seen": averages.seen, "steps": averages.steps, "end": module.flat(), "said": said}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("elastic")
    return run_ranks(one_run, 4, folder, str(folder), gloo=False, may_die=[1])


def test_the_run_goes_on_when_ranks_die_come_and_leave(runs: list[Any]) -> None:
    assert runs[1] is None  # it was killed
    assert runs[0]["steps"] == list(range(1, STEPS + 1)) and len(runs[2]["steps"]) == 4 * EVERY
    assert any("runs broke off: Connection closed by peer" in line for line in runs[0]["said"] + runs[2]["said"])
    assert not any("/gloo/" in line or "GLHF" in line for line in runs[0]["said"] + runs[2]["said"])
    sizes = [size for _, size, _ in runs[0]["seen"]]
    assert sizes[1] == 2 and max(sizes) >= 3  # two began, and others came
    assert [number for number, _, _ in runs[0]["seen"]] == list(range(len(sizes)))  # each average counted once


def test_all_who_take_an_average_hold_the_same_parameters_after_it(runs: list[Any]) -> None:
    first = {number: flat for number, _, flat in runs[0]["seen"]}
    for run in (runs[2], runs[3]):
        common = [(first[number], flat) for number, _, flat in run["seen"][1:] if number in first]
        assert len(common) >= 3
        assert all(torch.equal(one, other) for one, other in common)


def test_a_rank_that_comes_back_counts_on_from_its_checkpoint_and_starts_from_the_others_weights(
    runs: list[Any],
) -> None:
    assert runs[3]["steps"][0] == EVERY * (DIES_AT - 1) + 1 and runs[3]["steps"][-1] == STEPS
    number, _, flat = runs[3]["seen"][0]  # after its first step, alone, from the others' average
    others = {number: flat for number, _, flat in runs[0]["seen"]}
    assert number >= DIES_AT
    assert (flat - others[number]).abs().max() < 0.02 < (flat - runs[0]["seen"][0][2]).abs().max()


def resumed_alone(rank: int, folder: str) -> Any:
    """A whole run, and one that ends between two averages and goes on, by a checkpoint and by a snapshot."""
    warnings.simplefilter("ignore")
    alone(os.environ)  # type: ignore[arg-type]

    def run(name: str, steps: int, callbacks: list[Callback], ckpt_path: Any = None, **arguments: Any) -> Any:
        with meeting_point() as where:
            address = f"{where['MASTER_ADDR']}:{where['MASTER_PORT']}"
            strategy = NPUSparseStrategy(process_group_backend="gloo", rendezvous=address, **OPTIONS)
            arguments |= {"max_epochs": -1, "max_steps": steps, "default_root_dir": Path(folder, name)}
            trainer = make_trainer(strategy=strategy, callbacks=callbacks, **arguments)
            module = Small()
            batches = make_batches(0, 1) * 4  # the same each time: Lightning's checkpoint has no place in the data
            trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
        return module.flat()

    save = ModelCheckpoint(Path(folder, "saved"), filename="{epoch}", save_top_k=-1)  # after epochs of four steps
    whole = run("whole", 10, [save], enable_checkpointing=True)
    after_checkpoint = run("checkpoint", 10, [], ckpt_path=Path(folder, "saved", "epoch=0.ckpt"))
    with pytest.raises(StoppedError):
        run("snapshot", 10, [ExactSnapshot(4), StopsAt(5)])
    return [whole, after_checkpoint, run("snapshot", 10, [ExactSnapshot(4)], ckpt_path="latest")]


class StoppedError(Exception):
    pass


class StopsAt(Callback):
    """Ends the run after this step, without the last average."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise StoppedError


def test_a_run_that_is_alone_at_its_store_resumes_to_the_bit(tmp_path: Path) -> None:
    ((whole, after_checkpoint, after_snapshot),) = run_ranks(resumed_alone, 1, tmp_path, str(tmp_path), gloo=False)
    assert torch.equal(whole, after_checkpoint)
    assert torch.equal(whole, after_snapshot)


def members(*standings: tuple[int, int, int]) -> Meeting:
    return Meeting(0, tuple(Standing(i, *standing) for i, standing in enumerate(standings, 1)), 0)


def test_the_leader_has_seen_the_most_averages_and_those_with_other_weights_are_behind() -> None:
    meeting = members((3, 11, 5), (4, 12, 5), (4, 12, 0), (4, 13, 5))
    assert (meeting.leader, meeting.behind, meeting.contributors) == (1, [0, 3], [1])


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(quorum, "DEAD_AFTER_S", 1.0)
    monkeypatch.setattr(quorum, "BEAT_S", 0.1)
    with meeting_point() as where:
        address = f"{where['MASTER_ADDR']}:{where['MASTER_PORT']}"
        ranks = [Quorum(address, 1, timedelta(seconds=10)) for _ in range(2)]
        yield ranks
        for rank in ranks:
            rank.leave()


def together(*calls: Any) -> list[Any]:
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda i=i, c=c: results.update({i: c()})) for i, c in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[i] for i in range(len(calls))]


def begin(two: list[Quorum]) -> list[Meeting]:
    """A meeting of both; without a number to wait for, who comes first may meet alone."""
    for rank in two:
        rank._min_ranks = 2
    meetings = together(*(lambda q=q: q.meet(0, 0, 1) for q in two))
    for rank in two:
        rank._min_ranks = 1
    return meetings


def test_an_average_counts_only_if_it_arrived_at_all(two: list[Quorum]) -> None:
    for arrived, counts in (((True, True), True), ((True, False), False)):
        meetings = begin(two)
        assert meetings[0].members == meetings[1].members
        votes = zip(two, meetings, arrived, strict=True)
        assert together(*(lambda q=q, m=m, a=a: q.settle(m, arrived=a) for q, m, a in votes)) == [counts] * 2


def test_an_average_with_a_rank_that_died_does_not_count_and_the_next_is_without_it(two: list[Quorum]) -> None:
    meetings = begin(two)
    two[1]._ended.set()  # no heartbeat any more, and no vote
    assert not two[0].settle(meetings[0], arrived=True)
    assert two[0].meet(1, 0, 1).ids == (two[0].id,)


def test_a_rank_that_slept_through_an_average_hears_that_it_did_not_count(two: list[Quorum]) -> None:
    meetings = begin(two)
    two[1]._ended.set()
    assert not two[0].settle(meetings[0], arrived=True)
    for _ in range(4):  # its keys are deleted by then
        assert two[0].settle(two[0].meet(1, 0, 1), arrived=True)
    assert not two[1].settle(meetings[1], arrived=True)


def test_too_few_ranks_are_an_error_with_their_number() -> None:
    with meeting_point() as where:
        lonely = Quorum(f"{where['MASTER_ADDR']}:{where['MASTER_PORT']}", 3, timedelta(seconds=0.5))
        with pytest.raises(SyncError, match=r"1 rank\(s\) were ready .* wanted 3"):
            lonely.meet(0, 0, 1)
        lonely.leave()


def test_a_partner_that_finished_counts_and_one_that_was_stopped_is_waited_for(two: list[Quorum]) -> None:
    meetings = begin(two)
    two[0]._min_ranks = 2
    assert together(*(lambda q=q, m=m: q.settle(m, arrived=True) for q, m in zip(two, meetings, strict=True))) == [1, 1]
    two[1].leave(has_finished=True)
    two[1].leave()  # a second call changes nothing
    alone = two[0].meet(1, 0, 1)
    assert alone is not None and alone.ids == (two[0].id,) and two[0].why_left(two[1].id) == "has finished"


def test_the_console_says_which_runs_are_missing_and_a_stop_ends_the_wait(
    two: list[Quorum], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quorum, "TOO_FEW_S", 0.2)
    monkeypatch.setattr(quorum, "SLOW_S", 0.2)
    meetings = begin(two)
    together(*(lambda q=q, m=m: q.settle(m, arrived=True) for q, m in zip(two, meetings, strict=True)))
    stop_at = time.monotonic() + 0.6
    two[0]._is_stopped = lambda: time.monotonic() > stop_at
    assert two[0].meet(1, 0, 1) is None
    assert f"waiting for run(s) {two[1].id} at " in capsys.readouterr().err  # alive, and not ready
    two[1].leave()
    two[0]._min_ranks, stop_at = 2, time.monotonic() + 0.6
    assert two[0].meet(1, 0, 1) is None and "waiting for 1 more run(s) at " in capsys.readouterr().err
    assert not two[0]._has(f"ready/1/{two[0].id}") and "was stopped" in two[0].why_left(two[1].id)


def stopped_while_waiting(rank: int, folder: str) -> Any:
    """Run 1 ends by an error; run 0, which waits for it, is told to end, and goes on later."""
    warnings.simplefilter("ignore")
    address = alone(os.environ)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {"max_epochs": -1, "max_steps": 9, "default_root_dir": Path(folder, f"run{rank}")}
    batches = DataLoader(make_batches(rank, 9), batch_size=None)

    def fit(min_ranks: int, *callbacks: Callback, ckpt_path: Any = None) -> Any:
        strategy = NPUSparseStrategy(
            process_group_backend="gloo",
            rendezvous=address,
            min_ranks=min_ranks,
            timeout=timedelta(minutes=5),
            **OPTIONS,
        )
        make_trainer(strategy=strategy, callbacks=list(callbacks), **arguments).fit(
            Small(), batches, ckpt_path=ckpt_path
        )

    if rank == 1:
        with pytest.raises(StoppedError):
            fit(2, StopsAt(4))
        return None
    tells = threading.Thread(target=signal_in_wait, args=(time.monotonic() + 60,))
    tells.start()
    with pytest.raises(SystemExit):
        fit(2, ExactSnapshot())
    tells.join()
    steps = [path.name for path in Path(folder, "run0").rglob("step-*") if path.is_dir()]
    noted = Averages(Path(folder, "progress"))
    fit(1, noted, ExactSnapshot(), ckpt_path="latest")
    return steps, noted.steps


def signal_in_wait(deadline: float) -> None:
    """Send SIGTERM once this process waits for members for longer than another rank's step."""
    waits = 0
    while waits < 20 and time.monotonic() < deadline:
        names = {frame.name for frame in traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])}  # type: ignore[index]
        waits = waits + 1 if "_wait_for_members" in names and "_after_step" in names else 0
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_waits_for_others_is_saved_when_it_is_told_to_end(tmp_path: Path) -> None:
    (steps, resumed), _ = run_ranks(stopped_while_waiting, 2, tmp_path, str(tmp_path), gloo=False)
    assert len(steps) == 1 and resumed == [7, 8, 9]  # step 6 is saved, though its average never came


def test_a_stop_before_the_first_step_says_that_nothing_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Quorum, "_wait_for_members", interrupted)
    with meeting_point() as where:
        address = f"{where['MASTER_ADDR']}:{where['MASTER_PORT']}"
        strategy = NPUSparseStrategy(process_group_backend="gloo", rendezvous=address, min_ranks=2, **OPTIONS)
        trainer = make_trainer(strategy=strategy, max_steps=3, default_root_dir=tmp_path)
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            trainer.fit(Small(), DataLoader(make_batches(0, 3), batch_size=None))
    assert "stopped while it waited for other runs: nothing was trained" in capsys.readouterr().err


def test_a_run_with_another_job_is_refused_and_a_lost_store_is_named() -> None:
    with meeting_point() as where:
        address = f"{where['MASTER_ADDR']}:{where['MASTER_PORT']}"
        first = Quorum(address, 1, timedelta(seconds=5), "8 trained parameters")
        with pytest.raises(ConfigError, match=r"has 9 trained parameters, and the runs at .* have 8 trained"):
            Quorum(address, 1, timedelta(seconds=5), "9 trained parameters")
        assert first.settle(first.meet(0, 0, 1), arrived=True)
    with pytest.raises(SyncError, match=r"the store at .* does not answer any more; start it again"):
        first.meet(1, 0, 1)
    first.leave()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rendezvous": "here"}, "rendezvous must be HOST:PORT, such as 10.0.0.1:29400; got 'here'"),
        ({"mode": "int3"}, "rendezvous wants mode: local, whose runs step on their own; got mode: int3"),
        ({"overlap_average": True}, "rendezvous and overlap_average exclude each other"),
        ({"min_ranks": 0}, "min_ranks must be at least 1, got 0"),
        ({"min_ranks": 2, "rendezvous": None}, "min_ranks=2 counts the runs at a rendezvous, which is not set"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"mode": "local", "rendezvous": "127.0.0.1:1", **options}
    assert said in refusal(lambda: NPUSparseStrategy(**given))


def test_a_run_of_several_ranks_is_refused() -> None:
    place = MeetingPlace.of("127.0.0.1:1", 1, SyncOptions("local"))
    place.refuse_ranks(1)
    assert "joins runs of one rank each, and this run has 2; start each with devices: 1" in refusal(
        lambda: place.refuse_ranks(2)
    )
