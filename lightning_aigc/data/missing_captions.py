"""Caption the pictures that have none, as `missing_captions` and `class_prompt` say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_aigc.data.choices import MissingCaptions
from lightning_aigc.data.names import printable
from lightning_aigc.data.sources import Picture


def fill_captions(used: Sequence[Picture], switch: MissingCaptions, trigger_word: str) -> int:
    """Give every used picture a caption, the empty one under "error". Returns: the number of pictures that had none."""
    without = [picture for picture in used if picture.caption is None]
    for picture in without:
        if switch == "filename":
            picture.caption = " ".join(printable(Path(picture.name).stem).replace("_", " ").split())
        else:
            picture.caption = trigger_word if switch == "trigger" else ""
    return len(without)


def fill_class_captions(used: Sequence[Picture], class_prompt: str | None) -> None:
    """Caption every class picture that has none with `class_prompt`."""
    for picture in used:
        if picture.caption is None:
            picture.caption = class_prompt or ""
