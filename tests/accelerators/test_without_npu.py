"""On a machine without an NPU: Lightning is as it was, and who asks for one is told what is missing."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_aigc.accelerators import NPUAccelerator, torch_npu_import
from lightning_aigc.errors import ConfigError

PATCHED = (
    (accelerator_connector, "_select_auto_accelerator"),
    (_AcceleratorConnector, "_choose_strategy"),
    (_AcceleratorConnector, "_check_and_init_precision"),
)


@pytest.fixture
def install_broken_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a torch_npu on the path whose import ends in this statement."""
    monkeypatch.setattr(torch_npu_import, "_import_error", None)
    monkeypatch.syspath_prepend(tmp_path)

    def install(statement: str) -> None:
        (tmp_path / "torch_npu").mkdir()
        (tmp_path / "torch_npu" / "__init__.py").write_text(statement)
        information = tmp_path / "torch_npu-2.13.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")

    return install


def test_npu_is_a_name_that_lightning_knows() -> None:
    assert AcceleratorRegistry["npu"]["accelerator"] is NPUAccelerator
    assert not NPUAccelerator.is_available()


def test_asking_for_an_npu_names_what_is_missing_and_three_commands() -> None:
    with pytest.raises(ConfigError) as raised:
        Trainer(accelerator="npu", devices=1)
    first, *commands = str(raised.value).splitlines()
    assert "got no torch_npu: it is not installed" in first
    assert commands[0].split()[:3] == ["pip", "install", f"'torch_npu=={torch.__version__.split('+')[0]}.*'"]
    assert commands[1].split()[:2] == ["source", "/usr/local/Ascend/ascend-toolkit/set_env.sh"]
    assert commands[2].split()[:2] == ["npu-smi", "info"]


@pytest.mark.parametrize(
    ("statement", "got"),
    [
        (
            "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')",
            "got torch_npu 2.13.0 without CANN: its library libhccl.so is not found",
        ),
        (
            "raise RuntimeError('Two accelerators cannot be used at the same time')",
            "got torch_npu 2.13.0, whose import failed with RuntimeError: Two accelerators cannot be used",
        ),
    ],
)
def test_a_torch_npu_that_cannot_be_imported_is_quoted(statement: str, got: str, install_broken_torch_npu: Any) -> None:
    install_broken_torch_npu(statement)
    assert not NPUAccelerator.is_available()
    with pytest.raises(ConfigError, match=got):
        Trainer(accelerator="npu", devices=1)
    assert "torch_npu" not in sys.modules


def test_auto_says_that_a_broken_torch_npu_stays_unused(install_broken_torch_npu: Any) -> None:
    install_broken_torch_npu("raise ImportError('libascendcl.so: cannot open shared object file')")
    with pytest.warns(UserWarning, match=r"no NPU is used: got torch_npu 2\.13\.0 without CANN.* libascendcl\.so"):
        assert accelerator_connector._select_auto_accelerator() == "cpu"


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"accelerator": "auto", "devices": 2},
    {"accelerator": "cpu", "precision": "bf16-mixed"},
    {"accelerator": "cpu", "precision": "16-mixed"},
    {"accelerator": "cpu", "precision": "bf16-true"},
    {"accelerator": "cpu", "devices": 2, "strategy": "ddp_spawn"},
    {"accelerator": "cpu", "num_nodes": 2},
    {"accelerator": "npu"},
    {"accelerator": "gpu"},
    {"accelerator": "mps"},
    {"accelerator": "nonsense"},
]


def outcome(arguments: dict[str, Any]) -> list[str]:
    """Result of the connector for Trainer arguments: its parts with all they hold, or its error; and its warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            made = _AcceleratorConnector(**arguments)
        except Exception as error:
            return [repr(error), *(str(w.message) for w in said)]
    parts = (made.accelerator, made.strategy, made.precision_plugin)
    held = [
        f"{type(p).__name__} {sorted((k, type(v).__name__, str(v)[:20]) for k, v in vars(p).items())}" for p in parts
    ]
    return [*held, str(made._parallel_devices), *(str(w.message) for w in said)]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_without_an_npu_lightning_does_what_it_did(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    patched = outcome(arguments)
    for owner, name in PATCHED:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    assert outcome(arguments) == patched


def test_an_instance_keeps_its_own_error_where_there_is_no_npu() -> None:
    with pytest.raises(ConfigError, match="needs torch_npu, CANN and an Ascend NPU"):
        Trainer(accelerator=NPUAccelerator(), strategy=SingleDeviceStrategy("cpu"))
