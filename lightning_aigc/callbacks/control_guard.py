"""ControlGuard: say when a ControlNet begins to control, stop when it has stopped improving, keep the best.

The loss says nothing of it for thousands of steps: a ControlNet that ignores its condition has the loss of its frozen
U-Net. The loss with the right condition against that with another image's, at equal noise, does.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_aigc._lightning import Callback, LightningModule, Trainer, rank_zero_info
from lightning_aigc.callbacks.sampling.pairs import begins_anew
from lightning_aigc.callbacks.saving.save_result import best_path, set_aside_best, set_aside_earlier_run
from lightning_aigc.errors import ConfigError
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.protocols import HasHeldOutBatches, SavesModel
from lightning_aigc.rng import isolate_rng
from lightning_aigc.setting_checks import check_types

APPEARED_STDERRS = 4.0
"""Standard errors by which the paired difference must be above zero."""
APPEARED_SHARE = 0.02
"""Share of the loss that another condition must cost; less is a difference that no image shows."""


@runtime_checkable
class SupportsControlCheck(Protocol):
    """Compares the loss with right conditions to that with another image's, for ControlGuard."""

    def control_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with all that frozen parts compute, so that checks of it take two forwards."""
        ...

    def control_losses(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the losses [B] with the right and with another image's condition, at fixed noise."""
        ...


class ControlGuard(Callback):
    """Measures control: how much the loss rises when each image is given another one's condition.

    Every `every_n_steps` optimizer steps it takes two forwards of one fixed batch, at fixed noise and timesteps, and
    samples nothing. Logs `control_gap`, the rise as a share of the loss. Control has appeared when the rise is above
    zero by 4 standard errors and above 2 % of the loss in two checks in a row; the step is the first one's.
    Works with any LightningModule that has `control_batch` and `control_losses`, and with a data module that has
    `held_out_loader`.

    Args:
        every_n_steps: Optimizer steps between checks.
        num_images: Images in the batch; held-out ones where there are some.
        patience: Stop after as many steps without a better gap, once control has appeared; 0 never stops.
        give_up_after: Warn once if control has not appeared after as many steps; 0 never warns.
        save_best: Whether the weights of the best gap are written as `<output_name>_best`.

    Raises: ConfigError for numbers out of range, or a model or data without these methods.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import ControlGuard
        >>> trainer = Trainer(callbacks=[ControlGuard(every_n_steps=250)])
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        num_images: int = 32,
        patience: int = 0,
        give_up_after: int = 0,
        save_best: bool = True,
    ) -> None:
        check_types(ControlGuard.__init__, locals())
        if every_n_steps < 1 or num_images < 2 or patience < 0 or give_up_after < 0:
            raise ConfigError(
                "ControlGuard wants every_n_steps >= 1, num_images >= 2, patience and give_up_after >= 0, got"
                f" {every_n_steps}, {num_images}, {patience} and {give_up_after}"
            )
        self.every_n_steps, self.num_images = every_n_steps, num_images
        self.patience, self.give_up_after, self.save_best = patience, give_up_after, save_best
        self._batch: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self.gaps: list[tuple[int, float, float]] = []
        """Step, gap and its standard error, both as shares of the loss."""
        self.appeared_at: int | None = None
        self.best_step: int | None = None
        self._has_warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._batch = None
        if begins_anew(trainer):
            self._reset()
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        wanted: tuple[tuple[Any, Any, str], ...] = (
            (pl_module, SupportsControlCheck, "a model with control_batch and control_losses"),
            (data, HasHeldOutBatches, "a data module with held_out_loader"),
        )
        for thing, protocol, what in wanted:
            if not isinstance(thing, protocol):
                raise ConfigError(f"ControlGuard needs {what}, got {type(thing).__name__}; remove the callback")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        with isolate_rng(pl_module.device), torch.no_grad(), evaluating(pl_module):
            self._batch = pl_module.control_batch(next(iter(data.held_out_loader(self.num_images))))  # type: ignore[operator]
        count = len(self._batch["captions"])
        if count < 2:
            raise ConfigError(
                "ControlGuard compares an image's condition with another's, and the data has one; hold out more"
            )
        set_aside_earlier_run(trainer, pl_module)
        if not self.gaps:
            set_aside_best(trainer, pl_module, "model")
            self._check(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        is_due = step % self.every_n_steps == 0 or step == trainer.max_steps
        if self._batch is not None and is_due and step > self.gaps[-1][0]:
            self._check(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._batch is None or not self.gaps:
            return
        step, gap, _ = self.gaps[-1]
        gap = round(gap, 3) + 0.0  # no -0.0
        if self.appeared_at is None:
            rank_zero_info(
                f"ControlGuard: no control yet at step {step}: another image's condition changes the loss by {gap:.1%},"
                f" and control is above {APPEARED_SHARE:.0%} in two checks; train on with a larger"
                " model.init_args.max_train_steps and --resume"
            )
        elif self.best_step is not None:
            best = next(gap for at, gap, _ in self.gaps if at == self.best_step)
            rank_zero_info(
                f"ControlGuard: control since step {self.appeared_at}; best gap {best:.0%}, step {self.best_step}"
            )

    def report_entries(self) -> dict[str, Any]:
        """For the summary: when control appeared, and the last gap."""
        if not self.gaps:
            return {}
        appeared = math.nan if self.appeared_at is None else self.appeared_at
        best = math.nan if self.best_step is None else self.best_step
        return {
            "figures": {
                "control_appeared_at_step": appeared,
                "control_gap": self.gaps[-1][1],
                "control_best_step": best,
            }
        }

    def state_dict(self) -> dict[str, Any]:
        return {"gaps": [list(gap) for gap in self.gaps], "appeared_at": self.appeared_at, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.gaps = [(int(step), float(gap), float(error)) for step, gap, error in state_dict["gaps"]]
        self.appeared_at, self.best_step = state_dict["appeared_at"], state_dict["best_step"]

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the gap; every rank has the same batch, weights and noise, so none waits for another."""
        assert self._batch is not None
        step, context = trainer.global_step, trainer.precision_plugin.forward_context()
        with isolate_rng(pl_module.device), torch.no_grad(), evaluating(pl_module), context:
            right_B, other_B = pl_module.control_losses(self._batch)  # type: ignore[operator]
        rise_B, loss = (other_B - right_B).double().cpu(), float(right_B.double().mean())
        gap, error = float(rise_B.mean()) / loss, float(rise_B.std()) / (loss * math.sqrt(len(rise_B)))
        self.gaps.append((step, gap, error))
        for logger in trainer.loggers:
            logger.log_metrics({"control_gap": gap}, step=step)
        if self.appeared_at is None and len(self.gaps) > 1 and all(_is_control(each) for each in self.gaps[-2:]):
            self.appeared_at = self.gaps[-2][0]
            rank_zero_info(
                f"ControlGuard: control appeared at step {self.appeared_at}: another image's condition now raises the"
                f" loss by {gap:.0%}"
            )
        if self.appeared_at is not None:
            self._keep_best(trainer, pl_module)
        elif 0 < self.give_up_after <= step and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"ControlGuard: no control after {step} steps (gap {gap:.2%} of the loss); raise learning_rate or the"
                " share of dropped captions (data.init_args.caption_dropout_rate: 0.5), or look at the conditions",
                stacklevel=2,
            )

    def _keep_best(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, gap, error = self.gaps[-1]
        best = next((g for s, g, _ in self.gaps if s == self.best_step), None)
        if best is None or gap > best + error:
            self.best_step = step
            if self.save_best and trainer.is_global_zero and isinstance(pl_module, SavesModel):
                pl_module.save_model(best_path(trainer, pl_module, "model"))
        elif self.patience and self.best_step is not None and step - self.best_step >= self.patience:
            kept = ", whose weights are kept" if self.save_best else ""
            rank_zero_info(
                f"ControlGuard: stopped at step {step}: the gap has not risen above its noise since step"
                f" {self.best_step}{kept}"
            )
            trainer.should_stop = True


def _is_control(measured: tuple[int, float, float]) -> bool:
    _, gap, error = measured
    return gap > APPEARED_SHARE and gap > APPEARED_STDERRS * error
