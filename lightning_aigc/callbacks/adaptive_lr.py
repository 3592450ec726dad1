"""AdaptiveLR: search for a learning rate in the first steps, cut it at peaks of the gradient norm, recover.

HarmWatch reads signs that a raised rate harms the model: held-out loss, scores of images, size of the adapter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from inspect import signature
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc._lightning import Callback, LightningModule, Trainer, _MockOptimizer, rank_zero_info, rank_zero_warn
from lightning_aigc.callbacks.fine_tune.ranks import adapter_size
from lightning_aigc.devices import loss_scale
from lightning_aigc.errors import ConfigError
from lightning_aigc.report.paired_scores import improvement
from lightning_aigc.report.record import RateChange
from lightning_aigc.schedulers.adaptive_rate import AdaptiveRate, HeldRate, sets_own_rate
from lightning_aigc.schedulers.rate_control import Change, RateSettings
from lightning_aigc.setting_checks import Readers, check_types, unread_settings
from lightning_aigc.sharding.local_parts import original_class

READERS: Readers = {
    "max_raise": ("search", (False,), "true"),
    "relative": ("grad_norm_threshold", (None,), "6.0"),
}
ADAPTER_EVERY = 25
"""Optimizer steps between two looks at a LoRA's size."""


class AdaptiveLR(Callback):
    """Multiplies the schedule's learning rate by what the gradients allow; every optimizer, any LightningModule.

    In the first 10 to 60 optimizer steps it searches for the rate, from a hundredth of the configured rate upwards,
    until steps begin to overshoot. Then the schedule continues, multiplied by the factor found: a rate 30 times too
    high is lowered, a rate too low is raised, and without evidence against it the configured rate is kept. Later, a
    peak of the gradient norm multiplies the rate by `recovery_factor`; the rate recovers in `recovery_steps`, without
    another cut until then. A loss that diverges lowers the rate found itself, and so does harm, down to the configured
    rate: `val_loss` above the untrained model's, a guard's images clearly below step 0, a LoRA that is large against
    weights. The schedule is never written to.

    Args:
        search: whether to search for the rate, which takes a copy of the trainable weights until it ends; `auto` leaves
            the search out, and says so, for an optimizer that finds its own rate or averages weights by rates.
        grad_norm_threshold: a global gradient norm, before clipping, above it cuts the rate; null never cuts.
        relative: whether the threshold is a robust z of the log norm among the last 100, or a norm itself.
        recovery_factor: what a cut multiplies the rate by.
        recovery_steps: optimizer steps to recover from a cut.
        max_raise: how far above the configured rate the search may go.

    Logs `adaptive_lr/factor` and `adaptive_lr/lr`, the rate that was used, every `log_every_n_steps`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import AdaptiveLR
        >>> trainer = Trainer(callbacks=[AdaptiveLR(search="auto", max_raise=5.0)])
    """

    def __init__(
        self,
        search: bool | Literal["auto"] = True,
        grad_norm_threshold: float | None = 6.0,
        relative: bool = True,
        recovery_factor: float = 0.5,
        recovery_steps: int = 50,
        max_raise: float = 5.0,
    ) -> None:
        check_types(AdaptiveLR.__init__, locals())
        if search not in (True, False, "auto"):
            raise ConfigError(f"AdaptiveLR search must be true, false or auto, got {search!r}")
        self._is_auto = search == "auto"
        self.settings = RateSettings(
            bool(search), grad_norm_threshold, relative, recovery_factor, recovery_steps, max_raise
        )
        given = {**vars(self.settings), "search": search}
        defaults = {name: each.default for name, each in signature(AdaptiveLR.__init__).parameters.items()}
        self._unread = unread_settings(given, defaults, READERS, "AdaptiveLR")
        self.changes: list[Change] = []
        """Every decision so far, with its reason; steps count from 1."""
        self._rates: list[AdaptiveRate] = []
        self._losses: list[Tensor] = []
        """Losses of the batches since the last optimizer step, under the loss scale as in backward."""
        self._states: list[dict[str, Any]] = []
        self._is_resumed = False
        self._harm = HarmWatch()

    @property
    def factor(self) -> float:
        """Multiplier of the first optimizer's scheduled rate; 1 before training."""
        return self._rates[0].control.factor if self._rates else 1.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._states, self._is_resumed = [], False  # a checkpoint is loaded after this

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises: ConfigError without an optimizer, or for an optimizer whose rate must not be adapted."""
        optimizers = [optimizer for optimizer in trainer.optimizers if not isinstance(optimizer, _MockOptimizer)]
        for sentence in self._unread:
            rank_zero_warn(sentence)
        if not optimizers:
            raise ConfigError(
                f"AdaptiveLR found no optimizer: {original_class(pl_module).__name__}.configure_optimizers returned "
                "none; return one, or leave AdaptiveLR out"
            )
        self._rates = [AdaptiveRate(optimizer, self._settings_for(optimizer)) for optimizer in optimizers]
        if self._is_resumed:
            self._restore()
        else:
            self.changes, self._harm = [], HarmWatch()

    def _restore(self) -> None:
        """Continue from a checkpoint's states, which a strategy that shards brings after `on_fit_start`."""
        self._is_resumed = False
        if len(self._states) != len(self._rates):
            raise ConfigError(
                f"the checkpoint's AdaptiveLR followed {len(self._states)} optimizers and there are {len(self._rates)};"
                " resume with the same optimizers, or without ckpt_path"
            )
        for rate, state in zip(self._rates, self._states, strict=True):
            rate.load_state_dict(state)

    def _settings_for(self, optimizer: Optimizer) -> RateSettings:
        if not (self._is_auto and sets_own_rate(optimizer)):
            return self.settings
        rank_zero_info(
            f"AdaptiveLR: no search, {type(optimizer).__name__} sets its own rate; only gradient peaks cut it"
        )
        return replace(self.settings, search=False)

    def held(self) -> HeldRate | None:
        """The smallest factor on an optimizer's rates and its reason; None before training."""
        held = [HeldRate.by("AdaptiveLR", rate) for rate in self._rates]
        return min(held, key=lambda rate: rate.factor, default=None)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def _loss(self, trainer: Trainer) -> Tensor | None:
        """The step's loss; Lightning divides each batch's by how many there are."""
        losses, self._losses = self._losses, []
        if not losses:
            return None
        device = losses[-1].device  # those of a checkpoint come back on the CPU
        loss = torch.stack([loss.to(device, torch.float32).reshape(()) for loss in losses]).sum()
        scale = loss_scale(trainer.precision_plugin)
        return loss if scale is None else loss / scale.to(loss.device)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        rate = next(rate for rate in self._rates if rate.optimizer is optimizer)

        def mean_over_ranks(numbers: Tensor) -> Tensor:
            mean: Tensor = trainer.strategy.reduce(numbers, reduce_op="mean")
            return mean

        change = rate.apply(mean_over_ranks if trainer.world_size > 1 else None, self._loss(trainer))
        if change is not None:
            self._tell(rate, change)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and rate.steps % every == 0:
            suffix = "" if len(self._rates) == 1 else f"_{self._rates.index(rate)}"
            numbers = {
                f"adaptive_lr/factor{suffix}": rate.control.factor,
                f"adaptive_lr/lr{suffix}": float(optimizer.param_groups[0]["lr"]),
            }
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._heed(self._harm.held_out(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not any(rate.control.top > 1 for rate in self._rates):
            return
        self._heed(self._harm.scores(trainer))
        if self._rates[0].steps % ADAPTER_EVERY == 0:
            self._heed(self._harm.adapter(pl_module))

    def _heed(self, harm: str | None) -> None:
        """Take back a part of what the search raised, if there is a sign of harm."""
        if harm is None:
            return
        for rate in self._rates:
            reason = rate.control.heed(harm)
            if reason is not None:
                self._tell(rate, Change(rate.steps, rate.control.factor, reason))

    def _tell(self, rate: AdaptiveRate, change: Change) -> None:
        self.changes.append(change)
        which = "" if len(self._rates) == 1 else f" of optimizer {self._rates.index(rate)}"
        now = ", ".join(f"{scheduled * change.factor:.3g}" for scheduled in rate.scheduled_rates())
        rank_zero_info(
            f"AdaptiveLR: step {change.step}, rate{which} now {now}, {change.factor:.3g} times the schedule's: "
            f"{change.reason}"
        )

    def report_entries(self) -> dict[str, Any]:
        """The changes of the rate, for RunReport's page."""
        return {"rate_changes": [RateChange(*change) for change in self.changes]}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._states = [rate.state_dict() for rate in self._rates] or self._states
        for rate in self._rates:
            rate.close()
        self._rates, self._losses = [], []

    def state_dict(self) -> dict[str, Any]:
        states = [rate.state_dict() for rate in self._rates] or self._states
        losses = [loss.cpu() for loss in self._losses]  # a checkpoint may be saved amid an accumulation window
        return {
            "rates": states,
            "changes": [list(change) for change in self.changes],
            "losses": losses,
            "harm": self._harm.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._states = list(state_dict["rates"])
        self._is_resumed = bool(self._states)  # none in what Lightning's Tuner saves before the training begins
        self._harm.load_state_dict(state_dict.get("harm", {}))
        self._losses = list(state_dict.get("losses", []))  # older checkpoints have none
        self.changes = [Change(int(step), factor, reason) for step, factor, reason in state_dict["changes"]]
        if self._rates:
            self._restore()


CLEAR = 2.0
"""Standard errors by which a check must lie below step 0."""
LARGEST_ADAPTER = 0.5
"""Norm of an adapter's change of the weights over the weights' own norm."""


@runtime_checkable
class ScoresImages(Protocol):
    """Scores images while training; AdaptiveLR lowers a raised rate where they get worse."""

    checks: list[Any]
    """Scores of each check, `report.paired_scores.Check`."""
    metric: str


class HarmWatch:
    """Compares the model with what it was untrained. Each new sign is told once."""

    def __init__(self) -> None:
        self.untrained_loss = math.nan
        """`val_loss` of step 0."""
        self.checks_seen = 0
        self.is_too_large = False
        self._base_norms: dict[str, float] = {}

    def held_out(self, trainer: Trainer) -> str | None:
        """A reason if `val_loss` is above the untrained model's. Call after each validation."""
        if "val_loss" not in trainer.callback_metrics:
            return None
        loss = float(trainer.callback_metrics["val_loss"])
        if trainer.global_step == 0:
            self.untrained_loss = loss
        if loss > self.untrained_loss:  # never with NaN
            return f"val_loss {loss:.4g} is above the untrained model's {self.untrained_loss:.4g}"
        return None

    def scores(self, trainer: Trainer) -> str | None:
        """A reason if the newest check of a guard is clearly below step 0."""
        found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for guard in (callback for callback in found if isinstance(callback, ScoresImages)):
            if len(guard.checks) <= max(1, self.checks_seen):
                continue
            self.checks_seen = len(guard.checks)
            first, last = (guard.checks[at].scores(guard.metric) for at in (0, -1))
            better, stderr = improvement(last, first)
            if better < -CLEAR * stderr:
                return f"the images of step {guard.checks[-1].step} score {-better:.3f} below the untrained model's"
        return None

    def adapter(self, module: LightningModule) -> str | None:
        """A reason, once, if a LoRA has grown large relative to the weights that it changes."""
        if self.is_too_large:
            return None
        size = adapter_size(module, self._base_norms)
        if size is None or size <= LARGEST_ADAPTER:
            return None
        self.is_too_large = True
        return f"the adapter's change is {size:.0%} of the weights that it changes"

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_base_norms"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
