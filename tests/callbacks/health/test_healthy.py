"""Healthy trainings of other kinds than ours: no warning, and what would have raised one before."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from fakes.healthy import KINDS, Kind, fit_healthy
from lightning_aigc.callbacks.health import Alert, GradientHealthMonitor
from lightning_aigc.callbacks.health.checks.frozen import FrozenSamples
from lightning_aigc.callbacks.health.history.history import History
from lightning_aigc.callbacks.health.training_stage import StageTracker

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*batch_size. from an ambiguous"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:.*resumable"),
]
BY_NAME = {kind.name: kind for kind in KINDS}
QUICK = {
    "MLP regression, summed loss": 100,
    "MLP classification, hinge": 250,
    "MLP, EMA of the weights": 60,
    "MLP, EMA teacher": 60,
    "memorising MLP, regression, AdamW": 500,
    "GRU, clipped by value": 40,
    "memorising MLP, classification, SGD": 450,
    "GAN": 60,
    "Wasserstein GAN, 5 to 1": 60,
}
"""Kinds that gave false warnings, and steps by which they did."""


def warnings_of(kind: Kind, folder: Path, *others: Any, seed: int = 1) -> list[Alert]:
    monitor = GradientHealthMonitor(page=False)
    fit_healthy(kind, seed, [*others, monitor], folder)
    return [alert for alert in monitor.alerts if alert.level != "info"]


@pytest.mark.parametrize("name", QUICK)
def test_what_once_gave_a_false_warning_gives_none(name: str, tmp_path: Path) -> None:
    kind = dataclasses.replace(BY_NAME[name], steps=QUICK[name])
    assert [alert.line() for alert in warnings_of(kind, tmp_path)] == []


@pytest.mark.table
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_healthy_training_gives_a_warning(kind: Kind, tmp_path: Path) -> None:
    assert [alert.line() for alert in warnings_of(kind, tmp_path)] == []


class Shrink(Callback):
    """Takes nearly all of some gradients away, late in the training."""

    def __init__(self, since: int, layer: str) -> None:
        self.since, self.layer = since, layer

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step + 1 >= self.since:
            for name, p in pl_module.named_parameters():
                if name.startswith(self.layer) and p.grad is not None:
                    p.grad.mul_(1e-7)


@pytest.mark.parametrize("layer", ["net.2.weight", "net."])
def test_a_model_that_has_learned_is_still_sick_where_gradients_vanish_at_once(layer: str, tmp_path: Path) -> None:
    kind = dataclasses.replace(BY_NAME["MLP regression, AdamW"], steps=150)
    [first, *_] = warnings_of(kind, tmp_path, Shrink(121, layer))
    assert (first.check, first.layer, first.since) == (
        "vanishing",
        layer if layer == "net.2.weight" else "net.0.weight",
        130,
    )


def test_each_of_two_optimizers_has_its_own_history_and_its_fault_is_confirmed(tmp_path: Path) -> None:
    """A look at the other optimizer's weights is no look at these."""
    kind = dataclasses.replace(BY_NAME["GAN"], steps=60)
    alerts = warnings_of(kind, tmp_path, Shrink(15, "critic.2.weight"))
    assert {(alert.check, alert.layer) for alert in alerts} == {("vanishing", "critic.2.weight")}


def stages(losses: list[float], norms: list[float]) -> StageTracker:
    made = StageTracker()
    for loss, norm in zip(losses, norms, strict=True):
        made.add_loss(loss)
        made.add_norm(norm)
    return made


def test_small_gradients_are_measured_against_their_fall_where_the_loss_fell_with_them() -> None:
    down = [10.0**-i for i in range(20)]
    learned, stuck = stages(down, down), stages([1.0] * 20, down)
    assert learned.at(down[-1]).gradient_fall == pytest.approx(1e-18, rel=1e-3)
    assert stuck.at(1.0).gradient_fall == 1
    assert learned.at(1e-7).is_fitted and not learned.at(1e-5).is_fitted
    assert not stuck.at(1.0).is_fitted


def test_gradients_that_go_from_one_look_to_the_next_have_not_come_down() -> None:
    losses = [1.0 / (1 + i) for i in range(20)]
    assert stages(losses, [1.0] * 15 + [1e-9] * 5).at(0.05).gradient_fall == 1
    assert stages([*losses, 1e-9], [1.0] * 20 + [1e-9]).at(1e-9).gradient_fall == pytest.approx(1e-9)


def test_a_loss_below_zero_falls_too_and_is_never_fitted() -> None:
    made = stages([-1.0 - i for i in range(20)], [1.0 / 2**i for i in range(20)])
    assert made.has_learned
    assert not made.at(-20.0).is_fitted


def test_a_trend_is_the_same_after_a_checkpoint() -> None:
    made, again = stages([1.0, 0.5] * 10, [1.0, 0.1] * 10), StageTracker()
    again.load(made.state())
    assert again.state() == made.state()


def test_a_shift_shows_in_the_median_of_several_where_single_values_vary_too_much() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(60, generator=generator).mul(0.6).exp().tolist()
    history = History(100, shortest=20)
    for value in draws[:40]:
        history.add(value)
    assert not any(history.has_shifted(value, 6, 5, counts=(5,)) for value in draws[40:])
    shifted = []
    for value in draws[40:50]:
        shifted.append(history.has_shifted(30 * value, 6, 5, counts=(5,)))
        history.add(30 * value)
    assert not any(history.is_spike(30 * value, 6, 5) for value in draws[40:44])
    assert shifted[:2] == [False, False] and all(shifted[4:])


def test_a_wide_spread_takes_more_values_to_show_a_shift_and_shows_none_without_one() -> None:
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(400, generator=generator).mul(1.2).exp().tolist()
    healthy, shifted = History(100, shortest=20), []
    for value in draws:
        assert not healthy.has_shifted(value, 6, 5, counts=(5, 9, 13))
        healthy.add(value)
    history = History(100, shortest=20)
    for value in draws[:40]:
        history.add(value)
    for value in draws[40:60]:
        shifted.append((history.has_shifted(30 * value, 6, 5, (5,)), history.has_shifted(30 * value, 6, 5, (5, 9, 13))))
        history.add(30 * value)
    assert sum(both for _, both in shifted) >= 8 > sum(few for few, _ in shifted)


def test_a_frozen_copy_that_follows_its_trained_twin_is_no_error_and_any_other_move_is() -> None:
    torch.manual_seed(0)
    student, teacher = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False).requires_grad_(False)

    def moved(change: Any, name: str = "teacher.0.weight") -> str:
        samples = FrozenSamples([(name, teacher.weight)], [("student.0.weight", student.weight)])
        with torch.no_grad():
            change(teacher.weight)
        changed = samples.changed()
        assert changed is not None
        return samples.findings(changed.tolist())[0].level

    assert moved(lambda w: w.lerp_(student.weight, 0.1)) == "info"
    assert moved(lambda w: w.mul_(1.01)) == "error"
    assert moved(lambda w: w.lerp_(student.weight, 0.1), "teacher.1.weight") == "error"
