"""Held-out images: which they are, and their batches without augmentation, the same for every batch size and rank.

Legend: B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_aigc.data.cache.encoded_caches import EncodedCaches
from lightning_aigc.data.images.crop import Sample
from lightning_aigc.data.loader.dataset import Batch, BatchDataset, ItemOptions
from lightning_aigc.data.loader.sampler import BatchPlan, BucketBatchSampler
from lightning_aigc.errors import DataError

NOTHING_HELD_OUT = (
    "no images are held out, so there is nothing to validate on; set data.init_args.validation_split, such as 0.1,"
    " or data.init_args.validation_data_dir to a folder of images that are not trained on"
)
NOTHING_WAS_HELD_OUT = (
    "no images are held out, so there is nothing to validate on; set data.init_args.validation_data_dir to a folder of"
    " images that were not trained on (data.init_args.validation_split has to be set before a training)"
)
"""The same of a trained model, which may know every image of its folder."""


def held_out(contents: Sequence[str], share: float) -> set[int]:
    """Positions of the images to hold out, by their content hashes: about `share` of them, at least one if above 0.

    An image's fate depends on its own content, so images that are added later change nothing, and copies of one
    image stay together. Only where no image falls under the share is it the one with the lowest draw.
    Raises: DataError if none is left to train on.
    """
    if not share:
        return set()
    draws = [int(sha256(f"validation|{content}".encode()).hexdigest()[:16], 16) / 16**16 for content in contents]
    limit = max(share, min(draws))
    chosen = {position for position, draw in enumerate(draws) if draw <= limit}
    if len(chosen) == len(contents):
        raise DataError(
            f"data.init_args.validation_split: {share} holds out all {len(contents)} images; use a smaller share, or"
            " data.init_args.validation_data_dir"
        )
    return chosen


def example_seed(sample: Sample) -> int:
    """The seed of an image's noise and timesteps in validation, by its content."""
    return int(sample.content_sha256[:15], 16)


def validation_batches(samples: Sequence[Sample], batch_size: int) -> list[list[int]]:
    """All batches in order, each of one shape, as positions in `samples`."""
    by_shape: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for position, sample in enumerate(samples):
        by_shape.setdefault(sample.shape, []).append(position)
    return [
        rows[at : at + batch_size] for _, rows in sorted(by_shape.items()) for at in range(0, len(rows), batch_size)
    ]


class ValidationDataset(Dataset[Batch]):
    """One rank's batches, as training's, with `seeds` int64 [B] and `is_counted` bool [B].

    Every rank has equally many batches, because DDP may synchronise in forward; one that has fewer repeats its first,
    which does not count.
    """

    def __init__(self, batches: BatchDataset, plans: Sequence[Sequence[int]], rank: int, world_size: int) -> None:
        self.batches = batches
        mine = list(plans[rank::world_size])
        spare = -(-len(plans) // world_size) - len(mine)
        self.plans = [(rows, True) for rows in mine] + [(plans[0], False)] * spare

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, position: int) -> Batch:
        rows, is_counted = self.plans[position]
        batch = self.batches[BatchPlan(0, tuple(rows), tuple(rows), len(rows))]
        batch["seeds"] = torch.tensor([example_seed(self.batches.samples[row]) for row in rows])
        batch["is_counted"] = torch.full((len(rows),), is_counted)
        return batch


class InOrder(DistributedSampler[Any]):
    """All positions in order, on every rank. It is a DistributedSampler because Lightning replaces any other."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count), num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]


def validation_loader(
    samples: Sequence[Sample],
    options: ItemOptions,
    has_masks: bool,
    caches: EncodedCaches,
    batch_size: int,
    rank: int,
    world_size: int,
    settings: dict[str, Any],
) -> DataLoader[Batch]:
    """The loader of one rank's held-out images, out of the filled caches or the files, cropped at the centre."""
    plain = ItemOptions(trigger_word=options.trigger_word, use_alpha_mask=options.use_alpha_mask)
    unused = BucketBatchSampler([], [], batch_size)
    batches = BatchDataset(samples, plain, unused, has_masks, caches.latents, caches.embeddings, sources=caches.sources)
    dataset = ValidationDataset(batches, validation_batches(samples, batch_size), rank, world_size)
    # A generator of its own: each iteration draws a seed, and the training's random states must not notice.
    own = torch.Generator().manual_seed(0)
    return DataLoader(dataset, batch_size=None, sampler=InOrder(len(dataset)), generator=own, **settings)
