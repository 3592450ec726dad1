"""Remedies: config lines of the running training, or words where it has no such key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning_aigc._lightning import GradClipAlgorithmType, LightningModule, Trainer
from lightning_aigc.callbacks.adaptive_lr import AdaptiveLR
from lightning_aigc.checkpoint.resume import go_back
from lightning_aigc.checkpoint.session import session_of
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.schedulers import AIGCLRScheduler
from lightning_aigc.schedulers.adaptive_rate import HeldRate
from lightning_aigc.schedulers.rate_search import SEARCH_START
from lightning_aigc.sharding.local_parts import original_class

LARGEST_FACTOR = 10.0
"""By how much a remedy changes a learning rate at most."""
NEAR = 0.9
"""Ratio from which two rates count as the same."""
LOW_SHARE = 0.01
"""Share of the configured rate below which the schedule is what to change."""


@dataclass(frozen=True)
class Remedies:
    """The config keys of a run; without a Trainer the remedies are in general terms."""

    model_keys: Collection[str] = ()
    """Arguments of the LightningModule."""
    precision_key: str = "precision"
    """Key of the precision in the Trainer's config."""
    precision: str = ""
    rate: float | None = None
    """The highest configured learning rate, whatever the schedule gives now."""
    scheduled_rate: float | None = None
    """The highest learning rate that the schedule gives now."""
    held: HeldRate | None = None
    """The factor that AdaptiveLR or AIGCLRScheduler holds the rate at."""
    clip: float | None = None
    """The Trainer's gradient_clip_val."""
    clips_by_value: bool = False
    """Whether the Trainer clips each value by itself."""
    steps_in: Literal["trainer", "training_step", "loop"] = "trainer"
    """Who takes the optimizer's step: the Trainer, a training_step under manual optimization, or a plain loop."""
    snapshots: Path | None = None
    """Folder of the run's snapshots."""
    too_high: str | None = None
    """The standing warning that says that the learning rate is too high."""

    @classmethod
    def of(cls, trainer: Trainer, model: LightningModule) -> Remedies:
        """The remedies of a run."""
        own = isinstance(trainer.precision_plugin, FusedBackwardPrecision)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        groups = [group for group in groups if group.get("lr", 0) is not None]
        held = _held(trainer)
        scheduled = max((float(group.get("lr", 0)) for group in groups), default=None)
        configured = max((float(group.get("initial_lr", group.get("lr", 0))) for group in groups), default=None)
        return cls(
            model_keys=frozenset(inspect.signature(original_class(model)).parameters),
            precision_key="trainer.plugins.init_args.precision" if own else "trainer.precision",
            precision=str(trainer.precision),
            rate=held.configured if held is not None else configured,
            scheduled_rate=held.scheduled if held is not None else scheduled,
            held=held,
            clip=trainer.gradient_clip_val,
            clips_by_value=trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE,
            steps_in="trainer" if model.automatic_optimization else "training_step",
            snapshots=_snapshots(trainer),
        )

    def besides(self, too_high: str) -> Remedies:
        """The remedies while a warning, named as `check of layer`, says that the learning rate is too high."""
        return replace(self, too_high=too_high)

    def learning_rate(self, factor: float) -> str:
        """Multiply the learning rate, in the place that decides it: the config, the schedule, or what adapts it.

        Args: factor: it is limited to a tenth and to ten times, since one measurement says no more.
        """
        if factor > 1 and self.too_high is not None:
            return f"that of {self.too_high}: the learning rate is too high, not too low"
        factor = min(max(factor, 1 / LARGEST_FACTOR), LARGEST_FACTOR)
        key = "model.init_args.learning_rate" if "learning_rate" in self.model_keys else "learning_rate"
        elsewhere = self._more_elsewhere() if factor > 1 else self._less_elsewhere(factor, key)
        if elsewhere is not None:
            return elsewhere
        if self.rate:
            return f"{key}: {self.rate * factor:.3g}"
        if self.rate is not None and factor >= 1:
            return f"set {key} above 0, such as {key}: 1e-4"
        return f"{factor:g} times the learning rate"

    def go_back(self) -> str:
        """The command that trains on from the newest snapshot, whatever the configuration is by then."""
        return go_back(self.snapshots)

    def _more_elsewhere(self) -> str | None:
        """Remedy for a rate below the configured one."""
        held = self.held
        if held is not None and held.factor < NEAR * max(held.found, 1.0):
            where = f"{held.owner} holds the rate at {held.factor:.3g} times the configured one"
            if held.is_searching:
                return f"none yet: {where}, because it is still looking for the rate"
            if held.top < NEAR * held.found:
                return f"a checkpoint from before the loss diverged: {where} since"
            if held.factor < NEAR * held.top:
                return f"{self._of_owner('grad_norm_threshold: null', 'adaptive_mode: false')} ({where} after a peak)"
            return f"{self._of_owner('search: false')} ({where}, which its search found)"
        if self.rate and self.scheduled_rate is not None and self.scheduled_rate < LOW_SHARE * self.rate:
            more = "model.init_args.max_train_steps" if "max_train_steps" in self.model_keys else "its steps"
            return f"raise {more}: the schedule holds the rate at {self.scheduled_rate:.3g} of {self.rate:.3g}"
        return None

    def _less_elsewhere(self, factor: float, key: str) -> str | None:
        """Remedy after a rate search, which would reach the same rate from another configured one."""
        held = self.held
        if held is None or not held.is_searched or held.is_searching:
            return None
        where = f"{held.owner} found {held.found:.3g} times the configured rate"
        most = held.factor * factor
        if held.owner == "AdaptiveLR" and most > SEARCH_START:
            return f"{self._of_owner(f'max_raise: {most:.3g}')} ({where})"
        return f"{key}: {held.configured * most:.3g}, and {self._of_owner('search: false')} ({where})"

    def _of_owner(self, line: str, of_scheduler: str | None = None) -> str:
        assert self.held is not None
        is_scheduler = self.held.owner != "AdaptiveLR"
        return f"{self.held.owner}.init_args.{of_scheduler if is_scheduler and of_scheduler else line}"

    def safe_precision(self) -> str:
        """bfloat16, or float32 where it is bfloat16 already."""
        return f"{self.precision_key}: {'32-true' if self.precision.startswith('bf16') else 'bf16-mixed'}"

    def mixed_precision(self) -> str:
        """Weights in float32."""
        return f"{self.precision_key}: {'32-true' if 'mixed' in self.precision else 'bf16-mixed'}"

    def clipping(self, value: float) -> str:
        """Clip the norm of all gradients at a value. Lightning refuses its own clipping under manual optimization."""
        return {
            "trainer": f"trainer.gradient_clip_val: {value:.3g}",
            "training_step": f"self.clip_gradients(optimizer, gradient_clip_val={value:.3g}) in training_step, before"
            " each optimizer.step()",
            "loop": f"torch.nn.utils.clip_grad_norm_(model.parameters(), {value:.3g}) before optimizer.step()",
        }[self.steps_in]

    def alike(self) -> str:
        """Against gradients whose values have one size."""
        if self.precision.startswith("16"):
            return self.safe_precision()
        if self.clips_by_value:
            return "trainer.gradient_clip_algorithm: norm"
        return "clip gradients by their norm, not by value; a loss that sees more than signs"

    def model(self, key: str, value: Any, otherwise: str) -> str:
        """An argument of the model if it has one of this name, else `otherwise`."""
        return f"model.init_args.{key}: {value}" if key in self.model_keys else otherwise

    def non_finite(self, phase: str) -> str:
        """Against values that are not finite, by the phase that made them."""
        if self.steps_in == "loop":
            return "run the forward and the loss in torch.autocast(device, dtype=torch.bfloat16), or in float32"
        if self.precision.startswith("16") or (self.precision == "" and phase != "input"):
            return f"{self.precision_key}: bf16-mixed"
        if phase == "input":
            return self.model("vae_dtype", "float32", "look at this batch's data for values that are not finite")
        return self.learning_rate(0.1) if phase != "code" else "look at the hooks and callbacks that change gradients"


def _held(trainer: Trainer) -> HeldRate | None:
    """The callback or scheduler that adapts the rate, if any."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs] if trainer.optimizers else []
    for owner in (*trainer.callbacks, *schedulers):  # type: ignore[attr-defined]
        if isinstance(owner, AdaptiveLR | AIGCLRScheduler) and (held := owner.held()) is not None:
            return held
    return None


def _snapshots(trainer: Trainer) -> Path | None:
    session = session_of(trainer)
    return None if session is None else session.taker.writer.directory


GENERAL = Remedies(steps_in="loop")
"""For code without a Trainer."""


class LazyRemedies:
    """Behaves as the Remedies that `make` returns, and calls it at the first attribute that is read."""

    def __init__(self, make: Callable[[], Remedies]) -> None:
        self._make = make
        self._made: Remedies | None = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)
