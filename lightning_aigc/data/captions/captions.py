"""Clean a caption, and make the caption of one training item."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence


def clean_caption(text: str) -> str:
    """The caption on one line without control characters or lone surrogates, safe for a tokenizer and UTF-8."""
    text = text.encode("utf-8", errors="replace").decode("utf-8").replace("\ufeff", "").replace("\x00", "")
    return " ".join(text.split())


def add_trigger_word(caption: str, trigger_word: str | None, separator: str) -> str:
    """The caption with the trigger word in front, unless it already contains that whole word in any case.

    >>> add_trigger_word("a red shoe", "zorp", ",")
    'zorp a red shoe'
    >>> add_trigger_word("shoe, red", "zorp", ",")
    'zorp, shoe, red'
    """
    if not trigger_word or find_trigger_word(caption, trigger_word):
        return caption
    if not caption:
        return trigger_word
    return f"{trigger_word}{separator} {caption}" if separator in caption else f"{trigger_word} {caption}"


def find_trigger_word(caption: str, trigger_word: str) -> re.Match[str] | None:
    """Position of the full trigger word in a caption; case does not matter."""
    return re.search(rf"(?<!\w){re.escape(trigger_word)}(?!\w)", caption, re.IGNORECASE)


def without_trigger_word(prompts: Sequence[str], trigger_word: str) -> list[str]:
    """The prompts that do not have the trigger word."""
    return [prompt for prompt in prompts if find_trigger_word(prompt, trigger_word) is None]


def trigger_tags(caption: str, trigger_word: str | None, separator: str) -> int:
    """Leading tags that hold the trigger word, which stay in front; 0 for a word further behind.

    >>> [trigger_tags(text, "zorp", ",") for text in ("Zorp, red", "a zorp shoe, red", "red, zorp", "zorpy, red")]
    [1, 1, 0, 0]
    """
    found = find_trigger_word(caption, trigger_word) if trigger_word else None
    if found is None or separator in caption[: found.start()]:
        return 0
    return caption[: found.end()].count(separator) + 1


def shuffle_tags(caption: str, separator: str, keep_tokens: int, rng: random.Random) -> str:
    """The caption with its tags shuffled, except the first `keep_tokens`."""
    tags = [tag.strip() for tag in caption.split(separator)]
    head, tail = tags[:keep_tokens], [tag for tag in tags[keep_tokens:] if tag]
    rng.shuffle(tail)
    return f"{separator} ".join([*head, *tail])
