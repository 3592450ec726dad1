"""StallWatchdog: report where each rank waits when no step finishes any more, before a timeout ends the run.

A collective that one rank never reaches looks the same on all others: they wait. While steps finish, the thread only
looks at a clock, four times in `after_s`. When none finishes, it writes the stacks of this rank's threads and the state
of gradient sync to a file, tells the other ranks through the process group's store, and prints one line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.watch.stall_board import StallBoard

FOLDER = "stalled"
"""Folder of the reports, in the run's folder."""
SHARE_OF_TIMEOUT = 1 / 3
"""Share of the collectives' timeout without a finished step before the report."""
LOOKS = 4
"""Looks of the thread at the clock in `after_s`."""
MOST_REPORTS = 5


class StallWatchdog:
    """Thread that reports a stall: no call of `progress` for `after_s` seconds.

    Args:
        after_s: seconds without progress before the report; None is a third of the timeout, 0 never reports.
        folder: folder of the files `rank0.txt` and so on; None writes to stderr.
        rank, world_size: rank of this process, and the number of ranks.
        timeout: the collectives' timeout, which ends a run that still waits; the line on the console names it.
        describe: returns lines on what gradient sync waits for. It runs in the watchdog's thread.
        say: takes the line for the console.
    Raises: ConfigError for a negative `after_s`.
    """

    def __init__(
        self,
        after_s: float | None,
        folder: Path | None,
        rank: int,
        world_size: int,
        timeout: timedelta,
        describe: Callable[[], Sequence[str]] = list,
        say: Callable[[str], None] | None = None,
    ) -> None:
        after_s = default_after_s(timeout) if after_s is None else after_s
        if after_s < 0:
            raise ConfigError(f"the watchdog's seconds must be above 0, or 0 to turn it off; got {after_s}")
        self.after_s, self.folder, self.rank, self.world_size = after_s, folder, rank, world_size
        self.describe, self.timeout = describe, timeout
        self._say = say or print_line
        self._board: StallBoard | None = None
        self._progress_at, self._steps = time.monotonic(), 0
        self._doing = "the first step"
        self._reports = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread, unless there is only one rank, which waits for nobody."""
        if self.after_s > 0 and self.world_size > 1:
            self._board = StallBoard.open(self.rank, self.world_size, timeout_s=max(1.0, self.after_s / LOOKS))
            self._progress_at = time.monotonic()
            self._thread.start()

    def progress(self, steps: int | None = None, doing: str | None = None) -> None:
        """Note progress of this rank. Args: steps: steps finished so far. doing: the next action, in words."""
        self._progress_at = time.monotonic()
        self._steps = self._steps if steps is None else steps
        self._doing = doing or f"step {self._steps + 1}"

    def close(self) -> None:
        """Stop the thread; a second call does nothing."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _watch(self) -> None:
        look_s = self.after_s / LOOKS
        woke_at, reported = time.monotonic(), None
        while not self._is_closed_after(look_s):
            late_s = time.monotonic() - woke_at - look_s
            woke_at = time.monotonic()
            if late_s > self.after_s / 2:  # the others may have reported this rank meanwhile
                self._progress_at += late_s
                self._say(
                    f"rank {self.rank} stood still for {late_s:.0f} s: its process was stopped, or its machine had no "
                    "time for it"
                )
            progress_at = self._progress_at
            if reported is not None and progress_at != reported:
                self._report_progress()
                reported = None
            is_due = time.monotonic() - progress_at >= self.after_s
            if is_due and reported is None and self._reports < MOST_REPORTS:
                reported = progress_at
                self._reports += 1
                if not self._report(progress_at):
                    reported = None
                woke_at = time.monotonic()

    def _is_closed_after(self, seconds: float) -> bool:
        # A thread that never releases the interpreter's lock blocks this one: then faulthandler, which needs no lock,
        # writes all stacks to stderr.
        with _last_resort(2 * self.after_s):
            return self._closed.wait(seconds)

    def _report(self, progress_at: float) -> bool:
        """Write this rank's report, and print one line for all. Returns: False where a step has finished meanwhile."""
        where = f"{self._doing}, in {innermost_frame(threading.main_thread())}"
        lines = self._lines()
        board = self._board
        if board is not None:
            board.post(where)
        path = write_report(
            self.folder, self.rank, self.world_size, time.monotonic() - progress_at, [f"it is at {where}", *lines]
        )
        said = {} if board is None else board.wait_for_posts(max(1.0, 2 * self.after_s / LOOKS))
        if board is not None and path is not None:
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write("\n".join(["the other ranks:", *board.lines(said), "", ""]))
        if self._progress_at != progress_at:
            if board is not None:
                board.clear()
            return False
        if board is None or min(said, default=self.rank) == self.rank:  # one rank speaks for all that answer
            silent = "" if board is None else board.sentence(said)
            files = "above" if path is None else f"in {path.parent}/rank*.txt"
            self._say(
                f"no step has finished for {time.monotonic() - progress_at:.0f} s: {silent}where each rank waits "
                f"stands {files}; if nothing moves, the run ends with an error at its timeout of {self.timeout}"
            )
        return True

    def _lines(self) -> list[str]:
        try:
            return list(self.describe())
        except Exception as error:  # other threads write the values that it reads
            return [f"what gradient sync waits for could not be read: {error!r}"]

    def _report_progress(self) -> None:
        if self._board is not None:
            self._board.clear()
        if self.rank == 0:
            self._say(f"steps finish again: {self._doing} is next")


def report_folder(run_folder: str) -> Path | None:
    """Return the folder of a run's reports; None for a run without a folder, or with a URL as its folder."""
    return Path(run_folder, FOLDER) if run_folder and "://" not in run_folder else None


def default_after_s(timeout: timedelta) -> float:
    """Return the default seconds without a step before a report."""
    return SHARE_OF_TIMEOUT * timeout.total_seconds()


@contextlib.contextmanager
def _last_resort(after_s: float) -> Iterator[None]:
    stderr = sys.__stderr__
    try:
        faulthandler.dump_traceback_later(after_s, file=stderr.fileno() if stderr is not None else 2)
    except (OSError, ValueError, RuntimeError):  # no stderr to write to
        yield
        return
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def print_line(sentence: str) -> None:
    """Print a line of gradient sync to the console."""
    print(f"npu_sparse: {sentence}", file=sys.stderr, flush=True)


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
