"""The plugin from YAML, by its short name and by its path, through our command."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_aigc.cli import main


def fit_from_yaml(
    folder: Path, plugin: Any, monkeypatch: pytest.MonkeyPatch, more: Sequence[str] = (), **trainer: Any
) -> int:
    config = {
        "trainer": {
            "plugins": plugin,
            "max_steps": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "default_root_dir": str(folder / "run"),
        }
        | trainer,
        "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
        "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config).replace("'off'", "off"))
    monkeypatch.setattr(sys, "argv", ["lightning"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with warnings.catch_warnings(action="ignore"), pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(path), *more])
    return int(stop.value.code)


@pytest.mark.parametrize("class_path", ["FusedBackwardPrecision", "lightning_aigc.precision.FusedBackwardPrecision"])
@pytest.mark.parametrize("as_list", [True, False])
def test_a_config_names_the_plugin(
    class_path: str, as_list: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `memory: off` without quotes, which YAML 1.1 reads as false.
    plugin = {"class_path": class_path, "init_args": {"precision": "bf16-mixed", "memory": "off", "protect": ["layer"]}}
    assert fit_from_yaml(tmp_path, [plugin] if as_list else plugin, monkeypatch) == 0
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["plugins"]
    saved = saved[0] if as_list else saved
    assert saved["class_path"] == "lightning_aigc.precision.FusedBackwardPrecision"
    assert saved["init_args"]["protect"] == ["layer"]


@pytest.mark.parametrize("memory", [{"kept": 0.18}, {"peak_gb": 6}, "fit"], ids=str)
def test_a_budget_in_place_of_a_level_is_saved_with_the_run(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = {"class_path": "FusedBackwardPrecision", "init_args": {"precision": "bf16-mixed", "memory": memory}}
    assert fit_from_yaml(tmp_path, plugin, monkeypatch) == 0
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["plugins"]
    assert saved["init_args"]["memory"] == memory


def test_a_budget_is_given_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = {"class_path": "FusedBackwardPrecision", "init_args": {"precision": "bf16-mixed", "memory": "lean"}}
    more = ["--trainer.plugins.init_args.memory", "{kept: 0.3}"]
    assert fit_from_yaml(tmp_path, plugin, monkeypatch, more) == 0
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["plugins"]
    assert saved["init_args"]["memory"] == {"kept": 0.3}


@pytest.mark.parametrize(
    ("init_args", "words"),
    [
        ({"precision": "bf16"}, ["precision", "bf16"]),
        ({"memory": "leen"}, ["memory", "leen", "did you mean lean"]),
        ({"memory": {"kept": 1.8}}, ["memory.kept is a share", "at most 1, got 1.8"]),
        ({"memory": {"kep": 0.2}}, ["{kept: 0.18} or {peak_gb: 6}", "kep"]),
        ({"memry": "lean"}, ["memry", "did you mean memory"]),
        ({"input_grad_density": 2.0}, ["input_grad_density must be in (0, 1], got 2.0"]),
    ],
    ids=str,
)
def test_a_wrong_value_in_yaml_is_one_line(
    init_args: dict[str, Any],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plugin = {"class_path": "FusedBackwardPrecision", "init_args": init_args}
    assert fit_from_yaml(tmp_path, [plugin], monkeypatch) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert all(word in errors[0] for word in words), errors[0]


def test_a_misspelt_class_is_answered_with_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit_from_yaml(tmp_path, [{"class_path": "FusedBackwardPrecison"}], monkeypatch) == 2
    assert "did you mean FusedBackwardPrecision?" in capsys.readouterr().err


def test_a_precision_beside_the_plugin_is_answered_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = {"class_path": "FusedBackwardPrecision", "init_args": {"memory": "off"}}
    assert fit_from_yaml(tmp_path, [plugin], monkeypatch, precision="bf16-mixed") == 1
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    assert "trainer.precision: bf16-mixed and the plugin FusedBackwardPrecision both set the precision" in error
