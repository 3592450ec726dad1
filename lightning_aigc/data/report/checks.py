"""The checks of the user's folders: each lists all that it found, so that one report shows everything at once.

A new check is a function of this kind and a line in CHECKS:
`def check(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lightning_aigc.data.captions.captions import find_trigger_word
from lightning_aigc.data.images.duplicates import duplicates, near_duplicates
from lightning_aigc.data.images.image_file import THUMBNAIL_SIDE
from lightning_aigc.data.index.checked_folder import CheckedFolder
from lightning_aigc.data.index.filenames import printable
from lightning_aigc.data.index.index_settings import IndexSettings
from lightning_aigc.data.index.sources import Picture, repeats_of
from lightning_aigc.data.report.findings import Finding, some

Check = Callable[[Sequence[CheckedFolder], IndexSettings], Iterator[Finding]]
SWITCH = "or set data.init_args.missing_captions to filename, empty or trigger"


def no_usable_pictures(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Folders without an image, or with broken ones only."""
    for folder in folders:
        if not folder.found.pictures:
            other = f" ({folder.found.other_files} other files are there)" if folder.found.other_files else ""
            advice = f"put images there or set {folder.argument} to their folder"
            yield Finding(f"no images in {folder.shown}{other}", advice, stops=True)
        elif not folder.accepted:
            reasons = some(f"{name}: {reason}" for name, reason in folder.rejected)
            what = f"none of the {len(folder.rejected)} images in {folder.shown} can be used: {reasons}"
            yield Finding(what, "replace them", stops=True)


def damaged_captions(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Lines of metadata.jsonl and captions.csv, and caption files, that cannot be read or contradict each other."""
    for folder in folders:
        if problems := folder.found.caption_problems:
            what = f"{len(problems)} captions in {folder.shown} cannot be read"
            yield Finding(what, "correct each of them", [printable(problem) for problem in problems], stops=True)


def missing_captions(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Usable images without a caption file or entry."""
    for folder in folders:
        names = [printable(p.name) for p in _without_caption(folder) if p.other_caption is None]
        if names and stops_without_caption(folder, settings):
            kind = "class images" if folder.role == "class" else "images"
            what = f"{len(names)} of {len(folder.used)} {kind} in {folder.shown} have no caption"
            advice = "Give them captions, or set data.init_args.class_prompt"
            if folder.role != "class":
                advice = (
                    f"Put the text of each in a file of the same name ending in {settings.caption_extension}, in "
                    f"metadata.jsonl or in captions.csv, let `lightning caption {folder.shown}` write them, {SWITCH}"
                )
                if folder.found.unread_tables:
                    advice += f". Not read because of their names: {some(folder.found.unread_tables)}"
            yield Finding(what, advice, names, stops=True)


def captions_of_another_ending(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Images without a caption that have a caption file with another ending than `caption_extension`."""
    for folder in folders:
        for ending in sorted({p.other_caption for p in _without_caption(folder) if p.other_caption is not None}):
            names = [printable(p.name) for p in _without_caption(folder) if p.other_caption == ending]
            what = f"{len(names)} of {len(folder.used)} images in {folder.shown} have a caption in a {ending} file"
            advice = f"set data.init_args.caption_extension to {ending}, which is {settings.caption_extension} now"
            if any(p.caption is not None for p in folder.used):
                advice = f"rename these files to end in {settings.caption_extension}, as the others do"
            yield Finding(what, advice, names, stops=stops_without_caption(folder, settings))


def empty_captions(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Usable images whose caption file or entry has no text."""
    for folder in folders:
        pictures = [p for p in folder.used if p.caption is None and p.empty_caption is not None]
        if pictures and stops_without_caption(folder, settings):
            listed = [f"{printable(p.name)} ({printable(p.empty_caption)})" for p in pictures]
            what = f"{len(pictures)} of {len(folder.used)} images in {folder.shown} have an empty caption"
            advice = f"Write what each shows, {SWITCH}"
            yield Finding(what, advice, listed, stops=True)


def unmatched_captions(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Captions that belong to no image file."""
    for folder in folders:
        if orphans := [printable(name) for name in folder.found.orphan_captions]:
            what = f"{len(orphans)} captions in {folder.shown} match no image"
            advice = f"Add the images or move these captions away, {SWITCH}"
            yield Finding(what, advice, orphans, stops=settings.missing_captions == "error")


def rejected_pictures(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Files that are no usable images; training continues without them."""
    for folder in folders:
        if folder.rejected and folder.accepted:
            what = f"{len(folder.rejected)} of {len(folder.found.pictures)} images in {folder.shown} are rejected"
            listed = [f"{name}: {reason}" for name, reason in folder.rejected]
            yield Finding(what, "training continues without them", listed)


def words_of_folders(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Folders called like kohya's `10_zorp`, whose word is neither the trigger word nor in the captions."""
    for folder in folders:
        if folder.role != "train" or settings.trigger_word is not None:
            continue
        for (repeats, word), used in _by_kohya_name(folder).items():
            if any(find_trigger_word(picture.caption or "", word) for picture in used):
                continue
            what = f"{len(used)} images are in {repeats}_{printable(word)}: each is taken {repeats} times an epoch"
            trigger = printable(word.split()[0])
            yield Finding(what, f"for {trigger} in each caption, set data.init_args.trigger_word to {trigger}")


def plain_pictures(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Images of one colour: blank scans, and white drawings on transparency, which are laid on white."""
    for folder in folders:
        names = [
            printable(p.name) for p, info in folder.accepted if info.thumbnail == info.thumbnail[:3] * THUMBNAIL_SIDE**2
        ]
        if names:
            what = (
                f"{len(names)} images in {folder.shown} are one colour everywhere, where transparency is laid on white"
            )
            yield Finding(what, "give them a ground that shows what is on them, or leave them out", names)


def _without_caption(folder: CheckedFolder) -> list[Picture]:
    return [picture for picture in folder.used if picture.caption is None and picture.empty_caption is None]


def _by_kohya_name(folder: CheckedFolder) -> dict[tuple[int, str], list[Picture]]:
    """Images by the number and the word of their `10_zorp` folder."""
    found: dict[tuple[int, str], list[Picture]] = {}
    for picture in folder.used:
        repeats, word = repeats_of(folder.found.folder, picture.name)
        if word is not None:
            found.setdefault((repeats, word), []).append(picture)
    return found


def stops_without_caption(folder: CheckedFolder, settings: IndexSettings) -> bool:
    """Whether an image without a caption in this folder stops the training."""
    return settings.class_prompt is None if folder.role == "class" else settings.missing_captions == "error"


CHECKS: list[Check] = [
    no_usable_pictures,
    damaged_captions,
    captions_of_another_ending,
    missing_captions,
    empty_captions,
    unmatched_captions,
    rejected_pictures,
    words_of_folders,
    plain_pictures,
    duplicates,
    near_duplicates,
]
