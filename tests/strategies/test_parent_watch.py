"""A rank ends soon after the process of rank 0 that started it, even where no collective tells it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import os, sys, time
from lightning_aigc.strategies.device_process_group import watch_parent
watch_parent(1, last_words_s=0.2)
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""


def test_a_rank_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as said:
        arguments = [sys.executable, "-c", PARENT, CHILD]
        parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=said, text=True)
        assert parent.stdout is not None
        with parent.stdout:
            child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        end = time.monotonic() + 10
        while is_running(child) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_running(child)
    assert "rank 1: the process of rank 0 that started this one has ended" in (tmp_path / "said").read_text()


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
