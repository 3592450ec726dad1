"""health.jsonl, one alert a line, and health.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_aigc.atomic_file import write_text
from lightning_aigc.callbacks.health.alerts import Alert
from lightning_aigc.callbacks.health.norm_history import NormHistory
from lightning_aigc.callbacks.health.page import render_health_page

ALERTS_FILE, PAGE_FILE = "health.jsonl", "health.html"


class HealthFiles:
    """The files of one run, which rank zero alone writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, alerts: Sequence[Alert]) -> None:
        """Start health.jsonl with a checkpoint's alerts: after a resume it is the file of the whole run."""
        write_text(self.folder / ALERTS_FILE, "".join(alert.to_json() + "\n" for alert in alerts))

    def append(self, alerts: Sequence[Alert]) -> None:
        """Add lines to health.jsonl."""
        if alerts:
            with (self.folder / ALERTS_FILE).open("a", encoding="utf-8") as file:
                file.write("".join(alert.to_json() + "\n" for alert in alerts))

    def write_page(self, title: str, alerts: Sequence[Alert], norms: NormHistory, facts: Mapping[str, str]) -> None:
        """Write health.html."""
        write_text(self.folder / PAGE_FILE, render_health_page(title, alerts, norms, facts))
