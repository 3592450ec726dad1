"""Says a thing once: who was told what, since when, and when it has become worse."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_aigc.callbacks.health.alert import Alert, Check, Finding, Level, is_above


@dataclass(frozen=True)
class Policy:
    """How a check's findings become alerts."""

    confirm: int = 1
    """Looks in a row from which it has its own level; below, it is an info."""
    escalate_after: int | None = None
    """Looks in a row from which it is an error; None never makes it one."""


POLICIES: Mapping[Check, Policy] = {
    "exploding": Policy(confirm=2, escalate_after=4),
    "vanishing": Policy(confirm=2, escalate_after=10),
    "saturated": Policy(confirm=2),
    "no_gradient": Policy(confirm=2, escalate_after=10),
    "no_update": Policy(confirm=2, escalate_after=10),
    "update_ratio": Policy(escalate_after=10),
    "loss_spike": Policy(confirm=2),
}
FORGET_AFTER = 5
"""Looks without a finding after which it is news again."""


@dataclass
class _Entry:
    since: int
    seen: int = 0
    missed: int = 0
    told: Level | None = None


class Ledger:
    """Turns the findings of each look into the alerts that are news."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry] = {}

    def update(
        self,
        step: int,
        looked_at: Collection[Check],
        findings: Sequence[Finding],
        layers: Collection[str] | None = None,
    ) -> list[Alert]:
        """The alerts to give at this step.

        Args:
            step: The optimizer step.
            looked_at: Checks that ran: where they found nothing, what they said before is over.
            findings: What they found.
            layers: The places that they looked at; None means all.
        """
        alerts, found = [], set()
        for finding in findings:
            key = (finding.check, finding.layer)
            found.add(key)
            entry = self._entries.setdefault(key, _Entry(step))
            if entry.seen == 0 and entry.told is None:
                entry.since = step
            entry.seen, entry.missed = entry.seen + 1, 0
            level = self._level(finding, entry.seen)
            if is_above(level, entry.told):
                entry.told = level
                said = asdict(replace(finding, level=level))
                alerts.append(Alert(step=step, since=entry.since, **said))
        for known, entry in list(self._entries.items()):
            if known in found or known[0] not in looked_at or (layers is not None and known[1] not in layers):
                continue
            entry.seen, entry.missed = 0, entry.missed + 1
            if entry.missed >= FORGET_AFTER:
                del self._entries[known]
        return alerts

    def is_open(self, check: Check, layer: str) -> bool:
        """Whether the last look at this place found something."""
        entry = self._entries.get((check, layer))
        return entry is not None and entry.seen > 0

    @staticmethod
    def _level(finding: Finding, seen: int) -> Level:
        policy = POLICIES.get(finding.check, Policy())
        if seen < policy.confirm:
            return "info"
        if finding.level != "info" and policy.escalate_after is not None and seen >= policy.escalate_after:
            return "error"
        return finding.level

    def state(self) -> list[dict[str, Any]]:
        return [{"check": check, "layer": layer} | asdict(entry) for (check, layer), entry in self._entries.items()]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        self._entries = {
            (saved["check"], saved["layer"]): _Entry(saved["since"], saved["seen"], saved["missed"], saved["told"])
            for saved in state
        }
