"""Tokens of captions by a pipeline's own tokenizer, read without the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.diffusion.pipeline.single_file import configs_of, type_of_checkpoint
from lightning_aigc.embedded import resolve


def count_tokens(source: str, revision: str | None, captions: Sequence[str]) -> tuple[list[int], int] | None:
    """Each caption's tokens by the tokenizer whose encoder keeps the most, and how many that is.

    None for a single file of another type than `single_file.CONFIGS` has, and for a hub id that is not on this machine.
    """
    path = resolve(source)
    if not path.is_file():
        return _count(str(path) if path.is_dir() else source, revision, captions)
    try:
        with configs_of(type_of_checkpoint(path)) as folder:
            return None if folder is None else _count(str(folder), None, captions)
    except Exception:  # a file that is no checkpoint; loading the model says what is wrong
        return None


def _count(name: str, revision: str | None, captions: Sequence[str]) -> tuple[list[int], int] | None:
    from diffusers import DiffusionPipeline
    from transformers import AutoTokenizer

    where: dict[str, Any] = {"revision": revision, "local_files_only": True}
    try:
        config = DiffusionPipeline.load_config(name, **where)
        family = next(family for family in FAMILIES.values() if family.pipeline == config["_class_name"])
        present = {folder: kept for folder, kept in family.caption_tokens.items() if (config.get(folder) or [None])[0]}
        folder = max(present, key=lambda folder: present[folder])
        tokenizer = AutoTokenizer.from_pretrained(name, subfolder=folder, **where)
    except Exception:  # the hub, diffusers and transformers raise anything; loading the model says what is wrong
        return None
    kept = min(present[folder], int(tokenizer.model_max_length) - tokenizer.num_special_tokens_to_add())
    # A token has at least a byte of the text, so short captions need no tokenizer.
    long = [row for row, caption in enumerate(captions) if len(caption.encode("utf-8", errors="replace")) > kept]
    counts = [0] * len(captions)
    if long:
        given = [captions[row] for row in long]
        tokens = tokenizer(given, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        for row, of_caption in zip(long, tokens, strict=True):
            counts[row] = len(of_caption)
    return counts, kept
