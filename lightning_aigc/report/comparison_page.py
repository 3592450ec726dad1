"""Several runs on one page: their table, curves, images of the same prompts and seeds, and differing config keys."""

from __future__ import annotations

import html
from collections.abc import Sequence

from lightning_aigc.report.comparison import comparison_chart, config_differences, run_names, table_head, table_rows
from lightning_aigc.report.page import (
    image,
    inline_code,
    note,
    picture_figure,
    picture_figures,
    render_page,
    section,
    table,
    unbroken,
)
from lightning_aigc.report.record import RunRecord
from lightning_aigc.report.theme import RUN_COLOURS
from lightning_aigc.report.vega import chart_html, scripts
from lightning_aigc.report.verdict import judge

MOST_SEEDS = 4
"""Images of each prompt."""


def render_comparison_page(records: Sequence[RunRecord]) -> str:
    """The whole page."""
    names = run_names(records)
    cells = [
        [_named(row[0], i), html.escape(row[1]), *map(unbroken, row[2:])] for i, row in enumerate(table_rows(records))
    ]
    verdicts = "".join(
        f'<p>{_named(name, i)}: <span class="{judge(record).tone}">{html.escape(judge(record).sentence)}</span></p>'
        for i, (name, record) in enumerate(zip(names, records, strict=True))
    )
    chart = comparison_chart(records)
    differing = config_differences(records)
    keys = [[inline_code(key), *map(inline_code, values)] for key, values in differing.items()]
    same = note("The configs are the same, but for the folder of the run.")
    parts = [
        f"<h1>{len(records)} runs: {html.escape(', '.join(names))}</h1>",
        section("Verdicts", verdicts),
        section("Scores and cost", table(cells, table_head(records))),
        section("Curves", chart_html(chart, "scores and losses of all runs by step") if chart is not None else ""),
        section("After training, same prompts and seeds", _pictures(records, names)),
        section("Config keys that differ", table(keys, ("key", *names)) if keys else same),
    ]
    return render_page(f"{len(records)} runs: comparison", parts, scripts() if chart is not None else ())


def _named(name: str, place: int) -> str:
    shade = RUN_COLOURS[place % len(RUN_COLOURS)]
    swatch = f'<span class="swatch" style="background:var(--{shade})"></span>'
    return f'<span class="run">{swatch}<span>{html.escape(name)}</span></span>'


def _pictures(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    """For each prompt that several runs drew, the images of the same seeds, a row a run."""
    drawn = [{(p.prompt, p.seed): p for p in record.pictures if p.after} for record in records]
    shared = [pair for pair in drawn[0] if all(pair in pictures for pictures in drawn[1:])]
    figures = []
    for prompt in dict.fromkeys(prompt for prompt, _ in shared):
        seeds = [seed for found, seed in shared if found == prompt][:MOST_SEEDS]
        cells = ['<span class="when">before</span>' + "".join(image(drawn[0][prompt, s].before, prompt) for s in seeds)]
        for place, pictures in enumerate(drawn):
            row = "".join(image(pictures[prompt, seed].after, prompt) for seed in seeds)
            cells.append(f'<span class="when">{_named(names[place], place)}</span>{row}')
        cells.append('<span class="when">seed</span>' + "".join(f"<span>{seed}</span>" for seed in seeds))
        style = f'style="--columns:{len(seeds)};--label:5.5rem"'
        figures.append(picture_figure(html.escape(prompt), cells, style))
    return picture_figures(figures)
