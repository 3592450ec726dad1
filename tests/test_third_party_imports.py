"""Imports of other packages: torchvision with a torch without CUDA, torchmetrics without its metrics."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fakes.processes.programs import WITHOUT_COLLECTIONS


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_COLLECTIONS + code], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "first",
    [
        "lightning_aigc, torchvision",
        pytest.param("lightning_aigc, torch", marks=pytest.mark.long),
        pytest.param("torch, lightning_aigc", marks=pytest.mark.long),
    ],
)
def test_torchvision_works_in_every_order_of_imports(first: str) -> None:
    done = run(f"import {first}\nfrom torchvision.transforms.functional import resize")
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_the_package_leaves_torch_alone() -> None:
    done = run("import sys, lightning_aigc, lightning_aigc.cli\nprint('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr[-2000:]


WITHOUT_METRICS = """
import sys
from lightning_aigc._third_party_imports import delay_torchmetrics
delay_torchmetrics()
import lightning.pytorch as pl
from torchmetrics import Metric, MetricCollection, __version__
heavy = ("torchmetrics.functional", "scipy.signal", "torchvision")
assert not [name for name in heavy if name in sys.modules]
"""


def test_lightning_starts_without_the_metrics_and_each_is_there_when_asked_for() -> None:
    done = run(
        WITHOUT_METRICS
        + """
import torch, torchmetrics, torchmetrics.classification
import torchmetrics.functional as functional
accuracy = torchmetrics.Accuracy("binary")
assert isinstance(accuracy, Metric) and torchmetrics.Metric is Metric is torchmetrics.metric.Metric
assert torchmetrics.MetricCollection is MetricCollection
assert float(accuracy(torch.tensor([1, 0]), torch.tensor([1, 1]))) == 0.5
assert float(functional.mean_squared_error(torch.zeros(2), torch.ones(2))) == 1
"""
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_torchmetrics_that_needs_its_metrics_is_imported_as_a_whole() -> None:
    done = run(
        """
import sys
sys.modules["torchmetrics.collections"] = None  # an import of it fails
from lightning_aigc._third_party_imports import delay_torchmetrics
delay_torchmetrics()
assert not [name for name in sys.modules if name.startswith("torchmetrics")]
import lightning.pytorch, torchmetrics
assert torchmetrics.functional and torchmetrics.Accuracy
"""
    )
    assert done.returncode == 0, done.stderr[-2000:]
