"""report.html: a whole run on one page, from its verdict to how to use the file."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from lightning_aigc.report.charts import line_chart, progress_chart
from lightning_aigc.report.health_charts import LEVEL_COLOURS, alert_chart, norm_heat_map
from lightning_aigc.report.page import (
    code,
    details,
    facts_strip,
    heading,
    image,
    inline_code,
    note,
    picture_figure,
    picture_figures,
    render_page,
    renewal,
    section,
    table,
)
from lightning_aigc.report.record import Curve, HealthAlert, Picture, RunRecord
from lightning_aigc.report.units import UNKNOWN, bytes_text, memory_text, rate_text, score_text, speed_text, time_text
from lightning_aigc.report.usage import usage_html
from lightning_aigc.report.vega import chart_html, scripts
from lightning_aigc.report.verdict import judge

MOST_ALERTS = 50
SCORES = {
    "clip_t": "CLIP-T, fit to the prompt",
    "clip_i": "CLIP-I, like your images",
    "direction": "edit, in the direction of the target",
    "kept": "edit, what it keeps",
    "prior_clip_t": "CLIP-T of other prompts",
    "full_base_clip_t": "CLIP-T, packed → full-precision base",
    "full_base_clip_i": "CLIP-I, packed → full-precision base",
}
NOISE = "The bar at a score is the standard error of its difference to step 0, over the same prompts and seeds."


def render_run_page(record: RunRecord, renewed_every_s: float | None = None) -> str:
    """The page of one run. Parts that the run did not measure are left out.

    renewed_every_s: the page loads itself again so often; unset for a run that writes it no more.
    """
    verdict = judge(record)
    parts = [
        heading(record.name, verdict.tone, verdict.sentence),
        note(f"This page renews itself every {renewed_every_s:g} s until the run ends.") if renewed_every_s else "",
        facts_strip(cost(record)),
        *(note(text) for text in record.notes),
        section("Before and after", pictures_html([p for p in record.pictures if not p.is_other])),
        section("Other prompts: what it should not forget", pictures_html([p for p in record.pictures if p.is_other])),
        *(section(html.escape(title), sheet_html(title, uri)) for title, uri in record.sheets.items()),
        section("What to fix", _fine_tune(record)),
        section("Progress", _progress(record)),
        section("Gradients", _health(record)),
        section("Between the ranks", _sync(record)),
        section("Snapshots", _snapshots(record)),
        section("Use the file", _usage(record)),
        section("Config", details("the whole config", code(record.config)) if record.config else ""),
    ]
    has_charts = any('class="chart"' in part for part in parts)
    own = [renewal(renewed_every_s)] if renewed_every_s is not None else []
    return render_page(f"{record.name}: report", parts, [*(scripts() if has_charts else ()), *own])


def cost(record: RunRecord) -> dict[str, str]:
    """Scores and costs of the run, with units, by label."""
    device = f"{record.world_size} × {record.device}" if record.world_size > 1 else record.device
    scored = {}
    for name, label in SCORES.items():
        value, _, noise = score_text(record, name).partition(" ± ")
        if value != UNKNOWN:
            scored[f"{label}{f', ± {noise}' if noise else ''}"] = value
    if "edge_f1" in record.figures:
        floor, ceiling = (record.figures.get(name, math.nan) for name in ("edge_f1_floor", "edge_f1_ceiling"))
        scored[f"edge F1, floor {floor:.2f}, ceiling {ceiling:.2f}"] = f"{record.figures['edge_f1']:.2f}"
    if "preserve_step_ratio" in record.figures:
        share, weight, ratio = (record.figures[f"preserve_{name}"] for name in ("share", "weight", "step_ratio"))
        scored[f"of a batch preserved, weight {weight:g}, at most {ratio:.2g} × a plain step"] = f"{share:.0%}"
    return scored | {
        "optimizer steps": f"{record.steps:,}",
        "training time": time_text(record.seconds),
        "speed": speed_text(record.steps, record.seconds),
        "peak memory" + (" of the process" if record.device == "cpu" else " a card"): memory_text(
            record.peak_memory_mib
        ),
        "device" + (f", {record.precision}" if record.precision else ""): device,
    }


def sheet_html(title: str, uri: str) -> str:
    """A sheet of images, as wide as the page at the most."""
    return image(uri, title, "max-width:100%;image-rendering:pixelated")


def pictures_html(pictures: Sequence[Picture]) -> str:
    """For each prompt a row of images before and one after, for edits their sources above; a column is a seed."""
    of_prompts: dict[str, list[Picture]] = {}
    for picture in pictures:
        of_prompts.setdefault(picture.prompt, []).append(picture)
    figures = []
    for prompt, found in of_prompts.items():
        cells = []
        for when in ("source", "before", "after"):
            uris = [getattr(picture, when) for picture in found]
            if any(uris):
                images = "".join(image(uri, f"{when}: {prompt}") for uri in uris)
                cells.append(f'<span class="when">{when}</span>{images}')
        cells.append('<span class="when">seed</span>' + "".join(f"<span>{picture.seed}</span>" for picture in found))
        style = f'style="--columns:{len(found)}"'
        figures.append(picture_figure(html.escape(prompt), cells, style))
    return picture_figures(figures)


def _progress(record: RunRecord) -> str:
    chart = progress_chart(record)
    if chart is None:
        return ""
    at = dict(zip(record.curves.get("lr", Curve()).steps, record.curves.get("lr", Curve()).values, strict=True))
    rows = [
        [str(c.step), rate_text(at.get(c.step, math.nan)), f"{c.factor:.3g} ×", html.escape(c.reason)]
        for c in record.rate_changes
    ]
    changes = table(rows, ("step", "rate", "times the schedule", "why"))
    said = f"AdaptiveLR changed the rate {'once' if len(rows) == 1 else f'{len(rows)} times'}"
    has_scores = bool(record.grids or record.guard)
    return (
        chart_html(chart, "scores, loss and learning rate by step")
        + (note(NOISE) if has_scores else "")
        + details(said, changes)
    )


def _fine_tune(record: RunRecord) -> str:
    """FineTuneCheck's findings with their remedies; nothing where it found none."""
    if record.fine_tune is None or not record.fine_tune.findings:
        return ""
    rows = [[html.escape(f.check), html.escape(f.message), inline_code(f.remedy)] for f in record.fine_tune.findings]
    return table(rows, ("finding", "what was measured on the last weights", "remedy"))


def _health(record: RunRecord) -> str:
    health = record.health
    if health is None:
        return ""
    timeline, heat = alert_chart(health.alerts, record.steps), norm_heat_map(health)
    return (
        (f"<p>{html.escape(count_alerts(health.alerts))}</p>")
        + (chart_html(timeline, "alerts by step") if timeline is not None else "")
        + details("the alerts", alert_table(health.alerts, MOST_ALERTS))
        + (
            f"<h3>Gradient norm by {html.escape(health.rows_are)} and step</h3>" + chart_html(heat, "gradient norms")
            if heat is not None
            else ""
        )
    )


def count_alerts(alerts: Sequence[HealthAlert]) -> str:
    """`1 error, 2 warnings`"""
    counts = {level: sum(a.level == level for a in alerts) for level in reversed(LEVEL_COLOURS)}
    said = [f"{n} {level}{'s' if n != 1 and level != 'info' else ''}" for level, n in counts.items() if n]
    return ", ".join(said) if said else "No check found anything."


def alert_table(alerts: Sequence[HealthAlert], most: int) -> str:
    """The alerts, the most serious first; one that got worse is listed once, at its worst."""
    levels = list(LEVEL_COLOURS)
    worst = {(a.check, a.layer, a.since): a for a in sorted(alerts, key=lambda a: levels.index(a.level))}
    ordered = sorted(worst.values(), key=lambda a: (-levels.index(a.level), a.step))
    rows = [
        [
            f'<span class="level" style="--tone:var(--{LEVEL_COLOURS[a.level]})">{a.level}</span>',
            str(a.step),
            html.escape(a.check),
            f"{inline_code(a.layer)}<br>{html.escape(a.message)}"
            + (f" (since step {a.since})" if a.since != a.step else ""),
            html.escape(a.cause),
            inline_code(a.remedy),
        ]
        for a in ordered[:most]
    ]
    more = note(f"and {len(ordered) - most} more in health.jsonl") if len(ordered) > most else ""
    return table(rows, ("level", "step", "check", "where and what", "likely cause", "remedy")) + more


def _sync(record: RunRecord) -> str:
    sync = record.sync
    if sync is None:
        return ""
    chart = line_chart(record.curves.get("sync_mb", Curve()), "Sent by one rank in a step", "MB")
    ratios = [value for value in record.curves.get("sync_ratio", Curve()).values if math.isfinite(value)]
    share = f", {ratios[-1]:.3f} of a dense float32 ring" if ratios else ""
    count = sync.skipped_steps
    skipped = f"; {count} step{'s' * (count != 1)} skipped for gradients that were not finite" if count else ""
    said = f"Gradients travelled as {sync.mode} between {sync.world_size} ranks{share}{skipped}."
    return f"<p>{html.escape(said)}</p>" + (chart_html(chart, "bytes sent by step") if chart is not None else "")


def _snapshots(record: RunRecord) -> str:
    taken = record.snapshots
    if taken is None or not (taken.taken or taken.newest):
        return ""
    facts = {"snapshots taken": str(taken.taken)}
    if taken.blocked_ms:
        facts |= {
            "training waited for one, median": f"{sorted(taken.blocked_ms)[len(taken.blocked_ms) // 2]:.1f} ms",
            "at most": f"{max(taken.blocked_ms):.1f} ms",
        }
    if taken.newest_bytes is not None:
        facts["size of the newest"] = bytes_text(taken.newest_bytes)
    said = f"The newest is of step {taken.newest_step}: {taken.newest}" if taken.newest else ""
    return facts_strip(facts) + (note(said) if said else "")


def _usage(record: RunRecord) -> str:
    if record.lora is None or not record.is_finished:
        return ""
    prompts = [picture.prompt for picture in record.pictures if not picture.is_other]
    return usage_html(record.lora, prompts[0] if prompts else "")
