"""The run's health as one HTML file that opens without a network: alerts in time, gradient norms as a heat map."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from lightning_aigc.callbacks.health.alerts import LEVELS, Alert
from lightning_aigc.callbacks.health.norm_history import NormHistory, block_norms
from lightning_aigc.callbacks.health.parameter_names import block_of
from lightning_aigc.callbacks.report_page import STYLE, curve

COLOURS = {"info": "#5b8dd6", "warning": "#e0a021", "error": "#d63a2a"}
MOST_ROWS = 160
"""Layers in the heat map; above, it shows blocks instead."""
MOST_LISTED = 200
OWN_STYLE = """
th{text-align:left;padding:.35rem .9rem}
td{vertical-align:top;font-size:.9rem}
code{background:#8882;padding:.1rem .3rem;border-radius:4px}
.level{color:#fff;border-radius:4px;padding:.05rem .45rem;font-size:.8rem}
.wide{overflow-x:auto}
"""


def render_health_page(title: str, alerts: Sequence[Alert], history: NormHistory, facts: Mapping[str, str]) -> str:
    """The whole page."""
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
    norms, title_of_map = history.norms(), "Gradient norm by layer and step"
    if len(norms) > MOST_ROWS:
        norms, title_of_map = _by_block(norms), "Gradient norm by block and step"
    last = max([*history.steps, *(a.step for a in alerts), 1])
    losses = curve(list(zip(history.steps, history.losses, strict=True)), "loss at each look")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}: health</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}{OWN_STYLE}</style></head>'
        f"<body><h1>{html.escape(title)}: health</h1><p class=note>{verdict(alerts)}</p><table>{rows}</table>"
        f"<h2>Alerts</h2>{timeline(alerts, last)}{table(alerts)}"
        f'<h2>{title_of_map}</h2><div class="wide">{heat_map(history.steps, norms)}</div>{losses}</body></html>'
    )


def verdict(alerts: Sequence[Alert]) -> str:
    """The page's first sentence."""
    counts = {level: sum(a.level == level for a in alerts) for level in reversed(LEVELS)}
    said = [f"{n} {level}{'s' if n != 1 and level != 'info' else ''}" for level, n in counts.items() if n]
    return ", ".join(said) if said else "No check found anything."


def timeline(alerts: Sequence[Alert], last_step: int, width: int = 900) -> str:
    """Each check as a row, each alert as a mark at its step."""
    checks = sorted({a.check for a in alerts})
    if not checks:
        return ""
    left, row, right = 130, 22, 12
    marks = []
    for i, check in enumerate(checks):
        y = 14 + i * row
        marks.append(_text(left - 8, y + 4, check, "end", 12))
        marks.append(f'<line x1="{left}" x2="{width - right}" y1="{y}" y2="{y}" stroke="var(--soft)"/>')
        for a in sorted((a for a in alerts if a.check == check), key=lambda a: LEVELS.index(a.level)):
            x = left + a.step / last_step * (width - left - right)
            tip = html.escape(f"step {a.step}, {a.layer}: {a.message}")
            marks.append(f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{COLOURS[a.level]}"><title>{tip}</title></circle>')
    height = 14 + len(checks) * row + 12
    ends = _text(left, height - 2, "step 0") + _text(width - right, height - 2, str(last_step), "end")
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">{"".join(marks)}{ends}</svg>'


def table(alerts: Sequence[Alert]) -> str:
    """The alerts, the most serious first."""
    if not alerts:
        return ""
    # An alert that got worse is listed once, at its worst.
    worst = {(a.check, a.layer, a.since): a for a in sorted(alerts, key=lambda a: LEVELS.index(a.level))}
    ordered = sorted(worst.values(), key=lambda a: (-LEVELS.index(a.level), a.step))
    rows = [
        f'<tr><td><span class="level" style="background:{COLOURS[a.level]}">{a.level}</span></td><td>{a.step}</td>'
        f"<td>{a.check}</td><td><code>{html.escape(a.layer)}</code><br>{html.escape(a.message)}"
        f"{f' (since step {a.since})' if a.since != a.step else ''}</td><td>{html.escape(a.cause)}</td>"
        f"<td><code>{html.escape(a.remedy)}</code></td></tr>"
        for a in ordered[:MOST_LISTED]
    ]
    more = (
        f"<p class=note>and {len(ordered) - MOST_LISTED} more in health.jsonl</p>" if len(ordered) > MOST_LISTED else ""
    )
    head = (
        "<tr><th>level</th><th>step</th><th>check</th><th>where and what</th><th>likely cause</th><th>remedy</th></tr>"
    )
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>{more}'


def heat_map(steps: Sequence[int], norms: Mapping[str, Sequence[float]], cell: int = 11) -> str:
    """Layers down, steps across, colour by the norm's order of magnitude; grey is None or zero, red is not finite."""
    known = [v for row in norms.values() for v in row if math.isfinite(v) and v > 0]
    if not known or not steps:
        return "<p class=note>No look at the gradients was taken.</p>"
    low, high = math.log10(min(known)), math.log10(max(known))
    wide = max(2.0, min(2.0 * cell, 700 / len(steps)))
    left, top = 10 + 6.2 * max(len(name) for name in norms), 8
    parts = []
    for r, (name, row) in enumerate(norms.items()):
        y = top + r * cell
        parts.append(_text(left - 6, y + cell - 2, name, "end", 10))
        for start, end, colour in _runs(row, low, high):
            parts.append(
                f'<rect x="{left + start * wide:.1f}" y="{y}" width="{(end - start) * wide + 0.3:.1f}" height="{cell}"'
                f' fill="{colour}"><title>{html.escape(name)}, step {steps[start]}: {row[start]:.3g}</title></rect>'
            )
    bottom = top + len(norms) * cell + 14
    right = left + len(steps) * wide
    parts += [_text(left, bottom, f"step {steps[0]}"), _text(right, bottom, str(steps[-1]), "end")]
    for i in range(40):  # the key
        parts.append(
            f'<rect x="{left + i * 5:.0f}" y="{bottom + 12}" width="5.3" height="10" fill="{_colour(i / 39)}"/>'
        )
    parts += [_text(left - 6, bottom + 21, f"{10**low:.1g}", "end"), _text(left + 206, bottom + 21, f"{10**high:.1g}")]
    width = max(right, left + 240) + 20
    size = f'viewBox="0 0 {width:.0f} {bottom + 30}" width="{width:.0f}"'
    return f'<svg {size} role="img" style="max-width:none">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="currentColor">{html.escape(text)}</text>'


def _runs(row: Sequence[float], low: float, high: float) -> list[tuple[int, int, str]]:
    """Neighbouring cells of one colour: first, end, colour."""
    runs: list[tuple[int, int, str]] = []
    for i, value in enumerate(row):
        if math.isnan(value) or value == 0:
            colour = "#8883"
        elif not math.isfinite(value):
            colour = COLOURS["error"]
        else:
            colour = _colour(round((math.log10(value) - low) / ((high - low) or 1), 2))
        if runs and runs[-1][2] == colour:
            runs[-1] = (runs[-1][0], i + 1, colour)
        else:
            runs.append((i, i + 1, colour))
    return runs


def _colour(share: float) -> str:
    """From dark blue over green to yellow."""
    return f"hsl({250 - 200 * share:.0f} 65% {25 + 40 * share:.0f}%)"


def _by_block(norms: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    names = list(norms)
    looks = len(next(iter(norms.values())))
    blocks = [block_norms(names, [norms[name][i] for name in names], block_of) for i in range(looks)]
    return {block: [look[block] for look in blocks] for block in (blocks[0] if blocks else {})}
