"""Checks of each parameter's gradient: missing, vanishing, exploding, saturated, not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_aigc.callbacks.health.alert import Check, Finding, Level
from lightning_aigc.callbacks.health.history import History
from lightning_aigc.callbacks.health.measurement import Measurement
from lightning_aigc.callbacks.health.names import lora_pairs
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.thresholds import HealthThresholds
from lightning_aigc.callbacks.health.trend import Standing

CHECKS: tuple[Check, ...] = ("no_gradient", "vanishing", "exploding", "saturated")
SETTLED_LORA = 0.03
"""Norm of B over that of A below which A's gradient, which is proportional to B, may be as small as it likes."""

SHIFTED_LOOKS = (3, 5, 7)
"""Looks whose median tells a norm that has grown for good from the spread of single ones."""
NORM_PER_LOSS = 5.0
"""Norm that a gradient may have for each unit of the first loss: a loss that is summed has large gradients."""


def check_gradients(
    now: Measurement,
    limits: HealthThresholds,
    remedies: Remedies,
    histories: Mapping[str, History] | None = None,
    standing: Standing | None = None,
) -> list[Finding]:
    """What is wrong with any gradient.

    Args:
        histories: Norms of earlier looks, by parameter.
        standing: How far the training has come; None where that is not known.
    """
    standing = standing or Standing()
    weights, gradients = now.by_name(now.weight_norm), now.by_name(now.gradient_norm)
    young = {
        a for a, b in lora_pairs(now.names).values() if not weights[b] > SETTLED_LORA * weights[a]
    }  # A's gradient is zero while B is
    findings = []
    for i, name in enumerate(now.names):
        if now.is_missing[i]:
            findings.append(_missing(name))
        elif now.gradient_norm[i] == 0:
            if name not in young and now.sizes[i]:
                is_idle = standing.is_fitted or _is_beside_a_weight(name, gradients, above=0.0)
                findings.append(_zero(name, remedies, "info" if is_idle else "warning"))
        elif not math.isfinite(now.gradient_norm[i]):
            pass  # the non_finite check's
        else:
            history = (histories or {}).get(name)
            if name not in young:
                findings += _too_small(now, i, limits, remedies, standing, gradients)
            findings += _too_large(now, i, limits, remedies, standing, history)
            findings += _of_values(now, i, limits, remedies)
    return findings


def non_finite_gradients(now: Measurement) -> list[str]:
    """Parameters whose gradients are not finite, the one nearest to the output first."""
    return [
        name
        for name, norm, missing in zip(now.names, now.gradient_norm, now.is_missing, strict=True)
        if not missing and not math.isfinite(norm)
    ][::-1]


def _missing(name: str) -> Finding:
    return Finding(
        "no_gradient",
        name,
        "error",
        "it is trainable, and its gradient is None",
        "it is not used in the loss, or what it goes through has no backward (a detach, a kernel without one)",
        f"{name}.requires_grad_(False), or use it in the loss",
    )


def _is_beside_a_weight(name: str, gradients: Mapping[str, float], above: float) -> bool:
    """Whether it is a bias and the weight beside it has a gradient above a norm.

    A norm behind a bias, a softmax over keys or a difference of two outputs takes the bias's gradient away.
    """
    return name.endswith("bias") and gradients.get(f"{name.removesuffix('bias')}weight", math.nan) > above


def _zero(name: str, remedies: Remedies, level: Level) -> Finding:
    return Finding(
        "no_gradient",
        name,
        level,
        "every value of its gradient is zero",
        "dead units behind it, a product with zero, or gradients too small for float16",
        remedies.mixed_precision() if remedies.precision.startswith("16") else remedies.learning_rate(0.5),
    )


def _too_small(
    now: Measurement,
    i: int,
    limits: HealthThresholds,
    remedies: Remedies,
    standing: Standing,
    gradients: Mapping[str, float],
) -> list[Finding]:
    name, norm = now.names[i], now.gradient_norm[i]
    limit = limits.vanishing_norm * standing.gradient_fall
    if not norm < limit:
        return []
    return [
        Finding(
            "vanishing",
            name,
            "info" if _is_beside_a_weight(name, gradients, above=limit) else "warning",
            f"its gradient's norm is {norm:.2g}, below {limit:.2g}",
            "the loss hardly depends on it: a saturated activation, a scale near zero, a loss that is too small",
            remedies.learning_rate(2),
        )
    ]


def _too_large(
    now: Measurement,
    i: int,
    limits: HealthThresholds,
    remedies: Remedies,
    standing: Standing,
    history: History | None,
) -> list[Finding]:
    norm, limit = now.gradient_norm[i], max(limits.exploding_norm, NORM_PER_LOSS * standing.first_loss)
    if norm > limit:
        said = f"its gradient's norm is {norm:.3g}, above {limit:.3g}"
    elif standing.is_fitted or history is None:
        return []
    elif history.is_spike(norm, limits.exploding_z, limits.exploding_ratio):
        said = f"its gradient's norm is {norm:.3g}, {norm / history.median():.0f} times its median"
    elif history.has_shifted(norm, limits.exploding_z, limits.exploding_ratio, SHIFTED_LOOKS):
        said = f"its gradient's norm is {norm:.3g}, and at the last looks it was far above its median before"
    else:
        return []
    return [exploding(now.names[i], said, remedies)]


def exploding(layer: str, said: str, remedies: Remedies) -> Finding:
    """The finding of a gradient that is too large."""
    return Finding(
        "exploding",
        layer,
        "warning",
        said,
        "a learning rate that is too high, or a batch unlike the others",
        remedies.clipping(1.0) if not remedies.clip else remedies.learning_rate(0.5),
    )


def spike_of_all(now: Measurement, norm: float, history: History, remedies: Remedies) -> Finding:
    """The finding where no gradient is too large by itself, but all of them together are; names the largest."""
    largest = max(zip(now.gradient_norm, now.names, strict=True), key=lambda pair: pair[0] if pair[0] > 0 else 0)
    said = f"the norm of all gradients is {norm:.3g}, {norm / history.median():.0f} times its median"
    return exploding(largest[1], said, remedies)


def _of_values(now: Measurement, i: int, limits: HealthThresholds, remedies: Remedies) -> list[Finding]:
    name = now.names[i]
    share = f"{limits.alike_share:.0%}"
    if now.is_alike[i]:
        return [
            Finding(
                "saturated",
                name,
                "warning",
                f"{share} of its gradient's values or more have one size",
                "values clipped one by one, a saturated float16 range, or a loss that only sees signs",
                remedies.safe_precision() if remedies.precision.startswith("16") else "gradient_clip_algorithm: norm",
            )
        ]
    if now.zero_share[i] >= limits.alike_share and now.dims[i] > 1:
        return [
            Finding(
                "saturated",
                name,
                "info",
                f"{now.zero_share[i]:.0%} of its gradient's values are zero",
                "rows that this batch does not use (an embedding), dead units, or a sparse gradient",
                "nothing for an embedding; else a smaller learning rate: " + remedies.learning_rate(0.5),
            )
        ]
    return []
