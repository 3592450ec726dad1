"""Encoding of caption files, guessed once for all files of a folder that are not UTF-8: one caption tells little."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

_BYTE_ORDER_MARKS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
TITLES = {
    "gb18030": "GBK",
    "big5": "Big5",
    "cp932": "Shift-JIS",
    "euc_jp": "EUC-JP",
    "euc_kr": "EUC-KR",
    "cp1251": "Cyrillic (cp1251)",
    "cp1252": "Latin-1 (cp1252)",
    "latin_1": "Latin-1",
    "utf-16-le": "UTF-16",
    "utf-16-be": "UTF-16",
}
"""Encodings that are guessed, with the names that editors show."""
GUESSED_FROM_BYTES = 2**16
_HIGH_BYTES = re.compile(rb"[\x80-\xff]+")
_WESTERN = re.compile(rb"[\x85\x91-\x97\xa0-\xff]{1,2}")


def title_of(encoding: str) -> str:
    """The name by which editors offer an encoding."""
    return TITLES.get(encoding, encoding)


def own_encoding(content: bytes) -> str | None:
    """The encoding that a text shows itself: by its mark, as UTF-8, or as UTF-16 without a mark; None for others."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            return encoding
    if content.count(0) * 4 >= len(content) > 0:  # every other byte of Latin text in UTF-16 is 0
        return "utf-16-le" if content[1::2].count(0) > content[::2].count(0) else "utf-16-be"
    return "utf-8" if _decodes(content, "utf-8") else None


def guess_encoding(contents: Iterable[bytes]) -> str | None:
    """The encoding of all texts that do not show theirs; None where each does.

    >>> guess_encoding([b"a mug", "caf\u00e9".encode("latin-1")])
    'cp1252'
    """
    pool = b"\n".join(content for content in contents if own_encoding(content) is None)[:GUESSED_FROM_BYTES]
    if not pool:
        return None
    runs = _HIGH_BYTES.findall(pool)
    if all(map(_WESTERN.fullmatch, runs)) and 2 * sum(len(run) == 1 for run in runs) > len(runs):
        return "cp1252"  # single accents between letters; too few of them for statistics
    from charset_normalizer import from_bytes

    known = [encoding for encoding in TITLES if not encoding.startswith(("utf", "latin"))]
    found = from_bytes(pool, cp_isolation=known, preemptive_behaviour=False, enable_fallback=False).best()
    return found.encoding if found is not None else "cp1252"


def decode_text(content: bytes, encoding: str | None = None) -> tuple[str, str | None]:
    """The text, in `encoding` if it does not show its own, and the encoding's title where that is not UTF-8.

    A damaged text is read as well as possible, and its title says so.
    """
    shown = own_encoding(content)
    if shown is not None:
        title = None if shown.startswith("utf-8") else title_of(shown)
        if _decodes(content, shown):
            return content.decode(shown), title if shown in TITLES else None
        return content.decode(shown, errors="replace"), f"damaged {shown} text, as well as possible"
    for chosen in filter(None, (encoding, guess_encoding([content]))):
        if _decodes(content, chosen):
            return content.decode(chosen), title_of(chosen)
    return content.decode("latin_1"), title_of("latin_1")


def _decodes(content: bytes, encoding: str) -> bool:
    try:
        content.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True
