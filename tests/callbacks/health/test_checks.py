"""The list of checks: what adding one takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fakes.models.denoisers import Denoiser, fit
from lightning_aigc.callbacks.health import GradientHealthMonitor, diagnostics
from lightning_aigc.callbacks.health.alerts.alerts import Finding, Policy
from lightning_aigc.callbacks.health.checks import CHECK_NAMES, OTHER_CHECKS, STEP_CHECKS
from lightning_aigc.callbacks.health.checks.gradients import check_gradients
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.parameter_stats import ParameterStats
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


class FakeRemedies:
    """Answers anything with a line."""

    precision, clip = "32-true", None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: "a line"
