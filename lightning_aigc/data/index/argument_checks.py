"""Checks of ImageCaptionData's arguments that need no data."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Mapping
from typing import Any, Literal, get_args

from lightning_aigc.errors import DataError
from lightning_aigc.setting_checks import Readers, unread_settings

MissingCaptions = Literal["error", "filename", "empty", "trigger"]
SourceFit = Literal["crop", "own"]
READERS: Readers = {
    "prior_ratio": ("class_data_dir", (None,), "FOLDER"),
    "keep_tokens": ("shuffle_caption", (False,), "true"),
    **dict.fromkeys(
        ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale"),
        ("enable_bucket", (False,), "true"),
    ),
    **dict.fromkeys(("image_column", "dataset_split"), ("dataset_name", (None,), "NAME")),
    "prefetch_factor": ("num_workers", (0,), "2"),
}


def check_choices(given: dict[str, Any]) -> None:
    """Check the arguments and their combinations. Raises: DataError naming the argument."""
    sources = [key for key in ("train_data_dir", "dataset_name", "shards") if given[key] is not None]
    if len(sources) != 1:
        got = " and ".join(sources) or "none"
        raise DataError(f"set exactly one of data.init_args.train_data_dir, dataset_name and shards, got {got}")
    for key in ("train_batch_size", "num_repeats", "max_image_pixels"):
        if given[key] < 1:
            raise DataError(f"data.init_args.{key} must be at least 1, got {given[key]}")
    for key in ("keep_tokens", "num_workers", "seed"):
        if given[key] is not None and given[key] < 0:
            raise DataError(f"data.init_args.{key} must be at least 0, got {given[key]}")
    if given["prefetch_factor"] is not None and given["prefetch_factor"] < 1:
        raise DataError(f"data.init_args.prefetch_factor must be at least 1, got {given['prefetch_factor']}")
    if not 0 <= given["caption_dropout_rate"] <= 1:
        raise DataError(f"data.init_args.caption_dropout_rate must be in [0, 1], got {given['caption_dropout_rate']}")
    if not 0 < given["prior_ratio"] < float("inf"):
        raise DataError(
            f"data.init_args.prior_ratio must be above 0, got {given['prior_ratio']};"
            " set data.init_args.prior_ratio: 1.0 for as many class images as your own"
        )
    if not 0 <= given["validation_split"] < 1:
        raise DataError(
            f"data.init_args.validation_split must be in [0, 1), got {given['validation_split']};"
            " 0.1 holds out a tenth of all"
        )
    if given["validation_split"] and given["validation_data_dir"] is not None:
        raise DataError(
            "data.init_args.validation_split and validation_data_dir both say which images are held out; set only one"
        )
    if given["missing_captions"] not in get_args(MissingCaptions):
        accepted = ", ".join(get_args(MissingCaptions))
        raise DataError(f"data.init_args.missing_captions must be one of {accepted}, got {given['missing_captions']!r}")
    if given["source_fit"] not in get_args(SourceFit):
        accepted = " or ".join(get_args(SourceFit))
        raise DataError(f"data.init_args.source_fit must be {accepted}, got {given['source_fit']!r}")
    if given["source_column"] is not None and given["dataset_name"] is None:
        raise DataError(
            "data.init_args.source_column names a column of a dataset, and dataset_name is not set; a folder's sources"
            " are in data.init_args.source_data_dir, or listed in its table"
        )
    if given["source_column"] is not None and given["source_data_dir"] is not None:
        raise DataError("data.init_args.source_column and source_data_dir both say where sources are; set only one")
    if given["source_resolution"] is not None:
        if given["source_fit"] != "own":
            raise DataError(
                "data.init_args.source_resolution is the size of sources with a shape of their own; set"
                " data.init_args.source_fit: own, or data.init_args.source_resolution: null"
            )
        if given["source_resolution"] < 8 or given["source_resolution"] % 8:
            raise DataError(
                f"data.init_args.source_resolution must be a positive multiple of 8, got {given['source_resolution']}"
            )
    for key in ("caption_separator", "image_column", "caption_column", "dataset_split"):
        if not given[key]:
            raise DataError(f"data.init_args.{key} must not be empty")
    if not given["caption_extension"].strip(". "):
        raise DataError(
            f"data.init_args.caption_extension must be something like .txt, got {given['caption_extension']!r}"
        )
    if (encoding := given["caption_encoding"]) is not None and not _is_encoding(encoding):
        raise DataError(
            f"data.init_args.caption_encoding must be an encoding that Python knows, got {encoding!r}; use gb18030,"
            " cp932 or cp1252, or set data.init_args.caption_encoding: null to have it guessed"
        )
    check_trigger_word(given["trigger_word"], "data.init_args.trigger_word")
    if given["missing_captions"] == "trigger" and not given["trigger_word"]:
        raise DataError(
            "data.init_args.missing_captions: trigger needs a word; set data.init_args.trigger_word, such as zorp"
        )
    if given["class_prompt"] is not None and given["class_data_dir"] is None:
        raise DataError("data.init_args.class_prompt needs data.init_args.class_data_dir, the folder of class images")
    if given["cache_latents"] and not given["center_crop"]:
        raise DataError(
            "data.init_args.cache_latents and center_crop: false exclude each other (a cached image has one crop); set"
            " data.init_args.center_crop: true"
        )
    if given["cache_text_embeddings"] and given["shuffle_caption"]:
        raise DataError(
            "data.init_args.cache_text_embeddings and shuffle_caption exclude each other (each order is a new text);"
            " set data.init_args.shuffle_caption: false"
        )


def unread_arguments(given: dict[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each argument that is given and no other argument reads."""
    said = unread_settings(given, defaults, READERS, "data.init_args")
    if given["caption_separator"] != defaults["caption_separator"] and not (
        given["shuffle_caption"] or given["trigger_word"]
    ):
        said.append(
            "data.init_args.caption_separator changes nothing without shuffle_caption and trigger_word; set"
            " data.init_args.shuffle_caption: true, or remove caption_separator"
        )
    return said


def check_seen_sources(given: dict[str, Any], title: str) -> None:
    """Check that the caches suit a text encoder that sees the sources of an edit, which `title` has.

    Raises: DataError naming the argument.
    """
    if given["cache_latents"] and not given["cache_text_embeddings"]:
        raise DataError(
            f"{title}'s text encoder sees the source images, and data.init_args.cache_latents keeps their latents"
            " alone; set data.init_args.cache_text_embeddings: true"
        )
    if given["cache_text_embeddings"] and not given["center_crop"]:
        raise DataError(
            f"{title}'s text encoder sees the source images, so that each random crop is a new text; set"
            " data.init_args.center_crop: true"
        )


def check_trigger_word(word: str | None, shown: str) -> None:
    """Refuse a trigger word that a wrong encoding made: one accented letter, or a character that stands for damage.

    Raises: DataError naming the argument, `shown`.
    """
    if word is None:
        return
    alone = len(word) == 1 and not word.isascii() and word < "\u2e80"  # a Chinese character alone is a word
    if alone or "\ufffd" in word or any(unicodedata.category(letter) == "Cc" for letter in word):
        raise DataError(
            f"{shown} is {word!r}, which looks like text that was read in a wrong encoding;"
            f" set {shown}: zorp or another word that you can type"
        )


def _is_encoding(name: str) -> bool:
    try:
        codecs.lookup(name)
    except (LookupError, ValueError):
        return False
    return True
