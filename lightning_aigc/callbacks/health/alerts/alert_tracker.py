"""AlertTracker: selects new findings, findings that became worse, and findings that came back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_aigc.callbacks.health.alerts.alerts import Alert, CheckName, Finding, Level, Policy, is_above

FORGET_AFTER = 5
"""Looks without a finding after which the same finding is news again."""


@dataclass
class _Entry:
    since: int
    seen: int = 0
    """Looks in a row that found it."""
    missed: int = 0
    """Looks in a row that did not."""
    reported: Level | None = None
    """The highest level reported so far."""


class AlertTracker:
    """Turns the findings of each look into alerts.

    Args:
        policies: How findings become alerts, by check; a check without one reports each finding at its own level.
    """

    def __init__(self, policies: Mapping[CheckName, Policy]) -> None:
        self._policies = policies
        self._entries: dict[tuple[str, str], _Entry] = {}

    def update(
        self,
        step: int,
        checked: Collection[CheckName],
        findings: Sequence[Finding],
        layers: Collection[str] | None = None,
    ) -> list[Alert]:
        """Return the alerts to report at this step.

        Args:
            step: The optimizer step.
            checked: Checks that ran: an earlier finding of theirs that is not among these has ended.
            findings: What they found.
            layers: The layers that they looked at; None means all.
        """
        alerts, found = [], set()
        for finding in findings:
            key = (finding.check, finding.layer)
            found.add(key)
            entry = self._entries.setdefault(key, _Entry(step))
            if entry.seen == 0 and entry.reported is None:
                entry.since = step
            entry.seen, entry.missed = entry.seen + 1, 0
            level = self._level(finding, entry.seen)
            if is_above(level, entry.reported):
                entry.reported = level
                said = asdict(replace(finding, level=level))
                alerts.append(Alert(step=step, since=entry.since, **said))
        for known, entry in list(self._entries.items()):
            if known in found or known[0] not in checked or (layers is not None and known[1] not in layers):
                continue
            entry.seen, entry.missed = 0, entry.missed + 1
            if entry.missed >= FORGET_AFTER:
                del self._entries[known]
        return alerts

    def is_open(self, check: CheckName, layer: str) -> bool:
        """Whether the last look at this layer found something."""
        entry = self._entries.get((check, layer))
        return entry is not None and entry.seen > 0

    def standing(self, checks: Collection[CheckName]) -> str | None:
        """The first warning or error of these checks that is not forgotten, as `check of layer`."""
        told = (key for key, entry in self._entries.items() if entry.reported in ("warning", "error"))
        return next((f"{check} of {layer}" for check, layer in told if check in checks), None)

    def _level(self, finding: Finding, seen: int) -> Level:
        policy = self._policies.get(finding.check, Policy())
        if seen < policy.confirm:
            return "info"
        if finding.level != "info" and policy.escalate_after is not None and seen >= policy.escalate_after:
            return "error"
        return finding.level

    def state(self) -> list[dict[str, Any]]:
        return [
            {"check": check, "layer": layer, "since": entry.since, "seen": entry.seen, "missed": entry.missed,
             "told": entry.reported}
            for (check, layer), entry in self._entries.items()
        ]  # fmt: skip

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        self._entries = {
            (saved["check"], saved["layer"]): _Entry(saved["since"], saved["seen"], saved["missed"], saved["told"])
            for saved in state
        }
