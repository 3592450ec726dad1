"""The list of checks: what adding one takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.models.denoisers import Denoiser, fit
from lightning_aigc.callbacks.health import GradientHealthMonitor, diagnostics
from lightning_aigc.callbacks.health.alerts.alerts import Alert, Finding, Policy
from lightning_aigc.callbacks.health.checks import CHECK_NAMES, OTHER_CHECKS, STEP_CHECKS
from lightning_aigc.callbacks.health.checks.gradients import GradientCheck, check_gradients
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.diagnostics import Diagnostics
from lightning_aigc.callbacks.health.parameter_stats import ParameterStats
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.step_reading import BatchedReadback, StepReading
from lightning_aigc.callbacks.health.thresholds import HealthThresholds

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class CountingCheck(Check):
    """Finds something at each step from the third on, and counts steps across a resume."""

    policies: ClassVar = {"counted": Policy()}
    state_key: ClassVar = "counting"

    def __init__(self) -> None:
        self.count = 0

    def request(self, readback: BatchedReadback, *, is_due: bool) -> None:
        readback.add("two", torch.tensor([1.0, 1.0]))

    def run(self, reading: StepReading) -> Findings | None:
        self.count += 1
        found = [Finding("counted", "all", "warning", f"{self.count}", "cause", "remedy")] if self.count > 2 else []
        return Findings(found, self.policies) if len(reading.numbers["two"]) == 2 else None

    def state(self) -> Any:
        return self.count

    def load(self, state: Any) -> None:
        self.count = state


def test_a_check_is_one_class_and_one_line_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "STEP_CHECKS", (*STEP_CHECKS, CountingCheck))
    monitor = GradientHealthMonitor()
    fit(Denoiser("lora"), [monitor], steps=5, default_root_dir=str(tmp_path))
    assert [(a.step, a.check, a.message) for a in monitor.alerts] == [(3, "counted", "3")]
    other = GradientHealthMonitor()
    other.load_state_dict(monitor.state_dict())
    assert other._diagnostics.check_of(CountingCheck).count == 5


def test_no_two_checks_share_a_name_or_a_key_and_the_documentation_has_a_row_for_each() -> None:
    names = [name for check in STEP_CHECKS for name in check.policies] + list(OTHER_CHECKS)
    assert len(names) == len(set(names)) and set(names) == set(CHECK_NAMES)
    keys = [check.state_key for check in STEP_CHECKS if check.state_key]
    assert len(keys) == len(set(keys))
    page = (Path(__file__).parents[3] / "docs" / "health.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page.split("## Checks")[1].split("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == sorted([*CHECK_NAMES, "check"])  # the head of the table


def stats_of(gradients: dict[str, float], weights: dict[str, float]) -> ParameterStats:
    """Statistics of matrices with these norms."""
    count = len(gradients)
    return ParameterStats(
        tuple(gradients), tuple(gradients.values()), tuple(weights.get(name, 1.0) for name in gradients),
        (False,) * count, (False,) * count, (0.0,) * count, (4096,) * count, (4,) * count,
    )  # fmt: skip


def test_a_controlnets_zero_convolutions_excuse_what_is_behind_them_until_they_have_moved() -> None:
    hint, zero = "net.controlnet_cond_embedding.blocks.0.weight", "net.controlnet_mid_block.weight"
    entry, copy = "net.controlnet_cond_embedding.conv_out.weight", "net.down_blocks.0.resnets.0.conv1.weight"
    gradients = {copy: 0.0, hint: 0.0, entry: 0.0, zero: 1e-2}

    def found(weights: dict[str, float]) -> set[str]:
        limits: Any = HealthThresholds()
        findings = check_gradients(stats_of(gradients, weights), limits, FakeRemedies())  # type: ignore[arg-type]
        return {finding.layer for finding in findings if finding.level != "info"}

    assert found({zero: 0.0, entry: 0.0}) == set()
    assert found({zero: 4.0, entry: 0.0}) == {copy, entry}  # the hint embedding still waits for its own
    assert found({zero: 4.0, entry: 4.0}) == {copy, hint, entry}


def perceptron(held: str = "", bias: float = 0.0, *, act: type[nn.Module] = nn.ReLU) -> Any:
    """Layers of which the optimizer holds those whose names begin with `held`."""

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(8, 16), act(), nn.Linear(16, 16), act(), nn.Linear(16, 8))
            nn.init.constant_(self.net[2].bias, bias)  # type: ignore[arg-type]
            self.dies_at = -1

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == self.dies_at:
                with torch.no_grad():
                    self.net[2].bias.fill_(-1000)  # type: ignore[union-attr, operator]
            x_NC = torch.randn(16, 8, generator=torch.Generator().manual_seed(batch_idx))
            loss: Tensor = (self.net(x_NC) - x_NC.roll(1, 1)).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for n, p in self.named_parameters() if n.startswith(held)], 1e-2)

    return Training()


def alerts_of(module: Any, tmp_path: Path, *callbacks: Callback, steps: int = 30) -> list[Alert]:
    monitor = GradientHealthMonitor(every_n_steps=2, page=False)
    trainer = Trainer(
        accelerator="cpu", logger=False, max_steps=steps, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[*callbacks, monitor],
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.zeros(steps, 1)))
    return monitor.alerts


def test_a_parameter_that_no_optimizer_holds_gets_one_diagnosis(tmp_path: Path) -> None:
    found = alerts_of(perceptron(held="net.0"), tmp_path, steps=60)
    others = {f"net.{i}.{kind}" for i in (2, 4) for kind in ("weight", "bias")}
    assert {(a.layer, a.check) for a in found if a.layer in others} == {(name, "not_in_optimizer") for name in others}


@pytest.mark.parametrize(("act", "bias"), [(nn.ReLU, -1000.0), (nn.Sigmoid, 1e5)])
def test_no_rate_is_the_remedy_of_gradients_that_were_zero_from_the_first_look(
    act: type[nn.Module], bias: float, tmp_path: Path
) -> None:
    found = [a for a in alerts_of(perceptron(bias=bias, act=act), tmp_path) if a.check == "no_gradient"]
    assert {a.layer for a in found} >= {"net.0.weight", "net.2.weight"}
    assert all("other initial values (bias, scale)" in a.remedy and "learning_rate" not in a.remedy for a in found)


def test_units_that_die_in_training_want_a_lower_rate_from_an_earlier_snapshot(tmp_path: Path) -> None:
    module = perceptron()
    module.dies_at = 12
    found = [a for a in alerts_of(module, tmp_path) if a.check == "no_gradient" and a.layer == "net.2.weight"]
    assert found
    assert all(a.remedy.startswith("learning_rate: 0.005, from a snapshot of when it had") for a in found)


class Frozen(Callback):
    """Freezes a layer up to a step, or from it on, and moves another that stays frozen."""

    def __init__(self, step: int, *, is_first: bool, moves: bool = False) -> None:
        self.step, self.is_first, self.moves = step, is_first, moves

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        pl_module.net[2].requires_grad_(not self.is_first)
        pl_module.net[0].requires_grad_(not self.moves)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == self.step:
            pl_module.net[2].requires_grad_(self.is_first)
        if batch_idx == self.step + 5 and self.moves:
            pl_module.net[0].weight.data.mul_(1.5)


@pytest.mark.parametrize("is_first", [True, False])
def test_weights_that_are_frozen_for_a_part_of_the_run_are_healthy(is_first: bool, tmp_path: Path) -> None:
    assert not [a for a in alerts_of(perceptron(), tmp_path, Frozen(11, is_first=is_first)) if a.level != "info"]


def test_weights_that_stay_frozen_are_judged_beside_some_that_do_not(tmp_path: Path) -> None:
    found = [a for a in alerts_of(perceptron(), tmp_path, Frozen(11, is_first=True, moves=True)) if a.level != "info"]
    assert [(a.step, a.check, a.layer) for a in found] == [(18, "frozen_moved", "net.0.weight")]


def test_weights_that_were_unfrozen_and_have_no_gradient_are_found(tmp_path: Path) -> None:
    module = perceptron()
    module.spare = nn.Linear(64, 64).requires_grad_(False)

    class Unfrozen(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 11:
                module.spare.requires_grad_(True)

    found = [a for a in alerts_of(module, tmp_path, Unfrozen()) if a.level != "info"]
    assert {(a.since, a.step, a.check, a.layer) for a in found} >= {(12, 14, "no_gradient", "spare.weight")}


class Alternating(LightningModule):
    """Two networks that one optimizer trains in turns, each frozen in the other's step, as GANs are written by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        own = batch_idx % 2
        self.first.requires_grad_(not own)
        self.second.requires_grad_(bool(own))
        optimizers[own].zero_grad()
        x_NC = torch.randn(16, 8, generator=torch.Generator().manual_seed(batch_idx))
        self.manual_backward((self.second(self.first(x_NC)) - x_NC).square().mean())
        optimizers[own].step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), 1e-3) for net in (self.first, self.second)]


def test_networks_that_are_frozen_in_turns_are_healthy(tmp_path: Path) -> None:
    assert not [a for a in alerts_of(Alternating(), tmp_path) if a.level != "info"]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_gradient_that_is_missing_only_at_the_looks_is_no_fault(tmp_path: Path) -> None:
    module = perceptron()
    training_step = module.training_step
    module.training_step = lambda batch, batch_idx: None if batch_idx % 2 else training_step(batch, batch_idx)
    assert not [a for a in alerts_of(module, tmp_path) if a.check == "no_gradient"]


def test_no_remedy_raises_the_rate_while_a_warning_says_that_it_is_too_high(tmp_path: Path) -> None:
    class Overshoots(CountingCheck):
        """Says so of another layer, at the first ten steps."""

        policies: ClassVar = {"update_ratio": Policy()}

        def run(self, reading: StepReading) -> Findings | None:
            far = [Finding("update_ratio", "net.4", "warning", "far", "the rate", "a lower one")] * (reading.step < 10)
            return Findings(far, self.policies)

    diagnosed, module = Diagnostics(HealthThresholds()), perceptron()
    diagnosed.attach(module, [module.configure_optimizers()])
    diagnosed.checks = [Overshoots(), GradientCheck()]
    remedies = Remedies(rate=1e-2)
    said: dict[int, list[Alert]] = {}
    for step in range(1, 40):
        stats = stats_of({"net.0.weight": 1e-9 if step > 2 else 1.0, "net.4": 1.0}, {})
        reading = diagnosed._reading(step, diagnosed.history(0), {}, remedies, is_due=True)
        reading.stats = stats
        said[step] = [a for a in diagnosed._run(diagnosed.checks, reading) if a.check == "vanishing"]
    (first,) = said.pop(3)
    assert (first.level, first.remedy) == ("info", "that of update_ratio of net.4")
    (later,) = [alert for alerts in said.values() for alert in alerts if alert.level != "info"]
    assert later.step > 10 and later.remedy == "learning_rate: 0.02"
    assert "too high, not too low" in remedies.besides("update_ratio of net.4").learning_rate(10)
    assert remedies.besides("update_ratio of net.4").learning_rate(0.5) == "learning_rate: 0.005"


def test_a_layer_that_vanishes_beside_one_that_explodes_wants_no_higher_rate() -> None:
    found = check_gradients(stats_of({"a": 1e-9, "b": 1e5}, {}), HealthThresholds(), Remedies(rate=1e-2))
    assert [(f.check, f.level) for f in found] == [("vanishing", "info"), ("exploding", "warning")]
    assert found[0].remedy == "that of exploding of b"


class FakeRemedies:
    """Answers anything with a line."""

    precision, clip = "32-true", None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: "a line"
