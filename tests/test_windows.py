"""Parts that use the operating system run with what Windows has: no fcntl, resource, getuid, O_NOFOLLOW, or fork hook.

No Windows is at hand: a fresh Python gets its platform's name, loses the names that it lacks, and gets a `msvcrt` whose
locks are POSIX's. `make check-systems` lets mypy look for all other uses of such names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fakes.processes.programs import WITHOUT_COLLECTIONS

ROOT = Path(__file__).parents[1]

AS_ON_WINDOWS = """
import fcntl, os, signal, sys, types
import lightning_aigc
import psutil, torch.distributed, torchmetrics, yaml  # they ask for the platform while they are imported

flock = fcntl.flock  # like Windows' locks one of an open file, not of a process


def locking(file, mode, count):
    try:
        flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None


sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
sys.modules["fcntl"] = sys.modules["resource"] = None  # an import of one of them fails
MISSING = "getuid O_NOFOLLOW O_CLOEXEC O_DIRECTORY sysconf sched_getaffinity pwrite register_at_fork"
for name in MISSING.split():
    delattr(os, name)
for name in ("SIGUSR1", "SIGKILL", "sigwaitinfo", "pthread_sigmask"):
    delattr(signal, name)
sys.platform = "win32"
"""
PARTS = """
from pathlib import Path

import torch

from lightning_aigc.atomic_file import write_text
from lightning_aigc.checkpoint.coordination import FolderLock, RankLock, is_gone
from lightning_aigc.checkpoint.dataloader.worker import WorkerInit
from lightning_aigc.checkpoint.files.torch_file import read_torch_file, remove_unfinished, write_torch_file
from lightning_aigc.checkpoint.preemption import AT_ONCE
from lightning_aigc.embedded.folders import _temporary_folder

folder = Path(sys.argv[1])
write_text(folder / "a.txt", "zorp")
write_torch_file({"a": torch.ones(2)}, folder / "a.ckpt")
(folder / ".b.ckpt.snapshot.tmp").write_bytes(b"half")
remove_unfinished(folder)
lock, of_rank = FolderLock(folder), RankLock(folder, 1)
print(read_torch_file(folder / "a.ckpt", "cpu")["a"].sum().item(), sorted(path.name for path in folder.iterdir()))
print(is_gone(folder, 2), _temporary_folder().name, AT_ONCE.name)
WorkerInit(None)(0)
of_rank.release(), lock.release()
"""


def run(program: str, *arguments: str) -> str:
    """Standard output of a fresh Python that runs the program as on Windows."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COLLECTIONS + AS_ON_WINDOWS + program, *arguments],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_files_locks_and_workers(tmp_path: Path) -> None:
    first, second = run(PARTS, str(tmp_path)).splitlines()
    assert first == "2.0 ['.lock', '.lock.rank1', 'a.ckpt', 'a.txt']"
    assert second == "True lightning_aigc SIGTERM"


def test_a_folder_is_locked_for_one_process(tmp_path: Path) -> None:
    program = """
from pathlib import Path
from lightning_aigc.checkpoint.coordination import FolderLock, is_gone
from lightning_aigc.errors import SnapshotError
try:
    FolderLock(Path(sys.argv[1]))
    print("locked")
except SnapshotError as error:
    print(is_gone(Path(sys.argv[1]), 0), error)
"""
    holds = """
import subprocess
from pathlib import Path
from lightning_aigc.checkpoint.coordination import FolderLock
lock = FolderLock(Path(sys.argv[1]))
sys.platform = "linux"  # for subprocess
command = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
sys.stdout.write(subprocess.run(command, capture_output=True, text=True).stdout)
"""
    said = run(holds, str(tmp_path), WITHOUT_COLLECTIONS + AS_ON_WINDOWS + program)
    assert said.startswith("False ") and f"{tmp_path} is in use by process " in said
    assert run(program, str(tmp_path)) == "locked\n"


def test_a_terminal_without_a_character_does_not_end_a_command() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    program = "from lightning_aigc.cli import _print_any_character\n_print_any_character()\nprint('\\u2713 done')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, b"? done"), done.stderr
