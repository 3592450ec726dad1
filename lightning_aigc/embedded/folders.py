"""Resolve paths such as `embedded:brand` to folders, unpacked once from the archives next to this module."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

from lightning_aigc.atomic_file import atomic_file
from lightning_aigc.cache_folder import cache_folder
from lightning_aigc.errors import DataError

PREFIX = "embedded:"
LINKS: Mapping[str, Mapping[str, str]] = {
    "sd3": {
        "text_encoder_2/config.json": "sd3/text_encoder/config.json",
        "text_encoder_2/model.safetensors": "sd3/text_encoder/model.safetensors",
        "tokenizer_2/tokenizer.json": "sd3/tokenizer/tokenizer.json",
        "tokenizer_2/tokenizer_config.json": "sd3/tokenizer/tokenizer_config.json",
        "vae/diffusion_pytorch_model.safetensors": "sd/vae/diffusion_pytorch_model.safetensors",
    }
}
"""Per folder, files that its archive leaves out because they equal another: file -> archive/file."""
_HERE = Path(__file__).parent
_resolved: dict[str, Path] = {}


def embedded_names() -> list[str]:
    """The names that may follow `embedded:`, sorted."""
    return sorted(path.stem for path in _HERE.glob("*.zip"))


def resolve(path: str) -> Path:
    """Resolve a path argument: `embedded:NAME` is a folder in `folder_of_sets()`; other paths only expand `~`.

    The first use of a name unpacks its archive; a process checks each file of a name once. Where the cache cannot be
    written, a folder for temporary files serves, with a warning.

    Raises: DataError listing the embedded names if NAME is unknown, or if no folder can be written.
    """
    if not path.startswith(PREFIX):
        return Path(path).expanduser()
    name = path.removeprefix(PREFIX)
    known = _resolved.get(name)
    if known is not None and known.is_dir():
        return known
    if name not in embedded_names():
        raise DataError(f"{path!r} is not embedded in this package; embedded are: {', '.join(embedded_names()) or '-'}")
    _resolved[name] = _unpack_where_possible(name)
    return _resolved[name]


def folder_of_sets() -> Path:
    """Parent of the unpacked folders. Raises: RuntimeError if there is no home folder."""
    return cache_folder() / "embedded"


def _unpack_where_possible(name: str) -> Path:
    try:
        return unpack(name, folder_of_sets())
    except (OSError, RuntimeError) as error:
        reason = str(error)
    advice = "set XDG_CACHE_HOME to a folder that can be written"
    try:
        folder = unpack(name, _temporary_folder())
    except OSError as error:
        raise DataError(
            f"cannot unpack {PREFIX}{name}: wanted to write into the cache ({reason}) or a folder for temporary files"
            f" ({error}); {advice}"
        ) from error
    warnings.warn(f"cannot unpack {PREFIX}{name} into the cache ({reason}) and uses {folder}; {advice}", stacklevel=3)
    return folder


def _temporary_folder() -> Path:
    """A folder of this user for temporary files. Raises: OSError, also if another user made it."""
    if sys.platform == "win32":  # each user has a folder for temporary files
        return Path(tempfile.gettempdir()) / "lightning_aigc"
    folder = Path(tempfile.gettempdir()) / f"lightning_aigc-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def unpack(name: str, parent: Path) -> Path:
    """Unpack an embedded folder into `parent / NAME-DIGEST`, and rewrite files there that are missing or damaged.

    Processes may do so at once: a new folder appears complete, by a rename, and a file is rewritten by a rename.

    Raises: OSError
    """
    content = read_content(name)
    folder = parent / f"{name}-{_digest(content)[:8]}"
    if not folder.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}.", ignore_cleanup_errors=True) as temporary:
            unfinished = Path(temporary) / name
            for file, data in content.items():
                (unfinished / file).parent.mkdir(parents=True, exist_ok=True)
                (unfinished / file).write_bytes(data)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    for file, data in content.items():
        if not _holds(folder / file, data):
            with atomic_file(folder / file, durable=False) as opened:
                opened.write(data)
    return folder


def _holds(path: Path, data: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size == len(data) and path.read_bytes() == data
    return False


def read_content(name: str) -> dict[str, bytes]:
    """The files of an embedded folder by their path in it, linked ones included."""
    with zipfile.ZipFile(_HERE / f"{name}.zip") as archive:
        content = {file: archive.read(file) for file in archive.namelist()}
    for file, target in LINKS.get(name, {}).items():
        source, _, member = target.partition("/")
        with zipfile.ZipFile(_HERE / f"{source}.zip") as archive:
            content[file] = archive.read(member)
    return content


def _digest(content: Mapping[str, bytes]) -> str:
    """sha256 of the lines that `sha256sum` prints for the sorted files."""
    lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {file}\n" for file, data in sorted(content.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
