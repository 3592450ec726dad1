"""Sphinx's configuration: `make docs` builds build/site and fails at a link or a picture that leads nowhere."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from lightning_aigc import __version__

project = author = "lightning_aigc"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the arguments' text tells more
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"  # light and dark, readable on a phone, nothing from a font server
html_title = "lightning_aigc"
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#b8451d", "color-brand-content": "#b8451d"},
    "dark_css_variables": {"color-brand-primary": "#f08a5d", "color-brand-content": "#f08a5d"},
}
# A notebook's output that looks like no language is shown as it is.
suppress_warnings = ["misc.highlighting_failure"]

ROOT = Path(__file__).parents[1]
OUTWARD = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)\)")


def name_other_files(app: Any, name: str, source: list[str]) -> None:
    """Name a file of the repository in place of a link to it, because the site does not hold it.

    Raises: FileNotFoundError if the repository has no such file.
    """
    folder = posixpath.dirname(f"docs/{name}")

    def named(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"docs/{name}.md links to {link[2]}, which is not in the repository")
        return f"{link[1]} (`{target}`)"

    source[0] = OUTWARD.sub(named, source[0])


def setup(app: Any) -> None:
    app.connect("source-read", name_other_files)
