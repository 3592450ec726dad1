"""Find the mask of each image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_aigc.data.images.image_file import PictureRejectedError, load_mask, looks_like_a_picture
from lightning_aigc.data.index.filenames import printable
from lightning_aigc.data.report.report import DataReport
from lightning_aigc.errors import DataError


def find_masks(
    folder: Path | None, use_alpha_mask: bool, names: Sequence[str], report: DataReport
) -> list[Path | None]:
    """The mask file with each image's name, suffix aside; None for an image without a mask.

    Raises: DataError if the folder does not exist, no mask matches, or a mask cannot be used.
    """
    if use_alpha_mask and folder is None:
        report.notes.append("masks: the alpha channel of each image that has one")
    if folder is None:
        return [None] * len(names)
    if not folder.is_dir():
        raise DataError(f"mask_dir {printable(folder)} does not exist; set data.init_args.mask_dir")
    by_name: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        stem = path.relative_to(folder).with_suffix("").as_posix()
        if path.is_file() and not path.name.startswith(".") and looks_like_a_picture(path):
            if stem in by_name:
                raise DataError(f"two masks have one name: {printable(by_name[stem])} and {printable(path)}; keep one")
            by_name[stem] = path
    masks = [by_name.get(Path(name).with_suffix("").as_posix()) for name in names]
    report.masks = sum(mask is not None for mask in masks)
    if not report.masks:
        raise DataError(
            f"no mask in {printable(folder)} has the name of an image, such as "
            f"{printable(Path(names[0]).with_suffix('.png'))}; rename them or remove data.init_args.mask_dir"
        )
    for mask in masks:
        if mask is not None:
            _check_mask(mask)
    return masks


def _check_mask(path: Path) -> None:
    try:
        extrema = load_mask(path).getextrema()
    except (Exception, PictureRejectedError) as error:
        raise DataError(f"the mask {printable(path)} cannot be read: {error}; make it again or remove it") from error
    if extrema[1] == 0:
        raise DataError(f"the mask {printable(path)} is black everywhere: nothing to learn; white is what gets learned")
