"""A `lightning fit` that reports its current phase, so that it can be killed in a chosen phase."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_aigc.callbacks import ExactSnapshot, clip_convergence_guard, sample_grid
from lightning_aigc.callbacks.run_report import run_report
from lightning_aigc.checkpoint import SnapshotWriter
from lightning_aigc.diffusion import DiffusionFineTuning, DiffusionLoRA
from lightning_aigc.diffusion.lora import file as lora_file
from lightning_aigc.metrics import CLIPSimilarity

LAST_PHASE_S = 0.5
"""Time that a process stays after its last phase, in which a kill that comes late still finds it."""
ENDING = "ending: "
"""Prefix of a phase after the last step."""
PHASES = ("drawing", "scoring", "sheet", "LoRA", "LoRA file", "report", "mark")
"""Pictures, their scores, a sheet of them, the LoRA's tensors, its file, the report, and the manifest's last word."""
PHASES_OF_WHOLE_MODELS = ("drawing", "scoring", "sheet", "model", "report", "mark")


def tell_phases(path: Path) -> None:
    """From here on this process appends a line to the file whenever a phase begins."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    prefix = [""]

    def tell(owner: Any, name: str, phase: str) -> None:
        stock: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(stock)
        def telling(*arguments: Any, **named: Any) -> Any:
            os.write(file, f"{prefix[0]}{phase}\n".encode())
            result = stock(*arguments, **named)
            time.sleep(LAST_PHASE_S if phase == "mark" else 0)
            return result

        setattr(owner, name, telling)

    for module in (DiffusionLoRA, DiffusionFineTuning):
        tell(module, "sample", "drawing")
    tell(CLIPSimilarity, "scores", "scoring")
    tell(sample_grid, "draw_sheet", "sheet")
    tell(clip_convergence_guard, "draw_sheet", "sheet")
    tell(DiffusionLoRA, "save_lora", "LoRA")
    tell(lora_file, "write_atomically", "LoRA file")
    tell(DiffusionFineTuning, "save_model", "model")
    tell(run_report, "render_run_page", "report")
    tell(SnapshotWriter, "amend", "mark")
    stock = ExactSnapshot.on_train_end

    def on_train_end(self: ExactSnapshot, *arguments: Any) -> None:
        stock(self, *arguments)
        prefix[0] = ENDING

    ExactSnapshot.on_train_end = on_train_end  # type: ignore[method-assign]


def told(path: Path) -> list[str]:
    """The phases that were begun, in their order."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def everything_in(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Each file's and folder's time of change and bytes, by its path."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }
