"""The verdict on a run in one sentence: what it learned, forgot and kept, held against the noise of the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_aigc.report.paired_scores import improvement
from lightning_aigc.report.record import Curve, GuardResult, Paired, RunRecord

Kind = Literal[
    "learned", "no gain", "worse", "forgotten", "memorised", "diverged", "ruined", "no usable file", "cannot tell",
    "not scored", "not finished", "stopped",
]  # fmt: skip
Tone = Literal["good", "mixed", "bad", "unknown"]

CLEAR = 2.0
"""Standard errors of the paired difference beyond which a change is no noise: about 95 %."""
FORGOTTEN_SHARE = 0.1
"""A fall of the other prompts' score by more than this share, and beyond the noise, is forgetting."""
MOST_CHANGED = 0.6
"""Pixel distance of the other prompts' images to those of before, over that between two images, above which they are
others: 0.24 in the demo, which forgets nothing, and 0.75 in a training that ended as noise."""
RUINED_SHARE = 0.25
"""Share of images that became noise, flat, saturated or black from which a training has ruined the model."""
LOST_SHARE = 0.05
"""Fall of `kept`, 1 minus an error in 0..1, from which an edit changes what it should leave alone."""
END_SHARE = 0.1
"""Share of the losses at either end that are compared for divergence."""
DIVERGED_FACTOR = 2.0


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    tone: Tone
    sentence: str


@dataclass(frozen=True)
class Change:
    """Change of a score over the training."""

    before: float
    after: float
    difference: float
    stderr: float
    """Standard error of the difference over images of the same prompts and seeds; NaN with one image."""

    @property
    def is_rise(self) -> bool:
        return self.difference > CLEAR * self.stderr  # never with NaN

    @property
    def is_fall(self) -> bool:
        return self.difference < -CLEAR * self.stderr

    def numbers(self) -> str:
        """`0.32 → 0.78 ± 0.02`"""
        return f"{self.before:.2f} → {self.after:.2f}{noise(self.stderr)}"


def noise(stderr: float) -> str:
    """` ± 0.02`; nothing where it is unknown."""
    if not math.isfinite(stderr):
        return ""
    return f" ± {stderr:.2f}" if stderr >= 0.01 else f" ± {stderr:.3f}"


def change(paired: Paired | None) -> Change | None:
    """The change of a score; None where it was not measured twice."""
    if paired is None or not paired.after or len(paired.after) != len(paired.before):
        return None
    difference, stderr = improvement(paired.after, paired.before)
    if len(paired.after) < 2:
        stderr = math.nan
    if not math.isfinite(difference):
        return None
    return Change(_mean(paired.before), _mean(paired.after), difference, stderr)


def judge(record: RunRecord) -> Verdict:
    """The verdict on a run: the worst of what is known.

    In this order: divergence, ruined images, no usable file, a judge that does not recognise the images, memorising,
    forgetting, a fall, no gain, a gain that FineTuneCheck did not find.
    """
    is_edit = "direction" in record.scores
    title = "edit direction" if is_edit else "CLIP-T"
    text, image = change(record.scores.get("direction" if is_edit else "clip_t")), change(record.scores.get("clip_i"))
    other = change(record.scores.get("prior_clip_t"))
    if _has_diverged(record):
        return Verdict("diverged", "bad", f"Diverged: {_divergence(record)}. Lower the learning rate{_kept(record)}.")
    if record.stopped_by:
        again = "; --resume continues from the last snapshot" if record.snapshots and record.snapshots.taken else ""
        return Verdict(
            "stopped", "unknown", f"Stopped at step {record.steps} by {record.stopped_by}{_kept(record)}{again}."
        )
    if not record.is_finished:
        return Verdict("not finished", "unknown", f"Not finished: this is step {record.steps}{_kept(record)}.")
    ruined = _ruined(record)
    if ruined:
        return Verdict("ruined", "bad", f"Ruined: {ruined}{_kept(record)}. Lower the learning rate and look at step 0.")
    if text is None and "control_gap" in record.figures:
        return _judge_control(record.figures)
    if text is None:
        return Verdict("not scored", "unknown", f"Not scored: {_why_unscored(record)}.")
    if math.isnan(text.stderr):
        return Verdict(
            "not scored", "unknown",
            f"Not decided: {title} {text.numbers()} on one image, whose noise is unknown; raise RunReport.num_images.",
        )  # fmt: skip
    unknown = _unrecognised(record)
    if record.guard is not None and record.guard.best_step == 0 and len(record.guard.checks) > 1:
        return Verdict(
            "no usable file", "bad",
            "No usable file: no check scored better than step 0, the untrained model, beyond the noise"
            f" ({_guard_scores(record.guard)}){f'; {unknown}' if unknown else ''}.",
        )  # fmt: skip
    if unknown:
        return Verdict("cannot tell", "unknown", f"Cannot tell what it learned: {unknown}; look at the images.")
    if is_edit:
        return _judge_edit(record, text, change(record.scores.get("kept")))
    memory = _memory(record, other)
    if image is not None and image.is_rise and text.is_fall:
        return Verdict(
            "memorised", "bad",
            f"Memorised: images grow like the training images (CLIP-I {image.numbers()}) and follow the prompt less"
            f" (CLIP-T {text.numbers()}){_kept(record)}.",
        )  # fmt: skip
    if other is not None and _is_forgotten(other, record):
        start = f"{_learned(record, text, image)}, but forgot" if text.is_rise or _rises(image) else "Forgot"
        return Verdict("forgotten", "bad", f"{start} other things: their CLIP-T {other.numbers()}{_kept(record)}.")
    if text.is_fall:
        return Verdict("worse", "bad", f"Got worse: CLIP-T {text.numbers()}{_kept(record)}{memory}.")
    if not text.is_rise and not _rises(image):
        return Verdict("no gain", "mixed", f"No gain beyond noise: CLIP-T {text.numbers()}{_kept(record)}{memory}.")
    if "not_learned" in _checks(record):
        said = f"Hardly a gain: CLIP-T {text.numbers()}{_kept(record)}{memory}{_findings(record)}."
        return Verdict("no gain", "mixed", said)
    warning = record.guard.memorising if record.guard is not None else None
    found = _findings(record)
    said = ("; it began to memorise on the way" if warning else "") + found
    is_mixed = bool(said) or _are_others_changed(record)
    return Verdict(
        "learned", "mixed" if is_mixed else "good", f"{_learned(record, text, image)}{_kept(record)}{memory}{said}."
    )


def _judge_edit(record: RunRecord, direction: Change, kept: Change | None) -> Verdict:
    """The verdict on edits, which are compared with their true targets."""
    where, rest = _kept(record), ""
    is_loss = kept is not None and kept.is_fall and kept.difference < -LOST_SHARE
    if kept is not None:
        said = "changes what should stay" if is_loss else "keeps the rest"
        rest = f"; {said} ({kept.numbers()})"
    numbers = f"in the direction of the target {direction.numbers()}"
    if direction.is_fall:
        return Verdict("worse", "bad", f"Got worse: {numbers}{rest}{where}.")
    if not direction.is_rise:
        return Verdict("no gain", "mixed", f"No gain beyond noise: {numbers}{rest}{where}.")
    return Verdict("learned", "mixed" if is_loss else "good", f"Learned the edit: {numbers}{rest}{where}.")


def _learned(record: RunRecord, text: Change, image: Change | None) -> str:
    word = record.lora.trigger_word if record.lora is not None else None
    what = f"Learned {word}" if word else "Learned your images"
    if text.is_rise or image is None:
        return f"{what}: CLIP-T {text.numbers()}"
    return f"{what}: images look more like yours, CLIP-I {image.numbers()}, and follow the prompt as before"


def _rises(image: Change | None) -> bool:
    return image is not None and image.is_rise


def _is_forgotten(other: Change, record: RunRecord) -> bool:
    is_large = other.difference < -FORGOTTEN_SHARE * abs(other.before)
    return other.is_fall and (is_large or _are_others_changed(record))


def _are_others_changed(record: RunRecord) -> bool:
    return record.looks is not None and record.looks.others_changed > MOST_CHANGED  # never with NaN


def _ruined(record: RunRecord) -> str:
    """The images that became noise, flat, saturated or black, if many did."""
    looks = record.looks
    if looks is None or len(looks.ruined_after) - len(looks.ruined_before) < max(1, RUINED_SHARE * looks.images):
        return ""
    kinds = " or ".join(dict.fromkeys(looks.ruined_after))
    return f"{len(looks.ruined_after)} of {looks.images} images are {kinds}, {len(looks.ruined_before)} were before"


def _unrecognised(record: RunRecord) -> str:
    """Why the scores say little: most images show nothing, or the judge did not tell those of before from others."""
    looks = record.looks
    if looks is None:
        return ""
    if len(looks.ruined_after) > looks.images / 2:
        kinds = " or ".join(dict.fromkeys(looks.ruined_after))
        before = len(looks.ruined_before)
        return f"{len(looks.ruined_after)} of {looks.images} images are {kinds}, and {before} were before"
    if not math.isfinite(looks.recognition) or not math.isfinite(looks.recognition_stderr):
        return ""
    if looks.recognition > CLEAR * looks.recognition_stderr:
        return ""
    changed = ""
    if _are_others_changed(record):
        changed = f", and the other prompts' images changed by {looks.others_changed:.0%} of the distance between two"
    return (
        "the judge does not recognise the untrained model's own images (they score"
        f" {looks.recognition:+.2f}{noise(looks.recognition_stderr)} above shuffled prompts), so its scores say"
        f" little{changed}"
    )


def _guard_scores(guard: GuardResult) -> str:
    """`clip_t -0.34, then -0.39 at best`"""
    first, *others = (check.mean(guard.metric) for check in guard.checks)
    return f"{guard.metric} {first:.2f}, then {max(others):.2f} at best"


def _memory(record: RunRecord, other: Change | None) -> str:
    """Whether the other prompts kept their score."""
    if other is None:
        return "; images of the other prompts, which have no score, changed" * _are_others_changed(record)
    if not other.is_fall:
        return "; nothing forgotten" + (", though other prompts' images changed" * _are_others_changed(record))
    return f"; other prompts hardly lower (CLIP-T {other.numbers()})"


def _findings(record: RunRecord) -> str:
    """Findings of FineTuneCheck on the last weights; another possible rank is no reason to doubt them."""
    named = [check.replace("_", " ") for check in _checks(record) if not check.startswith("rank_")]
    return f"; but see What to fix: {', '.join(named)}" if named else ""


def _checks(record: RunRecord) -> list[str]:
    """Checks of FineTuneCheck that found something."""
    return [finding.check for finding in record.fine_tune.findings] if record.fine_tune is not None else []


def _kept(record: RunRecord) -> str:
    """Place of the best weights."""
    guard = record.guard
    if guard is None or guard.best_step is None or len(guard.checks) < 2:
        return ""
    if guard.best_step == 0:
        return "; no check was better than step 0"
    kept = ", kept" if guard.best_file else ""
    last = guard.checks[-1]
    best = next((check for check in guard.checks if check.step == guard.best_step), last)
    difference, stderr = improvement(last.scores(guard.metric), best.scores(guard.metric))
    if difference < -CLEAR * stderr and guard.best_file:
        return f"; the last weights are worse than the best of step {guard.best_step}: use {Path(guard.best_file).name}"
    return f"; best at step {guard.best_step}{kept}"


def _judge_control(figures: Mapping[str, float]) -> Verdict:
    """The verdict of ControlGuard, where no CLIP score was asked for."""
    appeared, gap = figures.get("control_appeared_at_step", math.nan), round(figures["control_gap"], 3) + 0.0
    edges = f"; edge F1 {figures['edge_f1']:.2f}" if math.isfinite(figures.get("edge_f1", math.nan)) else ""
    if not math.isfinite(appeared):
        return Verdict(
            "no gain", "bad",
            f"No control yet: another image's condition changes the loss by {gap:.1%}{edges}. Train on with a larger"
            " model.init_args.max_train_steps and --resume.",
        )  # fmt: skip
    return Verdict(
        "learned", "good",
        f"Learned to follow its condition: control since step {appeared:.0f}, and another image's condition raises the"
        f" loss by {gap:.0%}{edges}.",
    )  # fmt: skip


def _why_unscored(record: RunRecord) -> str:
    for note in record.notes:
        if "CLIP" in note or "sampl" in note:
            return note.rstrip(".")
    text = record.scores.get("clip_t")
    if text is not None and text.before:
        return "the images after the training have no score that is a number" + (" each" if text.after else "")
    if not record.pictures:
        return "no images were drawn; they need prompts, RunReport.prompts or the module's, and the module's `sample`"
    return "RunReport has no clip_model; set it, such as clip_model: ViT-B-32"


# Divergence ----------------------------------------------------------------------------------------------------------


def _has_diverged(record: RunRecord) -> bool:
    curve = record.curves.get("loss", Curve())
    first, last = _ends(curve.values)
    if not last:
        return False
    if any(not math.isfinite(value) for value in last):
        return True
    return len(curve.values) >= 4 / END_SHARE and _median(last) > DIVERGED_FACTOR * _median(first) > 0


def _divergence(record: RunRecord) -> str:
    first, last = _ends(record.curves["loss"].values)
    bad = sum(not math.isfinite(value) for value in last)
    if bad:
        at = next(
            s
            for s, v in zip(record.curves["loss"].steps, record.curves["loss"].values, strict=True)
            if not math.isfinite(v)
        )
        return f"the loss is not finite from step {at} on"
    return f"the loss rose from {_median(first):.3g} to {_median(last):.3g}"


def _ends(values: Sequence[float]) -> tuple[list[float], list[float]]:
    count = max(1, round(END_SHARE * len(values)))
    return list(values[:count]), list(values[-count:]) if values else []


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
