"""Keep alerts, share them among the ranks, and write them to the console and health.jsonl."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_aigc._lightning import rank_zero_logger
from lightning_aigc.atomic_file import warns_if_unwritten, write_text
from lightning_aigc.callbacks.health.alerts.alerts import Alert, console_lines
from lightning_aigc.callbacks.health.history.norm_history import NormHistory
from lightning_aigc.callbacks.health.page import render_health_page

WRITER = "GradientHealthMonitor"
_log = logging.getLogger(rank_zero_logger())  # where rank_zero_info writes


class AlertLog:
    """Every alert that this rank knows; rank zero writes them.

    Args:
        alerts: The list to add them to.
    """

    def __init__(self, alerts: list[Alert]) -> None:
        self.alerts = alerts
        self.files: HealthFiles | None = None
        """Rank zero's, unless it writes none."""
        self._unshared: list[Alert] = []

    def report(self, rank: int, alerts: Sequence[Alert]) -> None:
        """Add this rank's alerts; rank zero writes its own at once."""
        if not alerts:
            return
        alerts = [dataclasses.replace(alert, rank=rank) for alert in alerts]
        self.alerts += alerts
        self._unshared += alerts
        if rank == 0:
            self._write(alerts)

    def exchange(self, rank: int) -> None:
        """Add the other ranks' alerts; a collective, so only at looks, which all ranks take."""
        own, self._unshared = self._unshared, []
        if is_single_rank():
            return
        known = {(a.check, a.layer, a.level) for a in self.alerts}
        for alert in share_alerts(own):
            key = (alert.check, alert.layer, alert.level)
            if key not in known:
                known.add(key)
                self.alerts.append(alert)
                if rank == 0:
                    self._write([alert])

    def _write(self, alerts: Sequence[Alert]) -> None:
        if self.files is not None:
            self.files.append(alerts)
        for level, line in console_lines(alerts):
            _log.log(logging.ERROR if level == "error" else logging.WARNING, line)


def is_single_rank() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def share_alerts(own: Sequence[Alert]) -> list[Alert]:
    """Gather every rank's alerts, rank zero's first. Collective; only one number is sent where no rank has any."""
    if is_single_rank():
        return list(own)
    device = torch.device("cpu") if dist.get_backend() == "gloo" else _device()
    count = torch.tensor(float(len(own)), device=device)
    dist.all_reduce(count)
    if int(count) == 0:
        return []
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, list(own))
    return [alert for alerts in of_ranks for alert in alerts]


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None else accelerator


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
            path = self.folder / ALERTS_FILE
            with warns_if_unwritten(WRITER, path), path.open("a", encoding="utf-8") as file:
                file.write("".join(alert.to_json() + "\n" for alert in alerts))

    def write_page(self, title: str, alerts: Sequence[Alert], norms: NormHistory, facts: Mapping[str, str]) -> None:
        """Write health.html."""
        path = self.folder / PAGE_FILE
        with warns_if_unwritten(WRITER, path):
            write_text(path, render_health_page(title, alerts, norms, facts))
