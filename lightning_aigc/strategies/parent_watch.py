"""A rank that another rank's process has started ends soon after that one, whatever it waits for.

NCCL and HCCL do not notice that a process is gone: a rank that waits in a collective of theirs would hold its device
until the timeout of half an hour. Under torchrun and SLURM the launcher ends the other ranks.
"""

from __future__ import annotations

import os
import sys
import threading
import time

POLL_S = 0.5
LAST_WORDS_S = 30.0
"""For an error that is on its way, and a last snapshot, which waits for its ranks as long."""
_watching: set[int] = set()


def watch_parent(rank: int, last_words_s: float = LAST_WORDS_S) -> None:
    """End this process `last_words_s` after its parent; once a process."""
    parent = os.getppid()
    if os.getpid() in _watching:
        return
    _watching.add(os.getpid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        print(
            f"rank {rank}: the process of rank 0 that started this one has ended; this one ends within "
            f"{last_words_s:g} s; look why in the log, and start again with --resume",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(last_words_s)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
