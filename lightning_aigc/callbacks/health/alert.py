"""What the monitor says: a finding of one look, and the alert that comes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error")

Check = Literal[
    "non_finite", "loss_scale", "exploding", "vanishing", "saturated", "no_gradient", "not_in_optimizer", "no_update",
    "update_ratio", "clip_share", "loss_spike", "rank_divergence", "frozen_moved", "lora_b_zero", "lora_imbalance",
    "lora_delta",
]  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What one look at one place found wrong."""

    check: Check
    layer: str
    """Dotted name of the parameter or module; `loss`, `loss.timesteps_800_899` or `all` where there is none."""
    level: Level
    """The level once it is confirmed; the ledger may say less at first sight and more later."""
    message: str
    cause: str
    remedy: str


@dataclass(frozen=True)
class Alert:
    """One thing said once; its fields are the keys of a line of health.jsonl."""

    step: int
    """Optimizer step at which it was said, counted from 1; 0 is before training."""
    check: Check
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
    """Optimizer step at which it was first seen, without a break since."""
    rank: int = 0
    """The rank that saw it."""

    def to_json(self) -> str:
        """One line of health.jsonl."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Alert:
        """The alert whose `dataclasses.asdict` this is."""
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
    """One line a check and level, infos left out, with how many more layers it is about."""
    groups: dict[tuple[str, Level], list[Alert]] = {}
    for alert in alerts:
        if alert.level != "info":
            groups.setdefault((alert.check, alert.level), []).append(alert)
    return [
        (level, group[0].line() + (f" ({len(group) - 1} more layers in health.jsonl)" if len(group) > 1 else ""))
        for (_, level), group in groups.items()
    ]
