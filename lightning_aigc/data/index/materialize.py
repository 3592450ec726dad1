"""Convert Hugging Face datasets and webdataset shards, once, to a cached folder of images with metadata.jsonl.

Checks, buckets and caches are then the same for every source.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_aigc.data.cache.cache import check_writable
from lightning_aigc.data.captions.listed_captions import TARGET_KEYS
from lightning_aigc.data.index.webdataset_shards import Sample, expand, read_shard
from lightning_aigc.errors import DataError

_DONE = "metadata.jsonl"
SAMPLES_FORMAT = 4
"""Rule by which members of a shard make a sample; a folder that was written by another rule is not used again."""


def folder_from_shards(
    pattern: str, cache_dir: Path, caption_extension: str, caption_key: str, encoding: str | None = None
) -> Path:
    """Extract the images and captions of .tar shards ("data/{000..009}.tar", or with * and ?) into the cache.

    Raises: DataError for a shard that is absent or damaged.
    """
    shards = expand(pattern)
    stamps = []
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"the shard {shard} does not exist; data.init_args.shards is {pattern!r}")
        status = shard.stat()
        stamps.append([str(shard.absolute()), status.st_size, status.st_mtime_ns])

    def rows() -> Iterator[Sample]:
        for number, shard in enumerate(shards):
            try:
                samples = read_shard(shard, caption_extension.lstrip(".").lower(), caption_key, encoding)
                for count, sample in enumerate(samples):
                    safe = re.sub(r"\W+", "_", sample.name.rpartition("/")[2])[:80]
                    yield sample._replace(name=f"{number:05d}_{count:07d}_{safe}")
            except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
                raise DataError(f"the shard {shard} cannot be read: {error}; make or download it again") from error

    return _materialize(cache_dir / "shards", [stamps, caption_extension, caption_key, encoding, SAMPLES_FORMAT], rows)


def folder_from_dataset(
    name: str, split: str, image_column: str, caption_column: str, source_columns: tuple[str, ...], cache_dir: Path
) -> Path:
    """Write images, captions and sources of a Hugging Face dataset (hub name, or local folder) into the cache.

    With sources, a column that describes targets goes along where there is one, by the names that tables have.
    Raises: DataError if it cannot be loaded, or has no such split or columns.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "data.init_args.dataset_name needs the package datasets: pip install 'lightning_aigc[hub]'"
        ) from error
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            loaded: Any = datasets.load_from_disk(name)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(name, split=split)
    except Exception as error:  # errors of datasets, fsspec, arrow or the network
        text = " ".join(str(error).split())[:300]
        raise DataError(
            f"the dataset {name!r}, split {split!r}, cannot be loaded: {type(error).__name__}: {text}. Check "
            "data.init_args.dataset_name and dataset_split, and the network; a local copy can be named by its folder"
        ) from error
    wanted = [("image_column", image_column), ("caption_column", caption_column)]
    for key, column in (*wanted, *(("source_column", column) for column in source_columns)):
        if column not in loaded.column_names:
            raise DataError(
                f"the dataset {name!r} has no column {column!r}, only {loaded.column_names}; set data.init_args.{key}"
            )
    describes = next((key for key in TARGET_KEYS if source_columns and key in loaded.column_names), None)
    for column in (image_column, *source_columns):
        if isinstance(loaded.features[column], datasets.Image):
            loaded = loaded.cast_column(column, datasets.Image(decode=False))

    def rows() -> Iterator[Sample]:
        for number, row in enumerate(loaded):
            caption = row[caption_column]
            if isinstance(caption, list) and caption:
                caption = caption[0]
            if caption is not None and not isinstance(caption, str):
                raise DataError(
                    f"the dataset {name!r}, row {number}: {caption_column!r} must be text, got "
                    f"{type(caption).__name__}; set data.init_args.caption_column"
                )
            image = _image_bytes(row[image_column], name, number, "image_column", image_column)
            sources = [_image_bytes(row[each], name, number, "source_column", each) for each in source_columns]
            description = row[describes] if describes is not None and isinstance(row[describes], str) else ""
            yield Sample(image, f"{number:08d}", caption, tuple(sources), description)

    columns = [image_column, caption_column, *source_columns, *([describes] if describes is not None else [])]
    return _materialize(cache_dir / "datasets", [name, split, loaded._fingerprint, *columns], rows)


def _materialize(parent: Path, identity: Any, rows: Callable[[], Iterator[Sample]]) -> Path:
    """The folder with all rows, named by a hash of the source's identity; written only if it does not exist yet."""
    key = sha256(json.dumps(identity).encode("utf-8", errors="backslashreplace")).hexdigest()[:32]
    folder = parent / key
    if (folder / _DONE).is_file():
        return folder
    check_writable(parent)
    temporary = Path(tempfile.mkdtemp(dir=parent, suffix=".part"))
    try:
        with (temporary / _DONE).open("w") as metadata:
            for content, stem, caption, sources, description in rows():
                name = f"{stem}{_suffix(content)}"
                (temporary / name).write_bytes(content)
                row: dict[str, Any] = {"file_name": name} | ({} if caption is None else {"text": caption})
                if sources:
                    row["source"] = [f"{stem}.source_{at}{_suffix(each)}" for at, each in enumerate(sources)]
                    for source, each in zip(row["source"], sources, strict=True):
                        (temporary / source).write_bytes(each)
                    row |= {TARGET_KEYS[0]: description} if description.strip() else {}
                if len(row) > 1:
                    metadata.write(json.dumps(row) + "\n")
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / _DONE).is_file():  # else another process wrote the same content first
                raise
    except OSError as error:
        raise DataError(
            f"cannot write {folder}: {error.strerror or error}; free some space, or set data.init_args.cache_dir"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _image_bytes(value: Any, name: str, number: int, key: str, column: str) -> bytes:
    if isinstance(value, dict) and value.get("bytes") is not None:
        return bytes(value["bytes"])
    if isinstance(value, bytes):
        return value
    path = value.get("path") if isinstance(value, dict) else value
    try:
        if isinstance(path, str):
            return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"the dataset {name!r}, row {number}: cannot read {path}: {error.strerror}") from error
    if hasattr(value, "save"):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return buffer.getvalue()
    raise DataError(f"the dataset {name!r}, row {number}: {column!r} holds no image; set data.init_args.{key}")


def _suffix(content: bytes) -> str:
    return ".jpg" if content.startswith(b"\xff\xd8") else ".png"  # only a name: images are opened by their content
