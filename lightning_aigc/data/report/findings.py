"""Finding: what a check of the data found, as lines of the report and as a part of an error's sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_aigc.errors import DataError

LISTED = 20


@dataclass(frozen=True)
class Finding:
    """One finding of a check."""

    what: str
    advice: str
    entries: Sequence[str] = ()
    """The files, one line each."""
    stops: bool = False
    """Whether training cannot start."""

    def lines(self) -> list[str]:
        """The finding as lines of the report."""
        return [f"  {'error' if self.stops else 'note ':<9} {self.what}: {self.advice}", *listed(self.entries)]

    def sentence(self) -> str:
        """The finding as a part of an error."""
        return (
            f"{self.what}{': ' if self.entries else ''}{some(self.entries)}. {self.advice[0].upper()}{self.advice[1:]}"
        )


class DataCheckError(DataError):
    """Findings that stop the training; `report` is the DataReport, with the others too."""

    def __init__(self, findings: Sequence[Finding], report: Any) -> None:
        self.report = report
        super().__init__(". ".join(finding.sentence() for finding in findings))


def listed(entries: Sequence[str]) -> list[str]:
    """Entries as indented lines, the first LISTED of them."""
    more = [f"    and {len(entries) - LISTED} more"] if len(entries) > LISTED else []
    return [*(f"    {entry}" for entry in entries[:LISTED]), *more]


def some(names: Iterable[str], separator: str = ", ") -> str:
    """The first five names, and how many more there are."""
    given = list(names)
    return separator.join(given[:5]) + (f" and {len(given) - 5} more" if len(given) > 5 else "")
