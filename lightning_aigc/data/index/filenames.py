"""File names as text for printing and for comparison."""

from __future__ import annotations

import sys
import unicodedata

from lightning_aigc.secrets import redact_text


def printable(text: object) -> str:
    """Escape bytes of a file name that are not valid characters."""
    return str(text).encode("utf-8", errors="backslashreplace").decode("utf-8")


def comparable(name: str) -> str:
    """The file name in Unicode form C: macOS writes form D, most editors form C."""
    return unicodedata.normalize("NFC", name).removeprefix("./")


def print_anywhere(text: str) -> None:
    """Print text without secrets, escaping characters outside the terminal's encoding."""
    text = redact_text(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding), flush=True)
