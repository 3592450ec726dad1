"""Each parameter's gradient: missing, vanishing, exploding, or saturated."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from lightning_aigc.callbacks.health.alerts.alerts import Finding, Level, Policy
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.checks.non_finite import NON_FINITE
from lightning_aigc.callbacks.health.history.history import History
from lightning_aigc.callbacks.health.parameter_names import HINT, lora_pairs, lora_part, zero_convolution_gates
from lightning_aigc.callbacks.health.parameter_stats import ParameterStats
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.step_reading import StepReading
from lightning_aigc.callbacks.health.thresholds import HealthThresholds
from lightning_aigc.callbacks.health.training_stage import TrainingStage

YOUNG_LORA = 0.03
"""Norm of B over that of A below which A's gradient, which is proportional to B, may be as small as it likes."""
YOUNG_CONVOLUTION = 0.03
"""Gain of a zero convolution below which gradients behind it, which are proportional to it, may be as small."""
SHIFTED_LOOKS = (3, 5, 7)
"""Numbers of last looks whose median shows a lasting rise that single looks hide in their spread."""
SPIKE_SHARE = 0.02
"""Share of the norm of all gradients below which one layer's spike is not worth a word: a bias before a norm."""
START_LOOKS, GROWN = 10, 2.0
"""Looks after which a gradient that began below the limit must have grown by this factor, if nothing was learned."""
SPARE_SHARE = 0.01
"""Share of the trained values that may never have a gradient."""
SURELY_EXPLODING = 1000.0
"""Times the limit above which a gradient explodes whatever the run began with."""
NORM_PER_LOSS = 5.0
"""Norm that a gradient may have for each unit of the first loss: a loss that is summed has large gradients."""


class GradientCheck(Check):
    """Judges each parameter's gradient at a look, and where the norm of all of them is a spike."""

    policies: ClassVar = {
        "no_gradient": Policy(confirm=2, escalate_after=10),
        "vanishing": Policy(confirm=2, escalate_after=10),
        "exploding": Policy(confirm=2, escalate_after=4),
        "saturated": Policy(confirm=2),
    }

    def run(self, reading: StepReading) -> Findings | None:
        stats = reading.stats
        if stats is None:
            return None
        missing = {name for name, _ in reading.history.without_gradient}
        found = check_gradients(stats, reading.limits, reading.remedies, reading.layer_norms, reading.stage, missing)
        if reading.too_high is not None:
            found = _without_faint(found, reading.too_high)
        if reading.is_spike and not any(f.check == "exploding" for f in found):
            found.append(spike_of_all(stats, reading.norm, reading.history.all_norms, reading.remedies))
        # Between two looks only the suspicion itself is judged; the rest would be counted too often.
        checked = (*self.policies, NON_FINITE) if reading.is_due else ("exploding",)
        return Findings([f for f in found if f.check in checked], checked, reading.layers_of(stats.names))


def check_gradients(
    stats: ParameterStats,
    limits: HealthThresholds,
    remedies: Remedies,
    histories: Mapping[str, History] | None = None,
    stage: TrainingStage | None = None,
    missing: Collection[str] | None = None,
) -> list[Finding]:
    """Find gradients that are missing, zero, too small, too large, or of one value.

    Args:
        histories: Norms of earlier looks, by parameter.
        stage: How far the training has come; None where that is not known.
        missing: Parameters without a gradient at every step since the last look; one step without is no fault, as of
            an expert that no example chose. None where only this step is known.
    """
    stage = stage or TrainingStage()
    weights, gradients = stats.by_name(stats.weight_norm), stats.by_name(stats.gradient_norm)
    young = {
        a for a, b in lora_pairs(stats.names).values() if not weights[b] > YOUNG_LORA * weights[a]
    }  # A's gradient is zero while B is
    young |= _behind_young_convolutions(stats)
    total = math.sqrt(sum(norm * norm for norm in stats.gradient_norm if math.isfinite(norm)))
    findings = []
    for i, name in enumerate(stats.names):
        history = (histories or {}).get(name)
        if stats.is_missing[i] and missing is not None and name not in missing:
            continue
        if stats.is_missing[i]:
            findings.append(_missing(name, "info" if _is_spare(stats, i, histories) else "error"))
        elif stats.gradient_norm[i] == 0:
            if name not in young and stats.sizes[i]:
                is_idle = stage.is_fitted or _is_beside_a_weight(name, gradients, above=0.0)
                had_one = history is not None and len(history) > 0
                findings.append(_zero(name, remedies, "info" if is_idle else "warning", had_one=had_one))
        elif not math.isfinite(stats.gradient_norm[i]):
            pass  # non_finite reports it
        else:
            if name not in young:
                findings += _too_small(stats, i, limits, remedies, stage, gradients, history)
            # A hint embedding's gradient grows a hundredfold when control appears: no outlier of its earlier norms.
            earlier = None if f".{HINT}." in f".{name}" else history
            findings += _too_large(stats, i, limits, remedies, stage, earlier, total)
            findings += _of_values(stats, i, limits, remedies)
    large = next((finding for finding in findings if finding.check == "exploding"), None)
    return findings if large is None else _without_faint(findings, f"exploding of {large.layer}")


def _without_faint(findings: Sequence[Finding], too_high: str) -> list[Finding]:
    """Findings in which a gradient that vanishes is an info: a rate that is too high saturates what follows."""
    cause = f"weights that a learning rate which is too high has made large, as {too_high} says"
    return [
        replace(f, level="info", cause=cause, remedy=f"that of {too_high}") if f.check == "vanishing" else f
        for f in findings
    ]


def _behind_young_convolutions(stats: ParameterStats) -> set[str]:
    """A ControlNet's parameters behind zero convolutions that have hardly moved, whose gradients are as faint."""
    sizes = dict(zip(stats.names, stats.sizes, strict=True))
    weights = stats.by_name(stats.weight_norm)

    def is_young(name: str) -> bool:
        # A square convolution that passes its input on has a norm of the root of its channels.
        return not weights[name] > YOUNG_CONVOLUTION * max(sizes[name], 1) ** 0.25

    gates = zero_convolution_gates(stats.names)
    return {name for name, before in gates.items() if before and all(is_young(gate) for gate in before)}


def _is_spare(stats: ParameterStats, i: int, histories: Mapping[str, History] | None) -> bool:
    """Whether it is a small part of the model that never had a gradient, such as a mask token without a use."""
    had_one = histories is None or (stats.names[i] in histories and len(histories[stats.names[i]]) > 0)
    return not had_one and lora_part(stats.names[i]) is None and stats.sizes[i] < SPARE_SHARE * sum(stats.sizes)


def _missing(name: str, level: Level) -> Finding:
    return Finding(
        "no_gradient",
        name,
        level,
        "it is trainable, and its gradient is None",
        "it is not used in the loss, or what it goes through has no backward (a detach, a kernel without one)",
        f"{name}.requires_grad_(False), or use it in the loss",
    )


def _is_beside_a_weight(name: str, gradients: Mapping[str, float], above: float) -> bool:
    """Whether it is a bias, and the gradient of its layer's weight has a norm above `above`.

    A normalisation behind a bias, a softmax over keys or a difference of two outputs cancels the bias's gradient.
    """
    return name.endswith("bias") and gradients.get(f"{name.removesuffix('bias')}weight", math.nan) > above


def _zero(name: str, remedies: Remedies, level: Level, *, had_one: bool) -> Finding:
    """The finding of a gradient of zeros.

    Args: had_one: it had another one at an earlier look; without one, no learning rate brings it.
    """
    said = "every value of its gradient is zero" + (", and was not before" if had_one else "")
    if remedies.precision.startswith("16"):
        cause = "gradients too small for float16, dead units in it or behind it, or a product with zero"
        return Finding("no_gradient", name, level, said, cause, remedies.mixed_precision())
    if had_one:
        cause = "its units, or those behind it, died in training: a learning rate that is too high"
        remedy = f"{remedies.learning_rate(0.5)}, from a snapshot of when it had a gradient"
        return Finding("no_gradient", name, level, said, cause, remedy)
    cause = "it or a layer behind it passes nothing back: dead or saturated units, or a product with zero"
    remedy = f"other initial values (bias, scale) there, no factor of zero; or {name}.requires_grad_(False)"
    return Finding("no_gradient", name, level, said, cause, remedy)


def _too_small(
    stats: ParameterStats,
    i: int,
    limits: HealthThresholds,
    remedies: Remedies,
    stage: TrainingStage,
    gradients: Mapping[str, float],
    history: History | None,
) -> list[Finding]:
    name, norm = stats.names[i], stats.gradient_norm[i]
    limit = limits.vanishing_norm * stage.gradient_fall
    if not norm < limit:
        return []
    # A layer behind a scale that starts near zero begins below the limit, and grows with the scale.
    has_fallen = history is None or norm < history.oldest() / limits.exploding_ratio
    is_old = history is not None and len(history) >= START_LOOKS and not stage.has_learned
    is_stuck = is_old and history is not None and not norm > GROWN * history.oldest()
    is_harmless = not (has_fallen or is_stuck) or _is_beside_a_weight(name, gradients, above=limit)
    return [
        Finding(
            "vanishing",
            name,
            "info" if is_harmless else "warning",
            f"its gradient's norm is {norm:.2g}, below {limit:.2g}",
            "the loss hardly depends on it: a saturated activation, a scale near zero, a loss that is too small",
            remedies.learning_rate(2),
        )
    ]


def _too_large(
    stats: ParameterStats,
    i: int,
    limits: HealthThresholds,
    remedies: Remedies,
    stage: TrainingStage,
    history: History | None,
    total: float,
) -> list[Finding]:
    norm, limit = stats.gradient_norm[i], max(limits.exploding_norm, NORM_PER_LOSS * stage.first_loss)
    # A network that is trained from scratch may have large gradients from its first step on, and be healthy.
    usual = history.oldest() if history is not None else math.nan
    if norm > min(max(limit, limits.exploding_ratio * usual), SURELY_EXPLODING * limit) or (
        norm > limit and history is None
    ):
        said = f"its gradient's norm is {norm:.3g}, above {limit:.3g}"
    elif stage.is_fitted or history is None or norm < SPIKE_SHARE * total:
        return []
    elif history.is_spike(norm, limits.exploding_z, limits.exploding_ratio):
        said = f"its gradient's norm is {norm:.3g}, {norm / history.median():.0f} times its median"
    elif history.has_shifted(norm, limits.exploding_z, limits.exploding_ratio, SHIFTED_LOOKS):
        said = f"its gradient's norm is {norm:.3g}, and at the last looks it was far above its median before"
    else:
        return []
    return [exploding(stats.names[i], said, remedies, usual)]


def exploding(layer: str, said: str, remedies: Remedies, usual: float = math.nan) -> Finding:
    """The finding of a gradient that is too large.

    Args: usual: the norm that the run had until then; clipping far below it would change a healthy step.
    """
    clip = float(f"{usual:.1g}") if usual > 1 else 1.0
    return Finding(
        "exploding",
        layer,
        "warning",
        said,
        "a learning rate that is too high, or a batch unlike the others",
        remedies.clipping(clip) if not remedies.clip else remedies.learning_rate(0.5),
    )


def spike_of_all(stats: ParameterStats, norm: float, history: History, remedies: Remedies) -> Finding:
    """The finding where no single gradient is too large, but all together are; it names the largest."""
    largest = max(zip(stats.gradient_norm, stats.names, strict=True), key=lambda pair: pair[0] if pair[0] > 0 else 0)
    said = f"the norm of all gradients is {norm:.3g}, {norm / history.median():.0f} times its median"
    return exploding(largest[1], said, remedies, history.median())


def _of_values(stats: ParameterStats, i: int, limits: HealthThresholds, remedies: Remedies) -> list[Finding]:
    name = stats.names[i]
    share = f"{limits.alike_share:.0%}"
    if stats.is_alike[i]:
        return [
            Finding(
                "saturated",
                name,
                "warning",
                f"{share} of its gradient's values or more have one size",
                "values clipped one by one, a saturated float16 range, or a loss that only sees signs",
                remedies.alike(),
            )
        ]
    if stats.zero_share[i] >= limits.alike_share and stats.dims[i] > 1:
        return [
            Finding(
                "saturated",
                name,
                "info",
                f"{stats.zero_share[i]:.0%} of its gradient's values are zero",
                "rows that this batch does not use (an embedding), dead units, or a sparse gradient",
                f"nothing for an embedding; against units that die in training {remedies.learning_rate(0.5)}",
            )
        ]
    return []
