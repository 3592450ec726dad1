"""A stalled rank's report: what it waits for, the stacks of all its threads, and torch's flight recorder."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

LIBRARIES = (f"{os.sep}torch{os.sep}", f"{os.sep}lightning{os.sep}", f"{os.sep}threading.py", f"{os.sep}queue.py")
"""Path parts of frames that are left out of a thread's location."""


def write_report(
    folder: Path | None, rank: int, world_size: int, stalled_s: float, lines: Sequence[str]
) -> Path | None:
    """Append this rank's report to its file in the folder, which is created. Returns: the file.

    Returns None where the report went to stderr, because there is no folder or it cannot be written.
    """
    head = [
        f"rank {rank} of {world_size} on {socket.gethostname()}, process {os.getpid()}, {time.strftime('%F %T')}",
        f"no step has finished for {stalled_s:.1f} s",
        *lines,
        "its threads, the innermost call first:",
    ]
    if folder is not None:
        path = folder / f"rank{rank}.txt"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                _write(file, head)
            recording = flight_recording()
            if recording:
                path.with_suffix(".flight_recorder.json").write_bytes(recording)
            return path
    _write(sys.__stderr__, head)
    return None


def innermost_frame(thread: threading.Thread) -> str:
    """Return a thread's innermost call outside of torch and Lightning: `file.py:12 function`."""
    top = sys._current_frames().get(thread.ident or 0)
    if top is None:
        return "no Python code"
    frames = traceback.extract_stack(top)
    outside = [frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)] or frames
    return f"{Path(outside[-1].filename).name}:{outside[-1].lineno} {outside[-1].name}"


def flight_recording() -> bytes:
    """Return torch's record of the last collectives as JSON; empty for a backend without one, such as Gloo."""
    c10d: Any = dist.distributed_c10d._c10d if hasattr(dist.distributed_c10d, "_c10d") else None
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None or dist.get_backend() != "nccl":
        return b""
    recorded = dump()
    return recorded if isinstance(recorded, bytes) else str(recorded).encode()


def _write(file: IO[str] | None, head: Sequence[str]) -> None:
    if file is None:
        return
    file.write("\n".join(head) + "\n")
    file.flush()
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        faulthandler.dump_traceback(file.fileno(), all_threads=True)
