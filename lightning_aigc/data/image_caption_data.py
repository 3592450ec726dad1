"""ImageCaptionData: a LightningDataModule for images with captions."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_aigc._lightning import LightningDataModule, Trainer
from lightning_aigc.cache_folder import cache_folder
from lightning_aigc.data.advice import advice_on
from lightning_aigc.data.advice.dataset_summary import material_of_run
from lightning_aigc.data.cache.cache import check_writable
from lightning_aigc.data.cache.encoded_caches import EncodedCaches, finder
from lightning_aigc.data.cache.encoder import Encoder, require_encoder
from lightning_aigc.data.cache.resources import loader_settings
from lightning_aigc.data.captions.caption_lengths import note_on_lengths
from lightning_aigc.data.images.crop import Sample, crop_offset, load_pixels, load_source_pixels
from lightning_aigc.data.index.argument_checks import (
    MissingCaptions,
    SourceFit,
    check_choices,
    check_seen_sources,
    unread_arguments,
)
from lightning_aigc.data.index.filenames import print_anywhere
from lightning_aigc.data.index.index import TrainingIndex, build_index
from lightning_aigc.data.index.index_settings import IndexSettings
from lightning_aigc.data.loader.buckets import BucketSettings
from lightning_aigc.data.loader.dataset import Batch, BatchDataset, BatchLoader, ItemOptions
from lightning_aigc.data.loader.sampler import BucketBatchSampler
from lightning_aigc.data.loader.validation import NOTHING_HELD_OUT, NOTHING_WAS_HELD_OUT, validation_loader
from lightning_aigc.data.report.findings import DataCheckError
from lightning_aigc.data.report.report import DataReport
from lightning_aigc.errors import DataError
from lightning_aigc.protocols import PreservesCaptions


class ImageCaptionData(LightningDataModule):
    """Images with captions from a folder, a Hugging Face dataset or webdataset shards, checked before training.

    A batch is a dict with B images, the user's first, then class images:
    `pixel_values` [B, 3, H, W] float32 in -1..1, or `latent_moments` [B, 2C, h, w] where latents are cached;
    `captions` and `names`, lists of B texts; the caption embeddings where they are cached;
    `mask` [B, 1, H, W] in 0..1 where masks are used; `is_prior`, a list of B bools;
    `conditioning` uint8 [B, C, H, W] where there are conditions;
    `sources`, a list of float32 [B, 3, h, w] in -1..1, or `source_latents`, a list of their means, for an edit;
    `original_size`, `crop_top_left`, `target_size` int64 [B, 2] as (height, width) or (top, left).

    The user's folders are never modified.

    Args:
        train_data_dir: Folder of images with captions (metadata.jsonl, captions.csv or one text file each).
            Sub-folders count; one named like `10_shoes` repeats its images 10 times. `embedded:brand` is built in.
        dataset_name: Hugging Face dataset instead of a folder: its name on the hub, or a local copy's folder.
        shards: webdataset shards instead of a folder, for example `data/{000..009}.tar`.
        image_column: Column of the dataset that holds the images.
        source_column: Column of the dataset that holds the image before an edit, or several in order.
        caption_column: Column of the dataset, or key in metadata.jsonl and captions.csv, that holds the captions.
        dataset_split: Split of the dataset.
        caption_extension: How a caption file's name ends; the rest is the image's name without its suffix.
        caption_encoding: Encoding of caption files that are not UTF-8, such as gb18030; by default guessed from all.
        resolution: Side in pixels of a square training image; other shapes have about the same area.
        train_batch_size: User images in a batch, on each device. Class images come on top.
        enable_bucket: Group images by aspect ratio. If false all are cropped to squares.
        min_bucket_reso: Smallest side of a bucket in pixels.
        max_bucket_reso: Largest side of a bucket in pixels.
        bucket_reso_steps: Sides of buckets are multiples of this.
        bucket_no_upscale: Never enlarge an image: small ones get buckets of their own size.
        center_crop: Crop the middle; if false, a random part each time.
        random_flip: Mirror every other image at random.
        trigger_word: Word that is put in front of each caption that lacks it.
        shuffle_caption: Shuffle the parts of a caption between separators each time.
        keep_tokens: How many parts of a caption stay in front when shuffled.
        caption_separator: What separates the parts of a caption.
        caption_dropout_rate: Share of items whose caption is replaced by the empty one.
        num_repeats: How many times an epoch shows each image.
        missing_captions: What to do if captions and images do not match: `error`, or train such images on their
            file name (`filename`), an empty caption (`empty`) or the trigger word alone (`trigger`).
        cache_latents: Run the VAE once per image and keep the result on disk.
        cache_text_embeddings: Run the text encoder once per caption and keep the result on disk.
        cache_dir: Folder of the caches, by default `lightning_aigc` in $XDG_CACHE_HOME or else ~/.cache.
        class_data_dir: Folder of ordinary images of the class, for prior preservation. `embedded:prior` ships.
        class_prompt: Caption of class images that have none.
        prior_ratio: Class images for each user image, over the training; a small ratio leaves some batches without.
        validation_split: Share of the user's images that are held out for `val_loss`, chosen by their content, so that
            images added later change nothing; at least one if above 0. Class images are never held out.
        validation_data_dir: Folder of images that are held out, with captions, instead of `validation_split`.
        mask_dir: Folder of masks named like the images; white is learned, black is not.
        conditioning_data_dir: Folder of conditions named like the images, for `conditions: folder`; or list them in
            metadata.jsonl under `conditioning_image`. They share crop, flip and bucket with their image.
        source_data_dir: Folder of the images that an edit starts from, named like the images, whose captions are the
            instructions; a list of folders, or `name_1`, `name_2` in one folder, for several sources of an image. Or
            list them in metadata.jsonl and captions.csv under `source`.
        source_fit: `crop` cuts and flips a source as its image, for edits in place; `own` keeps its own shape, for
            references.
        source_resolution: Side in pixels of sources with a shape of their own; unset is `resolution`.
        use_alpha_mask: Take the alpha channel of an image as its mask.
        num_workers: Processes that load images. By default chosen from the cores and caches.
        pin_memory: Copy batches through pinned memory. By default where an accelerator is present.
        prefetch_factor: Batches that each worker prepares ahead.
        max_image_pixels: Larger images are rejected before they are decoded.
        seed: Seed of everything that is random in the data.

    Example:
        >>> data = ImageCaptionData("embedded:brand", resolution=64, train_batch_size=4, num_workers=0)
        >>> data.setup("fit")
        data: embedded:brand
          images    504 found, 504 used, 0 rejected
        ...
        >>> batch = next(iter(data.train_dataloader()))
        >>> tuple(batch["pixel_values"].shape), len(batch["captions"])
        ((4, 3, 64, 64), 4)
    """

    snapshot_ignored_arguments = frozenset(
        ("cache_dir", "num_workers", "pin_memory", "prefetch_factor", "max_image_pixels")
    )

    def __init__(
        self,
        train_data_dir: str | None = None,
        dataset_name: str | None = None,
        shards: str | None = None,
        image_column: str = "image",
        caption_column: str = "text",
        dataset_split: str = "train",
        caption_extension: str = ".txt",
        caption_encoding: str | None = None,
        resolution: int = 512,
        train_batch_size: int = 4,
        enable_bucket: bool = True,
        min_bucket_reso: int = 256,
        max_bucket_reso: int = 1024,
        bucket_reso_steps: int = 64,
        bucket_no_upscale: bool = False,
        center_crop: bool = True,
        random_flip: bool = False,
        trigger_word: str | None = None,
        shuffle_caption: bool = False,
        keep_tokens: int = 0,
        caption_separator: str = ",",
        caption_dropout_rate: float = 0.0,
        num_repeats: int = 1,
        missing_captions: MissingCaptions = "error",
        cache_latents: bool = False,
        cache_text_embeddings: bool = False,
        cache_dir: str | None = None,
        class_data_dir: str | None = None,
        class_prompt: str | None = None,
        prior_ratio: float = 1.0,
        validation_split: float = 0.0,
        validation_data_dir: str | None = None,
        mask_dir: str | None = None,
        conditioning_data_dir: str | None = None,
        source_data_dir: str | list[str] | None = None,
        source_column: str | list[str] | None = None,
        source_fit: SourceFit = "crop",
        source_resolution: int | None = None,
        use_alpha_mask: bool = False,
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
        max_image_pixels: int = 178_000_000,
        seed: int = 42,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        check_choices(given)
        if not validation_split and validation_data_dir is None:  # then the loader is empty
            warnings.filterwarnings("ignore", "You passed in a `val_dataloader` but have no `validation_step`")
        self.buckets = BucketSettings(**{f.name: given[f.name] for f in fields(BucketSettings)})
        self.train_batch_size = train_batch_size
        self.options = ItemOptions(**{f.name: given[f.name] for f in fields(ItemOptions)})
        self._given = given
        self._without_pair: set[str] = set()
        self.cache_dir = Path(cache_dir or cache_folder()).expanduser().absolute()
        self.prior_ratio = prior_ratio
        self.num_workers, self.pin_memory, self.prefetch_factor = num_workers, pin_memory, prefetch_factor
        cached = (self.cache_dir, cache_latents, cache_text_embeddings, train_batch_size)
        self.caches = EncodedCaches(*cached, random_flip, caption_dropout_rate > 0)
        self.validation_caches = EncodedCaches(*cached)
        self._report: DataReport | None = None
        self._index: TrainingIndex | None = None
        self._sampler: BucketBatchSampler | None = None

    # Lightning's hooks

    def prepare_data(self) -> None:
        """Check all images in one process per node; the other ranks read the results from the cache folder."""
        if self._stage != "predict":
            self.index()

    def setup(self, stage: str) -> None:
        """Index the images and print the report. Raises: DataError for anything that would stop training later."""
        if stage == "fit":
            self.index()
            if self.trainer is None or self.trainer.is_global_zero:
                print_anywhere(self.report())

    def train_dataloader(self) -> DataLoader[Batch]:
        """Fill this rank's share of the caches with the Trainer's model, and return this rank's loader."""
        if self.trainer is None:
            return self.loader()
        if self.caches.wanted:
            index = self.index()
            index.report.cache = self.caches.fill_together(self.trainer, index.samples, index.report, "cache")
        return self.loader(self.trainer.global_rank, self.trainer.world_size)

    @property
    def caches_captions(self) -> bool:
        """Whether batches have captions' embeddings."""
        return self.caches.wants_text

    def cache_captions(self, encoder: Encoder, trainer: Trainer) -> Callable[[str], Mapping[str, Tensor] | None]:
        """Fill the text caches before there is a model, each rank a share; returns what finds a caption's entry."""
        index = self.index()
        pairs = ((self.caches, index.samples), (self.validation_caches, index.validation))
        return finder([caches.fill_texts_together(trainer, encoder, samples) for caches, samples in pairs])

    def val_dataloader(self) -> Any:
        """The held-out images of this rank, without augmentation; nothing where fit holds none out.

        Raises: DataError where no image is held out and that is all that was asked for.
        """
        index, trainer = self.index(), self.trainer
        if not index.validation:
            if self._stage in ("validate", "test"):
                is_trained = trainer is not None and (trainer.ckpt_path is not None or trainer.global_step > 0)
                raise DataError(NOTHING_WAS_HELD_OUT if is_trained else NOTHING_HELD_OUT)
            return []
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        caches, batch_size = self.validation_caches, self.train_batch_size
        if caches.wanted and trainer is not None:
            caches.fill_together(trainer, index.validation, index.report, "cache of held-out images")
        settings = self._loader_settings(caches, len(index.validation) // batch_size, world_size)
        source = (index.validation, self.options, index.has_masks, caches)
        return validation_loader(*source, batch_size, rank, world_size, settings)

    def test_dataloader(self) -> Any:
        """The same held-out images as `val_dataloader`."""
        return self.val_dataloader()

    # Use without a Trainer

    def prepare(self, encoder: Encoder | None = None, rank: int = 0, world_size: int = 1) -> None:
        """Index the images and fill the configured caches, as `fit` does before its first step."""
        self.index()
        if self.caches.wanted:
            ready = require_encoder(encoder)
            self._fill_caches(ready, rank, world_size)
            self.caches.open(ready, world_size)
            self.validation_caches.open(ready, world_size)

    def loader(self, rank: int = 0, world_size: int = 1) -> DataLoader[Batch]:
        """The training loader of one rank. Its sampler shards over ranks, so Lightning does not replace it."""
        index = self.index()
        if self.caches.are_missing:
            raise DataError("the caches are not filled yet: call prepare(encoder) before loader()")
        self._sampler = self._make_sampler(index, rank, world_size)
        caches = self.caches
        dataset = BatchDataset(
            index.samples, self.options, self._sampler, index.has_masks, caches.latents, caches.embeddings,
            preserved=caches.preserved, sources=caches.sources, contents=index.contents(),
        )  # fmt: skip
        settings = self._loader_settings(self.caches, len(self._sampler), world_size)
        return BatchLoader(dataset, batch_size=None, sampler=self._sampler, **settings)

    def report(self) -> str:
        """The data report as text; indexes the images if needed."""
        return str(self.data_report)

    @property
    def data_report(self) -> DataReport:
        """The data report; indexes the images if needed."""
        return self.index().report

    # For callbacks

    def reference_images(self, count: int) -> Tensor:
        """Up to `count` of the user's images, evenly spread over the largest bucket: float32 [N, 3, H, W] in 0..1.

        For image-to-image scores.
        """
        chosen = self.index().spread_samples(count)
        pictures = [load_pixels(sample, crop_offset(sample.placement))[0] for sample in chosen]
        return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255

    def example_batch(self, count: int) -> Batch:
        """Up to `count` of the user's images, evenly spread over the largest bucket, as a batch of validation."""
        batch: Batch = next(iter(self._plain_loader(self.index().spread_samples(count), count)))
        return batch

    def held_out_loader(self, batch_size: int) -> DataLoader[Batch]:
        """Batches of held-out images, of training images where none is held out, in order and without caches."""
        index = self.index()
        return self._plain_loader(index.validation or index.spread_samples(len(index.samples)), batch_size)

    def _plain_loader(self, samples: Sequence[Sample], batch_size: int) -> DataLoader[Batch]:
        caches = EncodedCaches(self.cache_dir, False, False, batch_size)
        return validation_loader(samples, self.options, False, caches, batch_size, 0, 1, {"num_workers": 0})

    @property
    def has_condition_files(self) -> bool:
        """Whether conditions are files that the user gave."""
        return self.index().has_conditions

    @property
    def has_class_images(self) -> bool:
        """Whether there are class images, for prior preservation."""
        return any(self.index().class_buckets)

    @property
    def sources_per_image(self) -> int:
        """Source images of each image, 0 where they are no pairs of an edit."""
        return self.index().sources_per_image

    def check_source_sides(self, smallest: int, title: str) -> None:
        """Check that no source is cut to a side below `smallest`, the least that the pipeline of `title` takes.

        Raises: DataError.
        """
        index = self.index()
        sizes = {size for sample in (*index.samples, *index.validation) for size in sample.shape[1:]}
        small = min(sizes, key=min, default=(smallest, smallest))
        if min(small) < smallest:
            key = "resolution" if self._given["source_fit"] == "crop" else "source_resolution"
            raise DataError(
                f"sources are cut to {small[0]} x {small[1]} pixels, and {title}'s pipeline draws from sides of"
                f" {smallest} and more; raise data.init_args.{key}"
            )

    def check_seen_sources(self, title: str) -> None:
        """Check that batches show their sources to a text encoder that sees them, which `title` has.

        Raises: DataError where there are cached latents alone, or embeddings of other crops.
        """
        check_seen_sources(self._given, title)

    def edit_sources(self, prompt: str, seed: int) -> tuple[list[Image.Image], tuple[int, int]]:
        """Sources of a sample, and its (width, height): of a pair with this instruction where there is one.

        Pairs are held-out ones where there are any, all of one shape.
        """
        pair = self._pair_of(prompt, seed)
        return _sources_of(pair), (pair.placement.width, pair.placement.height)

    def edit_target(self, prompt: str, seed: int) -> Image.Image:
        """The true target of the sample that starts from `edit_sources(prompt, seed)`."""
        pair = self._pair_of(prompt, seed)
        if pair.caption != prompt and prompt not in self._without_pair:
            self._without_pair.add(prompt)
            of = "held-out pair" if self.index().validation else "pair"
            warnings.warn(
                f"{prompt!r} is the instruction of no {of}, so its edits are scored by the targets of other"
                f" instructions, such as {pair.caption!r}; validate with instructions of your pairs",
                stacklevel=2,
            )
        return _target_of(pair)

    def edit_description(self, prompt: str, seed: int) -> str | None:
        """Description of the target of that sample, where a table has one."""
        return self._pair_of(prompt, seed).description

    def edit_examples(self, count: int) -> list[tuple[str, Image.Image, Image.Image]]:
        """Up to `count` pairs, evenly spread over the largest bucket: instruction, first source and target."""
        return [(pair.caption, _sources_of(pair)[0], _target_of(pair)) for pair in self.index().spread_samples(count)]

    def _pair_of(self, prompt: str, seed: int) -> Sample:
        index = self.index()
        pairs = [s for s in index.validation if s.shape == index.validation[0].shape]
        pairs = pairs or index.spread_samples(len(index.samples))
        own = [pair for pair in pairs if pair.caption == prompt] or pairs
        return own[(zlib.crc32(prompt.encode()) + seed) % len(own)]

    def image_sizes(self) -> list[tuple[int, int]]:
        """Each (width, height) of the buckets in use and of held-out images."""
        index = self.index()
        sizes = {size for sample in (*index.validation, *index.samples) for size in sample.shape}
        return sorted(sizes.union(index.shapes))

    def size_remedy(self, step: int) -> str:
        """The setting that makes all sides multiples of `step`."""
        return self.buckets.remedy(step)

    def lora_metadata(self) -> dict[str, Any]:
        """Metadata on the training images for a LoRA file, by the field names of `LoRAMetadata`."""
        index = self.index()
        own = {row for bucket in index.buckets for row in bucket}
        return {
            "trigger_phrase": self.options.trigger_word,
            "resolution": self.buckets.resolution,
            "train_batch_size": self.train_batch_size,
            "num_train_images": sum(len(bucket) for bucket in index.buckets),
            "num_reg_images": sum(len(bucket) for bucket in index.class_buckets),
            "captions": tuple(index.samples[row].caption for row in sorted(own)),
        }

    def contents(self) -> dict[str, list[int]]:
        """The number and a checksum of each kind of file, by which ranks and resumed runs tell other data."""
        return self.index().contents()

    def files_written(self) -> tuple[int, int, str]:
        """Files that this process wrote for this run, their bytes, and the folder that holds them all."""
        report = self._report
        return (report.written_files, report.written_bytes, str(self.cache_dir)) if report else (0, 0, "")

    @property
    def _stage(self) -> str | None:
        """The Trainer's stage: fit, validate, test or predict."""
        return None if self.trainer is None or self.trainer.state.fn is None else str(self.trainer.state.fn.value)

    def index(self) -> TrainingIndex:
        """All images, found, checked and placed once. Raises: DataError for what would stop training later."""
        if self._index is None:
            if self.caches.wanted:
                check_writable(self.cache_dir)
            try:
                index = build_index(IndexSettings.of(self._given, self.cache_dir, self.buckets))
            except DataCheckError as error:
                self._report = error.report
                if self.trainer is not None and self.trainer.is_global_zero:
                    print_anywhere(str(error.report))
                raise
            self._report = index.report
            self._complete_report(index)
            module = getattr(self.trainer, "lightning_module", None)
            if isinstance(module, PreservesCaptions):
                options = self.options
                self.caches.preserved = module.caption_maker(options.trigger_word, options.caption_dropout_rate > 0)
            self._index = index
        return self._index

    def _complete_report(self, index: TrainingIndex) -> None:
        world_size = self.trainer.world_size if self.trainer is not None else 1
        index.report.count_batches(len(self._make_sampler(index, 0, world_size)), self.train_batch_size * world_size)
        module = getattr(self.trainer, "lightning_module", None)
        if note := note_on_lengths([sample.caption for sample in index.samples], module):
            index.report.notes.append(note)
        defaults = {name: p.default for name, p in signature(ImageCaptionData.__init__).parameters.items()}
        index.report.notes += unread_arguments(self._given, defaults)
        if not index.sources_per_image and self._given["source_fit"] != defaults["source_fit"]:
            index.report.notes.append("data.init_args.source_fit changes nothing without sources of an edit; remove it")
        index.report.advice = advice_on(
            material_of_run(index, self.trainer, self.options.trigger_word, self.train_batch_size, self.buckets)
        )
        wanted = self.caches.wanted
        index.report.cache = [f"{' and '.join(wanted)} in {self.cache_dir}"] if wanted else ["off"]

    def _make_sampler(self, index: TrainingIndex, rank: int, world_size: int) -> BucketBatchSampler:
        batch_size, prior_ratio, seed = self.train_batch_size, self.prior_ratio, self.options.seed
        return BucketBatchSampler(index.buckets, index.class_buckets, batch_size, prior_ratio, seed, rank, world_size)

    def _fill_caches(self, encoder: Encoder, rank: int, world_size: int) -> None:
        index = self.index()
        index.report.cache = self.caches.fill(encoder, index.samples, index.report, rank, world_size)
        self.validation_caches.fill(encoder, index.validation, index.report, rank, world_size)

    def _loader_settings(self, caches: EncodedCaches, batches: int, processes: int) -> dict[str, Any]:
        chosen = (self.num_workers, self.pin_memory, self.prefetch_factor)
        return loader_settings(*chosen, in_memory=caches.hold_all_in_memory, batches=batches, processes=processes)


def _sources_of(pair: Sample) -> list[Image.Image]:
    """The sources of a pair, cut as they are trained on."""
    numbers = range(len(pair.sources))
    return [Image.fromarray(load_source_pixels(pair, number, crop_offset(pair.placement))) for number in numbers]


def _target_of(pair: Sample) -> Image.Image:
    """The image of a pair, cut as it is trained on."""
    return Image.fromarray(load_pixels(pair, crop_offset(pair.placement))[0])
