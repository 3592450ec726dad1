"""Captions that a tokenizer cuts off: by its tokens where a model has one here, else by words and characters."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_aigc.protocols import CountsTokens

LONG_CAPTION_WORDS = 60
"""CLIP keeps 75 tokens; English averages about 1.25 tokens a word."""
LETTERS_A_WORD = 6
WORDS_A_CHARACTER = 1.5
"""Characters of a script without spaces (Chinese, Japanese, Thai): CLIP takes about two tokens a character."""
WORDS_A_LETTER = 0.5
"""Characters of another script than Latin (Cyrillic, Greek, Arabic), which CLIP has few words of."""
_LETTERS = re.compile(r"[^\W_]+")


def words_in(caption: str) -> float:
    """Words of English that take about as many of CLIP's tokens.

    >>> words_in("a red cup"), words_in("red_cup,1girl"), words_in("\u4e00\u4e2a\u7ea2\u8272")
    (3.0, 3.0, 6.0)
    """
    words = 0.0
    for letters in _LETTERS.findall(caption):
        latin = sum(letter < "\u0250" for letter in letters)
        dense = sum(letter >= "\u0e00" for letter in letters)
        words += max(1, latin // LETTERS_A_WORD) if latin else 0
        words += WORDS_A_CHARACTER * dense + WORDS_A_LETTER * (len(letters) - latin - dense)
    return words


def is_long(caption: str) -> bool:
    """Whether CLIP will probably cut a caption off."""
    return words_in(caption) > LONG_CAPTION_WORDS


def note_on_lengths(captions: Sequence[str], module: object = None) -> str | None:
    """A sentence on the captions that are cut off; None if none is."""
    counted = module.count_tokens(captions) if isinstance(module, CountsTokens) else None
    if counted is not None:
        tokens, kept = counted
        long = sum(count > kept for count in tokens)
        return f"{long} captions have more than {kept} tokens; the rest of each is cut off" if long else None
    long = sum(map(is_long, captions))
    if not long:
        return None
    return (
        f"{long} captions have more than {LONG_CAPTION_WORDS} words, or as many tags, or"
        f" {LONG_CAPTION_WORDS / WORDS_A_CHARACTER:g} characters of a script without spaces; CLIP's tokenizer keeps"
        " about 75 tokens of each"
    )
