"""Values that are not finite: in a gradient, in the loss, or in the module that a second run of the step points at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lightning_aigc.callbacks.health.alerts.alerts import Finding
from lightning_aigc.callbacks.health.nan_origin import Replay
from lightning_aigc.callbacks.health.parameter_stats import Named, ParameterStats
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.precision.nan.non_finite import NonFinite

NON_FINITE = "non_finite"


def explain_non_finite(stats: ParameterStats, replay: Replay, loss: float, named: Named, remedies: Remedies) -> Finding:
    """The finding for a step whose loss or gradients are not finite, as near to its origin as a second run showed."""
    if replay.found is not None:
        return finding_of_module(replay.found, named, remedies)
    if names := non_finite_gradients(stats):
        return finding_of_parameter(names, replay.why_not, remedies)
    return finding_of_loss(math.isfinite(loss), loss, replay.why_not, remedies)


def non_finite_gradients(stats: ParameterStats) -> list[str]:
    """Names of the parameters whose gradients are not finite, the one nearest to the output first."""
    return [
        name
        for name, norm, missing in zip(stats.names, stats.gradient_norm, stats.is_missing, strict=True)
        if not missing and not math.isfinite(norm)
    ][::-1]


def finding_of_module(origin: NonFinite, named: Named, remedies: Remedies) -> Finding:
    """The finding where a second run of the step showed the module."""
    layer = "loss" if not origin.module or origin.module.startswith("code outside") else origin.place()
    own = [(name, p) for name, p in named if name.startswith(f"{layer}.")]
    spoilt = [name for name, p in own if not bool(torch.isfinite(p).all())]
    if spoilt:
        cause = f"{spoilt[0]} holds values that are not finite, from an earlier step"
        remedy = f"stop this run, set {remedies.learning_rate(0.1)}, and {remedies.go_back()}"
        return Finding(NON_FINITE, layer, "error", origin.sentence(), cause, remedy)
    cause = {
        "forward": "values beyond what its dtype can hold, a division by zero, or the logarithm of zero",
        "input": "the batch holds values that are not finite, or code between modules made them",
        "between": "values beyond what their dtype can hold, a division by zero, or the logarithm of zero",
        "loss": "the loss divides by zero, or takes a logarithm or a root of something that is not positive",
        "backward": "the derivative has a pole there: a root, a norm or a division at zero; or an overflow",
    }[origin.phase]
    remedy = remedies.non_finite(origin.phase)
    if origin.phase == "between" and not remedies.precision.startswith("16"):
        remedy = "keep the divisor, or what the root or logarithm is taken of, away from zero in that code"
    return Finding(NON_FINITE, layer, "error", origin.sentence(), cause, remedy)


def finding_of_parameter(names: Sequence[str], why_not: str, remedies: Remedies) -> Finding:
    """The finding where only gradients show it."""
    said = "its gradient is not finite" + (f", and {len(names) - 1} more" if len(names) > 1 else "")
    if why_not:
        cause = "an overflow or a division by zero in forward or backward, or something after backward: a hook, a sync"
        remedy = remedies.non_finite("backward")
        return Finding(NON_FINITE, names[0], "error", said + _not_again(why_not), cause, remedy)
    return Finding(
        NON_FINITE,
        names[0],
        "error",
        f"{said}; the same batch run again gave finite values",
        "something after backward: a hook, gradient sync from another rank, or a device that computes wrongly",
        remedies.non_finite("code"),
    )


def finding_of_loss(loss_is_finite: bool, loss: float, why_not: str, remedies: Remedies) -> Finding:
    """The finding where neither a module nor a gradient shows it."""
    said = "a gradient is not finite" if loss_is_finite else f"the loss is {loss}"
    cause = "the loss itself, or code outside the modules"
    if why_not:
        said, cause = said + _not_again(why_not), "any module, the batch or the loss itself"
    return Finding(NON_FINITE, "loss", "error", said, cause, remedies.non_finite("loss"))


def _not_again(why_not: str) -> str:
    return f"; no second run shows where: {why_not}"
