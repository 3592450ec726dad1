"""IndexSettings: the arguments of ImageCaptionData that decide which images are trained on, and how each is cut."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_aigc.data.index.argument_checks import MissingCaptions, SourceFit
from lightning_aigc.data.index.materialize import folder_from_dataset, folder_from_shards
from lightning_aigc.data.loader.buckets import BucketSettings
from lightning_aigc.embedded import resolve


@dataclass(frozen=True)
class IndexSettings:
    """The arguments of ImageCaptionData that determine the index, under the same names."""

    folder: Path
    shown_as: str
    cache_dir: Path
    buckets: BucketSettings
    class_folder: Path | None = None
    validation_folder: Path | None = None
    mask_folder: Path | None = None
    condition_folder: Path | None = None
    source_folders: tuple[Path, ...] = ()
    source_fit: SourceFit = "crop"
    source_resolution: int | None = None
    caption_extension: str = ".txt"
    caption_key: str = "text"
    caption_encoding: str | None = None
    caption_separator: str = ","
    trigger_word: str | None = None
    class_prompt: str | None = None
    num_repeats: int = 1
    validation_split: float = 0.0
    missing_captions: MissingCaptions = "error"
    use_alpha_mask: bool = False
    max_image_pixels: int = 178_000_000
    written: tuple[int, int] = (0, 0)
    """Files and bytes that were written to the cache for a dataset or shards."""

    @classmethod
    def of(cls, given: dict[str, Any], cache_dir: Path, buckets: BucketSettings) -> IndexSettings:
        """From ImageCaptionData's arguments; writes a dataset or shards to a folder of the cache first.

        Raises: DataError for a dataset or shard that cannot be read.
        """
        began = time.time() - 0.1  # a file system's clock may be a tick behind
        folder = _picture_folder(given, cache_dir)
        is_new = given["train_data_dir"] is None and folder.stat().st_ctime >= began
        sizes = [path.stat().st_size for path in folder.iterdir()] if is_new else []
        own = {
            "written": (len(sizes), sum(sizes)),
            "folder": folder,
            "shown_as": str(given["train_data_dir"] or given["dataset_name"] or given["shards"]),
            "cache_dir": cache_dir,
            "buckets": buckets,
            "class_folder": _folder(given["class_data_dir"]),
            "validation_folder": _folder(given["validation_data_dir"]),
            "mask_folder": _folder(given["mask_dir"]),
            "condition_folder": _folder(given["conditioning_data_dir"]),
            "source_folders": _folders(given["source_data_dir"]),
            "caption_extension": dotted(given["caption_extension"]),
            "caption_key": given["caption_column"] if given["train_data_dir"] is not None else "text",
        }
        return cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given} | own)


def dotted(extension: str) -> str:
    """The extension with its dot."""
    return extension if extension.startswith(".") else f".{extension}"


def _picture_folder(given: dict[str, Any], cache_dir: Path) -> Path:
    if given["train_data_dir"] is not None:
        return resolve(given["train_data_dir"]).absolute()
    if given["dataset_name"] is not None:
        named = given["source_column"]
        sources = (named,) if isinstance(named, str) else tuple(named or ())
        columns = (given["image_column"], given["caption_column"], sources)
        return folder_from_dataset(given["dataset_name"], given["dataset_split"], *columns, cache_dir)
    captions = (dotted(given["caption_extension"]), given["caption_column"], given["caption_encoding"])
    return folder_from_shards(given["shards"], cache_dir, *captions)


def _folders(paths: str | list[str] | None) -> tuple[Path, ...]:
    given = [paths] if isinstance(paths, str) else paths or []
    return tuple(resolve(path).absolute() for path in given)


def _folder(path: str | None) -> Path | None:
    return None if path is None else resolve(path).absolute()
