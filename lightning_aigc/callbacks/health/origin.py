"""Which module made the value that is not finite: the kept batches of a step are run again and watched."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch import Tensor

from lightning_aigc.callbacks.health.alert import Finding
from lightning_aigc.callbacks.health.measurement import Named
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.precision.non_finite import NonFinite, first_non_finite
from lightning_aigc.precision.replay import DrawnBatch, arguments_for, loss_of, one_line, without_trace
from lightning_aigc.rng import RandomStates, have_host_states_changed, random_states, tensor_states

KEPT_BATCHES = 8
"""Batches of an accumulation window that can be run again, the last ones; they stay on the device until its end."""
WATCHED_BATCHES, WATCHED_EVERY = 8, 10
"""The first batches, and later each of so many, after which it is looked whether a step draws from Python or numpy: to
take their states at each batch takes longer than everything else in it."""
MANUAL = "under manual optimization a step moves the weights itself"


@dataclass(frozen=True)
class Replayed:
    """What a second run of a step showed."""

    found: NonFinite | None = None
    why_not: str = ""
    """Why there was no second run, or not of every batch; empty where all were finite again."""


@dataclass
class _Kept:
    batch: Any
    batch_idx: int
    states: RandomStates
    drawn: DrawnBatch | None = None
    is_watched: bool = False


class Origin:
    """Keeps the batches of the running window, and finds in them where a step went wrong."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=KEPT_BATCHES)
        self._batches = 0
        self._seen = 0
        self._draws_on_host = False

    def keep(self, model: LightningModule, batch: Any, batch_idx: int) -> None:
        """Call it at the start of each batch: what a module draws in its own hooks before the step is drawn anew."""
        self._batches += 1
        self._seen += 1
        is_watched = self._seen <= WATCHED_BATCHES or self._seen % WATCHED_EVERY == 0
        states = (random_states if self._draws_on_host or is_watched else tensor_states)(model.device)
        self._kept.append(_Kept(batch, batch_idx, states, is_watched=is_watched and not self._draws_on_host))

    def keep_drawn(self, trainer: Trainer) -> None:
        """Call it before backward: a step that takes a `dataloader_iter` has drawn its batch by then."""
        if self._kept and self._kept[-1].is_watched:
            self._draws_on_host = have_host_states_changed(self._kept[-1].states)
        fetcher = trainer.fit_loop._data_fetcher
        if self._kept and isinstance(fetcher, _DataLoaderIterDataFetcher):
            self._kept[-1].drawn = DrawnBatch(fetcher)

    def forget(self) -> None:
        self._kept.clear()
        self._batches = 0

    def find(self, trainer: Trainer, model: LightningModule, scale: float) -> Replayed:
        """The first module that made such a value, or why no second run could show it."""
        if not model.automatic_optimization:
            return Replayed(why_not=MANUAL)
        why_not = "" if self._kept else "its batch was not kept"
        if self._batches > len(self._kept) > 0:
            why_not = f"of the {self._batches} accumulated batches the last {len(self._kept)} are kept"
        for kept in self._kept:

            def loss(kept: _Kept = kept) -> Tensor | None:
                arguments = [kept.drawn] if kept.drawn else arguments_for(model, kept.batch, kept.batch_idx)
                with trainer.precision_plugin.forward_context(), torch.enable_grad():
                    return loss_of(model, arguments)

            try:
                with without_trace(model, kept.states):
                    found = first_non_finite(model, loss, scale)
            except Exception as error:  # a second run is a courtesy: it must not end the training
                why_not = one_line(error)
                continue
            if found is not None:
                return Replayed(found)
        return Replayed(why_not=why_not)


def finding_of_module(origin: NonFinite, named: Named, remedies: Remedies) -> Finding:
    """The finding for the place that a second run of the step pointed at."""
    layer = "loss" if not origin.module or origin.module.startswith("code outside") else origin.place()
    own = [(name, p) for name, p in named if name.startswith(f"{layer}.")]
    spoilt = [name for name, p in own if not bool(torch.isfinite(p).all())]
    if spoilt:
        cause = f"{spoilt[0]} holds values that are not finite, from an earlier step"
        remedy = "lightning fit --ckpt_path last: go back to the last checkpoint, and " + remedies.learning_rate(0.1)
        return Finding("non_finite", layer, "error", origin.sentence(), cause, remedy)
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
    return Finding("non_finite", layer, "error", origin.sentence(), cause, remedy)


def finding_of_parameter(names: Sequence[str], why_not: str, remedies: Remedies) -> Finding:
    """The finding where only the gradients show it."""
    said = "its gradient is not finite" + (f", and {len(names) - 1} more" if len(names) > 1 else "")
    if why_not:
        cause = "an overflow or a division by zero in forward or backward, or something after backward: a hook, a sync"
        remedy = remedies.non_finite("backward")
        return Finding("non_finite", names[0], "error", said + _not_again(why_not), cause, remedy)
    return Finding(
        "non_finite",
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
    return Finding("non_finite", "loss", "error", said, cause, remedies.non_finite("loss"))


def _not_again(why_not: str) -> str:
    return f"; no second run shows where: {why_not}"
