"""Judges of sampled images: by their prompts, or of edits by their true targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from lightning_aigc._lightning import LightningModule, Trainer
from lightning_aigc.errors import ConfigError
from lightning_aigc.metrics import CLIPSimilarity, EditSimilarity
from lightning_aigc.protocols import HasEditSources, HasReferenceImages, SamplesEdits
from lightning_aigc.report.paired_scores import improvement
from lightning_aigc.report.verdict import CLEAR

PAIRS_COMPARED = 32
"""Pairs whose instruction is compared with both sides."""
Pair = tuple[str, int]
"""A prompt and a seed."""


class Judge(Protocol):
    """Scores images by the pairs of prompt and seed that they were drawn from."""

    names: tuple[str, ...]
    """Names of the scores."""

    def check(self) -> None:
        """Load the model now. Raises: ModelError if it cannot be had."""

    def begin(self, trainer: Trainer, count: int, device: torch.device) -> None:
        """Prepare for a run: move to its device, and take up to `count` training images to compare with."""

    def scores(self, images_N3HW: Tensor, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """Each image's scores [N] by name; images in 0..1."""
        ...


class PromptJudge:
    """Scores images by their prompts, CLIP-T, and by the training images, CLIP-I."""

    names: tuple[str, ...] = ("clip_t", "clip_i")

    def __init__(self, model: str, pretrained: str | None) -> None:
        self.clip = CLIPSimilarity(model, pretrained)

    def check(self) -> None:
        self.clip.check()

    def begin(self, trainer: Trainer, count: int, device: torch.device) -> None:
        self.clip.to(device)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, HasReferenceImages):
            self.clip.set_reference_images(data.reference_images(count).to(device))

    def scores(self, images_N3HW: Tensor, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        return self.clip.scores(images_N3HW.to(self.clip.device), [prompt for prompt, _ in pairs])


class EditJudge:
    """Scores edits by the targets of the pairs whose sources they start from.

    CLIP-T compares images with descriptions of their targets; it is NaN where the data has none.
    """

    names: tuple[str, ...] = ("direction", "kept", "clip_t")

    def __init__(self, model: str, pretrained: str | None, data: HasEditSources) -> None:
        self.metric, self.data = EditSimilarity(model, pretrained), data

    def check(self) -> None:
        self.metric.check()

    def begin(self, trainer: Trainer, count: int, device: torch.device) -> None:
        self.metric.to(device)

    def scores(self, images_N3HW: Tensor, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        sources = [self.data.edit_sources(*pair)[0][0] for pair in pairs]
        targets = [self.data.edit_target(*pair) for pair in pairs]
        found = self.metric.scores(images_N3HW, [*map(as_pixels, sources)], [*map(as_pixels, targets)])
        said = [self.data.edit_description(*pair) for pair in pairs]
        described = [place for place, words in enumerate(said) if words]
        found["clip_t"] = torch.full_like(found["kept"], torch.nan)
        if described:
            images = images_N3HW[described].to(self.metric.clip.device)
            found["clip_t"][described] = self.metric.clip.scores(images, [str(said[n]) for n in described])["clip_t"]
        return found


def swapped_sides(judge: EditJudge) -> str | None:
    """A warning where sources fit their instructions better than the targets do; None where they do not.

    Example: `make it orange` fits the orange image, whichever side of the pair it stands on.
    """
    pairs = judge.data.edit_examples(PAIRS_COMPARED)
    captions, sources, targets = [caption for caption, _, _ in pairs], *zip(*(pair[1:] for pair in pairs), strict=True)
    before, after = (
        judge.metric.clip.scores(torch.stack([as_pixels(image) for image in images]), captions)["clip_t"]
        for images in (sources, targets)
    )
    difference, noise = improvement(after.tolist(), before.tolist())
    if len(pairs) < 2 or difference >= -CLEAR * noise:
        return None
    return (
        f"the sources fit their instructions better than the targets do (CLIP-T {-difference:+.3f} ± {noise:.3f} over"
        f" {len(pairs)} pairs), as if the sides were swapped; train_data_dir has the images after the edit, and"
        " source_data_dir those before it"
    )


def draws_edits(trainer: Trainer) -> bool:
    """Whether the run's images are edits of source images, whose prompts describe no image."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return isinstance(data, HasEditSources) and data.sources_per_image > 0


def make_judge(trainer: Trainer, pl_module: LightningModule, model: str, pretrained: str | None, owner: str) -> Judge:
    """The judge of a run's images; `owner` is the callback that asks.

    Raises: ConfigError for edits whose true targets are not known.
    """
    if not draws_edits(trainer):
        return PromptJudge(model, pretrained)
    if isinstance(pl_module, SamplesEdits) and pl_module.has_own_sources:
        raise ConfigError(
            f"{owner} compares edits with the targets of your pairs, and model.init_args.validation_sources have none;"
            f" set model.init_args.validation_sources: [], which draws from your pairs, or take {owner}'s scores out"
        )
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return EditJudge(model, pretrained, data)


def refuse_edits(trainer: Trainer, callback: str, remedy: str) -> None:
    """Raises: ConfigError, in the name of the callback, where images are edits, whose prompts describe no image."""
    if draws_edits(trainer):
        raise ConfigError(
            f"{callback} compares images with their prompts, and the prompt of an edit is an instruction that describes"
            f" no image; {remedy}"
        )


def as_pixels(image: Image) -> Tensor:
    """An RGB image as [3, H, W] in 0..1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
