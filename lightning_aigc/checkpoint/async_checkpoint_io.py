"""SnapshotCheckpointIO: Lightning's ordinary checkpoints, written asynchronously and atomically."""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning_aigc._lightning import CheckpointIO
from lightning_aigc.checkpoint.files.staging import lower_priority
from lightning_aigc.checkpoint.files.storage import is_remote, local_path
from lightning_aigc.checkpoint.files.torch_file import (
    read_remote_torch_file,
    read_torch_file,
    remove_unfinished,
    write_torch_file,
)
from lightning_aigc.errors import SnapshotError
from lightning_aigc.host_state import HostCopy

ROOM = 1.25
"""Copies of the largest checkpoint that may wait to be written: one, and its small files."""
REMOVE_WAIT_S = 60.0
"""Longest wait of an old checkpoint's removal for the other ranks' parts of a newer one."""


class SnapshotCheckpointIO(CheckpointIO):
    """`Trainer(plugins=[SnapshotCheckpointIO()])`: what ModelCheckpoint saves is copied to the host and written later.

    Files, names and format are those of Lightning's own. An old checkpoint is removed once the newer one is durable,
    and stays if that one failed. A failure is raised by the next save, or at the end of the fit; it is a warning where
    another error ended the fit. Outside of a fit, call `wait` before you read a file that was just saved.

    Args: allow_remote: load checkpoints from addresses such as s3://bucket/last.ckpt too; none is saved there.
    """

    def __init__(self, *, allow_remote: bool = False) -> None:
        self._allow_remote = allow_remote
        self._executor: ThreadPoolExecutor | None = None
        self._writing: list[tuple[Future[None], int]] = []
        self._largest = 0
        self._tidied: set[Path] = set()
        self._error: SnapshotError | None = None
        self._handled_by_caller: BaseException | None = None
        self._last_is_durable = True

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Copy the checkpoint and return.

        Raises: SnapshotError for a remote path, a folder that cannot be made, and a save before this one that failed.
        """
        if storage_options is not None:
            raise SnapshotError("SnapshotCheckpointIO takes no storage_options; TorchCheckpointIO does not either")
        target = local_path(path).absolute()
        self._raise_or_warn()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)  # at once: ModelCheckpoint links to it before it is there
        except OSError as error:
            raise SnapshotError(f"the checkpoint {target} cannot be written: {error.strerror}") from error
        copy = HostCopy(checkpoint)
        self._largest = max(self._largest, copy.size)
        self._wait_for_room(copy.size)
        self._writing.append((self._submit(self._write, copy.take(), target), copy.size))

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of tensors and plain types.

        Raises: FileNotFoundError; SnapshotError for a file that is torn or holds code, and for a remote path.
        """
        if weights_only is False:
            raise SnapshotError(
                "weights_only=False would run code from the checkpoint, which SnapshotCheckpointIO never does; leave "
                "it out, or load a file that you trust without this plugin"
            )
        self._finish()
        if self._allow_remote and is_remote(path):
            remote: dict[str, Any] = read_remote_torch_file(str(path), map_location)
            return remote
        loaded: dict[str, Any] = read_torch_file(local_path(path), map_location)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file, link or folder, once every earlier save is durable."""
        self._submit(self._remove, local_path(path).absolute())

    def remove_once(self, path: Any, is_durable: Callable[[], bool]) -> None:
        """Do as `remove_checkpoint` does, once the other ranks have written their parts of a newer one.

        Args: is_durable: asked again and again by the writing thread, for `REMOVE_WAIT_S` at most; then `path` stays.
        """
        self._submit(self._remove, local_path(path).absolute(), is_durable)

    def wait(self) -> None:
        """Return once every save is durable.

        Raises: SnapshotError with the reason why something is not; once.
        """
        self._finish()
        self._raise()

    def teardown(self) -> None:
        """Raises: SnapshotError as `wait` does."""
        self._finish()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        self._raise_or_warn()

    def _submit(self, work: Any, *arguments: Any) -> Future[None]:
        if self._executor is None:  # a fit's first; the interpreter joins the thread at exit
            self._handled_by_caller = sys.exc_info()[1]  # the fit may be a retry, within the `except` of another
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=lower_priority)
        return self._executor.submit(work, *arguments)

    def _wait_for_room(self, size: int) -> None:
        self._writing = [(future, written) for future, written in self._writing if not future.done()]
        while self._writing and size + sum(written for _, written in self._writing) > ROOM * self._largest:
            self._writing.pop(0)[0].result()

    def _finish(self) -> None:
        if self._executor is not None:
            self._executor.submit(lambda: None).result()

    def _note(self, error: SnapshotError) -> None:
        """Keep the first error until it is raised: what fails after it often fails because of it."""
        if self._error is None:
            self._error = error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _raise_or_warn(self) -> None:
        """Raise the error, or warn of it while a Trainer handles the one that ended its fit, which it would hide."""
        ended_by = sys.exc_info()[1]
        if self._error is not None and ended_by is not None and ended_by is not self._handled_by_caller:
            warnings.warn(str(self._error), stacklevel=3)
            self._error = None
        self._raise()

    def _write(self, state: dict[str, Any], target: Path) -> None:
        try:
            if target.parent not in self._tidied:
                remove_unfinished(target.parent)
                self._tidied.add(target.parent)
            write_torch_file(state, target)
            self._last_is_durable = True
        except Exception as error:
            self._last_is_durable = False
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            failure = SnapshotError(f"the checkpoint {target} could not be written: {reason}")
            failure.__cause__ = error
            self._note(failure)

    def _remove(self, path: Path, is_durable: Callable[[], bool] | None = None) -> None:
        if not self._last_is_durable:
            return
        if is_durable is not None and not _becomes(is_durable):
            warnings.warn(
                f"the old checkpoint {path} stays: after {REMOVE_WAIT_S:g} s another rank has not written its part of"
                " the newer one",
                stacklevel=2,
            )
            return
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            self._note(SnapshotError(f"the old checkpoint {path} could not be removed: {error.strerror}"))


def _becomes(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + REMOVE_WAIT_S
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
