"""Charts of one run as Altair charts; every x axis is the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_aigc.report.curves import METRICS, rows, score_rows, smooth, thin
from lightning_aigc.report.record import Curve, RunRecord
from lightning_aigc.report.theme import colour
from lightning_aigc.report.vega import Chart

WIDTH = 640
"""In images; on a page a chart is as wide as the page."""
AXIS_WIDTH = 44
"""The same for every chart, so that steps are above one another."""
SCORE_COLOURS = {"clip_t": "blue", "clip_i": "orange", "direction": "blue", "kept": "orange"}
Rows = Sequence[dict[str, Any]]


def progress_chart(record: RunRecord) -> Chart | None:
    """Scores with their noise, loss and learning rate, one above the other; None where nothing was measured."""
    import altair as alt

    panels = [
        *(score_panel(record, metric) for metric in METRICS),
        loss_panel(record),
        rate_panel(record),
    ]
    drawn: list[Any] = [panel for panel in panels if panel is not None]
    if not drawn:
        return None
    column: Chart = alt.vconcat(*drawn, spacing=18).resolve_scale(x="shared", color="independent")
    return column


def score_panel(record: RunRecord, metric: str) -> Chart | None:
    """One score of the sample grids and of the guard's checks."""
    import altair as alt

    guard = record.guard
    found = score_rows(record.grids, metric, source="sample grids")
    found += score_rows(guard.checks, metric, source="guard's checks") if guard is not None else []
    if not found:
        return None
    best = [
        row | {"mark": "best"}
        for row in found
        if guard is not None and row["source"] == "guard's checks" and row["step"] == guard.best_step
    ]
    shade = colour(SCORE_COLOURS[metric])
    sources = list(dict.fromkeys(row["source"] for row in found))
    dash = alt.StrokeDash(
        "source:N", scale=alt.Scale(domain=["guard's checks", "sample grids"], range=[[1, 0], [4, 4]]),
        legend=alt.Legend(symbolStrokeColor=colour("soft")) if len(sources) > 1 else None,
    )  # fmt: skip
    tips = [
        alt.Tooltip("step:Q"), alt.Tooltip("value:Q", title=METRICS[metric], format=".3f"),
        alt.Tooltip("noise:Q", title="± against step 0", format=".3f"), alt.Tooltip("source:N", title="of"),
    ]  # fmt: skip
    base = _chart(found).encode(x=step_axis(last_step(record)), tooltip=tips)
    value = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=value_axis(tickCount=4))
    layers = [
        base.mark_line(color=shade).encode(y=value, strokeDash=dash),
        base.mark_rule(color=shade, opacity=0.55).encode(y=alt.Y("low:Q", title=None), y2="high:Q", detail="source:N"),
        base.mark_point(color=shade, opacity=1).encode(y=value),
    ]
    if best:
        marked = _chart(best).encode(x=step_axis(last_step(record)), y=value, tooltip=tips)
        layers.append(marked.mark_point(shape="diamond", size=150, color=colour("good"), opacity=1))
        layers.append(
            marked.mark_text(text="best", dy=-14, color=colour("good"), fontWeight=600).encode(tooltip=alt.value(None))
        )
    return alt.layer(*layers).properties(title=METRICS[metric], height=130, width=WIDTH)


def loss_panel(record: RunRecord) -> Chart | None:
    """The loss, its running mean, and the validation loss where there is one."""
    import altair as alt

    loss, validation = record.curves.get("loss", Curve()), record.curves.get("val_loss", Curve())
    points = rows(thin(loss))
    mean = rows(thin(Curve(loss.steps, smooth(loss.values))), kind="mean of 20 steps")
    held_out = rows(thin(validation), kind="held-out images")
    if not points and not held_out:
        return None
    x = step_axis(last_step(record))
    value = alt.Y("value:Q", title=None, axis=value_axis(tickCount=4))
    kinds = alt.Scale(domain=["mean of 20 steps", "held-out images"], range=[colour("teal"), colour("violet")])
    shades = alt.Color(
        "kind:N", scale=kinds,
        legend=alt.Legend() if held_out else None,
    )  # fmt: skip
    tips = [
        alt.Tooltip("step:Q"),
        alt.Tooltip("value:Q", title="loss", format=".4g"),
        alt.Tooltip("kind:N", title="of"),
    ]
    layers = [_chart(points).mark_line(color=colour("teal"), opacity=0.28, strokeWidth=1).encode(x=x, y=value)]
    lines = _chart([*mean, *held_out]).encode(x=x, y=value, tooltip=tips)
    layers += [lines.mark_line().encode(color=shades), _targets(lines)]
    if held_out:
        layers.append(_chart(held_out).mark_point().encode(x=x, y=value, color=shades, tooltip=tips))
    return alt.layer(*layers).properties(title="Loss", height=120, width=WIDTH)


def rate_panel(record: RunRecord) -> Chart | None:
    """The learning rate that each step used, and where AdaptiveLR changed it."""
    import altair as alt

    curve = record.curves.get("lr", Curve())
    points = rows(thin(curve))
    if not points:
        return None
    value = alt.Y("value:Q", title=None, axis=value_axis(tickCount=3, format="~e"))
    base = _chart(points).encode(x=step_axis(last_step(record)), y=value)
    tips = [alt.Tooltip("step:Q"), alt.Tooltip("value:Q", title="learning rate", format=".3g")]
    layers = [base.mark_line(color=colour("violet"), strokeWidth=1.8), _targets(base.encode(tooltip=tips))]
    at = dict(zip(curve.steps, curve.values, strict=True))
    changes = [
        {"step": c.step, "value": at.get(c.step, points[-1]["value"]), "factor": c.factor, "reason": c.reason}
        for c in record.rate_changes
    ]
    if changes:
        why = [
            alt.Tooltip("step:Q"), alt.Tooltip("value:Q", title="learning rate", format=".3g"),
            alt.Tooltip("factor:Q", title="times the schedule", format=".3g"), alt.Tooltip("reason:N"),
        ]  # fmt: skip
        layers.append(
            _chart(changes).mark_point(shape="triangle-down", size=90, color=colour("orange"), opacity=1)
            .encode(x=step_axis(last_step(record)), y=value, tooltip=why)
        )  # fmt: skip
    return alt.layer(*layers).properties(title="Learning rate", height=80, width=WIDTH)


def line_chart(curve: Curve, title: str, unit: str, shade: str = "teal") -> Chart | None:
    """One number by step."""
    import altair as alt

    points = rows(thin(curve))
    if not points:
        return None
    value = alt.Y("value:Q", title=None, axis=value_axis(tickCount=4))
    tips = [alt.Tooltip("step:Q"), alt.Tooltip("value:Q", title=unit, format=".4g")]
    base = _chart(points).encode(x=step_axis(max(curve.steps)), y=value, tooltip=tips)
    layers = [base.mark_line(color=colour(shade)), base.mark_point(color=colour(shade), opacity=0.01, size=160)]
    return alt.layer(*layers).properties(title=f"{title}, {unit}", height=110, width=WIDTH)


def last_step(record: RunRecord) -> int:
    """Last step on the x axis of all panels."""
    guarded = record.guard.checks if record.guard is not None else []
    return max(
        [record.steps, *(step for curve in record.curves.values() for step in curve.steps[-1:])]
        + [check.step for check in (*record.grids, *guarded)]
    )


def step_axis(last: int) -> Any:
    """The x axis of every chart: optimizer steps from 0."""
    import altair as alt

    scale = alt.Scale(domain=[0, max(1, last)], nice=False)
    return alt.X("step:Q", title=None, scale=scale, axis=alt.Axis(grid=False, tickCount=6, format="d", labelFlush=True))


def _targets(base: Any) -> Any:
    """Invisible marks that are large enough for a finger, for the tooltips of a line."""
    return base.mark_point(opacity=0, size=160)


def value_axis(**options: Any) -> Any:
    """The y axis of every chart, as wide in each."""
    import altair as alt

    return alt.Axis(minExtent=AXIS_WIDTH, maxExtent=AXIS_WIDTH, **options)


def _chart(found: Rows) -> Any:
    import altair as alt

    return alt.Chart(alt.InlineData(values=list(found)))
