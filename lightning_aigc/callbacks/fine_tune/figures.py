"""Figures: what FineTuneCheck measured before the first step and after the last, and what is wrong with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from lightning_aigc.callbacks.fine_tune.copies import COPY_RATIO
from lightning_aigc.report.paired_scores import improvement
from lightning_aigc.report.record import FineTuneFinding

LEAST_LEARNED = 0.02
"""Gain of CLIP-T or CLIP-I, a cosine, below which a run taught its prompts nothing."""
MOST_FORGOTTEN = 0.1
"""Share of the class prompts' CLIP-T that a run may cost; the demo's bar."""
LEAST_BLED = 0.1
"""Rise of the class prompts' CLIP-I to the training images below which nothing bleeds."""
MOST_BLED = 0.25
"""Rise of the class prompts' CLIP-I to the training images, over that of the trained prompts."""
COPIED_SHARE = 0.25
"""Share of copies among the samples."""
MOST_SHIFTED = 0.1
"""Median change of a colour channel's mean or of the contrast on the class prompts, of 1: 25 of 255 levels."""
MOST_TEXT_DRIFT = 0.5
"""Change of a class prompt's embedding, over the usual distance between two prompts."""
RANK_UNUSED = 0.25
"""Effective rank over rank below which most of a LoRA is empty."""
RANK_FULL = 0.9
"""The same, above which no direction is left."""


@dataclass
class Pictures:
    """Scores of one set of prompts, [N] each, and colours [N, 4]: mean red, green, blue, and contrast."""

    clip_t: list[float]
    clip_i: list[float]
    colours: Tensor


@dataclass
class Figures:
    """Everything that was measured; a part that a module or data module cannot give is None or empty."""

    trained: tuple[Pictures, Pictures]
    """Prompts with the trigger word, before and after."""
    plain: tuple[Pictures, Pictures] | None = None
    """Class prompts, before and after."""
    copy_ratios: list[float] = field(default_factory=list)
    text_drift: float | None = None
    ranks: dict[str, tuple[int, float]] = field(default_factory=dict)


def gain(pictures: tuple[Pictures, Pictures], metric: str) -> tuple[float, float]:
    """The mean paired change of a score and its standard error; NaN where it was not measured."""
    before, after = (getattr(p, metric) for p in pictures)
    return improvement(after, before)


def find_all(figures: Figures) -> list[FineTuneFinding]:
    """Every finding, the gravest first."""
    found = [_text_drift(figures), _forgotten(figures), _bled(figures), _copied(figures)]
    found += [_shifted(figures), _not_learned(figures)]
    found += _ranks(figures)
    return [finding for finding in found if finding is not None]


def summary(figures: Figures) -> str:
    """The figures in one line."""
    parts = [f"trained prompts {_change(figures.trained, 'clip_t')} clip_t"]
    parts[0] += f" {_change(figures.trained, 'clip_i')} clip_i"
    if figures.plain is not None:
        parts.append(
            f"class prompts {_change(figures.plain, 'clip_t')} clip_t {_change(figures.plain, 'clip_i')} clip_i"
        )
        parts.append(f"their colours {_shift(figures.plain):+.3f}")
    if figures.copy_ratios:
        parts.append(f"{_copies(figures)} of {len(figures.copy_ratios)} samples copy a training image")
    if figures.text_drift is not None:
        parts.append(f"text drift {figures.text_drift:.2f}")
    if figures.ranks:
        rank, used = _usual_rank(figures)
        parts.append(f"effective rank {used:.1f} of {rank}")
    return "; ".join(parts)


def _change(pictures: tuple[Pictures, Pictures], metric: str) -> str:
    value = gain(pictures, metric)[0]
    return f"{value:+.3f}" if math.isfinite(value) else "?"


def _text_drift(figures: Figures) -> FineTuneFinding | None:
    if figures.text_drift is None or figures.text_drift <= MOST_TEXT_DRIFT:
        return None
    return FineTuneFinding(
        "text_encoder_drift",
        f"the embeddings of the class prompts moved {figures.text_drift:.2f} times as far as two prompts lie apart: "
        "the text encoder is over-trained and words lose their meaning",
        "model.init_args.text_encoder_lr at a tenth of what it is, or a frozen text encoder: train_text_encoder: false "
        "of DiffusionLoRA, trained_parts: [unet] of DiffusionFineTuning",
    )


def _forgotten(figures: Figures) -> FineTuneFinding | None:
    if figures.plain is None:
        return None
    change, noise = gain(figures.plain, "clip_t")
    before = sum(figures.plain[0].clip_t) / len(figures.plain[0].clip_t)
    if not (before > 0 and change < -MOST_FORGOTTEN * before and change < -2 * noise):
        return None
    return FineTuneFinding(
        "forgotten",
        f"CLIP-T of prompts without the trigger word fell from {before:.3f} to {before + change:.3f}: the model "
        "forgets what it knew",
        "data.init_args.class_data_dir with model.init_args.prior_loss_weight: 1.0, fewer steps, or a lower "
        "model.init_args.learning_rate",
    )


def _bled(figures: Figures) -> FineTuneFinding | None:
    if figures.plain is None:
        return None
    (plain, noise), (trained, _) = gain(figures.plain, "clip_i"), gain(figures.trained, "clip_i")
    if not (plain > 2 * noise and plain > LEAST_BLED and trained > 0 and plain > MOST_BLED * trained):
        return None
    return FineTuneFinding(
        "bleeding",
        f"prompts without the trigger word grow like the training images too (CLIP-I {plain:+.3f}, and "
        f"{trained:+.3f} of the trained prompts): the look bleeds into the class",
        "model.init_args.preserve: class with class_word, or a larger preserve_weight where it is set; or "
        "data.init_args.trigger_word: a rare word, and data.init_args.class_data_dir; or fewer steps",
    )


def _copied(figures: Figures) -> FineTuneFinding | None:
    if not figures.copy_ratios or _copies(figures) < COPIED_SHARE * len(figures.copy_ratios):
        return None
    return FineTuneFinding(
        "memorised",
        f"{_copies(figures)} of {len(figures.copy_ratios)} samples are copies of a training image: nearer to one "
        f"than {COPY_RATIO:g} times the distance between two of them",
        "fewer model.init_args.max_train_steps (CLIPConvergenceGuard stops at the best), a lower rank, more images",
    )


def _shifted(figures: Figures) -> FineTuneFinding | None:
    if figures.plain is None or abs(_shift(figures.plain)) <= MOST_SHIFTED:
        return None
    return FineTuneFinding(
        "colour_shift",
        f"images of prompts without the trigger word changed their brightness, tint or contrast by "
        f"{_shift(figures.plain):+.3f} of 1",
        "model.init_args.noise_offset: 0.05 at most, or a lower model.init_args.learning_rate",
    )


def _not_learned(figures: Figures) -> FineTuneFinding | None:
    (text, text_noise), (image, image_noise) = gain(figures.trained, "clip_t"), gain(figures.trained, "clip_i")
    if not math.isfinite(text) or text > max(LEAST_LEARNED, 2 * text_noise):
        return None
    if math.isfinite(image) and image > max(LEAST_LEARNED, 2 * image_noise):
        return None
    return FineTuneFinding(
        "not_learned",
        f"the trained prompts score as before ({text:+.3f} clip_t)",
        "a higher model.init_args.learning_rate (AdaptiveLR looks for it) or more max_train_steps",
    )


def _ranks(figures: Figures) -> list[FineTuneFinding]:
    if not figures.ranks:
        return []
    rank, used = _usual_rank(figures)
    if used < RANK_UNUSED * rank:
        wanted = 2 ** math.ceil(math.log2(max(used * 1.5, 1)))
        message = f"the LoRA's change has an effective rank of {used:.1f} of {rank}: most of its directions are empty"
        return [FineTuneFinding("rank_unused", message, f"model.init_args.rank: {wanted}")]
    if used > RANK_FULL * rank:
        message = f"the LoRA's change uses all of its rank ({used:.1f} of {rank}): there is no room for more"
        return [FineTuneFinding("rank_full", message, f"model.init_args.rank: {4 * rank}")]
    return []


def _usual_rank(figures: Figures) -> tuple[int, float]:
    """The largest rank, and the median effective rank of the layers that have it."""
    rank = max(rank for rank, _ in figures.ranks.values())
    used = sorted(used for full, used in figures.ranks.values() if full == rank)
    return rank, used[len(used) // 2]


def _copies(figures: Figures) -> int:
    return sum(ratio < COPY_RATIO for ratio in figures.copy_ratios)


def _shift(pictures: tuple[Pictures, Pictures]) -> float:
    """The largest median change of a colour channel or of the contrast; a prompt's free background may well change."""
    change_4 = (pictures[1].colours - pictures[0].colours).median(dim=0).values
    return float(change_4[change_4.abs().argmax()])
