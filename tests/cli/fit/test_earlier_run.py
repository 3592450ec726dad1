"""A training in the folder of an earlier one: refused in a sentence whose remedies can be typed."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_aigc.cli import DEMO_CONFIG, _demo_as_fit

Command = Callable[..., Any]


@pytest.mark.filterwarnings("ignore")
def test_a_second_training_in_a_folder_is_refused_and_each_remedy_works(
    command: Command, quick_config: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    quick_config["trainer"]["default_root_dir"] = str(run)
    config = tmp_path / "my.yaml"
    config.write_text(yaml.safe_dump(quick_config))
    assert command("fit", "-c", config).code == 0
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    said = command("fit", "-c", config)
    assert said.code == 1 and len(said.errors) == 1
    assert "results of an earlier run, report.html, " in said.errors[0]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    remedies = re.search(r"add (--resume) to .*, (--overwrite) to .*, or (--trainer\S+ \S+) to", said.errors[0])
    assert remedies is not None
    for remedy in remedies.groups():
        again = command("fit", "-c", config, *shlex.split(remedy), "--trainer.callbacks=null")
        assert again.code == 0, again.err
    assert (tmp_path / "run_2" / "config.yaml").is_file()
    assert yaml.safe_load((run / "config.yaml").read_text())["overwrite"] is False
    assert command("fit", "-c", config, "--dry_run").code == 0
    for snapshots in run.glob("snapshots*"):
        shutil.rmtree(snapshots)
    for more in ([], ["--resume"]):  # which would begin anew, over the result
        said = command("fit", "-c", config, *more)
        assert said.code == 1 and "no snapshot to resume from; add --overwrite to replace it, or" in said.errors[0]
    both = command("fit", "-c", config, "--resume", "--overwrite")
    assert both.code == 1 and "give only one" in both.errors[0]


def test_the_page_of_a_run_without_results_is_no_result(
    command: Command, quick_config: dict[str, Any], tmp_path: Path
) -> None:
    quick_config["trainer"] |= {"default_root_dir": str(tmp_path / "run"), "callbacks": []}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(quick_config))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").write_text("killed before its first snapshot")
    assert command("fit", "-c", tmp_path / "my.yaml").code == 0


def test_the_demo_runs_twice() -> None:
    assert _demo_as_fit(["demo", "--x"]) == ["fit", "-c", str(DEMO_CONFIG), "--overwrite", "--x"]
    for alone in ("--resume", "--print_config"):  # a printed config is to be edited, and then replaces nothing
        assert "--overwrite" not in _demo_as_fit(["demo", alone])
