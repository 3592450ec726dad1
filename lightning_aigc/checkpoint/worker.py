"""What a loader's worker processes do for exact snapshots: send their random states along, and take them up again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from lightning_aigc.rng import set_from_bytes, to_bytes


class WorkerStart:
    """The user's `worker_init_fn`; after it a worker that goes on takes up its random states.

    Ctrl-C and a scheduler's SIGTERM reach every process of a job: a worker that ended at once would fail the batch
    that the run wants to finish before its snapshot.
    """

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self.own = own
        self.states: list[bytes | None] = []

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if hasattr(signal, "sigwaitinfo"):  # macOS has none
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_on_sigterm_of_parent, daemon=True).start()
        if self.own is not None:
            self.own(worker)
        state = self.states[worker] if worker < len(self.states) else None
        if state is not None:
            set_from_bytes(state)


def _end_on_sigterm_of_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(-signal.SIGTERM)


class Stamped:
    """The user's `collate_fn`, whose batches come as (batch, the worker's random states after it)."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self.own = own

    def __call__(self, samples: Any) -> Any:
        batch = self.own(samples)
        return batch if get_worker_info() is None else (batch, to_bytes())
