"""Limits on the files that ship: their number, and no loose images among them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lightning_aigc
import lightning_aigc_kernels

MOST_FILES = 543
"""Nearly all are modules. Raise it for a feature, not for data: data goes into an archive."""
PACKAGES = [Path(package.__file__).parent for package in (lightning_aigc, lightning_aigc_kernels)]


def shipped() -> Iterator[Path]:
    """Files of both packages; the link to configs/ counts as one."""
    for package in PACKAGES:
        for path in package.rglob("*"):
            if "__pycache__" not in path.parts and (path.is_symlink() or path.is_file()):
                yield path


def test_the_packages_hold_few_files() -> None:
    assert len(list(shipped())) <= MOST_FILES


def test_images_ship_in_archives() -> None:
    assert [path for path in shipped() if path.suffix in (".png", ".jpg", ".jpeg", ".webp")] == []
