"""File names as text: for any terminal, and for comparing."""

from __future__ import annotations

import unicodedata


def printable(text: object) -> str:
    """Text that any terminal takes: file names may hold bytes that are no characters."""
    return str(text).encode("utf-8", errors="backslashreplace").decode("utf-8")


def comparable(name: str) -> str:
    """File names compare in Unicode form C: macOS writes form D, most editors form C."""
    return unicodedata.normalize("NFC", name).removeprefix("./")
