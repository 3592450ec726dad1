"""The run's health as one HTML file that opens without a network: alerts in time, gradient norms as a heat map."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from lightning_aigc.callbacks.health.alerts.alerts import Alert
from lightning_aigc.callbacks.health.history.norm_history import NormHistory, block_norms
from lightning_aigc.callbacks.health.parameter_names import block_of
from lightning_aigc.report.charts import line_chart
from lightning_aigc.report.health_charts import alert_chart, norm_heat_map
from lightning_aigc.report.page import facts_strip, heading, note, render_page, section
from lightning_aigc.report.record import Curve, Health, HealthAlert
from lightning_aigc.report.run_page import alert_table, count_alerts
from lightning_aigc.report.vega import chart_html, scripts

MOST_ROWS = 160
"""Layers in the page's heat map; above, it shows blocks instead."""
MOST_ROWS_IN_REPORT = 40
MOST_LISTED = 200
LAYERS_PX = 900
"""Width of a heat map with names of layers, which scrolls on a phone."""


def health_of(alerts: Sequence[Alert], history: NormHistory, most_rows: int = MOST_ROWS_IN_REPORT) -> Health:
    """Alerts and norms as the report keeps them, by block where there are more layers than `most_rows`."""
    norms = history.norms()
    rows_are: Literal["layer", "block"] = "layer"
    if len(norms) > most_rows:
        norms, rows_are = _by_block(norms), "block"
    return Health([HealthAlert(**dataclasses.asdict(a)) for a in alerts], list(history.steps), norms, rows_are)


def render_health_page(title: str, alerts: Sequence[Alert], history: NormHistory, facts: Mapping[str, str]) -> str:
    """The whole page."""
    health = health_of(alerts, history, MOST_ROWS)
    last = max([*history.steps, *(a.step for a in alerts), 1])
    timeline, heat = alert_chart(health.alerts, last), norm_heat_map(health)
    losses = line_chart(Curve(history.steps, history.losses), "Loss", "at each look")
    least_px = LAYERS_PX if health.rows_are == "layer" and len(health.norms) > MOST_ROWS_IN_REPORT else 0
    parts = [
        heading(f"{title}: health", tone(alerts), count_alerts(health.alerts)),
        facts_strip(facts),
        section(
            "Alerts",
            chart_html(timeline, "alerts by step") if timeline is not None else "",
            alert_table(health.alerts, MOST_LISTED),
        ),
        section(
            f"Gradient norm by {health.rows_are} and step",
            note("No look at the gradients was taken.")
            if heat is None
            else f'<div class="wide">{chart_html(heat, "gradient norms", least_px)}</div>'
            + note("Red is not finite; grey is no gradient, or zero."),
        ),
        section("Loss", chart_html(losses, "loss by step") if losses is not None else ""),
    ]
    has_charts = any(chart is not None for chart in (timeline, heat, losses))
    return render_page(f"{title}: health", parts, scripts() if has_charts else ())


def tone(alerts: Sequence[Alert]) -> str:
    """The colour of the verdict."""
    levels = {alert.level for alert in alerts}
    return "bad" if "error" in levels else "mixed" if "warning" in levels else "good"


def _by_block(norms: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    names = list(norms)
    looks = len(next(iter(norms.values())))
    blocks = [block_norms(names, [norms[name][i] for name in names], block_of) for i in range(looks)]
    return {block: [look[block] for look in blocks] for block in (blocks[0] if blocks else {})}
