"""Findings, the alerts that come of them, and the policy by which they do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error")

CheckName = str
"""A name of docs/health.md's table, which `checks.CHECK_NAMES` lists."""


@dataclass(frozen=True)
class Policy:
    """Rules that turn a check's findings into alerts."""

    confirm: int = 1
    """Looks in a row from which a finding has its own level; below, it is an info."""
    escalate_after: int | None = None
    """Looks in a row from which it is an error; None never makes it one."""


@dataclass(frozen=True)
class Finding:
    """A fault of one layer at one step, found by a check."""

    check: CheckName
    layer: str
    """Dotted name of the parameter or module; `loss`, `loss.timesteps_800_899` or `all` where there is none."""
    level: Level
    """The level once it is confirmed; the AlertTracker may lower it at first sight and raise it later."""
    message: str
    cause: str
    remedy: str


@dataclass(frozen=True)
class Alert:
    """A finding that is news; its fields are the keys of a line of health.jsonl."""

    step: int
    """Optimizer step at which it was reported, counted from 1; 0 is before training."""
    check: CheckName
    """A name of docs/health.md's table."""
    layer: str
    """Dotted name of the parameter or module."""
    level: Level
    message: str
    cause: str
    """The likely cause."""
    remedy: str
    """One config line, `key: value`; in code that knows no config, what to do."""
    since: int = 0
    """Optimizer step since which every look found it."""
    rank: int = 0
    """The rank that found it."""

    def to_json(self) -> str:
        """One line of health.jsonl."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Alert:
        """Rebuild an alert from its `dataclasses.asdict`."""
        return cls(**values)

    def line(self) -> str:
        """The console's line."""
        since = f", since step {self.since}" if self.since != self.step else ""
        where = f" (rank {self.rank})" if self.rank else ""
        return (
            f"health {self.level}: {self.check} at step {self.step}{since}, {self.layer}{where}: {self.message}."
            f" Likely cause: {self.cause}. Remedy: {self.remedy}"
        )


def is_above(level: Level, other: Level | None) -> bool:
    """Whether a level is more serious; anything is above None."""
    return other is None or LEVELS.index(level) > LEVELS.index(other)


def console_lines(alerts: Sequence[Alert]) -> list[tuple[Level, str]]:
    """One line for each check and level but info: its first alert, and how many more layers have it."""
    groups: dict[tuple[str, Level], list[Alert]] = {}
    for alert in alerts:
        if alert.level != "info":
            groups.setdefault((alert.check, alert.level), []).append(alert)
    return [
        (level, group[0].line() + (f" ({len(group) - 1} more layers in health.jsonl)" if len(group) > 1 else ""))
        for (_, level), group in groups.items()
    ]
