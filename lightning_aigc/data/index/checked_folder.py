"""CheckedFolder: the images of one folder after each was decoded, with their captions; what the checks look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_aigc.data.images.image_file import PictureInfo
from lightning_aigc.data.images.verify import PictureVerifier
from lightning_aigc.data.index.filenames import printable
from lightning_aigc.data.index.index_settings import IndexSettings
from lightning_aigc.data.index.sources import FoundPictures, Picture, find_pictures

Role = Literal["train", "class", "validation"]


@dataclass(frozen=True)
class CheckedFolder:
    """A folder's images: the accepted ones with what decoding told, and (name, reason) of the rejected ones."""

    role: Role
    found: FoundPictures
    accepted: list[tuple[Picture, PictureInfo]]
    rejected: list[tuple[str, str]]
    written_bytes: int = 0
    """Bytes of the file that holds the results for the next run; 0 if it was not written."""

    @property
    def shown(self) -> str:
        return printable(self.found.folder)

    @property
    def argument(self) -> str:
        return f"data.init_args.{self.role}_data_dir"

    @property
    def used(self) -> list[Picture]:
        return [picture for picture, _ in self.accepted]


def check_folder(settings: IndexSettings, folder: Path, role: Role) -> CheckedFolder:
    """Find a folder's images and captions, and decode every image.

    Raises: DataError for a folder that does not exist or cannot be listed.
    """
    others: tuple[Path | None, ...] = (settings.class_folder, settings.validation_folder, settings.mask_folder)
    others += (settings.condition_folder, settings.cache_dir, settings.folder, *settings.source_folders)
    excluded = tuple(path for path in others if path is not None and path != folder and path.is_relative_to(folder))
    repeats = settings.num_repeats if role == "train" else 1
    argument = f"{role}_data_dir"
    captions = (settings.caption_extension, settings.caption_key)
    found = find_pictures(folder, *captions, repeats, excluded, argument, settings.caption_encoding)
    verifier = PictureVerifier(folder, settings.cache_dir, settings.max_image_pixels)
    results = verifier.verify([picture.path for picture in found.pictures], progress=True)
    checked = CheckedFolder(role, found, [], [], verifier.written_bytes)
    for picture, result in zip(found.pictures, results, strict=True):
        if isinstance(result, str):
            checked.rejected.append((printable(picture.name), printable(result)))
        else:
            checked.accepted.append((picture, result))
            found.notes += [f"{printable(picture.name)}: {note}" for note in result.notes]
    return checked
