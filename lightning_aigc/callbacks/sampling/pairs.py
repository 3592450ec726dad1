"""Pairs of prompt and seed: sample their images, each rank a share, and gather images and scores on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_aigc._lightning import LightningModule, Trainer
from lightning_aigc.callbacks.sampling.gathered import gathered_weights
from lightning_aigc.callbacks.sampling.judges import Judge, Pair
from lightning_aigc.errors import ModelError, SamplingTooSlow
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.gradient_sync.transport.process_groups import errors_of_all_ranks
from lightning_aigc.protocols import HasValidationPrompts, SupportsSampling
from lightning_aigc.rng import isolate_rng
from lightning_aigc.sharding.local_parts import original_class

OVERSHOOT = 0.25
"""Distance that images may lie outside of 0..1, as those of a decoder that does not clamp do."""
HOW_TO_SAMPLE = (
    "add this method to it: `def sample(self, prompts: list[str], seeds: list[int]) -> Tensor`, which returns one "
    "image for each pair, [N, 3, H, W] in 0..1"
)


@dataclass(frozen=True)
class SampledPairs:
    """The images of all pairs in their order, whichever rank drew them."""

    images: Tensor
    """float32 [N, 3, H, W] in 0..1, on the CPU."""
    scores: dict[str, Tensor]
    """Each score [N] by name, on the training's device; empty without a judge."""


def begins_anew(trainer: Trainer) -> bool:
    """Whether the fit whose `setup` this is has no steps behind it, so that what a callback knows is of another fit.

    A second fit of one Trainer continues, and a checkpoint is loaded after `setup`.
    """
    return trainer.global_step == 0


def make_pairs(prompts: Sequence[str], seeds: Sequence[int]) -> list[Pair]:
    """Every prompt with every seed, prompt by prompt."""
    return [(prompt, seed) for prompt in prompts for seed in seeds]


def require_sampling(pl_module: LightningModule, callback: str) -> None:
    """Raises: ModelError, in the name of the callback, where the module cannot sample."""
    if not isinstance(pl_module, SupportsSampling):
        raise ModelError(
            f"{callback} cannot draw: {original_class(pl_module).__name__} has no `sample`; {HOW_TO_SAMPLE}"
        )


def find_prompts(pl_module: LightningModule, prompts: Sequence[str] | None) -> list[str]:
    """The callback's own prompts, else the module's `validation_prompts`; empty where there are neither."""
    if prompts:
        return list(prompts)
    found: Any = pl_module.validation_prompts if isinstance(pl_module, HasValidationPrompts) else None
    if isinstance(found, str):
        raise ModelError(
            f"{original_class(pl_module).__name__}.validation_prompts is {found!r}; wanted a list: write [{found!r}]"
        )
    return list(found or ())


def sample_pairs(pl_module: LightningModule, pairs: Sequence[Pair]) -> Tensor:
    """Sample the image of each pair, float32 [N, 3, H, W] on the device where the module returned them.

    Raises: ModelError when the module returned something else.
    """
    assert isinstance(pl_module, SupportsSampling)
    images: Any = pl_module.sample([prompt for prompt, _ in pairs], [seed for _, seed in pairs])
    owner = original_class(pl_module).__name__
    shape = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
    if not isinstance(images, Tensor) or images.ndim != 4 or shape[:2] != [len(pairs), 3]:
        raise ModelError(
            f"{owner}.sample returned {shape} for {len(pairs)} prompts; wanted [{len(pairs)}, 3, H, W] in 0..1"
        )
    if not images.is_floating_point():
        raise ModelError(f"{owner}.sample returned {images.dtype}; wanted floating point in 0..1: divide by 255")
    found: Tensor = images.detach().float()
    if getattr(pl_module, "global_step", 0) == 0:  # later a training that diverges may give anything
        _check_range(found, owner)
    return found


def _check_range(images_N3HW: Tensor, owner: str) -> None:
    """Raises: ModelError for images that are clearly not in 0..1. Values that are not finite are named elsewhere."""
    finite = images_N3HW[images_N3HW.isfinite()]
    if not finite.numel():
        return
    low, high = (float(value) for value in finite.aminmax())
    if low < -OVERSHOOT or high > 1 + OVERSHOOT:
        remedy = "return images / 2 + 0.5" if low < -OVERSHOOT else "return images / 255"
        raise ModelError(f"{owner}.sample returned values from {low:.3g} to {high:.3g}; wanted 0..1: {remedy}")


def sample_on_all_ranks(
    trainer: Trainer,
    pl_module: LightningModule,
    pairs: Sequence[Pair],
    judge: Judge | None = None,
    *,
    warn_of_broken: bool = True,
) -> SampledPairs:
    """Sample and score each pair on one of the ranks, and gather the results on all. Collective.

    The training is not disturbed: random states and modes of modules come back.

    Args:
        judge: scores the images, on every rank or on none.
        warn_of_broken: whether the judge warns of images that cannot be right; without, leave that to `check_images`.
    Raises: SamplingTooSlow on every rank, where sampling would take too long on any; ConfigError where another rank
        has an error, which that rank raises itself.
    """
    rank, world = trainer.global_rank, trainer.world_size
    share = pairs[rank::world]
    with errors_of_all_ranks():
        images, slow = _sample_share(pl_module, share)
        scores = None if images is None or judge is None else _score(judge, images, share, warn_of_broken)
    if trainer.strategy.reduce_boolean_decision(slow is not None, all=False):
        raise slow or SamplingTooSlow("another rank was too slow")
    names = judge.names if judge is not None else ()
    if world > 1:
        scores, images = _gather(pl_module, len(pairs), world, scores, images, len(names))
    assert images is not None
    return SampledPairs(images.cpu(), {} if scores is None else dict(zip(names, scores, strict=True)))


def _sample_share(pl_module: LightningModule, share: Sequence[Pair]) -> tuple[Tensor | None, SamplingTooSlow | None]:
    """This rank's images, None where it has no pair or was too slow."""
    try:
        with gathered_weights(pl_module), isolate_rng(pl_module.device), evaluating(pl_module):
            return (sample_pairs(pl_module, share) if share else None), None
    except SamplingTooSlow as error:
        return None, error


def _score(judge: Judge, images_N3HW: Tensor, share: Sequence[Pair], warn_of_broken: bool) -> Tensor:
    """The judge's scores of each image, [names, N]."""
    with warnings.catch_warnings():
        if not warn_of_broken:
            warnings.simplefilter("ignore")
        scores = judge.scores(images_N3HW, share)
    return torch.stack([scores[name] for name in judge.names])


def _gather(
    pl_module: LightningModule,
    count: int,
    world: int,
    scores_KN: Tensor | None,
    images_N3HW: Tensor | None,
    kinds: int,
) -> tuple[Tensor | None, Tensor]:
    """Scores [kinds, count] and images [count, 3, H, W] of all ranks, in the order of the pairs."""
    device = pl_module.device
    per_rank = -(-count // world)
    size = torch.tensor((0, 0) if images_N3HW is None else images_N3HW.shape[2:], device=device, dtype=torch.int32)
    height, width = _all_gather(pl_module, size).amax(0).tolist()  # a rank without images does not know it
    padded = torch.zeros(per_rank, 3, height, width, device=device)
    if images_N3HW is not None:
        padded[: len(images_N3HW)] = images_N3HW.to(device)
    scores = None
    if kinds:
        padded_scores = torch.zeros(kinds, per_rank, device=device)
        if scores_KN is not None:
            padded_scores[:, : scores_KN.shape[1]] = scores_KN
        # Rank r drew the pairs r, r + world, ...: its e-th image is number e * world + r.
        scores = _all_gather(pl_module, padded_scores).permute(1, 2, 0).reshape(kinds, -1)[:, :count]
    images = _all_gather(pl_module, padded).transpose(0, 1).flatten(0, 1)[:count]
    return scores, images


def _all_gather(pl_module: LightningModule, tensor: Tensor) -> Tensor:
    """Stack every rank's tensor in a new first dimension."""
    gathered = pl_module.all_gather(tensor)
    assert isinstance(gathered, Tensor)
    return gathered
