"""The list of checks: what adding one takes."""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fakes.denoisers import Denoiser, fit
from lightning_aigc.callbacks.health import GradientHealthMonitor, diagnostics
from lightning_aigc.callbacks.health.alerts import Finding, Policy
from lightning_aigc.callbacks.health.batched_readback import BatchedReadback
from lightning_aigc.callbacks.health.checks import CHECK_NAMES, OTHER_CHECKS, STEP_CHECKS
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.step_reading import StepReading

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
