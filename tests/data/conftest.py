"""Folders of small images, a fake encoder, and a fingerprint of a folder."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fakes.models.encoder import FakeEncoder
from lightning_aigc.data import ImageCaptionData


def picture(width: int = 64, height: int = 64, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A smooth random image, so that scaling and JPEG leave it recognisable."""
    values = np.random.default_rng(seed).integers(0, 255, (4, 4, len(mode) if mode in {"RGB", "RGBA", "LA"} else 1))
    image = Image.fromarray(values.squeeze().astype(np.uint8), mode if mode in {"RGB", "RGBA", "LA"} else "L")
    return image.resize((width, height), Image.Resampling.BICUBIC)


def save(path: Path, image: Image.Image | None = None, caption: str | None = "a thing", **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture(seed=sum(map(ord, path.name)))).save(path, **options)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def fingerprint(folder: Path) -> dict[str, tuple[str, int]]:
    """Content hash and time of every file and folder."""
    return {
        str(path.relative_to(folder)): (
            sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder",
            path.lstat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def tools() -> SimpleNamespace:
    return SimpleNamespace(picture=picture, save=save, fingerprint=fingerprint, FakeEncoder=FakeEncoder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The user's folder, empty."""
    path = tmp_path / "photos"
    path.mkdir()
    return path


@pytest.fixture
def make(tmp_path: Path, folder: Path) -> Callable[..., ImageCaptionData]:
    """ImageCaptionData for 64-pixel training with a cache of its own."""

    def build(**arguments: Any) -> ImageCaptionData:
        defaults: dict[str, Any] = {
            "train_data_dir": str(folder),
            "resolution": 64,
            "bucket_reso_steps": 16,
            "cache_dir": str(tmp_path / "cache"),
            "num_workers": 0,
            "pin_memory": False,
        }
        return ImageCaptionData(**{**defaults, **arguments})

    return build
