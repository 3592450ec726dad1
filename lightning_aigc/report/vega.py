"""Charts as parts of a page, drawn by Vega from a script that the page includes, or as images."""

from __future__ import annotations

import contextlib
import functools
import html
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from lightning_aigc.atomic_file import atomic_file
from lightning_aigc.cache_folder import cache_folder
from lightning_aigc.errors import ConfigError
from lightning_aigc.report.theme import as_light, chart_config


class Chart(Protocol):
    """An Altair chart of any kind."""

    def to_dict(self, validate: bool = True) -> dict[str, Any]:
        """Return it as Vega-Lite JSON."""
        ...


PICTURE_SCALE = 2.0
PICTURE_ENDINGS = (".png", ".svg")

# Vega-Lite fits single charts to their container; charts above one another have a common width, set from here.
DRAW = """
document.querySelectorAll('.chart').forEach(box=>{
  const spec=JSON.parse(box.querySelector('script').textContent), at=box.querySelector('div');
  const isColumn='vconcat' in spec, room=()=>Math.max(120,at.clientWidth-64);
  if(isColumn)spec.vconcat.forEach(panel=>panel.width=room());else spec.width='container';
  vegaEmbed(at,spec,{renderer:'svg',actions:false}).then(({view})=>{
    box.dataset.drawn='yes';
    const fit=()=>isColumn?view.width(room()).run():window.dispatchEvent(new Event('resize'));
    new ResizeObserver(fit).observe(at);
  }).catch(error=>{box.dataset.drawn='no';at.textContent='This chart could not be drawn: '+error;console.error(error)});
});
"""


def chart_html(chart: Chart, label: str, least_px: int = 0) -> str:
    """A chart's place on a page.

    Args: label: what it shows, for those who do not see it.
        least_px: below this width it scrolls by itself instead of shrinking; 0 always shrinks.
    """
    style = f' style="min-width:{least_px}px"' if least_px else ""
    spec = json.dumps(spec_of(chart)).replace("<", "\\u003c")
    return (
        f'<div class="chart"><script type="application/json">{spec}</script>'
        f'<div role="img" aria-label="{html.escape(label)}"{style}></div></div>'
    )


def spec_of(chart: Chart) -> dict[str, Any]:
    """The chart as Vega-Lite JSON, in the page's colours."""
    spec: dict[str, Any] = chart.to_dict(validate=False)  # the tests validate; it takes half of the time
    return spec | {
        "config": chart_config(),
        "autosize": {"type": "fit-x" if "vconcat" not in spec else "pad", "contains": "padding"},
    }


def scripts() -> tuple[str, str]:
    """The scripts that draw all charts of a page: Vega itself, some 900 KB, and a few lines."""
    return bundle(), DRAW


@functools.cache
def bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that needs no network.

    Making it takes 1.5 s, so it is kept in the cache folder, by the version of vl-convert.
    """
    file = None
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, or none that can be read and written
        file = cache_folder() / f"vega-{version('vl-convert-python')}.js"
        return file.read_text(encoding="utf-8")
    import vl_convert

    script: str = vl_convert.javascript_bundle(None)  # type: ignore[arg-type]  # the default, of vega-embed
    script = script.replace("</script", "<\\/script")
    if file is not None:
        with contextlib.suppress(OSError), atomic_file(file) as out:
            out.write(script.encode())
    return script


def check_picture(file: Path) -> None:
    """Raises: ConfigError for a name that is neither .png nor .svg."""
    if file.suffix not in PICTURE_ENDINGS:
        raise ConfigError(f"got the image {file}; wanted a name that ends with {' or '.join(PICTURE_ENDINGS)}")


def write_picture(chart: Chart, file: Path) -> None:
    """Write a chart as .png or .svg, on white. Raises: ConfigError for another ending, OSError."""
    import vl_convert

    check_picture(file)
    spec = spec_of(chart)
    spec = spec | {"config": spec["config"] | {"background": "#ffffff"}, "padding": 16}
    spec.pop("autosize")
    text = as_light(json.dumps(spec))
    data = (
        vl_convert.vegalite_to_png(text, scale=PICTURE_SCALE)
        if file.suffix == ".png"
        else vl_convert.vegalite_to_svg(text).encode()
    )
    with atomic_file(file, durable=False) as out:
        out.write(data)
