"""AdaptiveLR on real trainings: what it does to the rates, and all that it leaves alone."""

from __future__ import annotations

import csv
import itertools
import math
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

from fakes.models import small_lightning
from fakes.models.denoisers import Denoiser, batches, fit
from fakes.processes.ranks import run_ranks
from fakes.runs import trainings
from lightning_aigc.callbacks import AdaptiveLR, GradientHealthMonitor
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.schedulers.rate_search import SEARCH_GROWTH, SEARCH_START
from lightning_aigc.schedulers.step_statistics import StepStatistics
from lightning_aigc.strategies import NPUSparseStrategy


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class Scheduled(Denoiser):
    """With a cosine that reads the rate it wrote itself, and a second group at a tenth of the rate."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.blocks.parameters()}, {"params": self.inlet.parameters(), "lr": 1e-4}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rates(Callback):
    """The groups' rates within each step, where gradients are clipped, and after it."""

    def __init__(self) -> None:
        self.within: list[list[float]] = []
        self.after: list[list[float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.within.append([group["lr"] for group in optimizer.param_groups])

        # Before the callback's own hook, which puts the rates back.
        hooks: Any = trainer.optimizers[0]._optimizer_step_post_hooks
        trainer.optimizers[0].register_step_post_hook(note)
        hooks.move_to_end(next(reversed(hooks)), last=False)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.after.append([group["lr"] for group in trainer.optimizers[0].param_groups])


class Peaks(Callback):
    """Gradients of ten times their size at some steps, counted from 1."""

    def __init__(self, *steps: int, times: float = 10.0) -> None:
        self.steps, self.times = steps, times

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step + 1 in self.steps:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad *= self.times


def test_a_recursive_schedule_of_several_groups_goes_on_as_if_nobody_multiplied_it() -> None:
    alone, beside = Rates(), Rates()
    fit(Scheduled(), [alone])
    adaptive = AdaptiveLR(search=False)
    fit(Scheduled(), [adaptive, beside, Peaks(15)])
    assert beside.after == alone.after
    assert [change.step for change in adaptive.changes] == [15]
    factors = [now[0] / plain[0] for now, plain in zip(beside.within, alone.within, strict=True)]
    assert factors[:14] == [1.0] * 14
    assert factors[14] == pytest.approx(0.5)
    assert factors[14:] == sorted(factors[14:])
    assert 0.5 < factors[-1] < 1.0
    assert all(first == pytest.approx(10 * second) for first, second in beside.within)


def test_the_search_starts_low_ends_and_leaves_a_line_and_scalars(tmp_path: Path, caplog: Any) -> None:
    adaptive, rates = AdaptiveLR(), Rates()
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    with caplog.at_level("INFO"):
        fit(Scheduled(learning_rate=1e-3), [adaptive, rates], logger=logger, log_every_n_steps=1, gradient_clip_val=1.0)
    within = [first for first, _ in rates.within]
    assert within[0] == pytest.approx(1e-3 * SEARCH_START)
    change = adaptive.changes[0]
    assert change.reason.startswith("the search ends")
    searched = within[: change.step - 1]
    for rate, following in itertools.pairwise(searched):  # it waits, grows once, or stops at the configured rate
        grown = SEARCH_GROWTH * rate
        assert following in (pytest.approx(rate), pytest.approx(grown), pytest.approx(1e-3))
    assert any(
        f"AdaptiveLR: step {change.step}, rate now" in r.message and change.reason in r.message for r in caplog.records
    )
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["adaptive_lr/lr"]]
    assert [float(row["adaptive_lr/lr"]) for row in rows] == pytest.approx(within)
    assert float(rows[-1]["adaptive_lr/factor"]) == pytest.approx(adaptive.changes[-1].factor)


def test_the_factor_comes_back_between_peaks_that_come_before_it_has_recovered() -> None:
    adaptive, rates = AdaptiveLR(search=False, recovery_steps=20), Rates()
    fit(Denoiser(), [adaptive, rates, Peaks(*range(15, 80, 9), times=100.0)], steps=110)
    cuts = [change.step for change in adaptive.changes if "above" in change.reason]
    assert len(cuts) >= 2
    assert all(later - earlier >= 20 for earlier, later in itertools.pairwise(cuts))
    first = rates.within[0][0]
    assert min(within[0] for within in rates.within) == pytest.approx(0.5 * first)
    assert rates.within[-1][0] == first


class Diverges(trainings.Regression):
    """Its loss is a hundred times as large from batch 25 on."""

    def training_step(self, batch_NC: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch_NC, batch_idx) * (100.0 if batch_idx >= 25 else 1.0)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_loss_that_diverges_lowers_the_rate_and_its_scale_is_not_part_of_it(precision: Any) -> None:
    adaptive = AdaptiveLR(search=False, grad_norm_threshold=None)
    plugin = FusedBackwardPrecision(precision, memory="off")
    trainings.fit(plugin, Diverges(), trainings.make_batches(60), callbacks=[adaptive])
    [change] = adaptive.changes
    assert "the run diverges" in change.reason
    state = adaptive.state_dict()["rates"][0]["control"]
    assert state["top"] == 0.5
    assert max(state["divergence"]["first"]) < 1000.0


def test_with_everything_off_no_bit_changes() -> None:
    plain, watched = Scheduled(), Scheduled()
    fit(plain, [])
    fit(watched, [AdaptiveLR(search=False, grad_norm_threshold=None)])
    assert torch.equal(weights(plain), weights(watched))


class SameNoise(Callback):
    """A stock checkpoint holds no random state; so each step draws from its own number."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        torch.manual_seed(trainer.global_step)


class RestoresLate(SingleDeviceStrategy):
    """As strategies that shard: callbacks get a checkpoint's states after `on_fit_start`."""

    restore_checkpoint_after_setup = True


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the saver of the first run
@pytest.mark.parametrize("restores_late", [False, True])
@pytest.mark.parametrize(("stop", "search"), [(8, True), (24, False)])  # in the search; on the way back from a cut
def test_a_resumed_training_ends_in_the_same_weights(
    stop: int, search: bool, restores_late: bool, tmp_path: Path
) -> None:
    whole, adaptive = Scheduled(), AdaptiveLR(search)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=stop, save_top_k=-1)
    fit(whole, [adaptive, Peaks(20), SameNoise(), saver], enable_checkpointing=True)
    file = tmp_path / f"step={stop}.ckpt"
    state = torch.load(file, weights_only=True)["callbacks"]["AdaptiveLR"]
    assert bool(state["rates"][0]["weights"]) == (stop == 8)
    resumed, again = Scheduled(), AdaptiveLR(search)
    strategy = RestoresLate("cpu") if restores_late else "auto"
    fit(resumed, [again, Peaks(20), SameNoise()], ckpt_path=str(file), strategy=strategy)
    assert torch.equal(weights(whole), weights(resumed))
    assert again.changes == adaptive.changes
    assert adaptive.changes[0].step == 20 or search
    assert adaptive.changes


class Complex(Denoiser):
    """With a complex parameter, beside a monitor that samples it."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(8, 4, dtype=torch.complex64))

    def training_step(self, batch_BSC: torch.Tensor, batch_idx: int) -> torch.Tensor:
        filtered = torch.fft.ifft2(torch.fft.fft2(batch_BSC) * self.filter).real
        return super().training_step(batch_BSC, batch_idx) + (filtered - batch_BSC.roll(1, 1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def test_complex_parameters_count_with_both_their_parts(tmp_path: Path) -> None:
    adaptive, monitor = AdaptiveLR(), GradientHealthMonitor()
    fit(Complex(), [adaptive, monitor], default_root_dir=tmp_path)
    assert adaptive.changes and not [alert for alert in monitor.alerts if alert.level != "info"]
    parameter = nn.Parameter(torch.tensor([3j]))
    parameter.grad = torch.tensor([4j])
    statistics, optimizer = StepStatistics(), torch.optim.SGD([parameter], 1.0)
    assert statistics(optimizer, True)[0] == 4.0
    optimizer.step()
    _, last_step, _ = statistics(optimizer, True)
    assert last_step is not None
    assert last_step.agreement == pytest.approx(1.0) and last_step.update_ratio == pytest.approx(4 / 3)


def test_a_second_fit_starts_anew() -> None:
    adaptive = AdaptiveLR()
    fit(Scheduled(), [adaptive])
    first = list(adaptive.changes)
    second = Scheduled()
    fit(second, [adaptive])
    assert adaptive.changes == first


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_a_search_of_the_tuner_is_no_run_to_go_on_with(tmp_path: Path) -> None:
    module, adaptive = Scheduled(), AdaptiveLR(search=False)
    trainer = fit(module, [adaptive, Peaks(15)], default_root_dir=tmp_path)
    assert [change.step for change in adaptive.changes] == [15]
    assert Tuner(trainer).lr_find(module, DataLoader(batches(8), batch_size=None), num_training=5) is not None
    fit(Scheduled(), [adaptive])
    assert adaptive.changes == [] and adaptive.report_entries() == {"rate_changes": []}


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_steps_skipped_by_a_loss_scaler_leave_the_schedule_alone(precision: Any) -> None:
    adaptive, rates = AdaptiveLR(search=False, grad_norm_threshold=1e-3, relative=False), Rates()
    module = trainings.Regression()
    plugin = FusedBackwardPrecision(precision, memory="off")
    trainings.fit(plugin, module, trainings.make_batches(6, huge=[2]), callbacks=[adaptive, rates])
    assert rates.after == [[1e-2]] * 6
    assert (len(rates.within) < 6) == (precision == "16-mixed")
    assert all(within[0] < 1e-2 for within in rates.within)


def test_manual_optimization_is_adapted_too() -> None:
    adaptive = AdaptiveLR()
    trainings.fit(
        FusedBackwardPrecision("32-true", memory="off"),
        trainings.ManualRegression(),
        trainings.make_batches(6),
        callbacks=[adaptive],
    )
    assert adaptive.state_dict()["rates"][0]["steps"] == 6


class TwoOptimizers(trainings.ManualRegression):
    def configure_optimizers(self) -> Any:
        layers = list(self.net.children())
        return [torch.optim.Adam(layers[0].parameters(), 1e-2), torch.optim.SGD(layers[4].parameters(), 1e-3)]

    def training_step(self, batch_NC: torch.Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(trainings.Regression.training_step(self, batch_NC, batch_idx))
        for optimizer in optimizers:
            optimizer.step()


def test_each_optimizer_has_a_factor_of_its_own() -> None:
    adaptive = AdaptiveLR(search=False, grad_norm_threshold=0.0001, relative=False)
    trainings.fit(
        FusedBackwardPrecision("32-true", memory="off"),
        TwoOptimizers(),
        trainings.make_batches(3),
        callbacks=[adaptive],
    )
    assert [state["steps"] for state in adaptive.state_dict()["rates"]] == [3, 3]


class Optimized(Denoiser):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return None if self.make is None else self.make(self.parameters())


def test_optimizers_that_find_their_own_rate_are_refused_before_training_starts() -> None:
    from prodigyopt import Prodigy
    from schedulefree import AdamWScheduleFree

    for make, says in (
        (Prodigy, "Prodigy finds its own rate, so a search for one makes no sense; set AdaptiveLR's search: false"),
        (AdamWScheduleFree, "AdamWScheduleFree weighs its average by rates"),
        (torch.optim.LBFGS, "leave AdaptiveLR out"),
    ):
        with pytest.raises(ConfigError, match=says):
            fit(Optimized(make), [AdaptiveLR()])
    fit(Optimized(Prodigy), [AdaptiveLR(search=False)], steps=3)
    with pytest.raises(ConfigError, match="search must be true, false or auto, got 'maybe'"):
        AdaptiveLR(search="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Prodigy", "AdamW"])
def test_auto_searches_unless_the_optimizer_finds_its_own_rate_and_then_says_so(name: str, caplog: Any) -> None:
    from prodigyopt import Prodigy

    adaptive = AdaptiveLR(search="auto")
    with caplog.at_level("INFO"):
        fit(Optimized({"Prodigy": Prodigy, "AdamW": torch.optim.AdamW}[name]), [adaptive], steps=30)
    said = [record.message for record in caplog.records if "AdaptiveLR: no search" in record.message]
    assert len(said) == (name == "Prodigy")
    assert bool(adaptive.changes) == (name == "AdamW")  # the search changes the rate


@pytest.mark.filterwarnings("ignore:.*will run with no optimizer")
def test_without_an_optimizer_the_fit_ends_before_it_starts() -> None:
    with pytest.raises(ConfigError, match=r"Optimized.configure_optimizers returned none"):
        fit(Optimized(None), [AdaptiveLR()])


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="recovery_factor must be a number between 0 and 1; got 2"):
        AdaptiveLR(recovery_factor=2)


def test_settings_that_change_nothing_are_named() -> None:
    named = r"AdaptiveLR.max_raise: 3.0 changes nothing while search is false; set AdaptiveLR.search: true, or remove"
    with pytest.warns(UserWarning, match=named):
        fit(Optimized(torch.optim.SGD), [AdaptiveLR(search=False, max_raise=3.0)])
    with pytest.warns(UserWarning, match=r"relative: false changes nothing while grad_norm_threshold is unset; set"):
        fit(Optimized(torch.optim.SGD), [AdaptiveLR(grad_norm_threshold=None, relative=False)])


def ranks_work(rank: int, folder: str) -> dict[str, Any]:
    """Two ranks with data of their own; in mode local even their gradients differ."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    quick = timedelta(seconds=20)
    for name, strategy in (
        ("ddp", DDPStrategy(process_group_backend="gloo", timeout=quick)),
        ("int3", NPUSparseStrategy(process_group_backend="gloo", timeout=quick)),
        ("local", NPUSparseStrategy(process_group_backend="gloo", timeout=quick, mode="local", local_steps=4)),
    ):
        adaptive = AdaptiveLR(grad_norm_threshold=3.0)
        module, _ = small_lightning.fit(
            rank, batches=40, strategy=strategy, devices=2, callbacks=[adaptive, Peaks(35, times=20.0)]
        )
        found[name] = [[list(change) for change in adaptive.changes], module.after[-1].tolist()]
    return found


def test_ranks_decide_alike(tmp_path: Path) -> None:
    first, second = run_ranks(ranks_work, 2, tmp_path, str(tmp_path), gloo=False)
    for name in ("ddp", "int3", "local"):
        assert first[name][0] == second[name][0]
        assert len(first[name][0]) >= 2
        assert all(math.isfinite(value) for value in first[name][1])
    assert first["ddp"][1] == second["ddp"][1]
