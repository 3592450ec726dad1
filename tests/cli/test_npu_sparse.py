"""`npu_sparse` from a YAML file and from the command line, and two ranks that the command starts itself."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.processes.commands import run_modules
from fakes.processes.ranks import run_ranks

Command = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loggers and folders
BY_CLASS: dict[str, Any] = {
    "class_path": "NPUSparseStrategy",
    "init_args": {"mode": "sparse", "sparsity": 0.5, "bucket_mb": 1.0},
}


def write(config: dict[str, Any], folder: Path, strategy: Any, devices: int) -> Path:
    config["trainer"] |= {"strategy": strategy, "devices": devices, "accelerator": "cpu"}
    config["trainer"]["default_root_dir"] = str(folder / "run")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def fit(rank: int, path: str) -> tuple[int, str]:
    """The command in a process of its own, because it leaves a process group behind: its code, and what it said."""
    from lightning_aigc.cli import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["lightning"]
        try:
            main(["fit", "-c", path])
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 99, said.getvalue()
    return 0, said.getvalue()


@pytest.mark.parametrize("strategy", ["npu_sparse", BY_CLASS], ids=["by name", "by class"])
def test_fit_takes_the_strategy_by_name_and_by_class(
    strategy: Any, quick_config: dict[str, Any], tmp_path: Path
) -> None:
    ((code, said),) = run_ranks(fit, 1, tmp_path, str(write(quick_config, tmp_path, strategy, 1)), gloo=False)
    assert code == 0, said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["strategy"]
    if strategy == "npu_sparse":
        assert saved == strategy
    else:
        assert saved["class_path"].endswith("NPUSparseStrategy")
        assert saved["init_args"].items() >= BY_CLASS["init_args"].items()


@pytest.mark.parametrize(
    ("init_args", "words"),
    [
        ({"sparsity": 1.0}, "sparsity must be in [0, 1), got 1.0: 0.75 sends a quarter of the gradient a step"),
        ({"mode": "int5"}, "trainer.strategy.init_args.mode: wanted one of ['auto', 'dense', 'bf16', 'int8', 'int4'"),
        ({"sparsty": 0.5}, "NPUSparseStrategy has no key 'sparsty'; did you mean sparsity?"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_is_accepted(
    init_args: dict[str, Any], words: str, command: Command, quick_config: dict[str, Any], tmp_path: Path
) -> None:
    said = command("fit", "-c", write(quick_config, tmp_path, BY_CLASS | {"init_args": init_args}, 1))
    assert said.code != 0
    assert len(said.errors) == 1 and words in said.errors[0]


def test_the_command_starts_two_ranks_that_train_together(quick_config: dict[str, Any], tmp_path: Path) -> None:
    path = write(quick_config, tmp_path, BY_CLASS | {"init_args": {"mode": "int3"}}, 2)
    (done,) = run_modules("lightning_aigc", [["fit", "-c", path]], tmp_path, {"HF_HUB_OFFLINE": "1"}, meet=True)
    assert done.code == 0, done.err[-3000:]
    assert "npu_sparse: mode int3, 2 ranks on 1 node(s), flat" in done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
