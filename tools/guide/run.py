"""Run `lightning fit` in a forked process, which shares the imports, and keep its terminal output."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.forked_child import import_once

CONFIGS = Path(__file__).parents[2] / "configs"


@dataclass(frozen=True)
class Run:
    """A finished run."""

    root: Path
    exit_code: int
    output: str
    """Terminal output without progress bars."""

    def line(self, pattern: str) -> str | None:
        """First line that the pattern matches, without the prefix of a warning."""
        for line in self.output.splitlines():
            if re.search(pattern, line):
                return re.sub(r"^(training: .*\]|.*?\.py:\d+: (\w+Warning: )?)(?=\w)", "", line).strip()
        return None

    @property
    def figures(self) -> str | None:
        """FineTuneCheck's summary; None if the run did not finish."""
        path = self.root / "fine_tune.json"
        return str(json.loads(path.read_text())["summary"]) if path.is_file() else None

    def summary(self) -> dict[str, Any]:
        path = self.root / "summary.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}


def command(pitfall: str | None, arguments: Mapping[str, str], root: Path, flags: tuple[str, ...] = ()) -> list[str]:
    """Arguments of `lightning` for the demo with a pitfall's overlay; without one, a healthy run."""
    configs = [CONFIGS / "sd_lora_demo.yaml", CONFIGS / "guide" / "common.yaml"]
    if pitfall is not None:
        configs.append(CONFIGS / "guide" / f"{pitfall}.yaml")
    given = [part for config in configs for part in ("-c", str(config))]
    settings = {"trainer.default_root_dir": str(root), **arguments}
    return ["fit", *given, *(part for key, value in settings.items() for part in (f"--{key}", value)), *flags]


def run(arguments: list[str], root: Path) -> Run:
    """Run the command line and wait for it."""
    import_once()
    root.mkdir(parents=True, exist_ok=True)
    for name in ("fine_tune.json", "summary.json", "health.jsonl"):  # left over from an earlier run
        (root / name).unlink(missing_ok=True)
    for picture in root.glob("samples/*.png"):
        picture.unlink()
    log = root / "terminal.log"
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            code = _call(arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.split("\r")[-1] for line in text.splitlines()]
    return Run(root, os.waitstatus_to_exitcode(status), "\n".join(line.rstrip() for line in lines))


def _call(arguments: list[str]) -> int:
    import logging
    import warnings

    from lightning_aigc.cli import main

    # Undo pytest's inherited streams and filters, which a terminal does not have.
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    importlib.reload(warnings)  # pytest records warnings instead of showing them
    warnings.resetwarnings()
    warnings.simplefilter("default")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)
    try:
        main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
