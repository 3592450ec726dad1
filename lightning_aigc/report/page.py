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

from lightning_aigc.report.theme import FONT, style_variables

# No address is allowed: nothing can be fetched or sent.
POLICY = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {}"
IMAGE = re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}")
BREAKS = re.compile(r"(?<=[._/,=])(?=\w)|(?=\[)")
GLUED = "\u00a0"
"""A space at which no line ends."""
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


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table of cells that are HTML already; on a phone each row is a block, and each cell a line with its name.

    It scrolls by itself where a single word is too wide.
    """
    top = f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    names = [f' data-of="{html.escape(name)}"' for name in head] or [""] * max(map(len, rows), default=0)
    body = "".join(
        f"<tr>{''.join(f'<td{name}>{cell}</td>' for name, cell in zip(names, row, strict=False))}</tr>" for row in rows
    )
    return f'<div class="wide"><table>{top}{body}</table></div>' if rows else ""


def unbroken(text: str) -> str:
    """A number with its unit, or a change of a score, as HTML that a line ends within only before its noise."""
    return html.escape(text).replace(" ", GLUED).replace(f"{GLUED}±", " ±")


def inline_code(text: str) -> str:
    """Code in a sentence or cell; a line may end behind the parts of a key, and not within a word."""
    return f"<code>{BREAKS.sub('<wbr>', html.escape(text))}</code>"


def code(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def note(text: str) -> str:
    return f'<p class="soft">{html.escape(text)}</p>'


def details(summary: str, body: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>" if body else ""


def renewal(every_s: float) -> str:
    """A script that loads the page again every `every_s` seconds, where it was scrolled to.

    It waits while a part is unfolded, text is selected or the page is not looked at.
    """
    return RENEW.replace("EVERY_MS", f"{every_s * 1000:.0f}")


@functools.cache
def _hash(script: str) -> str:
    """A script's sha256 as the policy names it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


RENEW = """
const place='scroll of '+location.pathname,back=()=>scrollTo(0,Number(sessionStorage.getItem(place)||0));
history.scrollRestoration='manual';back();addEventListener('load',()=>{back();setTimeout(back,300)});
addEventListener('scrollend',()=>sessionStorage.setItem(place,scrollY));
setInterval(()=>{if(document.hidden||document.querySelector('details[open]')||String(getSelection()))return;
sessionStorage.setItem(place,scrollY);location.reload()},EVERY_MS);
"""
"""The place is kept in the window: the charts, which give the page its height, are drawn after it is loaded."""
STYLE = (
    style_variables()
    + f"*{{box-sizing:border-box}}body{{margin:0;background:var(--page);color:var(--text);font:16px/1.55 {FONT}}}"
    + """
main{max-width:64rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:.95rem;font-weight:600;color:var(--soft);margin:0 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .7rem;letter-spacing:-.01em}
h3{font-size:.95rem;margin:1.2rem 0 .4rem}
p{margin:.4rem 0}
.soft{color:var(--soft);font-size:.9rem}
.card{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:1rem 1.1rem}
.verdict{border-left:6px solid var(--tone);font-size:1.3rem;line-height:1.4;font-weight:600;
letter-spacing:-.01em;overflow-wrap:anywhere}
.verdict .mark{color:var(--tone);margin-right:.45rem}
.good{--tone:var(--good)}.mixed{--tone:var(--mixed)}.bad{--tone:var(--bad)}.unknown{--tone:var(--unknown)}
span.good,span.mixed,span.bad,span.unknown{color:var(--tone);font-weight:500}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.8rem,1fr));gap:.7rem;margin:.9rem 0 0}
.fact{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:.65rem .85rem}
.fact b{display:block;font-size:1.12rem;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.fact span{color:var(--soft);font-size:.82rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th{text-align:left;color:var(--soft);font-weight:500;font-size:.82rem}
td,th{padding:.4rem .9rem .4rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
tr:last-child td{border-bottom:0}
td{font-variant-numeric:tabular-nums}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:.84rem}
code{overflow-wrap:break-word}
pre{background:var(--page);border:1px solid var(--rule);border-radius:8px;padding:.8rem;overflow-x:auto;margin:.4rem 0}
.prompts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:1.3rem}
.prompts figure{margin:0}
.prompts figcaption{font-weight:500;margin-bottom:.35rem;overflow-wrap:anywhere}
.images{display:grid;gap:4px 6px;
grid-template-columns:var(--label,3.1rem) repeat(var(--columns),minmax(0,9rem));align-items:center}
.images img{width:100%;display:block;border-radius:8px;background:var(--rule)}
.images span{font-size:.76rem;color:var(--soft);text-align:center}
.images span.when{text-align:left;overflow-wrap:anywhere}
.images .when .swatch{width:.6rem;height:.6rem}.images .when .run{gap:.25rem}
.chart svg{display:block;overflow:visible}
.chart+.chart{margin-top:1rem}
.chart>div{width:100%;display:block}
.level{color:var(--card);border-radius:99px;padding:.05rem .55rem;font-size:.76rem;background:var(--tone)}
.swatch{display:inline-block;width:.75rem;height:.75rem;border-radius:3px;vertical-align:-.05rem;flex:none}
.run{display:inline-flex;align-items:baseline;gap:.45rem}
details{margin:.4rem 0}summary{cursor:pointer;color:var(--soft);font-size:.9rem}
.copy{font-size:.8rem}
#vg-tooltip-element{background:var(--card)!important;color:var(--text)!important;border:1px solid var(--rule)!important;
border-radius:8px!important;font-family:inherit!important;font-size:.82rem!important;max-width:20rem;
box-shadow:0 4px 18px #0003!important}
#vg-tooltip-element td{border:0;padding:.1rem .4rem .1rem 0}#vg-tooltip-element td.key{color:var(--soft)!important}
@media(max-width:36rem){table,tbody,tr,td{display:block}tr:has(th){display:none}td{border:0;padding:.15rem 0;
overflow-wrap:anywhere}tr{padding:.5rem 0;border-bottom:1px solid var(--rule)}tr:last-child{border:0}
td:first-child{font-weight:600}td[data-of]:not(:first-child)::before{content:attr(data-of) ": ";color:var(--soft)}
main{padding:1rem .7rem 3rem}.card{padding:.8rem}.verdict{font-size:1.08rem}
h2{margin-top:1.7rem}}
"""
)
