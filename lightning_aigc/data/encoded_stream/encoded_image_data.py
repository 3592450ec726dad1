"""EncodedImageData: a LightningDataModule for what `lightning encode` wrote, on disks or at any fsspec address."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_aigc._lightning import LightningDataModule
from lightning_aigc.cache_folder import cache_folder
from lightning_aigc.data.cache.encoder import Encoder, can_cache_captions, frozen_text_setting
from lightning_aigc.data.cache.resources import loader_settings
from lightning_aigc.data.encoded_stream.manifest import COMMON, REFERENCES, Manifest, join, read_manifest
from lightning_aigc.data.encoded_stream.order import StreamSampler
from lightning_aigc.data.encoded_stream.shard_file import ShardReader
from lightning_aigc.data.encoded_stream.stream_dataset import OnBadShard, StreamDataset
from lightning_aigc.data.index.filenames import print_anywhere
from lightning_aigc.data.loader.dataset import Batch, BatchLoader
from lightning_aigc.errors import DataError


class EncodedImageData(LightningDataModule):
    """Latents and caption embeddings, streamed from shards; a batch is that of `ImageCaptionData` with both caches.

    Sharded over ranks and workers, shuffled, one bucket a batch, and resumed at any batch: the same entries in the same
    order for any number of workers. Memory does not grow with the number of entries.

    Args:
        shards_dir: Folder that `lightning encode` wrote, or its fsspec address, such as `s3://bucket/folder`.
        train_batch_size: Entries in a batch, on each device.
        validation_shards_dir: Another such folder, whose entries give `val_loss`.
        random_flip: Mirror half of the images; wants `lightning encode --flips`.
        caption_dropout_rate: Share of captions replaced by the empty caption.
        shuffle_window: Entries of a rank within which the order is random; shards are shuffled whole.
        on_bad_shard: At a missing or damaged shard: stop, or skip to the next good one with a warning.
        cache_dir: Folder for shards fetched from another address; by default `lightning_aigc` in $XDG_CACHE_HOME
            or else ~/.cache.
        cache_limit_gb: Most that this folder may take; unset keeps all.
        storage_options: Arguments of the fsspec file system, such as keys.
        num_workers: Loader processes; unset chooses by the machine.
        pin_memory: Copy batches to pinned memory; unset does so with an accelerator.
        prefetch_factor: Batches that each worker prepares ahead.
        seed: Seed of order, flips and dropout.

    Example:
        >>> data = EncodedImageData("shards")  # written by `lightning encode -c my.yaml -o shards`
    """

    has_images = False
    """Shards hold latents and no images, of which a ControlNet's conditions could be made."""

    def __init__(
        self,
        shards_dir: str,
        train_batch_size: int = 4,
        validation_shards_dir: str | None = None,
        random_flip: bool = False,
        caption_dropout_rate: float = 0.0,
        shuffle_window: int = 8192,
        on_bad_shard: OnBadShard = "stop",
        cache_dir: str | None = None,
        cache_limit_gb: float | None = None,
        storage_options: dict[str, Any] | None = None,
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
        seed: int = 42,
    ) -> None:
        super().__init__()
        for name, value, least in (("train_batch_size", train_batch_size, 1), ("shuffle_window", shuffle_window, 1)):
            if value < least:
                raise DataError(f"data.init_args.{name} must be at least {least}, got {value}")
        if not 0 <= caption_dropout_rate <= 1:
            raise DataError(f"data.init_args.caption_dropout_rate must be in 0..1, got {caption_dropout_rate}")
        self.shards_dir, self.validation_shards_dir = shards_dir, validation_shards_dir
        self.train_batch_size, self.shuffle_window, self.seed = train_batch_size, shuffle_window, seed
        self.random_flip, self.caption_dropout_rate, self.on_bad_shard = random_flip, caption_dropout_rate, on_bad_shard
        self.cache_dir = Path(cache_dir or cache_folder()).expanduser().absolute() / "shards"
        self.cache_limit_gb, self.storage_options = cache_limit_gb, storage_options
        self.num_workers, self.pin_memory, self.prefetch_factor = num_workers, pin_memory, prefetch_factor
        self._manifests: dict[str, Manifest] = {}

    # Lightning's hooks

    def setup(self, stage: str) -> None:
        """Read the index. Raises: DataError for a folder without one, or without what the arguments want."""
        manifest = self.manifest(self.shards_dir)
        if self.random_flip and not manifest.flips:
            raise DataError(
                f"data.init_args.random_flip wants mirrored latents, which {self.shards_dir} does not hold; encode it"
                " with --flips, or set random_flip: false"
            )
        if stage == "fit" and (self.trainer is None or self.trainer.is_global_zero):
            shapes = ", ".join(
                f"{w} x {h}: {sum(s.count for s in found)}" for (w, h), found in manifest.buckets().items()
            )
            print_anywhere(
                f"data: {manifest.count} entries in {len(manifest.shards)} shards of {self.shards_dir} ({shapes})"
            )

    def train_dataloader(self) -> DataLoader[Batch]:
        """This rank's loader."""
        trainer = self.trainer
        if trainer is None:
            return self.loader()
        self._check_encoder(trainer.lightning_module, self.shards_dir)
        return self.loader(trainer.global_rank, trainer.world_size)

    @property
    def caches_captions(self) -> bool:
        """Whether batches have captions' embeddings: always."""
        return True

    def cache_captions(self, encoder: Encoder, trainer: Any) -> Callable[[str], Mapping[str, Tensor] | None]:
        """Nothing to encode; shards are not searched for a caption."""
        return lambda caption: None

    def val_dataloader(self) -> Any:
        """This rank's share of `validation_shards_dir`, in order; nothing where fit has none.

        Raises: DataError without one, if that is all that was asked for.
        """
        folder, trainer = self.validation_shards_dir, self.trainer
        if folder is None:
            if trainer is not None and trainer.state.fn in ("validate", "test"):
                raise DataError(
                    "no shards are held out, so there is nothing to validate on; set"
                    " data.init_args.validation_shards_dir to a folder that `lightning encode` wrote"
                )
            return []
        if trainer is not None:
            self._check_encoder(trainer.lightning_module, folder)
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        sampler = self._sampler(folder, rank, world_size, shuffle=False)
        dataset = self._dataset(folder, is_training=False)
        own = torch.Generator().manual_seed(0)  # each iteration draws a seed, which training must not notice
        settings = self._loader_settings(len(sampler), world_size)
        return DataLoader(dataset, batch_size=None, sampler=sampler, generator=own, **settings)

    def test_dataloader(self) -> Any:
        """The same entries as `val_dataloader`."""
        return self.val_dataloader()

    def loader(self, rank: int = 0, world_size: int = 1) -> DataLoader[Batch]:
        """The training loader of one rank, for use without a Trainer too."""
        sampler = self._sampler(self.shards_dir, rank, world_size, shuffle=True)
        settings = self._loader_settings(len(sampler), world_size)
        dataset = self._dataset(self.shards_dir, is_training=True)
        return BatchLoader(dataset, batch_size=None, sampler=sampler, **settings)

    # For callbacks

    def reference_images(self, count: int) -> Tensor:
        """Up to `count` of the images that the encoder kept, float32 [N, 3, H, W] in 0..1."""
        return self._read_file(self.shards_dir, REFERENCES)["images"][:count].float() / 255

    def example_batch(self, count: int) -> Batch:
        """Up to `count` entries of one size as a batch, the same at each call."""
        sampler = StreamSampler(self._counts(self.shards_dir), count, self.shuffle_window, shuffle=False)
        return self._dataset(self.shards_dir, is_training=False)[next(iter(sampler))]

    def lora_metadata(self) -> dict[str, Any]:
        """Metadata on the training images for a LoRA file, by the field names of `LoRAMetadata`."""
        return {**self.manifest(self.shards_dir).facts, "train_batch_size": self.train_batch_size}

    def contents(self) -> dict[str, list[int]]:
        """The number of entries and a checksum of their shards, by which ranks and resumed runs tell other data."""
        kinds = {"entries": self.shards_dir, "held-out entries": self.validation_shards_dir}
        return {name: self.manifest(found).contents for name, found in kinds.items() if found}

    def image_sizes(self) -> list[tuple[int, int]]:
        """Each (width, height) of the shards, those of `validation_shards_dir` among them."""
        folders = [folder for folder in (self.shards_dir, self.validation_shards_dir) if folder is not None]
        return sorted({size for folder in folders for size in self.manifest(folder).buckets()})

    def size_remedy(self, step: int) -> str:
        """Settings to encode the images with, so that all sides are multiples of `step`."""
        return f"encode them again with data.init_args.bucket_reso_steps and resolution that are multiples of {step}"

    def manifest(self, folder: str) -> Manifest:
        """Manifest of a folder, read once."""
        if folder not in self._manifests:
            self._manifests[folder] = read_manifest(folder, self.storage_options)
        return self._manifests[folder]

    def _counts(self, folder: str) -> list[list[int]]:
        return [[shard.count for shard in shards] for shards in self.manifest(folder).buckets().values()]

    def _sampler(self, folder: str, rank: int, world_size: int, shuffle: bool) -> StreamSampler:
        source = (self._counts(folder), self.train_batch_size, self.shuffle_window, self.seed)
        return StreamSampler(*source, rank, world_size, shuffle)

    def _dataset(self, folder: str, is_training: bool) -> StreamDataset:
        reader = ShardReader(folder, self.cache_dir, self.cache_limit_gb, self.storage_options)
        empty = self._read_file(folder, COMMON) if is_training and self.caption_dropout_rate else {}
        dropout, flip = (self.caption_dropout_rate, self.random_flip) if is_training else (0.0, False)
        buckets = list(self.manifest(folder).buckets().values())
        contents = self.contents() if is_training else {}
        return StreamDataset(reader, buckets, empty, dropout, flip, self.on_bad_shard, self.seed, contents)

    def _read_file(self, folder: str, file: str) -> dict[str, Tensor]:
        try:
            with fsspec.open(join(folder, file), "rb", **(self.storage_options or {})) as stream:
                return safetensors.torch.load(stream.read())
        except (OSError, safetensors.SafetensorError) as error:
            raise DataError(
                f"{join(folder, file)} cannot be read ({type(error).__name__}); run `lightning encode` once more"
            ) from error

    def _loader_settings(self, batches: int, processes: int) -> dict[str, Any]:
        chosen = (self.num_workers, self.pin_memory, self.prefetch_factor)
        return loader_settings(*chosen, in_memory=False, batches=batches, processes=processes)

    def _check_encoder(self, module: object, folder: str) -> None:
        """Raise DataError if the entries were made with other weights than the model's."""
        if not isinstance(module, Encoder):
            return
        if not can_cache_captions(module):
            raise DataError(
                f"{folder} holds the embeddings of a fixed text encoder, and this one is trained; set"
                f" {frozen_text_setting(module)}, or train with ImageCaptionData"
            )
        written, own = self.manifest(folder).identity, module.encoder_identity()
        differing = [part for part in own if written.get(part) != own[part]]
        if differing:
            raise DataError(
                f"{folder} was encoded with another {' and '.join(differing)} than the model's"
                f" ({written.get(differing[0])}, not {own[differing[0]]}); encode the images with this model and"
                " precision, or give the model that they were encoded with"
            )


def facts_of(datamodule: Any) -> dict[str, Any]:
    """Header entries of a LoRA file about the images, in JSON's types."""
    return {k: v for k, v in datamodule.lora_metadata().items() if k not in ("train_batch_size", "captions")}
