"""StreamDataset: batches read from shards by plan, as those of `ImageCaptionData` with both caches.

Legend: B batch.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_aigc.data.cache.encoded import stack_padded
from lightning_aigc.data.encoded_stream.manifest import Shard
from lightning_aigc.data.encoded_stream.order import StreamPlan
from lightning_aigc.data.encoded_stream.shard_file import ShardError, ShardReader
from lightning_aigc.data.loader.dataset import Batch

OnBadShard = Literal["stop", "skip"]
NOT_EMBEDDINGS = frozenset(("latent_moments", "latent_moments_flipped", "mask", "sizes"))


class StreamDataset(Dataset[Batch]):
    """Reads the entries of a plan. Random choices depend on (seed, epoch, entry) only, not on ranks or workers.

    Args:
        buckets: the shards of each bucket.
        empty: the empty caption's embeddings, which caption dropout puts instead of others.
        on_bad_shard: stop, or skip: entries of the bucket's next shard that is good come instead of a bad one's.
    """

    def __init__(
        self,
        reader: ShardReader,
        buckets: Sequence[Sequence[Shard]],
        empty: dict[str, Tensor],
        caption_dropout_rate: float = 0.0,
        random_flip: bool = False,
        on_bad_shard: OnBadShard = "stop",
        seed: int = 42,
        contents: Mapping[str, list[int]] | None = None,
    ) -> None:
        self.reader, self.buckets, self.empty = reader, buckets, empty
        self.caption_dropout_rate, self.random_flip = caption_dropout_rate, random_flip
        self.on_bad_shard, self.seed = on_bad_shard, seed
        self._bad: set[str] = set()
        self.contents = contents or {}

    def __getitem__(self, plan: StreamPlan) -> Batch:
        of_bucket = self.buckets[plan.bucket]
        entries: list[dict[str, Tensor]] = []
        texts: list[dict[str, str]] = []
        flips: list[bool] = []
        for number, place in zip(plan.shards, plan.places, strict=True):
            tensors, named = self._read(of_bucket, number, place)
            flip, named = self._draw(plan, of_bucket[number], place, tensors, named)
            entries.append(tensors)
            texts.append(named)
            flips.append(flip)
        batch = _stacked(entries, flips)
        batch["captions"], batch["names"] = [t["caption"] for t in texts], [t["name"] for t in texts]
        batch["is_prior"] = [False] * len(entries)
        batch["is_counted"] = torch.tensor(plan.is_first)
        batch["seeds"] = torch.tensor([int(t["content"][:15], 16) for t in texts])
        return batch

    def _draw(
        self, plan: StreamPlan, shard: Shard, place: int, tensors: dict[str, Tensor], texts: dict[str, str]
    ) -> tuple[bool, dict[str, str]]:
        """Whether to mirror the image; the caption is dropped in place."""
        if not self.random_flip and not self.caption_dropout_rate:
            return False, texts
        rng = random.Random(f"{self.seed}|{plan.epoch}|{shard.file}|{place}")
        flip_draw, dropout = rng.random(), rng.random()
        if dropout < self.caption_dropout_rate:
            tensors |= self.empty
            texts = texts | {"caption": ""}
        return self.random_flip and flip_draw < 0.5, texts

    def _read(self, of_bucket: Sequence[Shard], number: int, place: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """An entry, or with `skip` one of the next good shard."""
        for further in range(len(of_bucket)):
            shard = of_bucket[(number + further) % len(of_bucket)]
            if shard.file in self._bad:
                continue
            try:
                return self.reader.read(shard, place % shard.count)
            except ShardError as error:
                if self.on_bad_shard == "stop":
                    raise
                self._bad.add(shard.file)
                warnings.warn(f"skipped: {str(error).partition('; copy')[0]}", stacklevel=2)
        raise ShardError(
            f"no shard of {of_bucket[0].width} x {of_bucket[0].height} pixels can be used, so there is nothing to skip"
            " to; the first error above names one"
        )


def _stacked(entries: list[dict[str, Tensor]], flips: list[bool]) -> Batch:
    """The tensors of a batch, by the keys of `ImageCaptionData`."""
    moments = [
        e["latent_moments_flipped" if flip else "latent_moments"] for e, flip in zip(entries, flips, strict=True)
    ]
    batch: dict[str, Any] = {"latent_moments": torch.stack(moments).float()}
    for name in entries[0].keys() - NOT_EMBEDDINGS:
        batch[name] = stack_padded([entry[name] for entry in entries])
    if "mask" in entries[0]:
        masks = [e["mask"].flip(-1) if flip else e["mask"] for e, flip in zip(entries, flips, strict=True)]
        batch["mask"] = torch.stack(masks)[:, None].float() / 255
    sizes_B7 = torch.stack([entry["sizes"] for entry in entries]).long()
    left_B = torch.where(torch.tensor(flips), sizes_B7[:, 6] - sizes_B7[:, 3], sizes_B7[:, 3])
    batch["original_size"], batch["target_size"] = sizes_B7[:, :2], sizes_B7[:, 4:6]
    batch["crop_top_left"] = torch.stack([sizes_B7[:, 2], left_B], dim=1)
    return batch
