"""GradientHealthMonitor: looks at every optimizer step, says what is wrong, where, since when, and what to change."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc.callbacks.health.alert import LEVELS, Alert, console_lines
from lightning_aigc.callbacks.health.files import HealthFiles
from lightning_aigc.callbacks.health.on_demand import RemediesOnDemand
from lightning_aigc.callbacks.health.origin import Origin
from lightning_aigc.callbacks.health.ranks import is_alone, share_alerts
from lightning_aigc.callbacks.health.record import last_norms
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.thresholds import HealthThresholds
from lightning_aigc.callbacks.health.updates import check_optimizers
from lightning_aigc.callbacks.health.watch import Watch
from lightning_aigc.errors import ConfigError

OnError = Literal["warn", "stop", "skip_step"]
NormsInLogger = Literal["auto", "all", "blocks", "layers", "off"]
EARLY_LOOK = 2
"""The first look: at the very first step a LoRA's A has no gradient, and a warm-up may begin at zero."""
SHARDED = ("FSDP", "DeepSpeed", "ModelParallel")

_log = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # where rank_zero_info writes


class GradientHealthMonitor(Callback):
    """Says within minutes whether a run is healthy, and if not, which config line to change.

    Works with any LightningModule. Every step it reads the loss and whether the gradients are finite, with one wait for
    the device; every `every_n_steps` it looks at each parameter. `alerts` holds what was said; so does health.jsonl,
    and health.html draws it. docs/health.md lists the checks.

    A module that sets `last_example_losses` and `last_timesteps`, both [B], in its training_step has loss spikes judged
    by timestep; `num_train_timesteps` is 1000 unless it says otherwise.

    Args:
        every_n_steps: Optimizer steps between two looks at every parameter.
        thresholds: A HealthThresholds, or a mapping of those of its fields that differ.
        on_error: What an error does: warn says it; skip_step leaves out a step that would do harm; stop does so too and
            ends the training. With several ranks the last two cost a small collective a step.
        page: Write health.html at the end.
        dirpath: Where health.jsonl and health.html go; unset means the Trainer's default_root_dir.
        norms_in_logger: Gradient norms that go to the logger at each look: all of them together (`all`), by block, by
            layer, or none (`off`); auto is by block where there is a logger.

    Raises: ConfigError that names the wrong argument.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        thresholds: HealthThresholds | dict[str, float] | None = None,
        on_error: OnError = "warn",
        page: bool = True,
        dirpath: str | Path | None = None,
        norms_in_logger: NormsInLogger = "auto",
    ) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ConfigError(f"GradientHealthMonitor.every_n_steps must be 1 or more, got {every_n_steps!r}")
        for name, value, wanted in (
            ("on_error", on_error, OnError),
            ("norms_in_logger", norms_in_logger, NormsInLogger),
        ):
            if value not in wanted.__args__:  # type: ignore[attr-defined]
                raise ConfigError(
                    f"GradientHealthMonitor.{name} must be one of {', '.join(wanted.__args__)}; got {value!r}"  # type: ignore[attr-defined]
                )
        self.every_n_steps, self.on_error, self.page = every_n_steps, on_error, page
        self.thresholds = HealthThresholds.of(thresholds)
        self.dirpath, self.norms_in_logger = dirpath, norms_in_logger
        self.alerts: list[Alert] = []
        """Everything said so far, in order."""
        self._forget()

    def _forget(self) -> None:
        self.alerts.clear()
        self._watch = Watch(self.thresholds)
        self._origin = Origin()
        self._losses: list[Tensor] = []
        self._examples: list[tuple[Tensor, Tensor]] = []
        self._unshared: list[Alert] = []
        self._files: HealthFiles | None = None
        self._is_on = False
        self._has_examples = False

    # Before training -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._forget()  # one monitor may serve two fits; a checkpoint is loaded after this

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if type(trainer.strategy).__name__.startswith(SHARDED):
            rank_zero_warn(
                f"GradientHealthMonitor sees no whole gradients under {type(trainer.strategy).__name__} and stays off;"
                " use trainer.strategy: ddp or npu_sparse to have it"
            )
            return
        if not any(p.requires_grad for p in pl_module.parameters()):
            raise ConfigError(
                f"{type(pl_module).__name__} has no trainable parameter; set requires_grad on what is to be trained, or"
                " add the LoRA in __init__ or configure_model"
            )
        if all(isinstance(optimizer, _MockOptimizer) for optimizer in trainer.optimizers):  # what None becomes
            raise ConfigError(
                f"{type(pl_module).__name__}.configure_optimizers returned no optimizer, so nothing would be trained;"
                " return one, or run trainer.validate instead of fit"
            )
        if self.norms_in_logger not in ("auto", "off") and not trainer.loggers:
            rank_zero_warn(
                f"GradientHealthMonitor.norms_in_logger is {self.norms_in_logger}, and there is no logger to write to;"
                " set trainer.logger: true, or norms_in_logger: off"
            )
        self._is_on = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on:
            return
        self._watch.attach(pl_module, trainer.optimizers)
        if not trainer.fast_dev_run and trainer.is_global_zero:  # type: ignore[attr-defined]
            self._files = HealthFiles(Path(self.dirpath or trainer.default_root_dir))
            self._files.begin(self.alerts)
        found = check_optimizers(self._watch.named, trainer.optimizers)
        self._give(trainer, self._watch.tell(trainer.global_step, found))

    # A step ----------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._is_on:
            self._origin.keep(pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if not self._is_on:
            return
        self._losses.append(loss.detach())
        self._origin.keep_drawn(trainer)
        losses, timesteps = (getattr(pl_module, f"last_{what}", None) for what in ("example_losses", "timesteps"))
        if isinstance(losses, Tensor) and isinstance(timesteps, Tensor):
            self._examples.append((losses.detach(), timesteps))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._is_on:
            return
        watch, step = self._watch, trainer.global_step + 1
        place = self._place_of(trainer, optimizer)
        number = self._number_of_step(trainer, place)
        is_due = number % self.every_n_steps == 0 or number == EARLY_LOOK
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = getattr(scaler, "_scale", None)
        remedies = cast(Remedies, RemediesOnDemand(lambda: Remedies.of(trainer, pl_module)))
        by_norm = trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
        alerts, numbers, is_harmful = watch.look(
            step,
            remedies,
            lambda at_scale: self._origin.find(trainer, pl_module, at_scale),
            is_due=is_due,
            loss=self._loss(),
            optimizer=place,
            clip=trainer.gradient_clip_val if by_norm else None,
            examples=self._examples_of_step(pl_module),
            scale=scale,
            is_scaled=scale is not None and _optimizer_handles_unscaling(optimizer),
        )
        if is_due and not is_alone() and getattr(trainer.strategy, "mode", None) != "local":
            alerts += watch.look_at_ranks(step)
        self._losses, self._examples = [], []
        self._origin.forget()
        self._give(trainer, alerts)
        if is_due:
            self._exchange(trainer)
            self._log_norms(trainer, step, numbers)
        self._act(trainer, optimizer, alerts, is_harmful, has_scaler=scale is not None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_on:
            self._watch.after_step()

    @staticmethod
    def _place_of(trainer: Trainer, optimizer: Optimizer) -> int:
        """The optimizer's place among the run's; 0 for one that Lightning does not know."""
        return next((i for i, known in enumerate(trainer.optimizers) if known is optimizer), 0)

    def _number_of_step(self, trainer: Trainer, place: int) -> int:
        """Counted from 1 for each optimizer: a critic may step five times as often as its generator."""
        course = self._watch.course(place)
        course.steps += 1
        return trainer.global_step + 1 if len(trainer.optimizers) == 1 else course.steps

    def _loss(self) -> Tensor | None:
        """The window's loss, still scaled: Lightning divides each batch's by how many there are."""
        if len(self._losses) == 1:
            return self._losses[0]
        return torch.stack([loss.float().reshape(()) for loss in self._losses]).sum() if self._losses else None

    def _examples_of_step(self, pl_module: LightningModule) -> tuple[Tensor, Tensor] | None:
        if not self._examples:
            return None
        if not self._has_examples:
            self._has_examples = True
            self._watch.course(0).losses.timesteps = int(getattr(pl_module, "num_train_timesteps", 1000))
        if len(self._examples) == 1:
            return self._examples[0]
        losses, timesteps = (torch.cat([pair[i].reshape(-1) for pair in self._examples]) for i in (0, 1))
        return losses, timesteps

    # Saying and doing ------------------------------------------------------------------------------------------------

    def _give(self, trainer: Trainer, alerts: list[Alert]) -> None:
        """Say what is news on this rank."""
        if not alerts:
            return
        rank = trainer.global_rank
        alerts = [dataclasses.replace(alert, rank=rank) for alert in alerts]
        self.alerts += alerts
        self._unshared += alerts
        if rank == 0:
            self._say(alerts)

    def _exchange(self, trainer: Trainer) -> None:
        """Every rank learns what the others saw; a collective, so only at looks that all ranks take."""
        own, self._unshared = self._unshared, []
        if is_alone():
            return
        known = {(a.check, a.layer, a.level) for a in self.alerts}
        for alert in share_alerts(own):
            key = (alert.check, alert.layer, alert.level)
            if key not in known:
                known.add(key)
                self.alerts.append(alert)
                if trainer.is_global_zero:
                    self._say([alert])

    def _say(self, alerts: list[Alert]) -> None:
        if self._files is not None:
            self._files.append(alerts)
        for level, line in console_lines(alerts):
            _log.log(logging.ERROR if level == "error" else logging.WARNING, line)

    def _act(
        self, trainer: Trainer, optimizer: Optimizer, alerts: list[Alert], is_harmful: bool, *, has_scaler: bool
    ) -> None:
        if self.on_error == "warn":
            return
        has_error = any(alert.level == "error" for alert in alerts)
        if not is_alone():
            is_harmful = trainer.strategy.reduce_boolean_decision(is_harmful, all=False)
            has_error = trainer.strategy.reduce_boolean_decision(has_error, all=False)
        if is_harmful and not has_scaler:  # a loss scaler skips by itself, and counts on the gradients
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # every optimizer leaves such a parameter alone, its moments too
            self._watch.course(self._place_of(trainer, optimizer)).drop_weights()
        if self.on_error == "stop" and has_error:
            _log.error(f"health: training stops at step {trainer.global_step + 1}, because on_error is stop")
            trainer.should_stop = True

    def _log_norms(self, trainer: Trainer, step: int, numbers: dict[str, float]) -> None:
        if self.norms_in_logger == "off" or not trainer.loggers or not numbers:
            return
        if self.norms_in_logger != "all":
            numbers |= last_norms(self._watch.record, step, by_block=self.norms_in_logger != "layers")
        for level in LEVELS:
            numbers[f"health/{level}s"] = float(sum(alert.level == level for alert in self.alerts))
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)

    # The end ---------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_on:
            self._give(trainer, self._watch.finish(trainer.global_step + 1, Remedies.of(trainer, pl_module)))
            self._exchange(trainer)  # all ranks come here, but not to on_exception
            self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._is_on:
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        self._is_on = False
        self._origin.forget()
        if self._files is not None and self.page:
            self._files.draw(Path(trainer.default_root_dir).name, self.alerts, self._watch.record, self._facts(trainer))

    def _facts(self, trainer: Trainer) -> dict[str, str]:
        return {
            "optimizer steps": str(trainer.global_step),
            "looks at every parameter": f"every {self.every_n_steps} steps",
            "trained parameters": str(len(self._watch.named)),
            "precision": str(trainer.precision),
            "median gradient norm": f"{self._watch.course(0).all_norms.median():.3g}",
            "steps skipped by the loss scaler": str(self._watch.loss_scale.skipped),
        }

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"alerts": [dataclasses.asdict(alert) for alert in self.alerts], "watch": self._watch.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.alerts[:] = [Alert.from_dict(values) for values in state_dict["alerts"]]
        self._watch.load(state_dict["watch"])
