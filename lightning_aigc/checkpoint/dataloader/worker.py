"""Worker processes of a resumable loader: they send their random states with each batch, and restore them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from lightning_aigc.rng import set_from_bytes, to_bytes


class WorkerInit:
    """A `worker_init_fn` that calls the user's and then restores a resumed worker's random states.

    Ctrl-C and a scheduler's SIGTERM reach every process of a job. Workers ignore them, because a worker that ended
    would fail the batch that the run finishes before its snapshot.
    """

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self.own = own
        self.states: list[bytes | None] = []

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform == "linux":  # others have no sigwaitinfo
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_on_sigterm_of_parent, daemon=True).start()
        if self.own is not None:
            self.own(worker)
        state = self.states[worker] if worker < len(self.states) else None
        if state is not None:
            set_from_bytes(state)


def _end_on_sigterm_of_parent() -> None:
    if sys.platform != "linux":
        return
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(-signal.SIGTERM)


class CollateWithRNG:
    """A `collate_fn` that calls the user's and returns (batch, the worker's random states after it)."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self.own = own

    def __call__(self, samples: Any) -> Any:
        batch = self.own(samples)
        return batch if get_worker_info() is None else (batch, to_bytes())
