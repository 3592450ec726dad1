"""FineTuneCheck: sample before the first step and after the last, and name what went wrong with a fine-tune."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from lightning_aigc._lightning import Callback, LightningModule, Trainer, rank_zero_info, rank_zero_warn
from lightning_aigc.atomic_file import warns_if_unwritten, write_text
from lightning_aigc.callbacks.fine_tune.copies import copy_ratios
from lightning_aigc.callbacks.fine_tune.figures import Figures, Pictures, find_all, summary
from lightning_aigc.callbacks.fine_tune.ranks import effective_ranks
from lightning_aigc.callbacks.sampling.judges import PromptJudge, refuse_edits
from lightning_aigc.callbacks.sampling.pairs import (
    begins_anew,
    find_prompts,
    make_pairs,
    require_sampling,
    sample_on_all_ranks,
)
from lightning_aigc.errors import ConfigError, SamplingTooSlow
from lightning_aigc.protocols import DescribesTrainingData, HasReferenceImages
from lightning_aigc.report.record import FineTuneFinding, FineTuneResult
from lightning_aigc.setting_checks import check_types

FILE = "fine_tune.json"


@runtime_checkable
class EncodesCaptions(Protocol):
    """Encodes captions, for FineTuneCheck."""

    def encode_captions(self, captions: Sequence[str]) -> Mapping[str, Tensor]:
        """Return embeddings by batch key, among them `prompt_embeds` [B, T, D]."""
        ...


class FineTuneCheck(Callback):
    """Says at the end of a fit what is wrong with the fine-tune: memorised, forgotten, bleeding, not_learned,
    colour_shift, text_encoder_drift, rank_unused or rank_full, each with its figure and a config line.

    It samples the same prompts and seeds before the first step and after the last, and compares them with one another
    and with the training images. Findings go to the log, to RunReport's page and to
    `<default_root_dir>/fine_tune.json`. The training is not disturbed. Works with any LightningModule that has
    `sample(prompts, seeds)`; what a module or data module cannot give (training images, caption embeddings, LoRA
    layers) is left out.

    Args:
        prompts: Prompts with the trigger word; unset means the module's `validation_prompts`.
        class_prompts: Prompts without it, whose images must stay as they were; unset means `prompts` without the
            trigger word (`an object` where no other word names the thing), where the data module knows one.
        num_images: Images of each prompt.
        seed: The first seed.
        clip_model: The model that scores: an open_clip name, a local folder, or `embedded:clip`.
        clip_pretrained: Weights of that model: an open_clip tag or a local file.
        reference_images: Training images to compare with, from the data module's `reference_images`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import FineTuneCheck
        >>> trainer = Trainer(callbacks=[FineTuneCheck(num_images=2, clip_model="embedded:clip")])
    """

    def __init__(
        self,
        prompts: list[str] | None = None,
        class_prompts: list[str] | None = None,
        num_images: int = 4,
        seed: int = 3000,
        clip_model: str = "ViT-B-32",
        clip_pretrained: str | None = None,
        reference_images: int = 64,
    ) -> None:
        check_types(FineTuneCheck.__init__, locals())
        for name, value in (("num_images", num_images), ("reference_images", reference_images)):
            if value < 1:
                raise ConfigError(f"FineTuneCheck {name} must be at least 1, got {value}")
        self.prompts, self.class_prompts = prompts, class_prompts
        self.num_images, self.seed = num_images, seed
        self.clip_model, self.clip_pretrained = clip_model, clip_pretrained
        self.reference_images = reference_images
        self._judge: PromptJudge | None = None
        self._sets: list[list[str]] = []
        self._resumed: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self.findings: list[FineTuneFinding] = []
        self.figures: Figures | None = None
        self._before: list[Pictures] = []
        self._before_of: list[Any] = []
        """Settings that the images before were drawn with."""
        self._text_before: Tensor | None = None

    def prompts_drawn(self, trainer: Trainer) -> list[str]:
        """The prompts of the images, with the trigger word and without."""
        prompts = find_prompts(trainer.lightning_module, self.prompts)
        return [*prompts, *self._plain_prompts(trainer, prompts)]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises: ModelError without `sample` or a CLIP model, ConfigError without prompts."""
        if stage != "fit":
            return
        self._judge, self._resumed = None, None
        if begins_anew(trainer):
            self._reset()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        require_sampling(pl_module, "FineTuneCheck")
        refuse_edits(trainer, "FineTuneCheck", "take it out of trainer.callbacks")
        prompts = find_prompts(pl_module, self.prompts)
        if not prompts:
            raise ConfigError("FineTuneCheck got no prompts; set its `prompts`, or model.init_args.validation_prompts")
        self._sets = [prompts]
        self._judge = PromptJudge(self.clip_model, self.clip_pretrained)
        self._judge.check()

    def state_dict(self) -> dict[str, Any]:
        before = [[p.clip_t, p.clip_i, p.colours] for p in self._before]
        return {"before": before, "text_before": self._text_before, "asked": self._asked()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def _asked(self) -> list[Any]:
        return [self._sets, self.num_images, self.seed, self.clip_model, self.clip_pretrained]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._judge is None:
            return
        self._judge.begin(trainer, self.reference_images, pl_module.device)
        self._sets = [self._sets[0], self._plain_prompts(trainer, self._sets[0])]
        resumed = self._resumed
        if resumed and resumed["before"] and resumed["asked"] == self._asked():
            self._before = [Pictures(list(t), list(i), colours) for t, i, colours in resumed["before"]]
            self._before_of, self._text_before = self._asked(), resumed["text_before"]
            return
        if trainer.global_step and self._before and self._before_of == self._asked():  # of the fit before this one
            return
        if trainer.global_step:
            rank_zero_warn("FineTuneCheck was not there when this run began, so it has nothing to compare with")
            self._judge = None
            return
        measured = self._measure(trainer, pl_module)
        if measured is None:
            self._judge = None
            return
        self._before, self._text_before = [pictures for pictures, _ in measured], self._text(pl_module)
        self._before_of = self._asked()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._judge is None or (measured := self._measure(trainer, pl_module)) is None:
            return
        after = [pictures for pictures, _ in measured]
        self.figures = Figures(
            trained=(self._before[0], after[0]),
            plain=(self._before[1], after[1]) if len(after) > 1 else None,
            copy_ratios=self._copy_ratios(trainer, measured[0][1]),
            text_drift=_drift(self._text_before, self._text(pl_module)),
            ranks=effective_ranks(pl_module),
        )
        self.findings = find_all(self.figures)
        if trainer.is_global_zero:
            rank_zero_info(f"fine-tune: {summary(self.figures)}")
            for finding in self.findings:
                rank_zero_warn(finding.line())
            known = {"summary": summary(self.figures), "findings": [dataclasses.asdict(f) for f in self.findings]}
            path = Path(trainer.default_root_dir) / FILE
            with warns_if_unwritten("FineTuneCheck", path):
                write_text(path, json.dumps(known, indent=2) + "\n")

    def report_entries(self) -> dict[str, Any]:
        """The findings for RunReport's page; nothing before the end."""
        return {} if self.figures is None else {"fine_tune": FineTuneResult(summary(self.figures), self.findings)}

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> list[tuple[Pictures, Tensor]] | None:
        """Sample and score each set of prompts; None where sampling would take too long. Collective."""
        found = []
        for prompts in filter(None, self._sets):
            pairs = make_pairs(prompts, range(self.seed, self.seed + self.num_images))
            try:
                sampled = sample_on_all_ranks(trainer, pl_module, pairs, self._judge, warn_of_broken=False)
            except SamplingTooSlow as slow:
                rank_zero_warn(f"FineTuneCheck checks nothing: {slow}")
                return None
            images = sampled.images.nan_to_num()
            colours_N4 = torch.cat([images.mean(dim=(2, 3)), images.std(dim=(1, 2, 3))[:, None]], dim=1)
            clip_t, clip_i = (sampled.scores[name].tolist() for name in ("clip_t", "clip_i"))
            found.append((Pictures(clip_t, clip_i, colours_N4), images))
        return found

    def _plain_prompts(self, trainer: Trainer, prompts: Sequence[str]) -> list[str]:
        if self.class_prompts is not None:
            return self.class_prompts
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        word = data.lora_metadata().get("trigger_phrase") if isinstance(data, DescribesTrainingData) else None
        if not word:
            return []
        plain = [_without(word, prompt) for prompt in prompts]
        return [p for p, original in zip(plain, prompts, strict=True) if p and p != original]

    def _copy_ratios(self, trainer: Trainer, images_N3HW: Tensor) -> list[float]:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, HasReferenceImages):
            return []
        ratios = copy_ratios(images_N3HW, data.reference_images(self.reference_images))
        return [] if ratios is None else ratios.tolist()

    def _text(self, pl_module: LightningModule) -> Tensor | None:
        """The class prompts' embeddings [N, T * D] on the CPU."""
        prompts = self._sets[1]
        if not prompts or not isinstance(pl_module, EncodesCaptions):
            return None
        return pl_module.encode_captions(prompts)["prompt_embeds"].float().cpu().flatten(1)


def _without(word: str, prompt: str) -> str:
    """The prompt without the trigger word: `a zorp mug` is a mug, and `a photo of zorp in the snow` shows an object."""
    word = rf"(?<!\w){re.escape(word)}(?!\w)"
    alone = rf"(?:\b(?:an?|the)\s+)?{word}(?=\s*(?:[,.;:]|$|(?:{'|'.join(_PREPOSITIONS)})\b))"
    prompt = re.sub(alone, "an object", prompt, flags=re.I)
    return " ".join(re.sub(word, " ", prompt, flags=re.I).split())


_PREPOSITIONS = ("on", "in", "at", "under", "over", "by", "with", "near", "next", "beside", "before", "behind", "and")


def _drift(before_ND: Tensor | None, after_ND: Tensor | None) -> float | None:
    """Distance that the embeddings moved over the usual distance between two of them, both as 1 - cosine."""
    if before_ND is None or after_ND is None or len(before_ND) < 2:
        return None
    center_D = before_ND.mean(dim=0)
    among_NN = 1 - cosine_similarity(before_ND[:, None] - center_D, before_ND[None] - center_D, dim=-1)
    usual = among_NN.sum() / (len(before_ND) * (len(before_ND) - 1))
    moved = (1 - cosine_similarity(before_ND - center_D, after_ND - center_D, dim=-1)).mean()
    return float(moved / usual.clamp(min=1e-6))
