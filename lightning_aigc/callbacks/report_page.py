"""Render a run as one HTML file that opens anywhere: numbers, pictures before and after, curves, the config."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

STYLE = """
:root{color-scheme:light dark;--line:#d6582a;--soft:#8884}
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
h1{margin-bottom:0}
table{border-collapse:collapse;margin:1rem 0}
td{padding:.35rem .9rem;border-bottom:1px solid var(--soft);text-align:left}
td:not(:first-child){font-variant-numeric:tabular-nums}
.grids{display:flex;flex-wrap:wrap;gap:2rem}
figure{margin:0}
.pictures{display:grid;gap:4px}
.pictures img{width:100%;min-width:64px;border-radius:4px;display:block}
.prompt{font-size:.9rem;opacity:.8;grid-column:1/-1;margin-top:.5rem}
svg{max-width:100%;height:auto}
pre{background:#8881;padding:1rem;overflow:auto;border-radius:6px;font-size:.85rem}
.note{opacity:.75}
"""


def thumbnail(picture_3HW: Tensor, largest_side: int = 256) -> Tensor:
    """A picture in 0..1 as the page shows it: uint8 on the CPU, no side longer than `largest_side`."""
    array = picture_3HW.detach().clamp(0, 1).nan_to_num(0).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(array)
    picture.thumbnail((largest_side, largest_side))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def picture_data_uri(picture_3HW: Tensor) -> str:
    """A PNG (JPEG above 128 px) as a data URI; the picture is float in 0..1, or a thumbnail."""
    small_3HW = picture_3HW if picture_3HW.dtype is torch.uint8 else thumbnail(picture_3HW)
    picture = Image.fromarray(small_3HW.permute(1, 2, 0).numpy())
    kind = "PNG" if max(picture.size) <= 128 else "JPEG"
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=88) if kind == "JPEG" else picture.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture_grid(pictures: Sequence[Tensor], prompts: Sequence[str], columns: int, title: str) -> str:
    """Pictures in rows of `columns` under their prompt, a group of rows for each prompt."""
    cells, last = [], None
    for picture, prompt in zip(pictures, prompts, strict=True):
        if prompt != last:
            cells.append(f'<div class="prompt">{html.escape(prompt)}</div>')
            last = prompt
        cells.append(f'<img src="{picture_data_uri(picture)}" alt="{html.escape(prompt)}">')
    return (
        f"<figure><h3>{html.escape(title)}</h3>"
        f'<div class="pictures" style="grid-template-columns:repeat({columns},minmax(0,8rem))">'
        f"{''.join(cells)}</div></figure>"
    )


def curve(points: Sequence[tuple[float, float]], title: str, width: int = 560, height: int = 200) -> str:
    """A line chart as inline SVG; points that are not finite are left out. Empty where there are fewer than two."""
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(points) < 2:
        return ""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = min(ys), max(ys)
    span_x, span_y = (max(xs) - min(xs)) or 1.0, (high - low) or 1.0
    left, right, top, bottom = 60, 10, 10, 24

    def place(x: float, y: float) -> str:
        px = left + (x - min(xs)) / span_x * (width - left - right)
        return f"{px:.1f},{top + (high - y) / span_y * (height - top - bottom):.1f}"

    line = " ".join(place(x, y) for x, y in points)

    def label(x: float, y: float, text: str, anchor: str) -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="currentColor">{text}</text>'

    labels = "".join(
        [
            label(left - 6, top + 8, f"{high:.3g}", "end"),
            label(left - 6, height - bottom, f"{low:.3g}", "end"),
            label(left, height - 6, f"step {min(xs):g}", "start"),
            label(width - right, height - 6, f"{max(xs):g}", "end"),
        ]
    )
    frame = f'<rect x="{left}" y="{top}" width="{width - left - right}" height="{height - top - bottom}" fill="none"/>'
    return (
        f'<figure><h3>{html.escape(title)}</h3><svg viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f'<g stroke="var(--soft)">{frame}</g>'
        f'<polyline points="{line}" fill="none" stroke="var(--line)" stroke-width="1.5"/>{labels}</svg></figure>'
    )


def smooth(points: Sequence[tuple[float, float]], window: int = 20) -> list[tuple[float, float]]:
    """The running mean over the last `window` points."""
    smoothed: list[tuple[float, float]] = []
    recent: list[float] = []
    for x, y in points:
        recent = [*recent, y][-window:]
        smoothed.append((x, sum(recent) / len(recent)))
    return smoothed


def render_page(
    title: str,
    rows: Mapping[str, Any],
    notes: Sequence[str],
    grids: Sequence[str],
    curves: Sequence[str],
    config: str,
) -> str:
    """The whole page; every part may be empty."""
    table = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in rows.items())
    said = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
    grids_html = f'<h2>Pictures</h2><div class="grids">{"".join(grids)}</div>' if grids else ""
    curves_html = f'<h2>Curves</h2><div class="grids">{"".join(curves)}</div>' if any(curves) else ""
    config_html = f"<h2>Config</h2><pre>{html.escape(config)}</pre>" if config else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{html.escape(title)}</h1>{said}<table>{table}</table>{grids_html}{curves_html}{config_html}</body></html>"
    )
