"""BeforeAfter: images of the same prompts and seeds before and after a training, and their scores."""

from __future__ import annotations

import base64
import contextlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightning_aigc._lightning import LightningModule, Trainer
from lightning_aigc.callbacks.sampling.judges import Judge, Pair, PromptJudge, as_pixels
from lightning_aigc.callbacks.sampling.pairs import sample_on_all_ranks
from lightning_aigc.errors import SamplingTooSlow, UserError
from lightning_aigc.metrics.clip_similarity import recognition
from lightning_aigc.metrics.image_problems import find_ruined
from lightning_aigc.protocols import HasPackedBase, SamplesEdits, SupportsSampling
from lightning_aigc.report.record import Looks, Paired, Picture

WHENS = ("before", "after")


class BeforeAfter:
    """Samples of one run before its first step and after its last.

    Args:
        prompts: by what names of scores and images begin with: `""`, and `prior_` for unrelated prompts.
        num_images: images of each set of prompts, rounded up so that each prompt has as many.
        seed: the first image's.
        images_shown: images of each prompt that are kept.
    """

    def __init__(self, prompts: Mapping[str, Sequence[str]], num_images: int, seed: int, images_shown: int) -> None:
        self.prompts = {kind: list(found) for kind, found in prompts.items() if found}
        self.num_images, self.seed, self.images_shown = num_images, seed, images_shown
        self.images: dict[str, Tensor] = {}
        """Thumbnails by kind and time, such as `prior_before`."""
        self.sources: dict[str, list[str]] = {}
        """By kind, the sources of the images on the page, as data URIs."""
        self.scores: dict[str, list[float]] = {}
        """Scores of each image by name, such as `clip_t_before`."""
        self.ruined: dict[str, list[str]] = {}
        """A word for each ruined image, by kind and time."""
        self.recognition = (math.nan, math.nan)
        """Recognition of the images of before, by `metrics.recognition`; on rank zero."""
        self.full_base: dict[str, Paired] = {}
        """Scores after training on a packed base and on the full-precision one, by name."""

    def measure(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        when: str,
        judge: Judge | None,
        note: Callable[[str], None],
    ) -> None:
        """Sample and score each set of prompts. Collective.

        Args: note: gets the reason where sampling would take too long; then there are no more images.
        """
        if not isinstance(pl_module, SupportsSampling) or (when == "after" and not self.images):
            return
        everything = list(dict.fromkeys(prompt for prompts in self.prompts.values() for prompt in prompts))
        similarities: list[Tensor] = []
        own: list[int] = []
        for kind, prompts in self.prompts.items():
            try:
                sampled = sample_on_all_ranks(trainer, pl_module, self.pairs(prompts), judge)
            except SamplingTooSlow as slow:
                note(str(slow))
                return
            if trainer.is_global_zero:
                self.ruined[kind + when] = list(find_ruined(sampled.images).values())
            if isinstance(judge, PromptJudge) and when == "before" and trainer.is_global_zero:
                similarities.append(judge.clip.similarity(sampled.images.to(judge.clip.device), everything))
                own += [everything.index(prompt) for prompt, _ in self.pairs(prompts)]
            self.images[kind + when] = torch.stack([thumbnail(sampled.images[i]) for i in self._shown(prompts)])
            self.sources[kind] = self._sources(pl_module, prompts)
            for metric, scores_N in sampled.scores.items():
                if bool(scores_N.isfinite().all()):
                    self.scores[f"{kind}{metric}_{when}"] = scores_N.tolist()
        if similarities:
            self.recognition = recognition(torch.cat(similarities), torch.tensor(own))

    def measure_full_base(
        self, trainer: Trainer, pl_module: LightningModule, judge: Judge, note: Callable[[str], None]
    ) -> None:
        """Score what was trained on a packed base where it is used, on the full-precision one. Collective."""
        prompts = self.prompts.get("", [])
        if (
            not isinstance(pl_module, HasPackedBase)
            or pl_module.packed_base is None
            or not any(name.endswith("_after") for name in self.scores)
        ):
            return
        with contextlib.ExitStack() as stack:
            failed = ""
            try:
                stack.enter_context(pl_module.full_precision_base())
            except (RuntimeError, OSError, UserError) as error:  # out of memory, or the source is gone
                failed = str(error).splitlines()[0]
            if trainer.strategy.reduce_boolean_decision(bool(failed), all=False):
                note(f"no score on the full-precision base: {failed or 'another rank could not load it'}")
                return
            try:
                sampled = sample_on_all_ranks(trainer, pl_module, self.pairs(prompts), judge)
            except SamplingTooSlow as slow:
                note(str(slow))
                return
        for metric, scores_N in sampled.scores.items():
            if f"{metric}_after" in self.scores:
                self.full_base[f"full_base_{metric}"] = Paired(self.scores[f"{metric}_after"], scores_N.tolist())

    def pairs(self, prompts: Sequence[str]) -> list[Pair]:
        """Each prompt as often, with seeds that count up."""
        per_prompt = max(1, math.ceil(self.num_images / len(prompts)))
        repeated = [prompt for prompt in prompts for _ in range(per_prompt)]
        return [(prompt, self.seed + i) for i, prompt in enumerate(repeated)]

    def _sources(self, pl_module: LightningModule, prompts: Sequence[str]) -> list[str]:
        """The first sources of the images on the page, as data URIs; none where they are no edits."""
        pairs = [self.pairs(prompts)[i] for i in self._shown(prompts)]
        if not isinstance(pl_module, SamplesEdits):
            return []
        found = pl_module.sources_of_samples([prompt for prompt, _ in pairs], [seed for _, seed in pairs])
        return [data_uri(thumbnail(as_pixels(images[0]))) for images in found or ()]

    def _shown(self, prompts: Sequence[str]) -> list[int]:
        """Indices of the pairs on the page."""
        count = len(self.pairs(prompts))
        per_prompt = count // len(prompts)
        return [i for i in range(count) if i % per_prompt < self.images_shown]

    def paired_scores(self) -> dict[str, Paired]:
        """The scores of both times by name."""
        names = sorted({name.rpartition("_")[0] for name in self.scores})
        found = {name: Paired(*(self.scores.get(f"{name}_{when}", []) for when in WHENS)) for name in names}
        return found | self.full_base

    def looks(self) -> Looks:
        """Facts about the images that need no score."""
        words = {when: [word for kind in self.prompts for word in self.ruined.get(kind + when, ())] for when in WHENS}
        count = sum(len(self.pairs(prompts)) for prompts in self.prompts.values())
        changed = self._changed(""), self._changed("prior_")
        return Looks(*self.recognition, *changed, count, words["before"], words["after"])

    def _changed(self, kind: str) -> float:
        """Pixel distance between before and after, over the mean distance between two images of before."""
        before, after = (self.images.get(kind + when) for when in WHENS)
        if before is None or after is None or len(before) < 2:
            return math.nan
        before, after = before.float().flatten(1), after.float().flatten(1)
        apart = torch.pdist(before).mean()
        return float((before - after).norm(dim=1).mean() / apart) if apart > 0 else math.nan

    def pictures(self) -> list[Picture]:
        """The images that the page shows, of both times."""
        found = []
        for kind, prompts in self.prompts.items():
            sets = [self.images.get(kind + when) for when in WHENS]
            pairs = self.pairs(prompts)
            for place, pair in enumerate(self._shown(prompts)):
                before, after = ("" if images is None else data_uri(images[place]) for images in sets)
                source = next(iter(self.sources.get(kind, [])[place : place + 1]), "")
                if before or after:
                    found.append(Picture(*pairs[pair], bool(kind), before, after, source))
        return found

    # Checkpoints: what was measured before the training

    def images_before(self) -> dict[str, Tensor]:
        return {kind: self.images[f"{kind}before"] for kind in self.prompts if f"{kind}before" in self.images}

    def looks_before(self) -> dict[str, Any]:
        return {"recognition": list(self.recognition), "ruined": dict(self.ruined)}

    def load(
        self, images_before: Mapping[str, Tensor], scores: Mapping[str, Any], looks: Mapping[str, Any] | None = None
    ) -> None:
        """Load a checkpoint's."""
        if looks is not None:
            self.recognition = (float(looks["recognition"][0]), float(looks["recognition"][1]))
            self.ruined = {key: list(words) for key, words in looks["ruined"].items()}
        self.images = {f"{kind}before": images for kind, images in images_before.items()}
        self.scores = {name: list(found) for name, found in scores.items()}


LARGEST_SIDE = 256
LARGEST_PNG = 128


def thumbnail(picture_3HW: Tensor, largest_side: int = LARGEST_SIDE) -> Tensor:
    """An image in 0..1 as the page shows it: uint8 on the CPU, no side longer than `largest_side`."""
    array = picture_3HW.detach().clamp(0, 1).nan_to_num(0).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(array)
    picture.thumbnail((largest_side, largest_side))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def data_uri(thumbnail_3HW: Tensor) -> str:
    """A thumbnail as the data URI of a PNG, above 128 px of a JPEG."""
    picture = Image.fromarray(thumbnail_3HW.permute(1, 2, 0).numpy())
    kind = "PNG" if max(picture.size) <= LARGEST_PNG else "JPEG"
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=88) if kind == "JPEG" else picture.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
