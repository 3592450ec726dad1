"""A remedy is a line that the command line takes."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fakes.models.denoisers import Denoiser, fit
from lightning_aigc.callbacks import AdaptiveLR, ExactSnapshot
from lightning_aigc.callbacks.health import GradientHealthMonitor
from lightning_aigc.callbacks.health.remedies import GENERAL, Remedies
from lightning_aigc.cli import main
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.schedulers.adaptive_rate import HeldRate

CONFIG = Path(__file__).parents[3] / "configs" / "sd_lora.yaml"


def of_sd(precision: Any = "16-mixed") -> Remedies:
    trainer = Trainer(
        accelerator="cpu", logger=False, plugins=[FusedBackwardPrecision(precision, memory="off")], max_steps=1
    )
    return Remedies.of(trainer, StableDiffusionLoRA("embedded:sd"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(CONFIG), *arguments, "--print_config"])
    said = capsys.readouterr()
    assert stop.value.code == 0, said.err
    config: dict[str, Any] = yaml.safe_load(said.out)
    return config


@pytest.mark.parametrize(
    "remedy",
    [
        Remedies(model_keys=["learning_rate"], rate=1e-4).learning_rate(0.5),
        of_sd().safe_precision(),
        of_sd("bf16-true").mixed_precision(),
        of_sd().clipping(1.5),
        of_sd().non_finite("forward"),
        of_sd("32-true").non_finite("input"),
    ],
)
def test_our_remedies_are_keys_and_values_that_the_command_line_accepts(
    remedy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning"])
    key, value = remedy.split(": ")
    found: Any = printed(capsys, f"--{key}", value)
    for part in key.split("."):
        found = found[part]
    assert str(found) == value or float(found) == float(value)


def test_a_module_without_our_keys_gets_general_words() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, precision="bf16-mixed", max_steps=1)
    remedies = Remedies.of(trainer, Denoiser())
    assert remedies.safe_precision() == "trainer.precision: 32-true"
    assert remedies.model("vae_dtype", "float32", "in words") == "in words"


def test_a_rate_of_zero_is_raised_by_no_factor() -> None:
    assert Remedies(rate=0.0).learning_rate(10) == "set learning_rate above 0, such as learning_rate: 1e-4"
    assert "above 0" not in Remedies(rate=0.0).learning_rate(0.5)


class Manual(LightningModule):
    """Clips with the call that is proposed."""

    def __init__(self, gradient_clip_val: float) -> None:
        super().__init__()
        self.automatic_optimization, self.clip = False, gradient_clip_val
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch: Tensor) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(1e6 * self.net(batch[..., :4]).sum())
        assert "self.clip_gradients(optimizer, gradient_clip_val=1)" in Remedies.of(self.trainer, self).clipping(1.0)
        self.clip_gradients(optimizer, gradient_clip_val=self.clip)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def test_under_manual_optimization_the_remedy_is_a_call_in_the_training_step(tmp_path: Path) -> None:
    monitor = GradientHealthMonitor(every_n_steps=1)
    fit(Manual(math.inf), [monitor], steps=3, default_root_dir=tmp_path)
    said = {alert.remedy for alert in monitor.alerts if alert.check == "exploding"}
    assert said and all("in training_step, before each optimizer.step()" in one for one in said)
    fit(Manual(1.0), [healthy := GradientHealthMonitor(every_n_steps=1)], steps=3, default_root_dir=tmp_path)
    assert not [alert for alert in healthy.alerts if alert.check == "exploding"]


def test_gradients_of_one_size_want_clipping_by_norm_only_where_the_trainer_clips_by_value() -> None:
    by_value = Trainer(accelerator="cpu", logger=False, gradient_clip_val=0.1, gradient_clip_algorithm="value")
    assert Remedies.of(by_value, Denoiser()).alike() == "trainer.gradient_clip_algorithm: norm"
    assert "trainer" not in GENERAL.alike()


@pytest.mark.filterwarnings("ignore:.*trained weights are not finite")
def test_the_remedy_for_spoilt_weights_goes_back_to_the_newest_snapshot(tmp_path: Path) -> None:
    """The wrong value lies in a weight, from the third step on."""

    class Spoil(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 3:
                next(pl_module.parameters()).data.fill_(torch.nan)

    monitor = GradientHealthMonitor()
    fit(Denoiser(), [ExactSnapshot(1), monitor, Spoil()], default_root_dir=tmp_path)
    said = next(alert.remedy for alert in monitor.alerts if alert.check == "non_finite")
    newest = tmp_path / "snapshots" / "step-00000002"
    assert said.startswith("stop this run, set model.init_args.learning_rate: ")
    assert said.endswith(f'go back to the snapshot of step 2: trainer.fit(..., ckpt_path="{newest}")')


def held(**given: Any) -> HeldRate:
    by_nobody: dict[str, Any] = {"owner": "AdaptiveLR", "factor": 1.0, "top": 1.0, "found": 1.0, "is_searched": False}
    return HeldRate(**(by_nobody | {"is_searching": False, "configured": 1e-4, "scheduled": 5e-5} | given))


@pytest.mark.parametrize(
    ("holds", "factor", "says"),
    [
        ({"factor": 0.5}, 10, "AdaptiveLR.init_args.grad_norm_threshold: null (AdaptiveLR holds the rate at 0.5 times"),
        ({"factor": 0.5, "owner": "AIGCLRScheduler"}, 10, "AIGCLRScheduler.init_args.adaptive_mode: false"),
        ({"factor": 0.1, "top": 0.1, "found": 0.1, "is_searched": True}, 10, "AdaptiveLR.init_args.search: false"),
        ({"factor": 0.1, "top": 0.1, "found": 0.1, "is_searching": True}, 10, "none yet: AdaptiveLR holds"),
        ({"factor": 0.5, "top": 0.5}, 10, "a checkpoint from before the loss diverged"),
        ({"factor": 4.0, "top": 4.0, "found": 4.0, "is_searched": True}, 0.5, "AdaptiveLR.init_args.max_raise: 2 ("),
        (
            {"factor": 0.05, "top": 0.05, "found": 0.05, "is_searched": True},
            0.1,
            "model.init_args.learning_rate: 5e-07",
        ),
        ({"scheduled": 0.0}, 10, "raise model.init_args.max_train_steps: the schedule holds the rate at 0 of 0.0001"),
        ({}, 10, "model.init_args.learning_rate: 0.001"),
        ({}, 0.1, "model.init_args.learning_rate: 1e-05"),
    ],
)
def test_a_remedy_for_the_rate_is_where_the_rate_is_held(holds: dict[str, Any], factor: float, says: str) -> None:
    one = held(**holds)
    keys = ["learning_rate", "max_train_steps"]
    remedies = Remedies(model_keys=keys, rate=one.configured, scheduled_rate=one.scheduled, held=one)
    assert remedies.learning_rate(factor).startswith(says)


class Asks(Callback):
    """Records the remedy of each step."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.said.append(Remedies.of(trainer, pl_module).learning_rate(10))


class PeakAt20(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 19:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 100


def test_in_a_run_the_callback_that_cut_the_rate_is_named_and_else_the_configured_rate_counts() -> None:
    for before in (True, False):  # a callback before AdaptiveLR sees the schedule's rate, one after it the product
        asks, adaptive = Asks(), AdaptiveLR(search=False)
        fit(Denoiser(learning_rate=1e-3), [asks, PeakAt20(), adaptive] if before else [PeakAt20(), adaptive, asks])
        cut = 20 if before else 19
        assert set(asks.said[:cut]) == {"model.init_args.learning_rate: 0.01"}
        assert asks.said[cut].startswith("AdaptiveLR.init_args.grad_norm_threshold: null")


def test_the_monitor_may_be_named_in_yaml_with_some_of_its_thresholds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning"])
    given = {"every_n_steps": 5, "on_error": "stop", "thresholds": {"exploding_norm": 3.0}}
    added = {"trainer": {"callbacks": [{"class_path": "GradientHealthMonitor", "init_args": given}]}}
    (tmp_path / "health.yaml").write_text(yaml.safe_dump(added))
    [callback] = printed(capsys, "-c", str(tmp_path / "health.yaml"))["trainer"]["callbacks"]
    assert callback["class_path"] in (
        "lightning_aigc.callbacks.GradientHealthMonitor",
        "lightning_aigc.callbacks.health.GradientHealthMonitor",
    )
    monitor = GradientHealthMonitor(**callback["init_args"])
    assert (monitor.every_n_steps, monitor.on_error, monitor.thresholds.exploding_norm) == (5, "stop", 3.0)
    assert monitor.thresholds.vanishing_norm == 1e-6
