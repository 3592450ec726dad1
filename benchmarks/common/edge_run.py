"""Run configs/controlnet_demo.yaml with other settings in a separate process."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks import ROOT


def run_demo(
    overrides: Mapping[str, Any], callbacks: Mapping[str, Mapping[str, Any] | None], what: str
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Run the demo. Returns: its summary, and the rows of its CSVLogger if `overrides` asks for one.

    Args:
        overrides: Command-line arguments by name, such as `--trainer.devices`.
        callbacks: New arguments of the demo's callbacks by class; None removes a callback.
        what: The run's name in an error.

    Raises: SystemExit with the end of the run's output, if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = yaml.safe_load((ROOT / "configs" / "controlnet_demo.yaml").read_text(encoding="utf-8"))
        kept = {entry["class_path"]: entry for entry in config["trainer"]["callbacks"]}
        for name, arguments in callbacks.items():
            if arguments is None:
                del kept[name]
            else:
                kept[name]["init_args"].update(arguments)
        config["trainer"]["callbacks"] = list(kept.values())
        file = Path(folder) / "demo.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "benchmarks.common.edge_run", "fit", "-c", str(file)]
        given = {"--trainer.default_root_dir": folder, "--trainer.enable_progress_bar": "false"} | dict(overrides)
        command += [f"{name}={value}" for name, value in given.items()]
        paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
        if done.returncode:
            raise SystemExit(f"{what}: exit {done.returncode}: {done.stderr[-3000:]}")
        summary = json.loads((Path(folder) / "summary.json").read_text())
        logged = sorted(Path(folder).rglob("metrics.csv"))
        rows = list(csv.DictReader(logged[-1].open(encoding="utf-8"))) if logged else []
    return summary, rows


def main() -> None:
    from lightning_aigc.cli import main as run

    run()


if __name__ == "__main__":
    main()
