"""Charts of a run's health: gradient norms as a heat map, alerts in time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_aigc.report.charts import step_axis
from lightning_aigc.report.record import Health, HealthAlert
from lightning_aigc.report.theme import colour
from lightning_aigc.report.vega import Chart

LEVEL_COLOURS = {"info": "blue", "warning": "mixed", "error": "bad"}
MOST_COLUMNS = 100
"""Columns of the heat map; beyond, each shows the largest norm of several looks."""
ROW_PX = 13


def norm_heat_map(health: Health, width: int = 640) -> Chart | None:
    """Layers down, steps across, colour by the norm's order of magnitude; grey is no gradient, red is not finite."""
    import altair as alt

    if not health.steps or not health.norms:
        return None
    names = short_names(list(health.norms))
    found = _cells(health.steps, {names[name]: norms for name, norms in health.norms.items()})
    x = alt.X("step:O", title=None, axis=alt.Axis(labelOverlap=True, labelAngle=0, grid=False))
    y = alt.Y("layer:N", title=None, sort=list(names.values()), axis=alt.Axis(labelLimit=0, labelPadding=4))
    tips = [alt.Tooltip("layer:N"), alt.Tooltip("step:O"), alt.Tooltip("said:N", title="norm")]
    shades = alt.Color(
        "norm:Q", scale=alt.Scale(type="log", scheme="viridis"),
        legend=alt.Legend(title=None, gradientLength=180, format=".0e", orient="bottom"),
    )  # fmt: skip
    base = alt.Chart(alt.InlineData(values=found)).encode(x=x, y=y, tooltip=tips)
    layers = [
        base.transform_filter("datum.kind == 'norm'").mark_rect().encode(color=shades),
        base.transform_filter("datum.kind == 'none'").mark_rect(color=colour("rule")),
        base.transform_filter("datum.kind == 'not finite'").mark_rect(color=colour("bad")),
    ]
    return alt.layer(*layers).properties(height=ROW_PX * len(names), width=width)


def alert_chart(alerts: Sequence[HealthAlert], last_step: int, width: int = 640) -> Chart | None:
    """Each check as a row, each alert as a mark at its step."""
    import altair as alt

    if not alerts:
        return None
    levels = list(LEVEL_COLOURS)
    found = [
        {"step": a.step, "check": a.check, "level": a.level, "layer": a.layer, "message": a.message, "remedy": a.remedy}
        for a in sorted(alerts, key=lambda a: levels.index(a.level))
    ]
    shades = alt.Scale(domain=levels, range=[colour(LEVEL_COLOURS[level]) for level in levels])
    chart: Chart = (
        alt.Chart(alt.InlineData(values=found))
        .mark_point(size=80, opacity=0.9)
        .encode(
            x=step_axis(max([last_step, *(a.step for a in alerts)])),
            y=alt.Y("check:N", title=None, axis=alt.Axis(labelLimit=0, grid=True)),
            color=alt.Color("level:N", scale=shades),
            tooltip=["step:Q", "level:N", "layer:N", "message:N", "remedy:N"],
        )
        .properties(height=22 * len({alert.check for alert in alerts}) + 12, width=width)
    )
    return chart


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names without what all of them begin and end with.

    >>> short_names(["unet.down.0.weight", "unet.up.1.weight"])
    {'unet.down.0.weight': 'down.0', 'unet.up.1.weight': 'up.1'}
    """
    split = [name.split(".") for name in names]
    before = _common(split)
    after = _common([parts[before:][::-1] for parts in split])
    return {name: ".".join(parts[before : len(parts) - after]) for name, parts in zip(names, split, strict=True)}


def _common(split: Sequence[Sequence[str]]) -> int:
    """Number of leading parts that all names share; each name keeps at least one part."""
    most = min(len(parts) for parts in split) - 1
    count = 0
    while len(split) > 1 and count < most and len({parts[count] for parts in split}) == 1:
        count += 1
    return count


def _cells(steps: Sequence[int], norms: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    stride = -(-len(steps) // MOST_COLUMNS)
    found = []
    for layer, values in norms.items():
        for start in range(0, len(steps), stride):
            part = [value for value in values[start : start + stride] if not math.isnan(value)]
            largest = max(part, default=0.0)
            cell: dict[str, Any] = {"layer": layer, "step": steps[start], "kind": "norm", "said": f"{largest:.3g}"}
            if not math.isfinite(largest):
                cell |= {"kind": "not finite", "said": "not finite"}
            elif largest <= 0:
                cell |= {"kind": "none", "said": "no gradient"}
            else:
                cell["norm"] = float(f"{largest:.3g}")
            found.append(cell)
    return found
