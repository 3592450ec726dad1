"""GradientHealthMonitor in a Trainer: what it says and writes, what an error does, what it needs to start."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from fakes.models.denoisers import Denoiser, batches, fit
from lightning_aigc.callbacks import GradientHealthMonitor
from lightning_aigc.callbacks.health import Alert, HealthThresholds
from lightning_aigc.callbacks.health.checks.loss_scale import LossScaleCheck
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
LAYER = "blocks.1.up.weight"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Lines written to the console, a list that grows."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("health"):
                said.append(record.getMessage())

    handler = Keep()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


class NaNAt(Callback):
    """Makes one gradient not finite at some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step + 1 in self.steps:
            gradient = pl_module.get_parameter(LAYER).grad
            assert gradient is not None
            gradient[0, 0] = float("nan")


class Root(nn.Module):
    """Its derivative is infinite while it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.calls = False, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + (x - x.detach()).abs().sqrt() if self.fails else x


class FailsAt(Denoiser):
    """A root at zero behind the third block, for one batch of the epoch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.bad_batch, self.root = batch, Root()
        self.blocks[2].extra = self.root  # type: ignore[union-attr]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.root.fails = batch_idx == self.bad_batch
        return super().training_step(batch, batch_idx)


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def is_finite(module: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in module.parameters())


def test_an_alert_says_what_where_since_when_why_and_what_to_change(tmp_path: Path, lines: list[str]) -> None:
    monitor = GradientHealthMonitor(dirpath=tmp_path)
    fit(Denoiser(), [NaNAt(7), monitor], steps=10, default_root_dir=str(tmp_path))
    first = monitor.alerts[0]
    assert (first.step, first.since, first.check, first.layer, first.level) == (7, 7, "non_finite", LAYER, "error")
    assert lines[0] == (
        f"health error: non_finite at step 7, {LAYER}: its gradient is not finite; the same batch run again gave finite"
        " values. Likely cause: something after backward: a hook, gradient sync from another rank,"
        " or a device that computes wrongly. Remedy: look at the hooks and callbacks that change gradients"
    )


def test_health_jsonl_holds_one_object_an_alert_with_the_fields_of_alert(tmp_path: Path) -> None:
    monitor = GradientHealthMonitor(dirpath=tmp_path / "new" / "folder")
    fit(Denoiser(learning_rate=0.0), [monitor], steps=21, default_root_dir=str(tmp_path))
    written = (tmp_path / "new" / "folder" / "health.jsonl").read_text(encoding="utf-8").splitlines()
    assert [Alert(**json.loads(line)) for line in written] == monitor.alerts
    assert len(written) > 0
    assert (tmp_path / "new" / "folder" / "health.html").is_file()


def test_the_first_bad_module_of_an_accumulated_batch_is_found_in_that_batch(tmp_path: Path) -> None:
    monitor = GradientHealthMonitor(page=False)
    fit(FailsAt(5), [monitor], steps=2, accumulate_grad_batches=4, default_root_dir=str(tmp_path))
    found = [a for a in monitor.alerts if a.check == "non_finite"]
    assert [(a.step, a.layer) for a in found] == [(2, "blocks.2.extra")]
    assert "backward pass" in found[0].message


def test_the_second_run_of_a_bad_batch_leaves_no_trace_in_the_training(tmp_path: Path) -> None:
    """With the step skipped, the training continues as if its batch had only been drawn."""

    def run(monitor: GradientHealthMonitor, *others: Callback) -> tuple[list[Tensor], int]:
        module = FailsAt(3)
        fit(module, [*others, monitor], steps=8, default_root_dir=str(tmp_path))
        return weights(module), module.root.calls

    class Drop(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
            if trainer.global_step == 3:
                for p in pl_module.parameters():
                    p.grad = None

    watched, calls = run(GradientHealthMonitor(on_error="skip_step", page=False))
    dropped, calls_of_training = run(GradientHealthMonitor(page=False), Drop())
    assert (calls, calls_of_training) == (9, 8)
    assert all(torch.equal(a, b) for a, b in zip(watched, dropped, strict=True))


@pytest.mark.parametrize("on_error", ["warn", "stop", "skip_step"])
def test_an_error_is_said_or_skips_its_step_or_ends_the_training_before_the_weights_are_spoilt(
    on_error: Any, tmp_path: Path
) -> None:
    module = Denoiser()
    monitor = GradientHealthMonitor(on_error=on_error, page=False)
    trainer = fit(module, [NaNAt(5), monitor], steps=12, default_root_dir=str(tmp_path))
    assert monitor.alerts[0].check == "non_finite"
    assert is_finite(module) == (on_error != "warn")
    assert trainer.global_step == (5 if on_error == "stop" else 12)


def test_watching_changes_no_bit_of_a_training(tmp_path: Path) -> None:
    alone, watched = Denoiser(), Denoiser()
    fit(alone, [], default_root_dir=str(tmp_path))
    fit(watched, [GradientHealthMonitor(every_n_steps=3)], default_root_dir=str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(weights(alone), weights(watched), strict=True))


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:.*your dataloader is not resumable")  # as wanted
def test_a_resumed_training_says_what_the_uninterrupted_one_says(tmp_path: Path) -> None:
    def fault() -> Callback:
        class Shrink(Callback):
            def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
                gradient = pl_module.get_parameter(LAYER).grad
                if gradient is not None and trainer.global_step + 1 >= 7:
                    gradient.mul_(1e-12)

        return Shrink()

    def saver(folder: str) -> ModelCheckpoint:
        return ModelCheckpoint(dirpath=tmp_path / folder, filename="{step}", every_n_train_steps=20, save_top_k=-1)

    # One batch, so that the place in the data does not matter; the draws differ, the norms' order does not.
    data = batches(1) * 100
    arguments: dict[str, Any] = {"data": data, "enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    whole = GradientHealthMonitor()
    fit(Denoiser(), [fault(), whole, saver("saved")], steps=40, **arguments)
    whole_lines = (tmp_path / "health.jsonl").read_text(encoding="utf-8")
    checkpoint = torch.load(tmp_path / "saved" / "step=20.ckpt", weights_only=True)
    resumed = GradientHealthMonitor()
    fit(
        Denoiser(),
        [fault(), resumed, saver("resumed")],
        steps=40,
        ckpt_path=str(tmp_path / "saved" / "step=20.ckpt"),
        **arguments,
    )
    brief = [(a.step, a.since, a.check, a.layer, a.level) for a in resumed.alerts]
    assert brief == [(a.step, a.since, a.check, a.layer, a.level) for a in whole.alerts]
    assert {a.step for a in resumed.alerts} >= {10, 20}
    assert (tmp_path / "health.jsonl").read_text(encoding="utf-8").count("\n") == whole_lines.count("\n")
    saved = checkpoint["callbacks"]["GradientHealthMonitor"]
    assert saved["watch"]["taken_steps"] == 20


def test_saved_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    monitor = GradientHealthMonitor(every_n_steps=2)
    fit(Denoiser("lora"), [monitor], steps=33, default_root_dir=str(tmp_path))
    torch.save(monitor.state_dict(), tmp_path / "state.pt")
    other = GradientHealthMonitor()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    torch.save(other.state_dict(), tmp_path / "again.pt")
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("state.pt", "again.pt"))
    rows = [state["watch"]["norms"].pop("norms") for state in (first, second)]
    ratios = [state["watch"]["optimizers"][0].pop("ratios") for state in (first, second)]
    assert torch.equal(*rows) and rows[0].shape == (12, 16)
    assert (ratios[0] is None) == (ratios[1] is None)
    assert repr(first) == repr(second)
    restored, saved = other._diagnostics, monitor._diagnostics
    assert restored.tracker.state() == saved.tracker.state()
    assert restored.check_of(LossScaleCheck).state() == saved.check_of(LossScaleCheck).state()
    histories = [saved.history(0), restored.history(0)]
    for name in ("unclipped_norms", "losses", "all_norms", "stage"):
        assert getattr(histories[0], name).state() == getattr(histories[1], name).state()
    assert histories[0].all_norms.median() == histories[1].all_norms.median() > 0
    assert {n: h.state() for n, h in other._diagnostics.layer_norms.items()} == {
        n: h.state() for n, h in monitor._diagnostics.layer_norms.items()
    }
    assert other._diagnostics.taken_steps == monitor._diagnostics.taken_steps == 33


def test_a_second_fit_starts_with_a_clean_sheet(tmp_path: Path) -> None:
    monitor = GradientHealthMonitor(page=False)
    fit(Denoiser(), [NaNAt(3), monitor], steps=4, default_root_dir=str(tmp_path))
    assert monitor.alerts
    fit(Denoiser(), [monitor], steps=4, default_root_dir=str(tmp_path))
    assert monitor.alerts == []


def test_norms_go_to_the_logger_by_block(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(
        Denoiser(),
        [GradientHealthMonitor(every_n_steps=5)],
        steps=11,
        logger=logger,
        log_every_n_steps=5,
        default_root_dir=str(tmp_path),
    )
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"health/gradient_norm", "health/gradient_norm/blocks.0", "health/warnings"} <= set(header)
    assert not any("up.weight" in name for name in header)


@pytest.mark.parametrize(("precision", "kind"), [("16-mixed", "full"), ("bf16-true", "full"), ("bf16-mixed", "lora")])
def test_it_works_beside_our_precision_plugin_with_accumulation_clipping_and_checkpoints(
    precision: Any, kind: str, tmp_path: Path
) -> None:
    monitor = GradientHealthMonitor(every_n_steps=4)
    trainer = fit(
        Denoiser(kind),
        [monitor, ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=5)],
        steps=12,
        plugins=[FusedBackwardPrecision(precision, memory="off")],
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        enable_checkpointing=True,
        default_root_dir=str(tmp_path),
    )
    assert trainer.global_step == 12
    assert [a.line() for a in monitor.alerts if a.level == "error"] == []


@pytest.mark.parametrize("fused", [False, True])
def test_norms_are_unscaled_under_a_loss_scale_even_where_the_optimizer_unscales(fused: bool, tmp_path: Path) -> None:
    median = []
    for precision in ("32-true", "16-mixed"):
        monitor, module = GradientHealthMonitor(page=False), Denoiser()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)
        vars(module)["configure_optimizers"] = lambda optimizer=optimizer: optimizer
        plugin = FusedBackwardPrecision(precision, memory="off")  # type: ignore[arg-type]
        fit(module, [monitor], steps=25, plugins=[plugin], default_root_dir=str(tmp_path))
        assert [a.line() for a in monitor.alerts if a.level != "info"] == []
        median.append(monitor._diagnostics.history(0).all_norms.median())
    assert median[1] == pytest.approx(median[0], rel=0.2)


def test_manual_optimization_is_watched_too(tmp_path: Path) -> None:
    class Manual(Denoiser):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    monitor = GradientHealthMonitor(page=False)
    fit(Manual(), [NaNAt(6), monitor], steps=8, default_root_dir=str(tmp_path))
    assert (monitor.alerts[0].check, monitor.alerts[0].layer, monitor.alerts[0].step) == ("non_finite", LAYER, 6)


def test_without_a_trainable_parameter_the_fit_ends_before_it_starts(tmp_path: Path) -> None:
    module = Denoiser().requires_grad_(False)
    vars(module)["configure_optimizers"] = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="Denoiser has no trainable parameter; set requires_grad"):
        fit(module, [GradientHealthMonitor()], default_root_dir=str(tmp_path))


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")
def test_without_an_optimizer_it_stays_off_and_says_so(tmp_path: Path) -> None:
    module = Denoiser()
    vars(module)["configure_optimizers"] = lambda: None  # Lightning allows it
    with pytest.warns(
        UserWarning, match="GradientHealthMonitor stays off: .*configure_optimizers returned no optimizer"
    ):
        fit(module, [GradientHealthMonitor()], default_root_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_where_nobody_named_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = GradientHealthMonitor(every_n_steps=1)
    fit(Denoiser(), [monitor], steps=3)
    assert list(tmp_path.iterdir()) == []


def test_norms_for_a_logger_that_is_not_there_are_warned_about(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="there is no logger to write to; set trainer.logger: true"):
        fit(Denoiser(), [GradientHealthMonitor(norms_in_logger="layers")], steps=1, default_root_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be 1 or more, got 0"),
        ({"every_n_steps": True}, "every_n_steps=True; wanted a whole number"),
        ({"on_error": "raise"}, "on_error must be one of warn, stop, skip_step; got 'raise'"),
        ({"norms_in_logger": "yes"}, "norms_in_logger must be one of auto, all, blocks, layers, off; got 'yes'"),
        ({"thresholds": {"vanishing": 1}}, "thresholds has no vanishing; it has vanishing_norm"),
        ({"thresholds": {"vanishing_norm": -1}}, "thresholds.vanishing_norm must be a number above 0, got -1"),
        ({"thresholds": {"alike_share": 2}}, "thresholds.alike_share is a share and at most 1, got 2"),
        ({"thresholds": {"history": 1.5}}, "thresholds.history must be a whole number, got 1.5"),
        ({"thresholds": 3}, "thresholds must be a mapping or a HealthThresholds, got int"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GradientHealthMonitor(**arguments)


def test_thresholds_may_be_given_in_part() -> None:
    monitor = GradientHealthMonitor(thresholds={"exploding_norm": 3.0})
    assert monitor.thresholds == dataclasses.replace(HealthThresholds(), exploding_norm=3.0)


def test_the_page_is_written_when_the_training_breaks_off(tmp_path: Path) -> None:
    class Break(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                raise KeyError("a broken callback")

    with pytest.raises(KeyError, match="a broken callback"):
        fit(Denoiser(), [GradientHealthMonitor(), Break()], default_root_dir=str(tmp_path))
    page = (tmp_path / "health.html").read_text(encoding="utf-8")
    assert "<b>4</b><span>optimizer steps</span>" in page


def test_a_batch_that_repeats_its_error_is_run_again_twice_at_most(tmp_path: Path) -> None:
    class Always(FailsAt):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, self.bad_batch)

    module = Always(0)
    fit(module, [GradientHealthMonitor(on_error="skip_step", page=False)], steps=10, default_root_dir=str(tmp_path))
    assert module.root.calls == 10 + 2
