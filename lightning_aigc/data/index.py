"""TrainingIndex: find, check and caption the pictures of the folders, place each in a bucket, and report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lightning_aigc.data.buckets import BucketSettings, Placement, bucket_shapes, place, place_in
from lightning_aigc.data.captions import LONG_CAPTION_WORDS, add_trigger_word, long_captions
from lightning_aigc.data.choices import MissingCaptions
from lightning_aigc.data.crop import Sample
from lightning_aigc.data.image_file import PictureInfo
from lightning_aigc.data.masks import find_masks
from lightning_aigc.data.missing_captions import fill_captions, fill_class_captions
from lightning_aigc.data.names import printable
from lightning_aigc.data.prior import assign_class_pictures
from lightning_aigc.data.report import BucketRow, DataReport
from lightning_aigc.data.sources import Picture, find_pictures
from lightning_aigc.data.verify import PictureVerifier
from lightning_aigc.errors import DataError


@dataclass(frozen=True)
class IndexSettings:
    """The arguments of ImageCaptionData that determine the index, under the same names."""

    folder: Path
    shown_as: str
    cache_dir: Path
    buckets: BucketSettings
    class_folder: Path | None = None
    mask_folder: Path | None = None
    caption_extension: str = ".txt"
    caption_key: str = "text"
    caption_separator: str = ","
    trigger_word: str | None = None
    class_prompt: str | None = None
    num_repeats: int = 1
    missing_captions: MissingCaptions = "error"
    use_alpha_mask: bool = False
    max_image_pixels: int = 178_000_000


@dataclass
class TrainingIndex:
    """All training samples, the user's first, then class pictures; buckets hold indices of `samples`."""

    samples: list[Sample]
    buckets: list[list[int]]
    class_buckets: list[list[int]]
    shapes: list[tuple[int, int]]
    has_masks: bool
    report: DataReport

    def spread_samples(self, count: int) -> list[Sample]:
        """Up to `count` of the user's samples, evenly spread over the largest bucket, so all have the same size."""
        largest: list[int] = max(self.buckets, key=len)
        rows = list(dict.fromkeys(largest))
        count = min(count, len(rows))
        return [self.samples[rows[i * len(rows) // count]] for i in range(count)]


def build_index(settings: IndexSettings) -> TrainingIndex:
    """Find, check and place all pictures; the same folders give the same index on every rank.

    Raises: DataError for a caption without a picture or the reverse, or if no usable picture is left.
    """
    report = DataReport(printable(settings.shown_as))
    user = _accepted(settings, settings.folder, report, is_class=False)
    shapes_known = bucket_shapes(settings.buckets)
    placed = [(picture, info, place(info.width, info.height, settings.buckets, shapes_known)) for picture, info in user]
    shapes = sorted({(placement.width, placement.height) for _, _, placement in placed})
    masks = find_masks(settings.mask_folder, settings.use_alpha_mask, [p.name for p, _, _ in placed], report)

    samples: list[Sample] = []
    buckets: list[list[int]] = [[] for _ in shapes]
    for (picture, info, placement), mask in zip(placed, masks, strict=True):
        bucket = shapes.index((placement.width, placement.height))
        caption = add_trigger_word(picture.caption or "", settings.trigger_word, settings.caption_separator)
        if picture.caption == "" and settings.missing_captions == "empty":
            caption = ""
        buckets[bucket] += [len(samples)] * picture.repeats
        samples.append(_sample(picture, info, placement, bucket, caption, mask))
        report.repeats[picture.repeats] = report.repeats.get(picture.repeats, 0) + 1
    report.images_used = len(samples)
    report.items_per_epoch = sum(map(len, buckets))

    class_buckets: list[list[int]] = [[] for _ in shapes]
    if settings.class_folder is not None:
        pictures = _accepted(settings, settings.class_folder, report, is_class=True)
        report.class_images_used = len(pictures)
        weights = [len(bucket) for bucket in buckets]
        sizes = [(info.width, info.height) for _, info in pictures]
        for position, bucket in assign_class_pictures(sizes, shapes, weights):
            picture, info = pictures[position]
            class_buckets[bucket].append(len(samples))
            placement = place_in(info.width, info.height, shapes[bucket])
            class_sample = _sample(picture, info, placement, bucket, picture.caption or "", None)
            samples.append(replace(class_sample, is_prior=True))
    if count := long_captions([sample.caption for sample in samples]):
        report.notes.append(
            f"{count} captions have more than {LONG_CAPTION_WORDS} words; the tokenizer keeps about 75 tokens of each"
        )
    report.buckets = [_bucket_row(shapes[b], buckets[b], class_buckets[b], samples) for b in range(len(shapes))]
    has_masks = settings.mask_folder is not None or settings.use_alpha_mask
    return TrainingIndex(samples, buckets, class_buckets, shapes, has_masks, report)


def _accepted(
    settings: IndexSettings, folder: Path, report: DataReport, is_class: bool
) -> list[tuple[Picture, PictureInfo]]:
    """The usable pictures of one folder, each with a caption."""
    key = "class_data_dir" if is_class else "train_data_dir"
    others = (settings.class_folder, settings.mask_folder, settings.cache_dir, settings.folder)
    excluded = tuple(path for path in others if path is not None and path != folder and path.is_relative_to(folder))
    repeats = 1 if is_class else settings.num_repeats
    found = find_pictures(folder, settings.caption_extension, settings.caption_key, repeats, excluded)
    shown = printable(folder)
    if not found.pictures:
        other = f" ({found.other_files} other files are there)" if found.other_files else ""
        raise DataError(f"no pictures in {shown}{other}; put images there or set data.init_args.{key} to their folder")
    results = PictureVerifier(folder, settings.cache_dir, settings.max_image_pixels).verify(
        [picture.path for picture in found.pictures], progress=True
    )
    accepted: list[tuple[Picture, PictureInfo]] = []
    rejected: list[tuple[str, str]] = []
    for picture, result in zip(found.pictures, results, strict=True):
        if isinstance(result, str):
            rejected.append((printable(picture.name), printable(result)))
        else:
            accepted.append((picture, result))
            found.notes += [f"{printable(picture.name)}: {note}" for note in result.notes]
    report.rejected += rejected
    report.other_files += found.other_files
    if not accepted:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected[:5])
        raise DataError(f"none of the {len(rejected)} pictures in {shown} can be used: {reasons}")
    used = [picture for picture, _ in accepted]
    if is_class:
        report.class_images_found = len(found.pictures)
        fill_class_captions(found, used, settings.missing_captions, settings.class_prompt)
    else:
        report.images_found = len(found.pictures)
        report.captions_matched = sum(picture.caption is not None for picture in used)
        report.captions_filled = fill_captions(
            found, used, settings.missing_captions, settings.caption_extension, settings.trigger_word or ""
        )
    report.notes += found.notes
    return accepted


def _sample(
    picture: Picture, info: PictureInfo, placement: Placement, bucket: int, caption: str, mask: Path | None
) -> Sample:
    return Sample(
        path=picture.path,
        name=printable(picture.name),
        caption=caption,
        content_sha256=info.content_sha256,
        original_size=(info.height, info.width),
        placement=placement,
        bucket=bucket,
        mask=mask,
    )


def _bucket_row(shape: tuple[int, int], items: list[int], class_items: list[int], samples: list[Sample]) -> BucketRow:
    members = sorted(set(items))
    cropped = sum(samples[member].placement.cropped_fraction for member in members) / len(members)
    return BucketRow(*shape, len(members), len(items), len(class_items), 0, 100 * cropped)
