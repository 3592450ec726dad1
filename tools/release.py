"""Steps of .github/workflows/release.yml: `python -m tools.release tag v0.1.0` and `python -m tools.release readme`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
"""A Markdown link, or an image with `!`, to a file of the repository."""


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    read: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return read


def check_tag(tag: str) -> None:
    """Raises: SystemExit if the tag is not that of the version in pyproject.toml."""
    wanted = f"v{project()['version']}"
    if tag != wanted:
        raise SystemExit(f"got tag {tag}, wanted {wanted}, the version in pyproject.toml; change one of them")


def with_addresses(text: str) -> str:
    """The README with links that work outside of the repository: to its files at this version's tag."""
    about = project()
    repository, tag = about["urls"]["Repository"], f"v{about['version']}"
    raw = repository.replace("https://github.com/", "https://raw.githubusercontent.com/")

    def address(link: re.Match[str]) -> str:
        folder = f"{raw}/{tag}" if link[1] else f"{repository}/blob/{tag}"
        return f"{link[1]}[{link[2]}]({folder}/{link[3]})"

    return LINK.sub(address, text)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["tag", tag]:
            check_tag(tag)
        case ["readme"]:
            path = ROOT / "README.md"
            path.write_text(with_addresses(path.read_text(encoding="utf-8")), encoding="utf-8")
        case _:
            raise SystemExit(f"got {' '.join(arguments) or 'no command'}, wanted `tag TAG` or `readme`")


if __name__ == "__main__":
    main(sys.argv[1:])
