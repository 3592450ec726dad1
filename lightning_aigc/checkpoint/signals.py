"""Signals that end a run: the first is noted for the next boundary, a second Ctrl-C ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any


class StopSignals:
    """Handlers for the time of one training.

    Args: at_once: what a second Ctrl-C does before the process ends.
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        self.received = 0
        """Number of the first signal; 0 before one came."""
        self._at_once = at_once
        self._before: dict[int, Any] = {}

    def install(self, numbers: Iterable[int]) -> None:
        """Take over; only a process's main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.received = 0
        for number in numbers:
            self._before[number] = signal.signal(number, self._note)

    def remove(self) -> None:
        """Put back the handlers of before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, _: Any) -> None:
        if self.received and number == signal.SIGINT:
            self._at_once()
            os._exit(128 + number)
        if not self.received:
            self.received = number
            again = "; Ctrl-C once more ends at once" if number == signal.SIGINT else ""
            # print() may be what was interrupted
            os.write(2, _line(number, again))


def _line(number: int, again: str) -> bytes:
    return f"\n{signal.Signals(number).name}: a snapshot follows this batch, then the run ends{again}\n".encode()
