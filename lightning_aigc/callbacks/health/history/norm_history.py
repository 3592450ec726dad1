"""Gradient norms of a whole run, for the page and the logger; thinned out when there are many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_aigc.callbacks.health.parameter_names import block_of

MOST_LOOKS = 240
"""Looks that are kept; at one more, every second is dropped."""


class NormHistory:
    """Gradient norms by look and layer, and the losses of the same steps."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.steps: list[int] = []
        self.losses: list[float] = []
        self._rows: list[list[float]] = []
        self._stride = 1
        self._looks = 0

    def add(self, step: int, names: Sequence[str], norms: Sequence[float], loss: float) -> None:
        """Add a look. A name that is new has NaN before; a norm of NaN is a gradient that is None."""
        self._looks += 1
        if (self._looks - 1) % self._stride:
            return
        if list(names) != self.names[: len(names)] or len(names) != len(self.names):
            self.names += [name for name in names if name not in set(self.names)]
        by_name = dict(zip(names, norms, strict=True))
        self.steps.append(step)
        self.losses.append(loss)
        self._rows.append([by_name.get(name, math.nan) for name in self.names])
        if len(self.steps) > MOST_LOOKS:
            self.steps, self.losses, self._rows = self.steps[::2], self.losses[::2], self._rows[::2]
            self._stride *= 2

    def norms(self) -> dict[str, list[float]]:
        """Return each layer's norm at every kept look."""
        wide = len(self.names)
        rows = [row + [math.nan] * (wide - len(row)) for row in self._rows]
        return {name: [row[i] for row in rows] for i, name in enumerate(self.names)}

    def state(self) -> dict[str, Any]:
        norms = self.norms()
        return {
            "names": list(self.names),
            "steps": list(self.steps),
            "losses": list(self.losses),
            "norms": torch.tensor([norms[name] for name in self.names], dtype=torch.float32),
            "stride": self._stride,
            "looks": self._looks,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.names, self.steps, self.losses = list(state["names"]), list(state["steps"]), list(state["losses"])
        self._rows = state["norms"].T.tolist() if self.names else []
        self._stride, self._looks = int(state["stride"]), int(state["looks"])


def block_norms(names: Sequence[str], norms: Sequence[float], block_of: Any) -> dict[str, float]:
    """The L2 norm of each block's gradient; a None counts as zero, a norm that is not finite makes its block so."""
    squares: dict[str, float] = {}
    for name, norm in zip(names, norms, strict=True):
        block = block_of(name)
        squares[block] = squares.get(block, 0.0) + (0.0 if math.isnan(norm) else norm * norm)
    return {block: math.sqrt(square) for block, square in squares.items()}


def last_norms(history: NormHistory, step: int, *, by_block: bool) -> dict[str, float]:
    """The finite gradient norms of this step for the logger, by layer or by block; empty if the step was not kept."""
    if not history.steps or history.steps[-1] != step:
        return {}
    last = {name: row[-1] for name, row in history.norms().items()}
    if by_block:
        last = block_norms(list(last), list(last.values()), block_of)
    return {f"health/gradient_norm/{name}": norm for name, norm in last.items() if math.isfinite(norm)}
