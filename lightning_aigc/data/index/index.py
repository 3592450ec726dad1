"""TrainingIndex: find, check and caption the images of the folders, place each in a bucket, and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

from lightning_aigc.data.captions.captions import add_trigger_word
from lightning_aigc.data.images.conditions import find_masks, pair_conditions
from lightning_aigc.data.images.crop import Sample
from lightning_aigc.data.images.edit_pairs import pair_sources, place_sources
from lightning_aigc.data.images.image_file import PictureInfo
from lightning_aigc.data.index.argument_checks import MissingCaptions
from lightning_aigc.data.index.checked_folder import CheckedFolder, check_folder
from lightning_aigc.data.index.filenames import printable
from lightning_aigc.data.index.index_settings import IndexSettings
from lightning_aigc.data.index.prior import assign_class_pictures
from lightning_aigc.data.index.sources import Picture
from lightning_aigc.data.loader.buckets import Placement, bucket_shapes, place, place_in
from lightning_aigc.data.loader.validation import held_out
from lightning_aigc.data.report.checks import CHECKS
from lightning_aigc.data.report.findings import DataCheckError
from lightning_aigc.data.report.report import BucketRow, DataReport

Accepted = tuple[Picture, PictureInfo]


@dataclass
class TrainingIndex:
    """All training samples, the user's first, then class images; buckets hold indices of `samples`."""

    samples: list[Sample]
    buckets: list[list[int]]
    class_buckets: list[list[int]]
    shapes: list[tuple[int, int]]
    has_masks: bool
    report: DataReport
    validation: list[Sample] = field(default_factory=list)
    """The held-out images."""
    _contents: dict[str, list[int]] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def sources_per_image(self) -> int:
        """Source images of each image, 0 where they are no pairs of an edit."""
        return len(self.samples[0].sources)

    @property
    def has_conditions(self) -> bool:
        """Whether each image has a condition file."""
        return self.samples[0].condition is not None

    def contents(self) -> dict[str, list[int]]:
        """Return the number and a checksum of each kind of file that is there, read once, to tell other data."""
        if self._contents is None:
            self._contents = self._count_contents()
        return self._contents

    def _count_contents(self) -> dict[str, list[int]]:
        own = [sample for sample in self.samples if not sample.is_prior]
        kinds: dict[str, list[Sample]] = {
            "images": own,
            "class images": [sample for sample in self.samples if sample.is_prior],
            "held-out images": self.validation,
        }
        files = {"masks": [s.mask for s in own], "conditions": [s.condition for s in (*own, *self.validation)]}
        found = {
            name: [
                len({sample.path for sample in some}),
                crc32(repr([_told_apart(sample) for sample in some]).encode()),
            ]
            for name, some in kinds.items()
        }
        for name, paths in files.items():
            there = [path for path in paths if path is not None]
            checksum = 0
            for path in there:
                checksum = crc32(path.read_bytes(), checksum)
            found[name] = [len(there), checksum]
        return {name: counted for name, counted in found.items() if counted[0]}

    def spread_samples(self, count: int) -> list[Sample]:
        """Up to `count` of the user's samples, evenly spread over the largest bucket, so all have the same size."""
        largest: list[int] = max(self.buckets, key=len)
        rows = list(dict.fromkeys(largest))
        count = min(count, len(rows))
        return [self.samples[rows[i * len(rows) // count]] for i in range(count)]


def _told_apart(sample: Sample) -> tuple[str, ...]:
    return (sample.content_sha256, sample.caption, *(source.content_sha256 for source in sample.sources))


def build_index(settings: IndexSettings) -> TrainingIndex:
    """Find, check and place all images; the same folders give the same index on every rank.

    Raises: DataCheckError with everything that stops the training and the whole report, such as captions without a
        image or the reverse; DataError for a split or folder that cannot be.
    """
    report = DataReport(printable(settings.shown_as))
    report.count_written(*settings.written)
    folders = _check_folders(settings, report)
    accepted = {folder.role: folder.accepted for folder in folders}
    masks = find_masks(folders, settings, report)
    if stops := [finding for finding in report.findings if finding.stops]:
        raise DataCheckError(stops, report)
    _fill_captions(settings, folders, report)

    # By the source's content: with five instructions for one source, all five are on one side.
    contents = [(picture.source_infos or (info,))[0].content_sha256 for picture, info in accepted["train"]]
    held = held_out(contents, settings.validation_split)
    shapes_known = bucket_shapes(settings.buckets)
    user, validation = [], []
    for position, ((picture, info), mask) in enumerate(zip(accepted["train"], masks, strict=True)):
        sample = _sample(picture, info, place(info.width, info.height, settings.buckets, shapes_known), mask, settings)
        if position in held:
            validation.append(sample)
        else:
            user.append((sample, picture.repeats))
    for picture, info in accepted.get("validation", []):
        placement = place(info.width, info.height, settings.buckets, shapes_known)
        validation.append(_sample(picture, info, placement, None, settings))
    index = _in_buckets(user, report)
    index.validation = validation
    index.has_masks = settings.mask_folder is not None or settings.use_alpha_mask
    _add_class_pictures(index, accepted.get("class", []), settings)
    rows = zip(index.shapes, index.buckets, index.class_buckets, strict=True)
    report.images_held_out = len(validation)
    report.buckets = [_bucket_row(shape, items, of_class, index.samples) for shape, items, of_class in rows]
    return index


def _check_folders(settings: IndexSettings, report: DataReport) -> list[CheckedFolder]:
    """Open every image of every folder, and run all checks on them."""
    folders = [check_folder(settings, settings.folder, "train")]
    if settings.class_folder is not None:
        folders.append(check_folder(settings, settings.class_folder, "class"))
    if settings.validation_folder is not None:
        folders.append(check_folder(settings, settings.validation_folder, "validation"))
    for folder in folders:
        report.rejected += folder.rejected
        report.other_files += folder.found.other_files
        report.notes += folder.found.notes
        if folder.written_bytes:
            report.count_written(1, folder.written_bytes)
        if folder.role == "train":
            report.images_found = len(folder.found.pictures)
            report.captions_matched = sum(picture.caption is not None for picture in folder.used)
        elif folder.role == "class":
            report.class_images_found = len(folder.found.pictures)
            report.class_images_used = len(folder.accepted)
    report.findings = [finding for check in CHECKS for finding in check(folders, settings)]
    report.findings += pair_conditions(folders, settings)
    report.findings += pair_sources(folders, settings)
    return folders


def _fill_captions(settings: IndexSettings, folders: Sequence[CheckedFolder], report: DataReport) -> None:
    for folder in folders:
        if folder.role == "class":
            fill_class_captions(folder.used, settings.class_prompt)
        else:
            report.captions_filled += fill_captions(folder.used, settings.missing_captions, settings.trigger_word or "")


def _in_buckets(user: Sequence[tuple[Sample, int]], report: DataReport) -> TrainingIndex:
    """The user's images, each as often as its repeats, in buckets of one shape."""
    kinds = sorted({sample.shape for sample, _ in user})
    shapes = [kind[0] for kind in kinds]
    buckets: list[list[int]] = [[] for _ in shapes]
    bucket_of = {kind: bucket for bucket, kind in enumerate(kinds)}
    samples = []
    for row, (sample, repeats) in enumerate(user):
        bucket = bucket_of[sample.shape]
        buckets[bucket] += [row] * repeats
        samples.append(replace(sample, bucket=bucket))
        report.repeats[repeats] = report.repeats.get(repeats, 0) + 1
    report.images_used = len(samples)
    report.items_per_epoch = sum(map(len, buckets))
    return TrainingIndex(samples, buckets, [[] for _ in shapes], shapes, False, report)


def _add_class_pictures(index: TrainingIndex, pictures: Sequence[Accepted], settings: IndexSettings) -> None:
    """Class images in the buckets of the user's, in proportion."""
    if not pictures:
        return
    sizes = [(info.width, info.height) for _, info in pictures]
    for position, bucket in assign_class_pictures(sizes, index.shapes, [len(rows) for rows in index.buckets]):
        picture, info = pictures[position]
        placement = place_in(info.width, info.height, index.shapes[bucket])
        sample = _sample(picture, info, placement, None, None)
        index.class_buckets[bucket].append(len(index.samples))
        index.samples.append(replace(sample, bucket=bucket, is_prior=True))


def _sample(
    picture: Picture, info: PictureInfo, placement: Placement, mask: Path | None, settings: IndexSettings | None
) -> Sample:
    """A sample without its bucket; with `settings` its caption gets the trigger word."""
    caption = picture.caption or ""
    if settings is not None and not (picture.caption == "" and settings.missing_captions == "empty"):
        caption = add_trigger_word(caption, settings.trigger_word, settings.caption_separator)
    sample = Sample(
        path=picture.path,
        name=printable(picture.name),
        caption=caption,
        content_sha256=info.content_sha256,
        original_size=(info.height, info.width),
        placement=placement,
        bucket=0,
        mask=mask,
        condition=picture.condition,
    )
    return sample if settings is None or not picture.sources else place_sources(sample, picture, settings)


def _bucket_row(shape: tuple[int, int], items: list[int], class_items: list[int], samples: list[Sample]) -> BucketRow:
    members = sorted(set(items))
    cropped = sum(samples[member].placement.cropped_fraction for member in members) / len(members)
    return BucketRow(*shape, len(members), len(items), len(class_items), 0, 100 * cropped)


def fill_captions(used: Sequence[Picture], switch: MissingCaptions, trigger_word: str) -> int:
    """Give every used image a caption, the empty one under "error". Returns: the number of images that had none."""
    without = [picture for picture in used if picture.caption is None]
    for picture in without:
        if switch == "filename":
            picture.caption = " ".join(printable(Path(picture.name).stem).replace("_", " ").split())
        else:
            picture.caption = trigger_word if switch == "trigger" else ""
    return len(without)


def fill_class_captions(used: Sequence[Picture], class_prompt: str | None) -> None:
    """Caption every class image that has none with `class_prompt`."""
    for picture in used:
        if picture.caption is None:
            picture.caption = class_prompt or ""
