"""health.jsonl, one alert a line, and health.html."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_aigc.callbacks.health.alert import Alert
from lightning_aigc.callbacks.health.page import render_health_page
from lightning_aigc.callbacks.health.record import Record

ALERTS_FILE, PAGE_FILE = "health.jsonl", "health.html"


class HealthFiles:
    """The files of one run; rank zero alone writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, alerts: Sequence[Alert]) -> None:
        """Start health.jsonl with what a checkpoint brought along: after a resume it is the file of one whole run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ALERTS_FILE).write_text("".join(a.to_json() + "\n" for a in alerts), encoding="utf-8")

    def append(self, alerts: Sequence[Alert]) -> None:
        if alerts:
            with (self.folder / ALERTS_FILE).open("a", encoding="utf-8") as file:
                file.write("".join(alert.to_json() + "\n" for alert in alerts))

    def draw(self, title: str, alerts: Sequence[Alert], record: Record, facts: Mapping[str, str]) -> None:
        """Write the page, whole or not at all."""
        temporary = self.folder / f".{PAGE_FILE}.{os.getpid()}"
        temporary.write_text(render_health_page(title, alerts, record, facts), encoding="utf-8")
        temporary.replace(self.folder / PAGE_FILE)
