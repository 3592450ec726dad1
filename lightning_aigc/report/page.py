"""A page as one HTML file that opens anywhere: its style, its parts, and nothing that asks a network.

A record may come from a stranger's run folder, so each of its values is escaped or checked here, and the policy runs
our own scripts alone, by their hashes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
from collections.abc import Mapping, Sequence

from lightning_aigc.report.style import STYLE

# No address is allowed: nothing can be fetched or sent.
POLICY = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {}"
IMAGE = re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}")
MARKS = {"good": "✓", "mixed": "–", "bad": "✕", "unknown": "?"}


def render_page(title: str, parts: Sequence[str], scripts: Sequence[str] = ()) -> str:
    """The whole page; empty parts are left out.

    Args: scripts: the text of each script, and nothing else will run.
    """
    # Vega builds functions from strings, hence unsafe-eval.
    allowed = " ".join([*(f"'sha256-{_hash(text)}'" for text in scripts), "'unsafe-eval'"]) if scripts else "'none'"
    run = "".join(f"<script>{text}</script>" for text in scripts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(allowed)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style></head><body><main>'
        f"{''.join(parts)}</main>{run}</body></html>\n"
    )


def image(uri: str, alt: str, style: str = "") -> str:
    """An image from a record; a dash where there is none, and a word where the value is no image."""
    if not IMAGE.fullmatch(uri):
        return f"<span>{'not an image' if uri else '-'}</span>"
    attribute = f' style="{style}"' if style else ""
    return f'<img src="{uri}" alt="{html.escape(alt)}"{attribute}>'


def heading(name: str, tone: str, sentence: str) -> str:
    """The page's top: whose it is, and the verdict."""
    return (
        f'<h1>{html.escape(name)}</h1><p class="card verdict {tone}">'
        f'<span class="mark" aria-hidden="true">{MARKS[tone]}</span>{html.escape(sentence)}</p>'
    )


def facts_strip(facts: Mapping[str, str]) -> str:
    """Numbers with what they are, by label."""
    cells = [
        f'<div class="fact"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>'
        for label, value in facts.items()
    ]
    return f'<div class="facts">{"".join(cells)}</div>' if cells else ""


def picture_figure(name: str, cells: Sequence[str], style: str) -> str:
    """The images of one prompt; `name` and `cells` are HTML, `style` a style attribute with the grid's columns."""
    return f'<figure><figcaption>{name}</figcaption><div class="images" {style}>{"".join(cells)}</div></figure>'


def picture_figures(figures: Sequence[str]) -> str:
    """The figures of all prompts; empty without one."""
    return f'<div class="prompts">{"".join(figures)}</div>' if figures else ""


def section(title: str, *parts: str) -> str:
    """A heading and a card; empty where all parts are."""
    body = "".join(parts)
    return f'<section><h2>{html.escape(title)}</h2><div class="card">{body}</div></section>' if body else ""


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), *, wraps: bool = True) -> str:
    """A table of cells that are HTML already; it scrolls by itself where it is too wide."""
    top = f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    kind = "" if wraps else ' class="numbers"'
    return f'<div class="wide"><table{kind}>{top}{body}</table></div>' if rows else ""


def code(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def note(text: str) -> str:
    return f'<p class="soft">{html.escape(text)}</p>'


def details(summary: str, body: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>" if body else ""


@functools.cache
def _hash(script: str) -> str:
    """A script's sha256 as the policy names it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
