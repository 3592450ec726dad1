"""Captions that say nothing: only the trigger word, all the same, or a camera's file names."""

from __future__ import annotations

import re

from lightning_aigc.data.advice.dataset_summary import Material, named
from lightning_aigc.data.captions.captions import without_trigger_word

SILENT_SHARE = 0.5
"""Share of captions without content from which they are reported."""
ALIKE_FROM = 10
"""Images from which one caption for all is reported; with fewer it is DreamBooth's usual instance prompt."""
_GENERIC = frozenset(
    ("a", "an", "the", "of", "on", "in", "by", "with", "and", "photo", "photograph", "picture", "image")
)
_FILE_NAME = re.compile(r"^(img|dsc[nf]?|pxl|image|photo|screenshot|untitled|\d{4,})[-_ ]*[\d_\- ]*$", re.IGNORECASE)


def words_of(caption: str) -> list[str]:
    """The words of a caption in lower case, without punctuation."""
    return re.findall(r"[^\W_]+", caption.lower())


def check_captions(material: Material) -> list[str]:
    """Report captions from which the model cannot learn what belongs to which word."""
    captions = [sample.caption for sample in material.samples]
    total = len(captions)
    if total < 2:
        return []
    names = [s.caption for s in material.samples if _FILE_NAME.match(_without(s.caption, material.trigger_word))]
    if len(names) >= SILENT_SHARE * total:
        return [
            f"{len(names)} of {total} captions are file names of a camera ({named(names)}): they name nothing in the "
            "image; write captions, or set data.init_args.missing_captions: trigger"
        ]
    is_one_word = len(set(captions)) == 1 and len(_content(captions[0], None)) == 1
    silent = total if is_one_word else sum(not _content(caption, material.trigger_word) for caption in captions)
    if silent >= SILENT_SHARE * total:
        return [
            f"{silent} of {total} captions say nothing beyond the trigger word (such as {captions[0]!r}): the word "
            "learns the thing, its place and its light at once, and no prompt can separate them; name in each caption "
            "what the image shows, as in `a zorp mug on white` (data.init_args.caption_extension: .txt)"
        ]
    if len(set(captions)) == 1 and total >= ALIKE_FROM:
        return [
            f"all {total} captions are the same ({captions[0]!r}): nothing tells the images apart; name in each what "
            "differs between them (data.init_args.caption_extension: .txt)"
        ]
    return []


def check_prompts(material: Material) -> list[str]:
    """Report prompts that the run samples and that do not name what it learns."""
    word = material.trigger_word
    without = without_trigger_word(material.prompts, word) if word else []
    if not without:
        return []
    return [
        f"{len(without)} of {len(material.prompts)} prompts lack the trigger word {word} (such as {without[0]!r}): "
        "they show what the base draws, and score nothing that was learned; put the word into "
        "model.init_args.validation_prompts"
    ]


def _content(caption: str, trigger_word: str | None) -> set[str]:
    return set(words_of(caption)) - _GENERIC - set(words_of(trigger_word or ""))


def _without(caption: str, trigger_word: str | None) -> str:
    return (
        re.sub(re.escape(trigger_word), "", caption, flags=re.IGNORECASE).strip(" ,")
        if trigger_word
        else caption.strip()
    )
