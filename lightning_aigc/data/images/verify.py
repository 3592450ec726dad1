"""PictureVerifier: decode every image before training, in threads, and cache the results between runs."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_aigc.atomic_file import write_text
from lightning_aigc.data.cache.resources import cpu_cores
from lightning_aigc.data.images.image_file import DECODERS, PictureInfo, PictureRejectedError, inspect_picture

_FORMAT = 3
_RECENT_NS = 100_000_000  # a file written this close to the check may change again within one clock tick

_Stamp = list[int]  # size, mtime_ns, ctime_ns


class PictureVerifier:
    """Checks images; results are cached by (path, size, times) in one file per folder in the cache directory."""

    def __init__(self, folder: Path, cache_dir: Path, max_image_pixels: int) -> None:
        self.max_image_pixels = max_image_pixels
        key = f"{os.fspath(folder.absolute())}|{max_image_pixels}|{_FORMAT}|{DECODERS}"
        self.memory_file = cache_dir / "pictures" / f"{sha256(os.fsencode(key)).hexdigest()[:32]}.json"
        self._memory = self._load()
        self.written_bytes = 0
        """Bytes of the file of results, if this object wrote it."""

    def verify(self, paths: Sequence[Path], progress: bool = False) -> list[PictureInfo | str]:
        """For each path its PictureInfo, or the reason why the image is rejected."""
        stamps = [_stamp(path) for path in paths]
        results = [self._recall(path, stamp) for path, stamp in zip(paths, stamps, strict=True)]
        unknown = [index for index, result in enumerate(results) if result is None]
        if unknown:
            now = time.time_ns()
            with ThreadPoolExecutor(min(8, cpu_cores())) as pool:
                checks = pool.map(self._check, (paths[index] for index in unknown))
                if progress and len(unknown) > 2000:
                    from tqdm import tqdm

                    checks = tqdm(checks, total=len(unknown), desc="checking images", unit="img")
                for index, result in zip(unknown, checks, strict=True):
                    results[index] = result
                    stamp = stamps[index]
                    if stamp is not None and max(stamp[1], stamp[2]) < now - _RECENT_NS:
                        self._memory[str(paths[index])] = (stamp, result)
            self._save()
        return [result for result in results if result is not None]

    def _check(self, path: Path) -> PictureInfo | str:
        try:
            return inspect_picture(path, self.max_image_pixels)
        except PictureRejectedError as rejected:
            return str(rejected)

    def _recall(self, path: Path, stamp: _Stamp | None) -> PictureInfo | str | None:
        known = self._memory.get(str(path))
        return known[1] if known is not None and known[0] == stamp else None

    def _load(self) -> dict[str, tuple[_Stamp, PictureInfo | str]]:
        memory: dict[str, tuple[_Stamp, PictureInfo | str]] = {}
        try:
            for path, (stamp, result) in json.loads(self.memory_file.read_bytes()).items():
                if isinstance(result, str):
                    memory[path] = (stamp, result)
                else:
                    width, height, content, notes, thumbnail = result
                    info = PictureInfo(width, height, content, tuple(notes), base64.b64decode(thumbnail))
                    memory[path] = (stamp, info)
        except (OSError, ValueError, TypeError, AttributeError):
            return {}  # absent or damaged: check the images again
        return memory

    def _save(self) -> None:
        """Write the results; if that fails, the next run checks the images again."""
        text = json.dumps({path: [stamp, _plain(result)] for path, (stamp, result) in self._memory.items()})
        with contextlib.suppress(OSError):
            write_text(self.memory_file, text)
            self.written_bytes = len(text)


def _plain(result: PictureInfo | str) -> Any:
    if isinstance(result, str):
        return result
    thumbnail = base64.b64encode(result.thumbnail).decode()
    return [result.width, result.height, result.content_sha256, list(result.notes), thumbnail]


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
