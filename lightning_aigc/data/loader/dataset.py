"""BatchDataset builds a batch from its plan, out of the caches or the image files; BatchLoader can resume.

Shapes: B batch (user images first, class images after), H W pixels, C latent channels, h w latent pixels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_aigc._lightning import rank_zero_warn
from lightning_aigc.data.cache.encoded import (
    EmbeddingCache,
    InstructionCache,
    LatentCache,
    SourceCache,
    to_minus_one_to_one,
)
from lightning_aigc.data.captions.captions import shuffle_tags, trigger_tags
from lightning_aigc.data.images.crop import (
    Sample,
    crop_offset,
    load_condition_pixels,
    load_mask_pixels,
    load_pixels,
    load_source_pixels,
)
from lightning_aigc.data.loader.sampler import BatchPlan, BucketBatchSampler, ResumableSampler

Batch = dict[str, Any]


@dataclass(frozen=True)
class ItemOptions:
    """Augmentations of an item, applied anew at each visit."""

    center_crop: bool = True
    random_flip: bool = False
    shuffle_caption: bool = False
    keep_tokens: int = 0
    caption_separator: str = ","
    caption_dropout_rate: float = 0.0
    trigger_word: str | None = None
    use_alpha_mask: bool = False
    seed: int = 42

    @property
    def is_random(self) -> bool:
        """Whether an item differs between visits."""
        return not self.center_crop or self.random_flip or self.shuffle_caption or self.caption_dropout_rate > 0


class BatchDataset(Dataset[Batch]):
    """Batches by plan. An item's random choices depend on (seed, epoch, draw) only, not on workers or order."""

    def __init__(
        self,
        samples: Sequence[Sample],
        options: ItemOptions,
        sampler: BucketBatchSampler,
        has_masks: bool = False,
        latents: LatentCache | None = None,
        embeddings: EmbeddingCache | InstructionCache | None = None,
        preserved: Callable[[str], str] | None = None,
        sources: SourceCache | None = None,
        contents: Mapping[str, list[int]] | None = None,
    ) -> None:
        self.samples = samples
        self.options = options
        self.sampler = sampler
        self.has_masks = has_masks
        self.latents = latents
        self.embeddings = embeddings
        self.preserved = preserved
        self.sources = sources
        self.contents = contents or {}
        self._masks: dict[int, NDArray[np.uint8] | None] = {}
        self._conditions: dict[int, NDArray[np.uint8]] = {}
        placements = [sample.placement for sample in samples]
        self._original_size = torch.tensor([sample.original_size for sample in samples]).reshape(-1, 2)
        self._target_size = torch.tensor([(p.height, p.width) for p in placements]).reshape(-1, 2)
        self._left_top = torch.tensor([crop_offset(p) for p in placements]).reshape(-1, 2)
        self._spare_x = torch.tensor([p.spare[0] for p in placements])

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, plan: BatchPlan | int) -> Batch:
        if isinstance(plan, int):  # Trainer(overfit_batches=...) replaces the sampler by a SequentialSampler
            plan = self.sampler.plans(0)[plan]
        chosen = torch.tensor(plan.samples)
        captions = [self.samples[index].caption for index in plan.samples]
        flips = [False] * len(captions)
        left_top = self._left_top[chosen]
        if self.options.is_random:
            for at, (index, draw) in enumerate(zip(plan.samples, plan.draws, strict=True)):
                flips[at], offset, captions[at] = self._draw(self.samples[index], plan.epoch, draw)
                left_top[at] = torch.tensor(offset)
        batch: Batch = self._pictures(plan.samples, flips, left_top)
        if self.embeddings is not None:
            batch |= self.embeddings.batch(self.embeddings.rows(captions, plan.samples, flips))
        left_B = torch.where(torch.tensor(flips), self._spare_x[chosen] - left_top[:, 0], left_top[:, 0])
        batch["captions"] = captions
        if self.preserved is not None:
            # Of the caption as it is written: a dropped one is taught as the empty caption and held as its class.
            held = [self.preserved(self.samples[index].caption) for index in plan.samples[: plan.user_count]]
            batch["preserved_captions"] = held
            if self.embeddings is not None:
                entries = self.embeddings.batch(
                    self.embeddings.rows(held, plan.samples[: len(held)], flips[: len(held)])
                )
                batch |= {f"preserved_{name}": value for name, value in entries.items()}
        batch["is_prior"] = [number >= plan.user_count for number in range(len(captions))]
        batch["original_size"] = self._original_size[chosen]
        batch["crop_top_left"] = torch.stack([left_top[:, 1], left_B], dim=1)
        batch["target_size"] = self._target_size[chosen]
        batch["names"] = [self.samples[index].name for index in plan.samples]
        return batch

    def _draw(self, sample: Sample, epoch: int, draw: int) -> tuple[bool, tuple[int, int], str]:
        options = self.options
        rng = random.Random(f"{options.seed}|{epoch}|{draw}")
        flip_draw, across, down, dropout = rng.random(), rng.random(), rng.random(), rng.random()
        offset = crop_offset(sample.placement) if options.center_crop else crop_offset(sample.placement, across, down)
        caption = sample.caption
        if dropout < options.caption_dropout_rate:
            caption = ""
        elif options.shuffle_caption:
            keep = options.keep_tokens
            if not sample.is_prior:
                keep = max(keep, trigger_tags(caption, options.trigger_word, options.caption_separator))
            caption = shuffle_tags(caption, options.caption_separator, keep, rng)
        return options.random_flip and flip_draw < 0.5, offset, caption

    def _pictures(self, samples: Sequence[int], flips: list[bool], left_top_B2: Tensor) -> Batch:
        batch: Batch = {}
        masks: list[NDArray[np.uint8] | None]
        if self.latents is not None:
            count = len(self.samples)
            batch = dict(self.latents.batch([s + count * flip for s, flip in zip(samples, flips, strict=True)]))
            masks = [self._mask(index) for index in samples] if self.has_masks else []
        else:
            pixels, masks = [], []
            for index, flip, (left, top) in zip(samples, flips, left_top_B2.tolist(), strict=True):
                pixels_HW3, mask = load_pixels(self.samples[index], (left, top), self.options.use_alpha_mask)
                pixels.append(pixels_HW3[:, ::-1] if flip else pixels_HW3)
                masks.append(mask)
            batch["pixel_values"] = to_minus_one_to_one(torch.from_numpy(np.stack(pixels)))
        if self.samples[samples[0]].condition is not None:
            conditions = [
                self._condition(index, offset)[:, :: -1 if flip else 1]
                for index, flip, offset in zip(samples, flips, left_top_B2.tolist(), strict=True)
            ]
            batch["conditioning"] = torch.from_numpy(np.stack(conditions)).permute(0, 3, 1, 2).contiguous()
        if self.samples[samples[0]].sources:
            batch |= self._sources(samples, flips, left_top_B2)
        if self.has_masks:
            shape = self.samples[samples[0]].placement
            mask_B1HW = torch.ones(len(samples), 1, shape.height, shape.width)
            for at, mask in enumerate(masks):
                if mask is not None:
                    mask_B1HW[at, 0] = torch.from_numpy((mask[:, ::-1] if flips[at] else mask).astype(np.float32) / 255)
            batch["mask"] = mask_B1HW
        return batch

    def _sources(self, samples: Sequence[int], flips: list[bool], left_top_B2: Tensor) -> Batch:
        """The sources, a list of one tensor each: latents where they are cached, else pixels in -1..1."""
        numbers = range(len(self.samples[samples[0]].sources))
        if self.sources is not None:
            return {"source_latents": [self.sources.of(samples, flips, number) for number in numbers]}
        sources = []
        for number in numbers:
            pixels = [
                load_source_pixels(self.samples[index], number, (left, top))[:, :: -1 if flip else 1]
                for index, flip, (left, top) in zip(samples, flips, left_top_B2.tolist(), strict=True)
            ]
            sources.append(to_minus_one_to_one(torch.from_numpy(np.stack(pixels))))
        return {"sources": sources}

    def _condition(self, index: int, left_top: list[int]) -> NDArray[np.uint8]:
        """The condition of an image, bytes [H, W, 3]; held in memory if latents are, which have one crop."""
        if index in self._conditions:
            return self._conditions[index]
        condition = load_condition_pixels(self.samples[index], (left_top[0], left_top[1]))
        if self.latents is not None and self.latents.in_memory:
            self._conditions[index] = condition
        return condition

    def _mask(self, index: int) -> NDArray[np.uint8] | None:
        """The mask of an image with cached latents; held in memory if the latents are."""
        if index in self._masks:
            return self._masks[index]
        sample = self.samples[index]
        offset = crop_offset(sample.placement)
        if self.options.use_alpha_mask and sample.mask is None:
            mask = load_pixels(sample, offset, use_alpha_mask=True)[1]
        else:
            mask = load_mask_pixels(sample, offset)
        if self.latents is not None and self.latents.in_memory:
            self._masks[index] = mask
        return mask


class BatchLoader(DataLoader[Batch]):
    """A DataLoader with a position that Lightning saves in checkpoints, to resume at the next batch."""

    _delivered: int | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # A generator, because Lightning may call set_epoch between iter() and the first batch.
        self._delivered = self.sampler.start if isinstance(self.sampler, ResumableSampler) else 0
        for batch in super().__iter__():
            self._delivered += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Epoch and batches delivered, without those that workers have prefetched; and what the data are."""
        if not isinstance(self.sampler, ResumableSampler):
            return {}
        return self.sampler.state_dict(self._delivered) | {"contents": self._contents()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration after the last batch that the state counts as delivered; warn of other data."""
        if state and isinstance(self.sampler, ResumableSampler):
            self.sampler.load_state_dict(state)
            self._delivered = None
            self._warn_of_changes(state.get("contents", self._contents()))

    def _contents(self) -> dict[str, list[int]]:
        return dict(getattr(self.dataset, "contents", {}))

    def _warn_of_changes(self, before: Mapping[str, list[int]]) -> None:
        now = self._contents()
        changed = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
        if changed:
            counts = [f"{name} ({before.get(name, [0])[0]} then, {now.get(name, [0])[0]} now)" for name in changed]
            rank_zero_warn(
                f"the data are others than before the resume: {', '.join(counts)}; a change of a caption counts. Scores"
                " before and after do not compare: restore the data, or start anew in another trainer.default_root_dir"
            )
