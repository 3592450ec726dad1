"""GradientHealthMonitor: check every optimizer step, and say what is wrong, where, since when, and what to change."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc._lightning import (
    Callback,
    GradClipAlgorithmType,
    LightningModule,
    Trainer,
    _MockOptimizer,
    _optimizer_handles_unscaling,
    rank_zero_logger,
    rank_zero_warn,
)
from lightning_aigc.callbacks.health.alerts.alert_log import AlertLog, HealthFiles, is_single_rank
from lightning_aigc.callbacks.health.alerts.alerts import LEVELS, Alert
from lightning_aigc.callbacks.health.checks.frozen import NOT_IN_OPTIMIZER, check_optimizers
from lightning_aigc.callbacks.health.checks.loss_scale import LossScaleCheck
from lightning_aigc.callbacks.health.diagnostics import Diagnostics
from lightning_aigc.callbacks.health.history.loss_history import WindowLosses
from lightning_aigc.callbacks.health.history.norm_history import last_norms
from lightning_aigc.callbacks.health.nan_origin import NanOrigin
from lightning_aigc.callbacks.health.page import health_of
from lightning_aigc.callbacks.health.remedies import LazyRemedies, Remedies
from lightning_aigc.callbacks.health.step_reading import StepInputs
from lightning_aigc.callbacks.health.thresholds import HealthThresholds
from lightning_aigc.devices import loss_scale
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.transport.process_groups import errors_as_warnings
from lightning_aigc.protocols import HasSnapshotState
from lightning_aigc.setting_checks import check_types
from lightning_aigc.sharding.local_parts import original_class

OnError = Literal["warn", "stop", "skip_step"]
NormsInLogger = Literal["auto", "all", "blocks", "layers", "off"]
EARLY_LOOK = 2
"""The step of the first look: at step 1 a LoRA's A has no gradient, and a warm-up may begin at zero."""
SHARDED = ("FSDP", "DeepSpeed", "ModelParallel")

_log = logging.getLogger(rank_zero_logger())  # where rank_zero_info writes


@runtime_checkable
class HasNoiseSchedule(Protocol):
    """Has a noise schedule with a number of timesteps."""

    num_train_timesteps: int


class GradientHealthMonitor(Callback):
    """Says within minutes whether a run is healthy, and if not, which config line to change.

    Works with any LightningModule. At every step it reads the loss and whether the gradients are finite, with one wait
    for the device; every `every_n_steps` it looks at each parameter. `alerts` and health.jsonl hold every alert, and
    health.html shows them. docs/health.md lists the checks.

    A module that sets `last_example_losses` and `last_timesteps`, both [B], in its training_step has loss spikes judged
    by timestep; `num_train_timesteps` is 1000 unless it says otherwise.

    Args:
        every_n_steps: Optimizer steps between two looks at every parameter.
        thresholds: A HealthThresholds, or a mapping of those of its fields that differ.
        on_error: What an error does: warn says it; skip_step leaves out a step that would do harm; stop does so too and
            ends the training. With several ranks the last two cost a small collective a step.
        page: Write health.html at the end.
        dirpath: Where health.jsonl and health.html go; unset means the Trainer's default_root_dir, or where that is the
            working folder, the logger's folder. Without either there are no files, only log lines and `alerts`.
        norms_in_logger: Gradient norms that go to the logger at each look: all of them together (`all`), by block, by
            layer, or none (`off`); auto is by block where there is a logger.

    Raises: ConfigError that names the wrong argument.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import GradientHealthMonitor
        >>> trainer = Trainer(callbacks=[GradientHealthMonitor(every_n_steps=10, on_error="skip_step")])
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
        check_types(GradientHealthMonitor.__init__, locals())
        if every_n_steps < 1:
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
        """Every alert so far, in order."""
        self._reset()

    def _reset(self) -> None:
        self.alerts.clear()
        self._diagnostics = Diagnostics(self.thresholds)
        self._nan_origin = NanOrigin()
        self._window = WindowLosses()
        self._log = AlertLog(self.alerts)
        self._is_on = False
        self._has_examples = False

    # Before training -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._reset()  # a monitor may serve two fits; a checkpoint is loaded after this

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if type(trainer.strategy).__name__.startswith(SHARDED):
            rank_zero_warn(
                f"GradientHealthMonitor sees no whole gradients under {type(trainer.strategy).__name__} and stays off;"
                " use trainer.strategy: ddp or npu_sparse to have it"
            )
            return
        if not any(p.requires_grad for p in pl_module.parameters()):
            raise ConfigError(
                f"{original_class(pl_module).__name__} has no trainable parameter; set requires_grad on what is to be"
                " trained, or add the LoRA in __init__ or configure_model"
            )
        if all(isinstance(optimizer, _MockOptimizer) for optimizer in trainer.optimizers):  # None to Lightning
            rank_zero_warn(
                f"GradientHealthMonitor stays off: {original_class(pl_module).__name__}.configure_optimizers returned "
                "no optimizer, so nothing is trained; return one, or run trainer.validate instead of fit"
            )
            return
        if self.norms_in_logger not in ("auto", "off") and not trainer.loggers:
            rank_zero_warn(
                f"GradientHealthMonitor.norms_in_logger is {self.norms_in_logger}, and there is no logger to write to;"
                " set trainer.logger: true, or norms_in_logger: off"
            )
        self._is_on = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on:
            return
        self._diagnostics.attach(pl_module, trainer.optimizers)
        folder = self._folder(trainer)
        if folder is not None and not trainer.fast_dev_run and trainer.is_global_zero:  # type: ignore[attr-defined]
            self._log.files = HealthFiles(folder)
            self._log.files.begin(self.alerts)
        found = check_optimizers(self._diagnostics.named, trainer.optimizers)
        self._log.report(trainer.global_rank, self._diagnostics.track(trainer.global_step, NOT_IN_OPTIMIZER, found))

    def _folder(self, trainer: Trainer) -> Path | None:
        """Folder of the files; None where no folder was given, so that none are left in the working folder."""
        if self.dirpath is not None:
            return Path(self.dirpath)
        root = Path(trainer.default_root_dir)
        if root.absolute() != Path.cwd():
            return root
        logged = getattr(trainer.logger, "log_dir", None)
        return Path(logged) if isinstance(logged, (str, Path)) else None

    # A step ----------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._is_on:
            self._nan_origin.keep(pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._is_on:
            self._nan_origin.keep_fetched(trainer)
            self._window.add(loss, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._is_on:
            return
        inputs = self._inputs_of_step(trainer, pl_module, optimizer)
        remedies = cast(Remedies, LazyRemedies(lambda: Remedies.of(trainer, pl_module)))
        result = self._diagnostics.look(
            inputs, remedies, lambda scale: self._nan_origin.find(trainer, pl_module, scale)
        )
        alerts = result.alerts
        strategy = trainer.strategy
        ranks_differ = isinstance(strategy, HasSnapshotState) and strategy.ranks_differ
        if inputs.is_due and not is_single_rank() and not ranks_differ:
            alerts += self._diagnostics.look_at_ranks(inputs.step)
        self._window.clear()
        self._nan_origin.clear()
        self._log.report(trainer.global_rank, alerts)
        if inputs.is_due:
            self._log.exchange(trainer.global_rank)
            self._log_norms(trainer, inputs.step, result.numbers)
        self._act(trainer, optimizer, alerts, result.is_harmful, has_scaler=inputs.scale is not None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_on:
            self._diagnostics.after_step()

    def _inputs_of_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> StepInputs:
        place = self._place_of(trainer, optimizer)
        number = self._number_of_step(trainer, place)
        scale = loss_scale(trainer.precision_plugin)
        clips_by_norm = trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
        return StepInputs(
            step=trainer.global_step + 1,
            is_due=number % self.every_n_steps == 0 or number == EARLY_LOOK,
            loss=self._window.total(),
            optimizer=place,
            examples=self._examples_of_step(pl_module),
            scale=scale,
            is_scaled=scale is not None and _optimizer_handles_unscaling(optimizer),
            clip=trainer.gradient_clip_val if clips_by_norm else None,
        )

    @staticmethod
    def _place_of(trainer: Trainer, optimizer: Optimizer) -> int:
        """The optimizer's place among the run's; 0 for one that Lightning does not know."""
        return next((i for i, known in enumerate(trainer.optimizers) if known is optimizer), 0)

    def _number_of_step(self, trainer: Trainer, place: int) -> int:
        """Counted from 1 for each optimizer: a critic may step five times as often as its generator."""
        history = self._diagnostics.history(place)
        history.steps += 1
        return trainer.global_step + 1 if len(trainer.optimizers) == 1 else history.steps

    def _examples_of_step(self, pl_module: LightningModule) -> tuple[Tensor, Tensor] | None:
        examples = self._window.examples()
        if examples is not None and not self._has_examples:
            self._has_examples = True
            timesteps = pl_module.num_train_timesteps if isinstance(pl_module, HasNoiseSchedule) else 1000
            self._diagnostics.history(0).losses.timesteps = int(timesteps)
        return examples

    # Alerts and actions ----------------------------------------------------------------------------------------------

    def _act(
        self, trainer: Trainer, optimizer: Optimizer, alerts: list[Alert], is_harmful: bool, *, has_scaler: bool
    ) -> None:
        if self.on_error == "warn":
            return
        has_error = any(alert.level == "error" for alert in alerts)
        if not is_single_rank():
            is_harmful = trainer.strategy.reduce_boolean_decision(is_harmful, all=False)
            has_error = trainer.strategy.reduce_boolean_decision(has_error, all=False)
        if is_harmful and not has_scaler:  # a loss scaler skips the step itself, and needs the gradients
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # optimizers skip such a parameter and its moments
            self._diagnostics.history(self._place_of(trainer, optimizer)).drop_weights()
        if self.on_error == "stop" and has_error:
            _log.error(f"health: training stops at step {trainer.global_step + 1}, because on_error is stop")
            trainer.should_stop = True

    def _log_norms(self, trainer: Trainer, step: int, numbers: dict[str, float]) -> None:
        if self.norms_in_logger == "off" or not trainer.loggers or not numbers:
            return
        if self.norms_in_logger != "all":
            numbers |= last_norms(self._diagnostics.norm_history, step, by_block=self.norms_in_logger != "layers")
        for level in LEVELS:
            numbers[f"health/{level}s"] = float(sum(alert.level == level for alert in self.alerts))
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)

    # The end ---------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_on:
            remedies = Remedies.of(trainer, pl_module)
            self._log.report(trainer.global_rank, self._diagnostics.finish(trainer.global_step + 1, remedies))
            self._log.exchange(trainer.global_rank)  # all ranks come here, but not to on_exception
            self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._is_on:
            with errors_as_warnings():
                self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        self._is_on = False
        self._nan_origin.clear()
        if self._log.files is not None and self.page:
            title = Path(trainer.default_root_dir).name
            self._log.files.write_page(title, self.alerts, self._diagnostics.norm_history, self._facts(trainer))

    def _facts(self, trainer: Trainer) -> dict[str, str]:
        return {
            "optimizer steps": str(trainer.global_step),
            "looks at every parameter": f"every {self.every_n_steps} steps",
            "trained parameters": str(len(self._diagnostics.named)),
            "precision": str(trainer.precision),
            "median gradient norm": f"{self._diagnostics.history(0).all_norms.median():.3g}",
            "steps skipped by the loss scaler": str(self._diagnostics.check_of(LossScaleCheck).skipped),
        }

    def report_entries(self) -> dict[str, Any]:
        """Alerts and gradient norms so far, for RunReport's page."""
        norms = self._diagnostics.norm_history
        return {"health": health_of(self.alerts, norms)} if norms.steps or self.alerts else {}

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"alerts": [dataclasses.asdict(alert) for alert in self.alerts], "watch": self._diagnostics.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.alerts[:] = [Alert.from_dict(values) for values in state_dict["alerts"]]
        self._diagnostics.load(state_dict["watch"])
