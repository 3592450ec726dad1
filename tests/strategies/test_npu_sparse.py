"""Trainer(strategy="npu_sparse") on two ranks over Gloo: training, what is skipped, schedules, logs, and stops."""

from __future__ import annotations

import csv
import itertools
import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from fakes.models.small_lightning import Small, fit, make_batches
from fakes.processes.given_gradients import MODES
from fakes.processes.ranks import run_ranks
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync import GradientCompressor
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.strategies import NPUSparseStrategy, ZeROStrategy

RUNS: dict[str, dict[str, Any]] = {mode: {"mode": mode, "local_steps": 1} for mode in (*MODES, "auto")}
RUNS |= {"static graph": {"static_graph": True}}
MIXED = {
    "fused": lambda: FusedBackwardPrecision("16-mixed", memory="off"),
    "stock": lambda: MixedPrecision("16-mixed", "cpu"),
}


def strategy(**options: Any) -> NPUSparseStrategy:
    return NPUSparseStrategy(process_group_backend="gloo", timeout=timedelta(seconds=20), **options)


def work(rank: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name, options in RUNS.items():
        module, trainer = fit(rank, strategy=strategy(**options), devices=2, gradient_clip_val=0.5)
        results[name] = [module.after, module.rates, trainer.global_step, "step" in vars(trainer.optimizers[0])]

    module, trainer = fit(rank, strategy="npu_sparse", devices=2, accumulate_grad_batches=4)
    results["by name"] = [type(trainer.strategy).__name__, trainer.strategy.mode, module.after]
    steps: list[int] = []
    counted = strategy(mode="sparse")
    counts = CountSteps(counted, steps)
    fit(rank, strategy=counted, devices=2, accumulate_grad_batches=4, callbacks=[counts])
    results["steps"] = steps
    early = CountSelections()
    fit(
        rank, Validated(), strategy=strategy(mode="sparse"), devices=2, batches=16, accumulate_grad_batches=4,
        val_check_interval=2, num_sanity_val_steps=0, callbacks=[early],
    )  # fmt: skip
    results["early choices"] = early.count
    whole = strategy(mode="sparse", protect=["net", "head"])
    results["all protected"] = fit(rank, strategy=whole, devices=2, accumulate_grad_batches=4)[0].after
    module, _ = fit(rank, Small(unused=True), strategy="npu_sparse_find_unused_parameters_true", devices=2)
    results["unused"] = module.after

    for mode in ("dense", "int3", "sparse", "two_four", "local"):
        options = {"mode": mode, "local_steps": 1}
        for name, plugin in MIXED.items():
            # The loss scale is 2^16: a millionth of float32's end overflows on the way back, on rank 1 alone.
            module, trainer = fit(
                rank, Small([(3, 1)], 1e37), strategy=strategy(**options), devices=2, plugins=[plugin()]
            )
            results[name, mode] = [module.after, trainer.precision_plugin.scaler.get_scale(), trainer.global_step]
        whole = strategy(**options)
        skipped: list[int] = []
        module, _ = fit(
            rank, Small([(3, 1)]), strategy=whole, devices=2, callbacks=[CountSteps(whole, skipped, "skipped_steps")]
        )
        results["NaN", mode] = [module.after, skipped]

    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    _, trainer = fit(rank, strategy=strategy(), devices=2, logger=logger, log_every_n_steps=2)
    results["log"] = str(Path(logger.log_dir, "metrics.csv"))

    results["protect"] = refusal(lambda: fit(rank, strategy=strategy(protect=["hed"]), devices=2))
    dense = {"mode": "dense", "protect": ["hed"]}
    results["protect in mode dense"] = refusal(lambda: fit(rank, strategy=strategy(**dense), devices=2))
    idle = Small()
    idle.extra = torch.nn.Linear(8, 8)
    results["idle layer"] = refusal(lambda: fit(rank, idle, strategy=strategy(), devices=2))
    embedding = Small()
    embedding.table = torch.nn.Embedding(8, 8, sparse=True)
    results["sparse gradients"] = refusal(lambda: fit(rank, embedding, strategy=strategy(), devices=2))
    results["own error"] = refusal(lambda: fit(rank, Fails(), strategy=strategy(), devices=2))
    results["said"] = warnings_of(lambda: fit(rank, strategy=strategy(sparsity=0.95), devices=2, batches=1))
    results["groups"] = len(torch.distributed.distributed_c10d._world.pg_map)
    drifting = strategy(checksum_every_n_steps=3)
    results["drift"] = refusal(lambda: fit(rank, strategy=drifting, devices=2, callbacks=[Meddle()]))
    return results


class Fails(Small):
    """Has an error of its own."""

    def training_step(self, batch_NC: torch.Tensor, batch_idx: int) -> torch.Tensor:
        raise RuntimeError("shapes do not fit")


def warnings_of(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def refusal(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class CountSteps(Callback):
    """Keeps what the sync has counted after each batch."""

    def __init__(self, counted: NPUSparseStrategy, into: list[int], name: str = "step") -> None:
        self.counted, self.into, self.name = counted, into, name

    def on_train_batch_end(self, *_: Any) -> None:
        self.into.append(getattr(self.counted.sync, self.name))


class Validated(Small):
    """Validates within an epoch, after which Lightning leaves the DDP wrapper in eval mode."""

    def validation_step(self, batch_NC: torch.Tensor, batch_idx: int) -> None:
        self.net(batch_NC)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(make_batches(0, 2), batch_size=None)


class CountSelections(Callback):
    """Counts selections of blocks by the sum of the micro-batches so far."""

    count = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        sync = trainer.strategy.sync
        select = sync.selection.select

        def counted(reduction: Any) -> Any:
            self.count += 1
            return select(reduction)

        sync.selection.select = counted


class Meddle(Callback):
    """Changes one parameter on one rank."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, batch_idx) == (1, 1):
            with torch.no_grad():
                module.head.bias[0] += 1


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("npu_sparse")
    return run_ranks(work, 2, folder, str(folder), gloo=False)


def assert_same(both: list[Any], *keys: Any) -> list[torch.Tensor]:
    one, other = ([row[key] for key in keys] for row in both)
    for mine, theirs in zip(one, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True))
    return list(one[0][0])


@pytest.mark.parametrize("name", RUNS)
def test_ranks_stay_equal_to_the_bit_with_clipping_and_a_schedule(name: str, both: list[Any]) -> None:
    after = assert_same(both, name)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(after[1:]))
    _, rates, steps, patched = both[0][name]
    assert rates == [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3, 1.25e-3, 1.25e-3] and steps == 8
    assert patched  # the schedule's wrapper of optimizer.step is back in its place


def test_the_name_alone_means_int3_and_accumulation_syncs_once_a_window(both: list[Any]) -> None:
    kind, mode, after = both[0]["by name"]
    assert (kind, mode) == ("NPUSparseStrategy", "int3")
    assert all(torch.equal(a, b) for a, b in zip(after, both[1]["by name"][2], strict=True))
    assert torch.equal(after[0], after[2]) and not torch.equal(after[2], after[3])
    assert both[0]["steps"] == [0, 0, 0, 1, 1, 1, 1, 2]


def test_a_validation_does_not_end_the_early_choice_of_blocks(both: list[Any]) -> None:
    assert both[0]["early choices"] == both[1]["early choices"] == 3  # four windows; the first has nothing to choose by


def test_accumulation_goes_without_anything_to_compress(both: list[Any]) -> None:
    assert len(both[0]["all protected"]) == 8
    assert all(torch.equal(a, b) for a, b in zip(both[0]["all protected"], both[1]["all protected"], strict=True))


def test_a_layer_that_the_loss_does_not_depend_on_is_named_with_the_strategy_that_takes_it(both: list[Any]) -> None:
    for said in (row["idle layer"] for row in both):
        assert said.startswith("ConfigError: npu_sparse: the loss does not depend on extra.weight, extra.bias, and all")
        assert said.endswith("or use strategy npu_sparse_find_unused_parameters_true")


def test_unused_parameters_train_under_the_name_that_finds_them(both: list[Any]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(both[0]["unused"], both[1]["unused"], strict=True))


@pytest.mark.parametrize("mode", ["dense", "int3", "sparse", "two_four", "local"])
@pytest.mark.parametrize("plugin", MIXED)
def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all(
    plugin: str, mode: str, both: list[Any]
) -> None:
    after = assert_same(both, (plugin, mode))
    assert torch.equal(after[2], after[3]) and not torch.equal(after[3], after[4])
    assert [row[plugin, mode][1] for row in both] == [2.0**15] * 2


@pytest.mark.parametrize("mode", ["dense", "int3", "sparse", "two_four", "local"])
def test_nan_on_one_rank_in_float32_skips_the_step_on_all(mode: str, both: list[Any]) -> None:
    after = assert_same(both, ("NaN", mode))
    assert after[-1].isfinite().all()
    assert torch.equal(after[2], after[3]) and not torch.equal(after[3], after[4])
    assert both[0]["NaN", mode][1] == [0, 0, 0, 1, 1, 1, 1, 1]


def test_loggers_get_what_was_sent_and_what_that_cost(both: list[Any]) -> None:
    with Path(both[0]["log"]).open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["sync/values_mb"]]
    assert len(rows) == 4
    for row in rows:
        assert 0.1 < float(row["sync/ratio_to_dense"]) < 0.3
        assert float(row["sync/values_mb"]) > 0 and float(row["sync/intra_node_mb"]) == 0
        assert float(row["sync/exposed_ms"]) >= 0 and float(row["sync/skipped_steps"]) == 0


def test_a_pattern_that_covers_nothing_stops_before_training(both: list[Any]) -> None:
    for row in both:
        assert row["protect"].startswith("ConfigError: protect pattern 'hed' covers no module; close names: head")
        assert row["protect in mode dense"] == row["protect"]


def test_sparse_gradients_are_refused_and_an_error_of_the_users_stays_his(both: list[Any]) -> None:
    for row in both:
        assert row["sparse gradients"].startswith("ConfigError: table, an Embedding with sparse=True, has a gradient")
        assert row["own error"] == "RuntimeError: shapes do not fit"


def test_an_argument_that_the_mode_does_not_look_at_is_said_once(both: list[Any]) -> None:
    lines = [[line for line in row["said"] if "changes nothing" in line] for row in both]
    assert lines[1] == []
    assert len(lines[0]) == 1
    assert lines[0][0].startswith("npu_sparse: sparsity: 0.95 changes nothing in mode int3: write mode: sparse")


def test_every_fit_lets_go_of_its_process_groups(both: list[Any]) -> None:
    assert [row["groups"] for row in both] == [1, 1]


def test_ranks_that_drifted_apart_stop_together(both: list[Any]) -> None:
    for row in both:
        assert row["drift"].startswith("RanksDivergedError: the ranks' parameters differ: ")


def dies(rank: int) -> Any:
    warnings.simplefilter("ignore")
    start = time.monotonic()
    said = refusal(
        lambda: fit(rank, strategy=NPUSparseStrategy(timeout=timedelta(seconds=5)), devices=2, callbacks=[Die()])
    )
    return said, time.monotonic() - start


class Normed(Small):
    """Has buffers, which DDP broadcasts in its forward, before any gradient travels."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(64))


def dies_before_buffers(rank: int) -> Any:
    warnings.simplefilter("ignore")
    short = NPUSparseStrategy(timeout=timedelta(seconds=5))
    return refusal(lambda: fit(rank, Normed(), strategy=short, devices=2, callbacks=[Die()]))


def test_a_dead_rank_that_shows_in_a_broadcast_of_buffers_is_the_same_error(tmp_path: Path) -> None:
    said, _ = run_ranks(dies_before_buffers, 2, tmp_path, gloo=False, may_die=[1])
    assert said.startswith("SyncError: rank 0 of 2 could not add up gradients in step 3")


class Die(Callback):
    """Ends the process of rank 1 in the middle of a run."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, batch_idx) == (1, 3):
            os._exit(1)


def test_a_dead_rank_ends_the_run_with_an_error_and_without_a_hang(tmp_path: Path) -> None:
    (said, seconds), _ = run_ranks(dies, 2, tmp_path, gloo=False, may_die=[1])
    assert said.startswith("SyncError: rank 0 of 2 could not add up gradients in step 3")
    assert seconds < 15


@pytest.mark.parametrize("value", [300, 300.0, "0:05:00", "00:05:00.0", timedelta(minutes=5)])
def test_a_timeout_may_be_seconds_or_a_text(value: Any) -> None:
    assert NPUSparseStrategy(timeout=value)._timeout == timedelta(minutes=5)
    assert {ZeROStrategy(stage, timeout=value)._timeout for stage in (1, 3)} == {timedelta(minutes=5)}
    assert GradientCompressor(timeout=value).timeout == timedelta(minutes=5)
    for wrong in ("soon", 0, -1, True, float("nan"), [5]):
        with pytest.raises(ConfigError, match=r"timeout must be seconds above 0, or a text such as 0:05:00; got "):
            NPUSparseStrategy(timeout=wrong)


def test_one_rank_trains_as_without_the_strategy(tmp_path: Path) -> None:
    ((ours, plain, sync),) = run_ranks(alone, 1, tmp_path, gloo=False)
    assert sync is None
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def alone(rank: int) -> Any:
    warnings.simplefilter("ignore")
    ours, trainer = fit(rank, strategy="npu_sparse", accumulate_grad_batches=2)
    plain, _ = fit(rank, strategy="auto", accumulate_grad_batches=2)
    return ours.after, plain.after, trainer.strategy.sync
