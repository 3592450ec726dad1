"""`lightning doctor` in a process of its own, and packages that it finds installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_doctor(*arguments: str, path: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with `path` in front of what it can import."""
    whole = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    whole |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), *sys.path])}
    command = [sys.executable, "-m", "lightning_aigc", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=whole | environ, timeout=300)


def fake_package(folder: Path, name: str, version: str, code: str, entry_points: str = "") -> None:
    """An installed distribution whose import runs this code."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
