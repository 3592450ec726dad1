"""File names as text: for any terminal, and for comparing."""

from __future__ import annotations

import sys
import unicodedata


def printable(text: object) -> str:
    """Text that any terminal takes: file names may hold bytes that are no characters."""
    return str(text).encode("utf-8", errors="backslashreplace").decode("utf-8")


def comparable(name: str) -> str:
    """File names compare in Unicode form C: macOS writes form D, most editors form C."""
    return unicodedata.normalize("NFC", name).removeprefix("./")


def print_anywhere(text: str) -> None:
    """Print text, escaping what the terminal's encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding), flush=True)
