"""Resolve paths such as `embedded:brand` to the folders that ship with this package."""

from __future__ import annotations

from pathlib import Path

from lightning_aigc.errors import DataError

PREFIX = "embedded:"
_HERE = Path(__file__).parent


def embedded_names() -> list[str]:
    """The names that may follow `embedded:`, sorted."""
    return sorted(path.name for path in _HERE.iterdir() if path.is_dir() and not path.name.startswith(("_", ".")))


def resolve(path: str) -> Path:
    """Resolve a path argument: `embedded:NAME` is a folder beside this module; other paths only expand `~`.

    Raises: DataError listing the embedded names if NAME is unknown.
    """
    if not path.startswith(PREFIX):
        return Path(path).expanduser()
    name = path.removeprefix(PREFIX)
    if name not in embedded_names():
        raise DataError(f"{path!r} is not embedded in this package; embedded are: {', '.join(embedded_names()) or '-'}")
    return _HERE / name
