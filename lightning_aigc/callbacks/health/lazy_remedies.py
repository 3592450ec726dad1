"""Remedies that are made when a finding asks for the first: a healthy step needs none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_aigc.callbacks.health.remedies import Remedies


class LazyRemedies:
    """Behaves as the Remedies that `make` returns, and calls it at the first attribute that is read."""

    def __init__(self, make: Callable[[], Remedies]) -> None:
        self._make = make
        self._made: Remedies | None = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)
