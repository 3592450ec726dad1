"""Several runs side by side: the table, the keys in which their configs differ, and their curves as one chart."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_aigc.report.charts import WIDTH, step_axis, value_axis
from lightning_aigc.report.curves import METRICS, rows, score_rows, smooth, thin
from lightning_aigc.report.paired_scores import Check
from lightning_aigc.report.record import Curve, RunRecord
from lightning_aigc.report.theme import RUN_COLOURS, colour
from lightning_aigc.report.units import UNKNOWN, memory_text, score_text, speed_text, time_text
from lightning_aigc.report.vega import Chart
from lightning_aigc.report.verdict import judge

COST = ("run", "verdict", "steps", "time", "speed", "memory")
SCORES = {
    "clip_t": "CLIP-T", "clip_i": "CLIP-I", "prior_clip_t": "other prompts", "direction": "edit, direction",
    "kept": "edit, kept",
}  # fmt: skip
OF_EDITS = ("direction", "kept")
ALWAYS_DIFFER = ("trainer.default_root_dir", "ckpt_path")
NOT_SET = "(not set)"


def run_names(records: Sequence[RunRecord]) -> list[str]:
    """A name for each run: its folder's, or the whole path where two folders have the same."""
    names = [Path(record.folder or record.name).name or record.name for record in records]
    return [record.folder if names.count(name) > 1 else name for name, record in zip(names, records, strict=True)]


def shown_scores(records: Sequence[RunRecord]) -> list[str]:
    """Scores with a column: of edits where a run drew some, the others unless all did."""
    drew_edits = [any(name in record.scores for name in OF_EDITS) for record in records]
    return [name for name in SCORES if (any(drew_edits) if name in OF_EDITS else not all(drew_edits))]


def table_head(records: Sequence[RunRecord]) -> list[str]:
    """Titles of `table_rows`' columns."""
    return [*COST, *(SCORES[name] for name in shown_scores(records)), "best step"]


def table_rows(records: Sequence[RunRecord]) -> list[list[str]]:
    """One row a run, in `table_head`'s columns; scores with the standard error of their paired difference."""
    shown = shown_scores(records)
    return [
        [
            name,
            judge(record).kind,
            str(record.steps),
            time_text(record.seconds),
            speed_text(record.steps, record.seconds),
            memory_text(record.peak_memory_mib),
            *(score_text(record, score) for score in shown),
            UNKNOWN if record.guard is None or record.guard.best_step is None else str(record.guard.best_step),
        ]
        for name, record in zip(run_names(records), records, strict=True)
    ]


def markdown_table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table that a pull request shows."""
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(as_text(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def as_text(value: str) -> str:
    """A value of a record as one line of Markdown without HTML."""
    return html.escape(" ".join(value.split()), quote=False)


def as_markdown(records: Sequence[RunRecord]) -> str:
    """The table of the runs, their verdicts, and the config keys in which they differ."""
    names = run_names(records)
    parts = [markdown_table(table_head(records), table_rows(records))]
    verdicts = [judge(record).sentence for record in records]
    parts.append("\n".join(f"- {as_text(n)}: {as_text(v)}" for n, v in zip(names, verdicts, strict=True)))
    differing = config_differences(records)
    if differing:
        cells = [[f"`{key}`", *values] for key, values in differing.items()]
        parts.append(markdown_table(("config key", *names), cells))
    return "\n\n".join(parts)


def config_differences(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """For each key whose values differ, the value of each run; the run's folder is left out."""
    configs = [_flat(_loaded(record.config)) for record in records]
    keys = dict.fromkeys(key for config in configs for key in config)
    found = {key: [config.get(key, NOT_SET) for config in configs] for key in keys if key not in ALWAYS_DIFFER}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def comparison_chart(records: Sequence[RunRecord]) -> Chart | None:
    """Scores and losses of all runs over the steps, a colour a run; None where there is nothing to draw."""
    import altair as alt

    names = run_names(records)
    last = max(record.steps for record in records)
    shades = alt.Color(
        "run:N",
        scale=alt.Scale(domain=names, range=[colour(RUN_COLOURS[i % len(RUN_COLOURS)]) for i in range(len(names))]),
    )
    of_runs = list(zip(names, records, strict=True))
    panels: list[Any] = []
    for metric, title in METRICS.items():
        found = [row for name, record in of_runs for row in score_rows(_checks(record), metric, run=name)]
        panels.append(_panel(found, title, shades, last, has_noise=True))
    for curve, title in (("loss", "Loss, mean of 20 steps"), ("val_loss", "Loss on held-out images")):
        found = [row for name, record in of_runs for row in _smooth_rows(record, curve, name)]
        panels.append(_panel(found, title, shades, last, has_noise=False))
    drawn = [panel for panel in panels if panel is not None]
    if not drawn:
        return None
    column: Chart = alt.vconcat(*drawn, spacing=18).resolve_scale(x="shared")
    return column


def _panel(found: list[dict[str, Any]], title: str, shades: Any, last: int, *, has_noise: bool) -> Any:
    import altair as alt

    if not found:
        return None
    value = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=value_axis(tickCount=4))
    tips = [alt.Tooltip("run:N"), alt.Tooltip("step:Q"), alt.Tooltip("value:Q", title=title, format=".4g")]
    base = alt.Chart(alt.InlineData(values=found)).encode(x=step_axis(last), color=shades, tooltip=tips)
    layers = [base.mark_line().encode(y=value), base.mark_point(opacity=0, size=160).encode(y=value)]
    if has_noise:
        layers.append(base.mark_rule(opacity=0.55).encode(y=alt.Y("low:Q", title=None), y2="high:Q"))
        layers.append(base.mark_point(opacity=1).encode(y=value))
    return alt.layer(*layers).properties(title=title, height=150, width=WIDTH)


def _checks(record: RunRecord) -> list[Check]:
    """The guard's checks, or where there was none the sample grids."""
    return record.guard.checks if record.guard is not None else record.grids


def _smooth_rows(record: RunRecord, name: str, run: str) -> list[dict[str, Any]]:
    curve = record.curves.get(name, Curve())
    values = smooth(curve.values) if name == "loss" else curve.values
    return rows(thin(Curve(curve.steps, values)), run=run)


def _loaded(config: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(config) or {}
    except yaml.YAMLError:
        return {}


def _flat(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}" if path else key).items()}
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        found: dict[str, str] = {}
        for index, item in enumerate(value):
            # A callback goes by its class: its place in the list says nothing.
            name = item.get("class_path", index) if isinstance(item, dict) else index
            found |= _flat(item.get("init_args", {}) if name != index else item, f"{path}[{str(name).split('.')[-1]}]")
        return found
    return {} if path == "" else {path: str(value)}
