"""Colours and type of pages and charts: CSS variables on a page, which follow light and dark; plain ones in files."""

from __future__ import annotations

from typing import Any

COLOURS = {
    # name: (light, dark); told apart with the common kinds of colour blindness too
    "text": ("#1d2330", "#e8eaf0"),
    "soft": ("#5c6575", "#9aa3b5"),
    "rule": ("#e3e6ec", "#2b3140"),
    "page": ("#f6f7f9", "#11141b"),
    "card": ("#ffffff", "#191e28"),
    "blue": ("#2467c9", "#6ea8ff"),
    "orange": ("#c8621a", "#f2a15c"),
    "teal": ("#0c8578", "#48cdbb"),
    "violet": ("#7a4fc0", "#b596f5"),
    "good": ("#15803d", "#4ccb7a"),
    "mixed": ("#a86500", "#f0b849"),
    "bad": ("#c22f2f", "#ff7d74"),
    "unknown": ("#5c6575", "#9aa3b5"),
}
RUN_COLOURS = ("blue", "orange", "teal", "violet", "bad", "good", "mixed", "soft")
"""One for each of the runs that are compared."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"


def colour(name: str) -> str:
    """A colour as charts on a page name it."""
    return f"var(--{name})"


def style_variables() -> str:
    """The colours as CSS variables, light and dark."""
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in COLOURS.items()) for i in range(2))
    return f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def as_light(text: str) -> str:
    """A chart's JSON with the light colours themselves, for images."""
    for name, (light, _) in COLOURS.items():
        text = text.replace(colour(name), light)
    return text


def chart_config() -> dict[str, Any]:
    """Vega-Lite's config."""
    axis = {
        "labelColor": colour("soft"), "titleColor": colour("soft"), "gridColor": colour("rule"),
        "domain": False, "ticks": False, "labelPadding": 6, "titleFontWeight": "normal", "titlePadding": 8,
        "labelFontSize": 11, "titleFontSize": 11,
    }  # fmt: skip
    return {
        "font": FONT,
        "background": "transparent",
        "view": {"stroke": None},
        "axis": axis,
        "title": {
            "color": colour("text"), "anchor": "start", "fontSize": 13, "fontWeight": 600, "frame": "group",
            "offset": 8, "subtitleColor": colour("soft"), "subtitleFontSize": 12,
        },
        "legend": {
            "labelColor": colour("text"), "titleColor": colour("soft"), "orient": "top", "title": None,
            "labelFontSize": 12, "symbolStrokeWidth": 2, "columnPadding": 16,
        },
        "line": {"strokeWidth": 2, "strokeCap": "round", "strokeJoin": "round"},
        "point": {"size": 46, "filled": True},
        "rule": {"strokeWidth": 1.5},
    }  # fmt: skip
