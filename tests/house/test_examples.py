"""The examples in public docstrings run, and every public class has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
from pathlib import Path

import pytest

from house.test_public_api import NAMES

PUBLIC = [(module, name) for module, names in NAMES.items() for name in names]
CLASSES = [(module, name) for module, name in PUBLIC if inspect.isclass(getattr(importlib.import_module(module), name))]
ALIASES = {"StableDiffusionLoRA", "StableDiffusionFineTuning", "ControlNetTraining"}
NOT_CONSTRUCTED = {
    "Alert", "AttentionStream", "BaseQuantization", "ControlNet", "DataReport", "DiffusionTraining", "Encoder",
    "FallbackWarning", "FullFineTuning", "Kind", "KnownAttention", "LoRA", "LoRAProjection", "NPUAccelerator",
    "NormParameters", "PackedBase", "PackedWeight", "RunRecord", "Snapshot", "SnapshotCheckpointIO", "SnapshotWriter",
    "SyncError",
}  # fmt: skip
"""Results, errors, types and parameter containers, and classes that Lightning or the public classes construct."""


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_a_public_class_has_an_example(module: str, name: str) -> None:
    found = getattr(importlib.import_module(module), name)
    assert name in ALIASES | NOT_CONSTRUCTED or ">>>" in (found.__doc__ or ""), f"{module}.{name} has no example"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_an_example_runs(module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    found = getattr(importlib.import_module(module), name)
    home = importlib.import_module(found.__module__) if hasattr(found, "__module__") else None
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(recurse=False).find(found, name, globs=dict(vars(home)) if home else {}):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
