"""ExactSnapshot: a run that was ended anywhere and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fakes.processes.ranks import run_ranks
from fakes.runs.killed_trainings import KillAt, Net, Noisy, train
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.checkpoint import coordination, find_snapshots, preemption, session
from lightning_aigc.checkpoint.files.staging import DeferredCopies, HostBuffer
from lightning_aigc.checkpoint.preemption import requeue
from lightning_aigc.errors import ConfigError, ModelError, SnapshotError
from lightning_aigc.strategies import NPUSparseStrategy

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loggers and workers
BATCHES = 12


def steps_of(root: Path) -> list[int]:
    return sorted(one.step for one in find_snapshots(root / "snapshots"))


def killed_and_resumed(root: Path, batch: int, every_n_steps: int = 1, **options: Any) -> Tensor:
    train(root, [ExactSnapshot(every_n_steps), KillAt(batch)], **options)
    return train(root, [ExactSnapshot(every_n_steps)], ckpt_path="latest", **options).flat()


# Lightning's Tuner ----------------------------------------------------------------------------------------------------


class Sized(Net):
    """Net with what Lightning's searches change."""

    lr, batch_size = 1e-2, 4

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Noisy(), self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Noisy(), self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def trainer_of(root: Path, *callbacks: Callback) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(default_root_dir=root, accelerator="cpu", max_steps=8, callbacks=[*callbacks], **quiet)


@pytest.mark.parametrize(
    "make", [lambda: LearningRateFinder(num_training_steps=5), lambda: BatchSizeFinder("power", 4, max_trials=1)]
)
def test_no_snapshot_is_taken_of_a_trial_of_the_tuner(make: Any, tmp_path: Path) -> None:
    snapshots = ExactSnapshot(3)
    trainer_of(tmp_path, make(), snapshots).fit(Sized())
    assert steps_of(tmp_path) == [3, 6, 8] and len(snapshots.blocked_s) == 3
    with pytest.raises(ConfigError, match=r"from the snapshot of step 8; take LearningRateFinder and BatchSizeFinder"):
        trainer_of(tmp_path, make(), ExactSnapshot(3)).fit(Sized(), ckpt_path="latest")


def test_a_search_of_the_tuner_leaves_no_snapshot_and_the_fit_after_it_takes_its_own(tmp_path: Path) -> None:
    trainer, module = trainer_of(tmp_path, ExactSnapshot(3)), Sized()
    assert Tuner(trainer).lr_find(module, num_training=5) is not None
    assert steps_of(tmp_path) == []
    trainer.fit(module)
    assert steps_of(tmp_path) == [3, 6, 8]


# The same bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_run_with_snapshots_equals_one_without(tmp_path: Path, precision: Any) -> None:
    plain = train(tmp_path, precision=precision)
    assert torch.equal(plain.flat(), train(tmp_path, [ExactSnapshot(1)], precision=precision).flat())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return train(tmp_path_factory.mktemp("whole")).flat()


# In and between windows, around validation, at an epoch's end and the next one's start, near the end.
@pytest.mark.parametrize("batch", [0, 2, 3, 5, 6, 11, 12, 13, 24, 29, 35])
def test_a_run_killed_at_any_batch_ends_with_the_same_bits(tmp_path: Path, whole: Tensor, batch: int) -> None:
    assert torch.equal(killed_and_resumed(tmp_path, batch), whole)


def test_an_open_window_keeps_its_gradients(tmp_path: Path, whole: Tensor) -> None:
    train(
        tmp_path, [ExactSnapshot(0, every_n_seconds=1e-9), KillAt(5)]
    )  # after each batch: the last one has two of three
    own = find_snapshots(tmp_path / "snapshots")[0].rank(0)
    assert own["gradients"]
    assert torch.equal(train(tmp_path, [ExactSnapshot(0)], ckpt_path="latest").flat(), whole)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_the_loss_scale_goes_on(tmp_path: Path, precision: Any) -> None:
    plain = train(tmp_path / "whole", precision=precision).flat()
    assert torch.equal(killed_and_resumed(tmp_path, 16, precision=precision), plain)


def test_workers_get_their_random_states_back(tmp_path: Path) -> None:
    plain = train(tmp_path / "whole", workers=2).flat()
    assert torch.equal(killed_and_resumed(tmp_path, 17, workers=2), plain)


def test_a_second_kill_is_no_worse_than_the_first(tmp_path: Path, whole: Tensor) -> None:
    train(tmp_path, [ExactSnapshot(1), KillAt(7)])
    train(tmp_path, [ExactSnapshot(1), KillAt(20)], ckpt_path="latest")
    assert torch.equal(train(tmp_path, [ExactSnapshot(1)], ckpt_path="latest").flat(), whole)


def test_an_early_stop_comes_at_the_same_step(tmp_path: Path) -> None:
    def stopper() -> Callback:
        return EarlyStopping("loss_epoch", patience=0, mode="max", check_on_train_epoch_end=True)

    plain = train(tmp_path / "whole", [stopper()]).flat()
    train(tmp_path, [ExactSnapshot(1), stopper(), KillAt(14)])
    resumed = train(tmp_path, [ExactSnapshot(1), stopper()], ckpt_path="latest")
    assert torch.equal(resumed.flat(), plain) and resumed.trainer.current_epoch < 3


class KillAtEnd(KillAt):
    """Ends the run, as SIGKILL would, once its last snapshot is durable and its end has begun."""

    def __init__(self) -> None:
        super().__init__(-1)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.callbacks[0].wait()
        self.kill(trainer)


class Ends(Callback):
    """Counts what follows the last step."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.called.append(f"epoch {trainer.current_epoch}")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.called.append("end")


STOPPER = {"patience": 0, "mode": "max", "check_on_train_epoch_end": True}


@pytest.mark.parametrize("every_n_steps", [1, 0])
@pytest.mark.parametrize(
    ("arguments", "stoppers"),
    [({"max_epochs": 3}, 0), ({"max_epochs": -1, "max_steps": 7}, 0), ({"max_epochs": 9}, 1), ({"max_epochs": 8}, 2)],
    ids=["epochs", "steps", "early stop", "stop within an epoch"],
)
def test_a_run_killed_after_its_last_step_has_its_end_once_and_no_more_steps(
    tmp_path: Path, every_n_steps: int, arguments: dict[str, Any], stoppers: int
) -> None:
    class StopAt(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step >= 6

    def more() -> list[Callback]:
        return [[], [EarlyStopping("loss_epoch", **STOPPER)], [StopAt()]][stoppers]  # type: ignore[arg-type]

    whole, ends = Ends(), Ends()
    plain = train(tmp_path / "whole", [whole, *more()], **arguments)
    train(tmp_path, [ExactSnapshot(every_n_steps), *more(), KillAtEnd()], **arguments)
    resumed = train(tmp_path, [ExactSnapshot(1), ends, *more()], ckpt_path="latest", **arguments)
    assert torch.equal(resumed.flat(), plain.flat())
    assert resumed.trainer.global_step == plain.trainer.global_step and ends.called == whole.called[-2:]
    written = find_snapshots(tmp_path / "snapshots")[0]
    assert written.facts["is_finished"]
    before = (written.path / "manifest.json").stat().st_mtime_ns
    over = Ends()
    again = train(tmp_path, [ExactSnapshot(1), over, *more()], ckpt_path="latest", **arguments)
    assert torch.equal(again.flat(), plain.flat()) and over.called == []
    assert (written.path / "manifest.json").stat().st_mtime_ns == before


def test_a_finished_run_goes_on_when_it_may_take_more_steps(tmp_path: Path) -> None:
    plain = train(tmp_path / "whole", max_epochs=-1, max_steps=10).flat()
    train(tmp_path, [ExactSnapshot(0)], max_epochs=-1, max_steps=7)
    assert steps_of(tmp_path) == [7]
    assert torch.equal(
        train(tmp_path, [ExactSnapshot(0)], max_epochs=-1, max_steps=10, ckpt_path="latest").flat(), plain
    )


def test_a_finished_epoch_goes_on_with_the_next(tmp_path: Path, whole: Tensor) -> None:
    train(tmp_path, [ExactSnapshot(0)], max_epochs=2)
    assert torch.equal(train(tmp_path, [ExactSnapshot(0)], max_epochs=3, ckpt_path="latest").flat(), whole)


class Manual(Net):
    """Steps by hand, with gradients that wait over batches."""

    automatic_optimization = False

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch_NC, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 4 == 3:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return loss


def test_manual_optimization_goes_on_with_the_gradients_it_holds(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate": 1, "gradient_clip_val": None}
    plain = train(tmp_path / "whole", module=Manual(), **options).flat()
    train(tmp_path, [ExactSnapshot(0, every_n_seconds=1e-9), KillAt(6)], module=Manual(), **options)
    assert torch.equal(
        train(tmp_path, [ExactSnapshot(0)], module=Manual(), ckpt_path="latest", **options).flat(), plain
    )


# Loaders --------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield from (torch.full((8,), float(i)) for i in range(24))


def test_a_stream_without_state_is_read_again_and_named(tmp_path: Path) -> None:
    plain = train(tmp_path / "whole", loader=DataLoader(Stream(), batch_size=2)).flat()
    train(tmp_path, [ExactSnapshot(1), KillAt(16)], loader=DataLoader(Stream(), batch_size=2))
    resumed = train(tmp_path, [ExactSnapshot(1)], loader=DataLoader(Stream(), batch_size=2), ckpt_path="latest")
    assert torch.equal(resumed.flat(), plain)


def test_several_loaders_go_on_together(tmp_path: Path) -> None:
    class Pair(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["a"] + batch["b"].mean(), batch_idx)

    def loaders() -> Any:
        return {
            "a": DataLoader(Noisy(), batch_size=2, shuffle=True),
            "b": DataLoader(Noisy(), batch_size=5, shuffle=True),
        }

    plain = train(tmp_path / "whole", module=Pair(), loader=loaders()).flat()
    train(tmp_path, [ExactSnapshot(1), KillAt(20)], module=Pair(), loader=loaders())
    assert torch.equal(
        train(tmp_path, [ExactSnapshot(1)], module=Pair(), loader=loaders(), ckpt_path="latest").flat(), plain
    )


# Several ranks --------------------------------------------------------------------------------------------------------


def ranks_work(rank: int, folder: str, strategy: str) -> list[Any]:
    def options() -> dict[str, Any]:
        given: dict[str, Any] = {"mode": strategy, "local_steps": 3}
        if strategy == "overlapped averages":
            given |= {"mode": "local", "average": "top_k", "outer_momentum": 0.3, "overlap_average": True}
        own: Any = "ddp" if strategy == "ddp" else NPUSparseStrategy(process_group_backend="gloo", **given)
        return {"devices": 2, "strategy": own, "accumulate": 2, "module": Net(96)}

    root = Path(folder)
    plain = train(root / "whole", **options()).flat()
    train(root, [ExactSnapshot(1), KillAt(8)], **options())
    return [plain, train(root, [ExactSnapshot(1)], ckpt_path="latest", **options()).flat()]


@pytest.mark.parametrize("strategy", ["ddp", "int3", "sparse", "local", "overlapped averages"])
def test_every_rank_goes_on_with_its_own_state(tmp_path: Path, strategy: str) -> None:
    for plain, resumed in run_ranks(ranks_work, 2, tmp_path / "ranks", str(tmp_path), strategy, gloo=False):
        assert torch.equal(plain, resumed)


class SignalTo(Callback):
    """One rank gets a signal in the middle of a batch."""

    def __init__(self, number: int, batch: int, rank: int = 0) -> None:
        self.number, self.batch, self.rank = number, batch, rank

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)


def signalled_work(rank: int, folder: str) -> Any:
    options = {"devices": 2, "strategy": "ddp", "accumulate": 3}
    try:
        train(Path(folder), [ExactSnapshot(0), SignalTo(signal.SIGTERM, 4, rank=1)], **options)
    except SystemExit as stop:
        return stop.code
    return "went on"


def test_a_signal_to_one_rank_stops_all_after_the_same_micro_batch(tmp_path: Path) -> None:
    assert run_ranks(signalled_work, 2, tmp_path / "ranks", str(tmp_path), gloo=False) == [143, 0]
    (snapshot,) = find_snapshots(tmp_path / "snapshots")
    counts = [
        snapshot.rank(k)["loop_state"]["loops"]["epoch_loop.batch_progress"]["current"]["completed"] for k in (0, 1)
    ]
    assert counts == [5, 5]
    assert all(snapshot.rank(k)["gradients"] for k in (0, 1))


def other_ranks_work(rank: int, folder: str) -> Any:
    module = train(Path(folder), [ExactSnapshot(0)], devices=2, strategy="ddp", accumulate=2, ckpt_path="latest")
    return [module.trainer.global_step, module.flat()]


def test_another_number_of_ranks_goes_on_from_the_same_weights(tmp_path: Path) -> None:
    train(tmp_path, [ExactSnapshot(2), KillAt(14)], accumulate=2)
    (steps, one), (_, other) = run_ranks(other_ranks_work, 2, tmp_path / "ranks", str(tmp_path), gloo=False)
    weights = slice(0, 8 * 16 + 16)
    assert steps > 6 and torch.equal(one[weights], other[weights])


# Signals, errors, ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_a_signal_leaves_a_snapshot_and_the_command_that_goes_on(
    tmp_path: Path, whole: Tensor, number: int, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(number)
    with caplog.at_level("INFO"), pytest.raises(SystemExit) as stop:
        train(tmp_path, [ExactSnapshot(0), SignalTo(number, 7)])
    assert stop.value.code == code
    assert 'resume with: trainer.fit(..., ckpt_path="latest")' in caplog.text
    signal.signal(number, before)
    assert torch.equal(train(tmp_path, [ExactSnapshot(0)], ckpt_path="latest").flat(), whole)


class BadPicture(Callback):
    """These ranks meet an error as they get to one micro-batch."""

    def __init__(self, batch: int, ranks: Sequence[int]) -> None:
        self.batch, self.ranks = batch, ranks
        self.raised_at = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch and trainer.global_rank in self.ranks:
            self.raised_at = time.monotonic()
            raise ModelError("the latents of cup.png are not finite")


def failing_work(rank: int, folder: str, bad: list[int]) -> list[Any]:
    """Each rank's end, and the seconds after its own error."""
    coordination.VOTE_WAIT_S = 2.0 if len(bad) == 1 else 10.0  # a busy machine may part the ranks by seconds
    picture = BadPicture(11, bad)
    try:
        train(Path(folder), [ExactSnapshot(2), picture], devices=2, strategy="ddp", accumulate=2)
    except Exception as error:
        return [type(error).__name__, time.monotonic() - picture.raised_at]
    return ["went on", 0.0]


def resuming_work(rank: int, folder: str) -> list[Any]:
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "accumulate": 2}
    whole = train(Path(folder, "whole"), **options).flat()
    return [whole, train(Path(folder), [ExactSnapshot(0)], ckpt_path="latest", **options).flat()]


def test_an_error_that_all_ranks_meet_leaves_a_snapshot(tmp_path: Path) -> None:
    rows = run_ranks(failing_work, 2, tmp_path / "ranks", str(tmp_path), [0, 1], gloo=False)
    assert [kind for kind, _ in rows] == ["ModelError", "ModelError"]
    assert steps_of(tmp_path) == [2, 4, 5]
    assert [path.name for path in (tmp_path / "snapshots").glob(".*")] == [".lock"]
    for whole, resumed in run_ranks(resuming_work, 2, tmp_path / "again", str(tmp_path), gloo=False):
        assert torch.equal(whole, resumed)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_one_rank_leaves_the_last_snapshot_and_hangs_no_rank(tmp_path: Path, bad: int) -> None:
    rows = run_ranks(failing_work, 2, tmp_path / "ranks", str(tmp_path), [bad], gloo=False, may_die=[0, 1])
    assert rows[bad][0] == "ModelError" and rows[bad][1] < 20
    assert rows[1 - bad] is None or rows[1 - bad][0] != "went on"
    assert steps_of(tmp_path) == [2, 4]


def test_a_rank_that_votes_after_the_run_was_closed_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 decides, closes and removes the votes while this one is about to take its own back."""
    (tmp_path / ".lock").write_text('{"run": "0123abcd"}')
    monkeypatch.setattr(coordination.time, "sleep", lambda _: shutil.rmtree(tmp_path / ".agree.0123abcd", True))
    assert not coordination.all_agree(tmp_path, 1, 2, "step 4", wait_s=0.05)


def votes_work(rank: int, folder: str) -> list[Any]:
    """Whether these ranks agree, and after how many seconds: alike, apart, one against it, and one that never comes."""
    rows: list[Any] = []
    for case, votes in enumerate([["a", "a"], ["a", "b"], ["a", None], [None, "a"], ["a"]]):
        place = Path(folder, str(case))
        place.mkdir(exist_ok=True)
        (place / ".lock").write_text('{"run": "0123abcd"}')
        if rank < len(votes):
            start = time.monotonic()
            rows.append([coordination.all_agree(place, rank, 2, votes[rank], wait_s=1.0), time.monotonic() - start])
    return rows


def test_ranks_agree_only_on_the_same_and_wait_for_nobody_for_long(tmp_path: Path) -> None:
    first, second = run_ranks(votes_work, 2, tmp_path / "ranks", str(tmp_path), gloo=False)
    assert [is_agreed for is_agreed, _ in first] == [True, False, False, False, False]
    assert [is_agreed for is_agreed, _ in second] == [True, False, False, False]
    assert max(seconds for _, seconds in first + second) < 5


class Hang(Callback):
    """One batch takes a minute; a file says that it has begun."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        if trainer.fit_loop.total_batch_idx == 7:
            Path(trainer.default_root_dir, "hangs").touch()
            end = time.monotonic() + 60
            while time.monotonic() < end:
                time.sleep(0.01)


def interrupted_work(rank: int, folder: str) -> Any:
    """End of a process with Ctrl-C twice within a batch, and the seconds after the second."""
    pid = os.fork()
    if pid == 0:
        try:
            train(Path(folder), [ExactSnapshot(2), Hang()])
        finally:
            os._exit(99)
    while not Path(folder, "hangs").exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    went_on = os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGINT)
    start = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [went_on, code, time.monotonic() - start]


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path: Path, whole: Tensor) -> None:
    ((went_on, code, seconds),) = run_ranks(interrupted_work, 1, tmp_path / "ranks", str(tmp_path), gloo=False)
    assert went_on and code == 130 and seconds < 5
    assert torch.equal(train(tmp_path, [ExactSnapshot(2)], ckpt_path="latest").flat(), whole)


def slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: tuple[str, str] | None = None) -> None:
    """Stand in for a job of one task, whose scontrol writes what it is asked into a file."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    job = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    job |= dict(zip(("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), array or (), strict=False))
    for name, value in {"PATH": f"{scontrol.parent}:{os.environ['PATH']}", **job}.items():
        monkeypatch.setenv(name, value)


def plugins() -> list[Any]:
    return [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)]


@pytest.mark.parametrize("array", [None, ("70", "4")])
def test_slurms_signal_requeues_the_job_which_then_goes_on_by_itself(
    tmp_path: Path, whole: Tensor, monkeypatch: pytest.MonkeyPatch, array: tuple[str, str] | None
) -> None:
    slurm_job(tmp_path, monkeypatch, array)
    with pytest.raises(SystemExit):
        train(tmp_path, [ExactSnapshot(0), SignalTo(signal.SIGUSR1, 7)], plugins=plugins())
    assert (tmp_path / "asked").read_text() == ("requeue 71\n" if array is None else "requeue 70_4\n")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    resumed = train(tmp_path, [ExactSnapshot(0)], plugins=plugins())
    assert torch.equal(resumed.flat(), whole) and len(find_snapshots(tmp_path / "snapshots")) == 2


class SignalIn(Callback):
    """Sends this process SLURM's signal in one hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda *_: os.kill(os.getpid(), signal.SIGUSR1))


@pytest.mark.parametrize("hook", ["on_fit_start", "on_sanity_check_start", "on_train_end", "on_fit_end"])
def test_slurms_signal_outside_of_the_loop_requeues_without_a_checkpoint_of_lightning(
    tmp_path: Path, whole: Tensor, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    slurm_job(tmp_path, monkeypatch)
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, [ExactSnapshot(0), SignalIn(hook)], plugins=plugins())
    assert stop.value.code == 128 + signal.SIGUSR1 and signal.getsignal(signal.SIGUSR1) == before
    assert (tmp_path / "asked").read_text() == "requeue 71\n"
    assert not list(tmp_path.rglob("*.ckpt")) and bool(steps_of(tmp_path)) == (hook in ("on_train_end", "on_fit_end"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert torch.equal(train(tmp_path, [ExactSnapshot(0)], plugins=plugins()).flat(), whole)


def test_lightnings_checkpoint_of_a_requeued_job_is_named_and_not_loaded_unasked(
    tmp_path: Path, whole: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_job(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_JOB_NAME", "sd_lora")
    path = tmp_path / "hpc_ckpt_1.ckpt"
    path.write_bytes(b"of an earlier version")
    said: list[str] = []
    monkeypatch.setattr(session, "rank_zero_warn", said.append)
    assert torch.equal(train(tmp_path, [ExactSnapshot(0)]).flat(), whole)
    assert len(said) == 1 and said[0].startswith(f"{path} is Lightning's checkpoint of a job that SLURM requeued")
    for asked in (str(path), "hpc"):
        with pytest.raises(pickle.UnpicklingError):
            train(tmp_path, [ExactSnapshot(0)], ckpt_path=asked)


def test_the_ranks_wait_for_each_others_signals_no_longer_than_the_strategys_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda **options: made.append(options))
    strategy = NPUSparseStrategy(timeout=timedelta(minutes=5))
    preemption.StopPoll(False, None).start(SimpleNamespace(world_size=2, strategy=strategy))  # type: ignore[arg-type]
    assert made == [{"backend": "gloo", "timeout": timedelta(minutes=5)}]


def test_a_job_without_scontrol_as_in_a_container_says_how_to_requeue_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    with caplog.at_level("INFO", "lightning.pytorch"):
        requeue()
    assert "`scontrol requeue 71` on the host" in caplog.text


class Fails(Callback):
    """Raises in a hook of one micro-batch."""

    def __init__(self, hook: str, batch: int) -> None:
        def fail(trainer: Any, module: Any, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == batch:
                raise torch.OutOfMemoryError("no memory")

        setattr(self, hook, fail)


def test_running_out_of_memory_in_a_forward_loses_nothing(tmp_path: Path, whole: Tensor) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, [ExactSnapshot(0), Fails("on_train_batch_start", 7)])
    assert torch.equal(train(tmp_path, [ExactSnapshot(0)], ckpt_path="latest").flat(), whole)


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_zero_grad"])
def test_an_error_in_the_middle_of_a_step_leaves_the_last_whole_state(
    tmp_path: Path, whole: Tensor, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, [ExactSnapshot(1), Fails(hook, 9)])
    assert "the last snapshot is of step 3" in caplog.text
    assert torch.equal(train(tmp_path, [ExactSnapshot(1)], ckpt_path="latest").flat(), whole)


# Choosing a snapshot --------------------------------------------------------------------------------------------------


def test_nothing_to_resume_is_said_and_the_run_starts(
    tmp_path: Path, whole: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert torch.equal(train(tmp_path, [ExactSnapshot(1)], ckpt_path="latest").flat(), whole)
    assert "nothing to resume in" in caplog.text


def test_a_torn_snapshot_is_passed_over_for_the_one_before(tmp_path: Path, whole: Tensor) -> None:
    train(tmp_path, [ExactSnapshot(1), KillAt(20)])
    newest = find_snapshots(tmp_path / "snapshots")[0]
    os.truncate(newest.path / "shared.safetensors", 1000)
    assert torch.equal(train(tmp_path, [ExactSnapshot(1)], ckpt_path="latest").flat(), whole)


def test_a_run_from_the_start_leaves_an_earlier_runs_snapshots_alone(tmp_path: Path) -> None:
    train(tmp_path, [ExactSnapshot(4)])
    train(tmp_path, [ExactSnapshot(4), KillAt(16)])
    assert steps_of(tmp_path) == [4]
    assert {p.name for p in (tmp_path / "snapshots" / "earlier-1").iterdir()} == {
        "step-00000004",
        "step-00000008",
        "step-00000012",
    }


def test_another_optimizer_or_accumulation_is_refused_with_both_values(tmp_path: Path) -> None:
    train(tmp_path, [ExactSnapshot(1), KillAt(8)])
    with pytest.raises(ConfigError, match=r"trainer.accumulate_grad_batches: 3 in the snapshot, 2 now"):
        train(tmp_path, [ExactSnapshot(1)], ckpt_path="latest", accumulate=2)

    class OtherDecay(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.5)

    OtherDecay.__qualname__ = Net.__qualname__
    with pytest.raises(ConfigError, match=r"weight_decay: 0.01 in the snapshot, 0.5 now"):
        train(tmp_path, [ExactSnapshot(1)], ckpt_path="latest", module=OtherDecay())


class Unfreezing(Net):
    """Its first layer is trained from step 3 on, and its last one up to there, under an optimizer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), 1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.net[0].requires_grad_(True)
            self.net[3].requires_grad_(False)


def test_weights_that_were_unfrozen_or_frozen_are_so_after_a_resume(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", [ExactSnapshot(1)], module=Unfreezing())
    train(tmp_path, [ExactSnapshot(1), KillAt(8)], module=Unfreezing())
    resumed = train(tmp_path, [ExactSnapshot(1)], ckpt_path="latest", module=Unfreezing())
    for (name, one), (_, other) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad, name


def test_a_named_snapshot_goes_on_with_another_configuration(tmp_path: Path) -> None:
    train(tmp_path, [ExactSnapshot(1), KillAt(8)])
    path = str(find_snapshots(tmp_path / "snapshots")[0].path)
    assert train(tmp_path, [ExactSnapshot(1)], ckpt_path=path, accumulate=2).trainer.current_epoch == 3


class Rated(Net):
    """Two groups whose rates fall by a schedule of steps, in one call or as a chain of two."""

    def __init__(self, rate: float, decay: float, is_chain: bool) -> None:
        super().__init__()
        self.rate, self.decay, self.is_chain = rate, decay, is_chain
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        first, second = self.net[0].parameters(), self.net[3].parameters()
        groups = [{"params": first}, {"params": second, "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, self.rate, weight_decay=self.decay)
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if self.is_chain:
            constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [schedule, constant], [100])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first, second = optimizer.param_groups
        assert first["weight_decay"] == second["weight_decay"] == self.decay and second["initial_lr"] == 1e-3
        self.rates.append(first["lr"])


@pytest.mark.parametrize("is_chain", [False, True])
def test_a_named_snapshot_goes_on_with_this_runs_rate_and_decay(tmp_path: Path, is_chain: bool) -> None:
    train(tmp_path, [ExactSnapshot(1), KillAt(8)], module=Rated(1e-2, 0.0, is_chain))
    path = str(find_snapshots(tmp_path / "snapshots")[0].path)
    resumed = train(tmp_path, [ExactSnapshot(1)], ckpt_path=path, module=Rated(1e-4, 0.1, is_chain))
    done = find_snapshots(tmp_path / "snapshots")[0].step
    assert resumed.rates == pytest.approx([1e-4 / (1 + step) for step in range(2, done)])
    again = find_snapshots(tmp_path / "snapshots")[1]
    more = train(tmp_path, [ExactSnapshot(1)], ckpt_path=str(again.path), module=Rated(1e-4, 0.1, is_chain))
    assert torch.equal(more.flat(), resumed.flat())


class Diverge(Callback):
    """Puts a value that is not finite into a weight of the last rank in the step after these."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step in self.steps and trainer.global_rank == trainer.world_size - 1:
            module.net[0].weight.data[0, 0] = torch.inf


def test_weights_that_are_not_finite_are_in_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_aigc.checkpoint.session.rank_zero_warn", said.append)
    train(tmp_path, [ExactSnapshot(1), Diverge(4)])
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    train(tmp_path / "other", [ExactSnapshot(0), Diverge(4)])
    assert not steps_of(tmp_path / "other")
    first, second = said
    assert first.startswith("step 5: trained weights are not finite, so no snapshot is taken from here on;")
    assert (
        f'go back to the snapshot of step 4: trainer.fit(..., ckpt_path="{tmp_path}/snapshots/step-00000004")' in first
    )
    assert second.endswith("lower the learning rate and train anew, since there is no snapshot to go back to")


def diverging_work(rank: int, folder: str) -> None:
    train(Path(folder), [ExactSnapshot(1), Diverge(2)], devices=2, strategy="ddp")


def test_ranks_leave_out_a_snapshot_together(tmp_path: Path) -> None:
    run_ranks(diverging_work, 2, tmp_path, str(tmp_path), gloo=False)
    assert steps_of(tmp_path) == [1, 2]


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    class StartAnother(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            with pytest.raises(SnapshotError):
                train(tmp_path, [ExactSnapshot(1)])

    train(tmp_path, [ExactSnapshot(1), StartAnother()], max_steps=2)


def test_the_best_snapshot_outlives_the_last_ones_and_a_resume(tmp_path: Path) -> None:
    def kept() -> dict[int, float]:
        return {one.step: one.facts["metrics"]["loss_step"] for one in find_snapshots(tmp_path / "snapshots")}

    train(tmp_path, [ExactSnapshot(1, keep_last=2, keep_best="loss_step", best_mode="min")])
    first = kept()
    best = min(first, key=lambda step: first[step])
    assert len(first) == 3
    assert best == min(first)
    again = ExactSnapshot(1, keep_last=1, keep_best="loss_step", best_mode="min")
    train(tmp_path, [again], ckpt_path=str(tmp_path / "snapshots" / f"step-{sorted(first)[1]:08d}"))
    assert best in kept()


def test_a_best_that_is_never_logged_is_said_with_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_aigc.checkpoint.snapshot_taker.rank_zero_warn", said.append)
    train(tmp_path, [ExactSnapshot(1, keep_best="val_los")])
    assert [text.startswith("ExactSnapshot.keep_best: val_los was never logged") for text in said] == [True]
    assert "loss_step" in said[0]


# Copies in the background ---------------------------------------------------------------------------------------------


def test_weights_are_copied_while_the_next_batch_runs_and_whole_before_the_next_step(
    tmp_path: Path, whole: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, threads = HostBuffer.copy_from, set()

    def slow(self: HostBuffer, source: Tensor, offset: int) -> None:
        threads.add(threading.current_thread().name)
        if threading.current_thread().name == "snapshot":
            time.sleep(0.002)
        stock(self, source, offset)

    monkeypatch.setattr(HostBuffer, "copy_from", slow)
    # The snapshot of step 6 is the last one, and step 7 is taken after it.
    assert torch.equal(killed_and_resumed(tmp_path, 22, every_n_steps=2), whole)
    assert threads == {"MainThread", "snapshot"}


def test_a_weight_that_changes_while_it_is_copied_spoils_no_snapshot(tmp_path: Path) -> None:
    class Clamped(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                self.net[0].weight.clamp_(-0.1, 0.1)

    plain = train(tmp_path / "whole", module=Clamped()).flat()
    train(tmp_path, [ExactSnapshot(1), KillAt(20)], module=Clamped())
    assert torch.equal(train(tmp_path, [ExactSnapshot(1)], ckpt_path="latest", module=Clamped()).flat(), plain)


class Averaging(Net):
    """Has an average, and says that only its optimizer's step writes it."""

    deferred_snapshot_keys = ("ema",)

    def __init__(self) -> None:
        super().__init__()
        self.ema = [parameter.detach().clone() for parameter in self.parameters()]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        torch._foreach_lerp_(self.ema, [parameter.detach() for parameter in self.parameters()], 0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ema"] = {"shadow_params": self.ema}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.ema = checkpoint["ema"]["shadow_params"]

    def flat(self) -> Tensor:
        return torch.cat([super().flat(), *[one.view(-1) for one in self.ema]])


def test_the_former_name_of_the_deferred_keys_works_and_says_so() -> None:
    module = Averaging()
    module.late_snapshot_keys = ("ema",)  # type: ignore[attr-defined]
    trainer: Any = SimpleNamespace(lightning_module=module, optimizers=[])
    average = torch.ones(3)
    with pytest.warns(FutureWarning, match="late_snapshot_keys is now deferred_snapshot_keys"):
        assert list(DeferredCopies(trainer, {"ema": average}).addresses) == [average.data_ptr()]


def test_an_average_that_only_the_step_writes_is_copied_beside_training_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(tmp_path / "whole", module=Averaging()).flat()
    stock, late = HostBuffer.copy_from, set()

    def watch(self: HostBuffer, source: Tensor, offset: int) -> None:
        if threading.current_thread().name == "snapshot":
            late.add(source.data_ptr())
        stock(self, source, offset)

    monkeypatch.setattr(HostBuffer, "copy_from", watch)
    killed = Averaging()
    train(tmp_path, [ExactSnapshot(1), KillAt(20)], module=killed)
    assert late >= {one.data_ptr() for one in killed.ema}
    resumed = train(tmp_path, [ExactSnapshot(1)], ckpt_path="latest", module=Averaging())
    assert torch.equal(resumed.flat(), plain)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"every_n_steps": -1}, "every_n_steps"),
        ({"keep_last": 0}, "keep_last"),
        ({"every_n_seconds": 0}, "every_n_seconds"),
        ({"best_mode": "most"}, "best_mode must be min or max"),
        ({"best_mode": "max"}, "best_mode: max is of the metric of keep_best, which is unset"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"ExactSnapshot.{named}"):
        ExactSnapshot(**arguments)
