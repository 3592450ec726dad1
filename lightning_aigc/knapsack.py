"""Choose one option of each group so that the bytes fit a budget and the cost is least."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CELLS = 8192
"""Steps into which the spare bytes are divided; an option's bytes are rounded up to them."""

Way = tuple[float, float]
"""Bytes and cost of an option, such as operations or an error."""


def choose(groups: Sequence[Sequence[Way]], spare_bytes: float) -> list[int] | None:
    """The index of the chosen option of each group, the least cost in all within `spare_bytes`.

    An exact dynamic programme over bytes in `CELLS` steps. Among equals the earlier option wins, so that the result
    depends on the arguments alone. None if even the smallest options do not fit.
    """
    least = [min(nbytes for nbytes, _ in ways) for ways in groups]
    spare = spare_bytes - sum(least)
    if spare < 0:
        return None
    fronts = [pareto(ways) for ways in groups]
    wanted = sum(max(ways[i][0] for i in front) - low for ways, front, low in zip(groups, fronts, least, strict=True))
    if spare >= wanted:
        return [front[-1] for front in fronts]
    cell = max(spare / CELLS, 1.0)  # bytes are whole: up to CELLS of them nothing is rounded
    cells = min(CELLS, int(spare / cell))
    best = np.zeros(cells + 1)
    chosen = np.zeros((len(groups), cells + 1), dtype=np.int32)
    for row, (ways, front, low) in enumerate(zip(groups, fronts, least, strict=True)):
        total = np.full(cells + 1, np.inf)
        for i in front:
            nbytes, cost = ways[i]
            offset = int(np.ceil((nbytes - low) / cell - 1e-9))
            if offset > cells:
                continue
            candidate = np.full(cells + 1, np.inf)
            candidate[offset:] = best[: cells + 1 - offset] + cost
            is_better = candidate < total
            total[is_better], chosen[row, is_better] = candidate[is_better], i
        best = total
    left, picks = cells, []
    for row in range(len(groups) - 1, -1, -1):
        pick = int(chosen[row, left])
        left -= int(np.ceil((groups[row][pick][0] - least[row]) / cell - 1e-9))
        picks.append(pick)
    return picks[::-1]


def pareto(ways: Sequence[Way]) -> list[int]:
    """Indices of the options that no other beats in both bytes and cost, by growing bytes."""
    front: list[int] = []
    for i in sorted(range(len(ways)), key=lambda i: (ways[i][0], ways[i][1], i)):
        if not front or ways[i][1] < ways[front[-1]][1]:
            front.append(i)
    return front
