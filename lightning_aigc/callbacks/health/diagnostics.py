"""Run every check on each optimizer step, and keep the histories that they judge by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_aigc._lightning import LightningModule
from lightning_aigc.callbacks.health.alerts.alert_tracker import AlertTracker
from lightning_aigc.callbacks.health.alerts.alerts import Alert, CheckName, Finding
from lightning_aigc.callbacks.health.checks import POLICIES, RATE_TOO_HIGH, STEP_CHECKS
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.checks.non_finite import NON_FINITE, explain_non_finite, non_finite_gradients
from lightning_aigc.callbacks.health.checks.ranks import RANK_DIVERGENCE, check_ranks
from lightning_aigc.callbacks.health.checks.updates import UpdateCheck
from lightning_aigc.callbacks.health.history.history import History
from lightning_aigc.callbacks.health.history.norm_history import NormHistory
from lightning_aigc.callbacks.health.history.optimizer_history import OptimizerHistory
from lightning_aigc.callbacks.health.nan_origin import Replay
from lightning_aigc.callbacks.health.parameter_names import clean_name, frozen, trained
from lightning_aigc.callbacks.health.parameter_stats import GradientNorm, Named, PendingStats, measure, sample_rows
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.step_reading import BatchedReadback, StepInputs, StepReading
from lightning_aigc.callbacks.health.thresholds import HealthThresholds

EXACT_BELOW = 50_000_000
"""Trainable values up to which every step reads every gradient's norm; above, a probe says whether they are finite."""
REPLAYS_IN_A_ROW = 2
"""Steps in a row that are run again where each is not finite: further ones would say the same."""

FindOrigin = Callable[[float], Replay]
C = TypeVar("C", bound=Check)


@dataclass(frozen=True)
class StepResult:
    """Result of all checks of a step."""

    alerts: list[Alert]
    numbers: dict[str, float]
    """For the logger."""
    is_harmful: bool
    """Whether the step would spoil the weights."""


class Diagnostics:
    """The checks of one run, their histories, and which alerts were given."""

    def __init__(self, limits: HealthThresholds) -> None:
        self.limits = limits
        self.checks: list[Check] = [check() for check in STEP_CHECKS]
        self.tracker, self.norm_history = AlertTracker(POLICIES), NormHistory()
        self.optimizers = [OptimizerHistory(limits)]
        self.layer_norms: dict[str, History] = {}
        """Gradient norms at the looks, by parameter."""
        self.bad_steps_in_a_row = 0
        self.taken_steps = 0
        self.last_scale = 0.0
        self.named: Named = []
        self._is_sharded = False

    def attach(self, model: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Keep the parameters as they are when training starts."""
        averages = {id(p) for m in model.modules() if isinstance(m, AveragedModel) for p in m.parameters()}
        named = [(name, p) for name, p in model.named_parameters() if id(p) not in averages]
        self.named = trained(named)
        self._everything = [(clean_name(name), p) for name, p in named]
        self._optimizers = list(optimizers)
        for i, optimizer in enumerate(optimizers):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            # Nothing zeroes the gradients of what no optimizer holds: they grow, and say nothing.
            self.history(i).attach([(name, p) for name, p in self.named if id(p) in held])
        for check in self.checks:
            check.attach(model, self.named, frozen(named))
        self._is_sharded = any(isinstance(p, DTensor) for _, p in self.named)
        self.is_exact = sum(p.numel() for _, p in self.named) <= EXACT_BELOW
        self._gradient_norms = [GradientNorm(history.named, self.is_exact) for history in self.optimizers]

    def _include_unfrozen(self, optimizer: int) -> None:
        """Read the gradients of parameters that became trainable since the training began too."""
        history = self.history(optimizer)
        groups = self._optimizers[optimizer].param_groups if optimizer < len(self._optimizers) else []
        known = {id(p) for _, p in history.named}
        new = {id(p) for group in groups for p in group["params"] if p.requires_grad} - known
        if not new:
            return
        everything = new | {id(p) for _, p in self.named}
        self.named = [(name, p) for name, p in self._everything if id(p) in everything]
        history.attach([(name, p) for name, p in self._everything if id(p) in known | new])
        self._gradient_norms[optimizer] = GradientNorm(history.named, self.is_exact)

    def history(self, optimizer: int) -> OptimizerHistory:
        """The history of the optimizer at this place among the run's."""
        while optimizer >= len(self.optimizers):
            self.optimizers.append(OptimizerHistory(self.limits, len(self.optimizers)))
        return self.optimizers[optimizer]

    def check_of(self, kind: type[C]) -> C:
        """This run's check of a class."""
        return next(check for check in self.checks if isinstance(check, kind))

    # A step ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look(self, inputs: StepInputs, remedies: Remedies, find_origin: FindOrigin) -> StepResult:
        """Check one optimizer step before it is taken; waits for the device once where nothing is wrong.

        Args:
            find_origin: Runs the step again at a loss scale, to find the module that made a value not finite.
        """
        reading = self._read(inputs, remedies)
        history = reading.history
        alerts = self._run([check for check in self.checks if check.runs_on_bad_steps], reading)
        if not _is_finite(reading, inputs):
            history.drop_weights()
            is_overflow = inputs.scale is not None and math.isfinite(reading.loss)  # the loss scaler skips the step
            if not is_overflow or any(alert.check == "loss_scale" for alert in alerts):
                alerts += self._explain_non_finite(reading, find_origin)
            return StepResult(alerts, {}, is_harmful=not is_overflow)
        self.bad_steps_in_a_row = 0
        self.taken_steps += inputs.optimizer == 0
        self._prepare(reading, inputs)
        alerts += self._run([check for check in self.checks if not check.runs_on_bad_steps], reading)
        self._remember(reading)
        is_harmful = any(alert.check == "exploding" and alert.level == "error" for alert in alerts)
        numbers = {"health/gradient_norm": reading.norm} if reading.stats is not None else {}
        return StepResult(alerts, numbers, is_harmful)

    def after_step(self) -> None:
        """Measure how far the step went, to be read with the next step's numbers. Waits for nothing."""
        for history in self.optimizers:
            history.measure_step()

    def finish(self, step: int, remedies: Remedies) -> list[Alert]:
        """Judge the updates of the last steps, which no further step reads."""
        alerts = []
        for history in self.optimizers:
            if history.ratios is not None:
                numbers = {"ratios": history.ratios.tolist()}
                alerts += self._run([self.check_of(UpdateCheck)], self._reading(step, history, numbers, remedies))
        return alerts

    def track(self, step: int, checked: CheckName, found: Sequence[Finding]) -> list[Alert]:
        """Track what a check found outside the steps."""
        return self.tracker.update(step, [checked], found)

    def look_at_ranks(self, step: int) -> list[Alert]:
        """Compare the ranks' weights. Collective."""
        rows = sample_rows([p for _, p in self.named])
        return self.track(step, RANK_DIVERGENCE, check_ranks([name for name, _ in self.named], rows))

    # Parts of a step -------------------------------------------------------------------------------------------------

    def _read(self, inputs: StepInputs, remedies: Remedies) -> StepReading:
        """Read the step's numbers from the device, with one wait."""
        if inputs.is_due:
            self._include_unfrozen(inputs.optimizer)
        history, scale = self.history(inputs.optimizer), inputs.scale
        history.note_gradients()
        pending = (
            PendingStats(history.trainable(), self.limits.alike_share, inputs.inverse_scale())
            if inputs.is_due
            else None
        )
        readback = BatchedReadback()
        readback.add("loss", inputs.loss)
        readback.add("scale", scale)
        readback.add("gradient", self._gradient_norms[inputs.optimizer].norm_or_probe(inputs.is_due, inputs.loss))
        readback.add("ratios", history.ratios)
        if inputs.examples is not None:
            readback.add("losses", inputs.examples[0])
            readback.add("timesteps", inputs.examples[1])
        if pending is not None:
            readback.add("look", pending.numbers)
        for check in self.checks:
            check.request(readback, is_due=inputs.is_due)
        numbers = readback.read()
        scale_now = numbers["scale"][0] if scale is not None else 1.0
        reading = self._reading(inputs.step, history, numbers, remedies, is_due=inputs.is_due, clip=inputs.clip)
        if inputs.loss is not None:
            reading.loss = numbers["loss"][0] / scale_now
        if "gradient" in numbers:
            reading.norm = numbers["gradient"][0] / (scale_now if inputs.is_scaled else 1.0)
        if scale is not None:
            reading.scale, reading.is_last_step_skipped = scale_now, scale_now < self.last_scale
            self.last_scale = scale_now
        if pending is not None:
            reading.stats = pending.read(numbers["look"])
        return reading

    def _reading(
        self,
        step: int,
        history: OptimizerHistory,
        numbers: dict[str, list[float]],
        remedies: Remedies,
        *,
        is_due: bool = False,
        clip: float | None = None,
    ) -> StepReading:
        return StepReading(
            step, is_due, self.limits, remedies, history, self.layer_norms, numbers, loss=math.nan, norm=0.0,
            is_every_norm_exact=self.is_exact, scale=None, clip=clip, has_several_optimizers=len(self.optimizers) > 1,
        )  # fmt: skip

    def _run(self, checks: Sequence[Check], reading: StepReading) -> list[Alert]:
        """Run checks and track what they find."""
        alerts: list[Alert] = []
        known = -1
        for check in checks:
            if known != len(alerts):
                known, said = len(alerts), self.tracker.standing(RATE_TOO_HIGH)
                if said is not None:
                    reading.remedies, reading.too_high = reading.remedies.besides(said), said
            result: Findings | None = check.run(reading)
            if result is not None:
                step = reading.step if result.step is None else result.step
                alerts += self.tracker.update(step, result.checked, result.found, result.layers)
        return alerts

    def _prepare(self, reading: StepReading, inputs: StepInputs) -> None:
        """Fill in what a finite step is judged by; at a spike of all gradients' norm, measure each of them."""
        history = reading.history
        reading.taken_steps = self.taken_steps
        history.stage.add_loss(reading.loss)
        reading.stage = history.stage.at(reading.loss)
        limits = (self.limits.exploding_z, self.limits.exploding_ratio)
        is_spike = self.is_exact and history.all_norms.is_spike(reading.norm, *limits)
        reading.is_spike = is_spike and not reading.stage.is_fitted
        # Of a sharded model all ranks measure, whatever their own losses say.
        if (is_spike if self._is_sharded else reading.is_spike) and reading.stats is None:
            reading.stats = measure(history.trainable(), inverse_scale=inputs.inverse_scale())
        if reading.stats is not None and not self.is_exact:
            reading.norm = math.sqrt(sum(n * n for n in reading.stats.gradient_norm if math.isfinite(n)))
        if reading.is_due:
            history.stage.add_norm(reading.norm)
            reading.stage = history.stage.at(reading.loss)

    def _remember(self, reading: StepReading) -> None:
        """Add a step to the histories, after it was judged by them."""
        stats = reading.stats
        if reading.is_due and stats is not None:
            self.norm_history.add(reading.step, stats.names, stats.gradient_norm, reading.loss)
            for name, norm in zip(stats.names, stats.gradient_norm, strict=True):
                self._layer_norms_of(name).add(norm)
        if reading.is_norm_exact:
            reading.history.all_norms.add(reading.norm)
        if reading.is_due:
            reading.history.take_weights(stats)
            reading.history.begin_interval()

    def _layer_norms_of(self, name: str) -> History:
        if name not in self.layer_norms:
            self.layer_norms[name] = History(int(self.limits.history), max(2, int(self.limits.min_history) // 2))
        return self.layer_norms[name]

    def _explain_non_finite(self, reading: StepReading, find_origin: FindOrigin) -> list[Alert]:
        self.bad_steps_in_a_row += 1
        if self.bad_steps_in_a_row > REPLAYS_IN_A_ROW:
            return []
        stats = reading.stats or measure(reading.history.named)
        shown = [
            norm if math.isfinite(norm) or is_none else math.inf
            for norm, is_none in zip(stats.gradient_norm, stats.is_missing, strict=True)
        ]
        self.norm_history.add(reading.step, stats.names, shown, reading.loss)
        with torch.enable_grad():
            replay = find_origin(1.0 if reading.scale is None else reading.scale)
        finding = explain_non_finite(stats, replay, reading.loss, self.named, reading.remedies)
        return self.track(reading.step, NON_FINITE, [finding])

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return {
            "tracker": self.tracker.state(),
            "norms": self.norm_history.state(),
            **{check.state_key: check.state() for check in self.checks if check.state_key},
            "optimizers": [history.state() for history in self.optimizers],
            "histories": {name: history.state() for name, history in self.layer_norms.items()},
            "bad_steps_in_a_row": self.bad_steps_in_a_row,
            "taken_steps": self.taken_steps,
            "last_scale": self.last_scale,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of `state`."""
        self.tracker.load(state["tracker"])
        self.norm_history.load(state["norms"])
        for check in self.checks:
            if check.state_key in state:
                check.load(state[check.state_key])
        for number, saved in enumerate(state["optimizers"]):
            self.history(number).load(saved)
        for name, logs in state["histories"].items():
            self._layer_norms_of(name).load(logs)
        self.bad_steps_in_a_row, self.taken_steps = int(state["bad_steps_in_a_row"]), int(state["taken_steps"])
        self.last_scale = float(state["last_scale"])


def _is_finite(reading: StepReading, inputs: StepInputs) -> bool:
    if not math.isfinite(reading.norm) or not (inputs.loss is None or math.isfinite(reading.loss)):
        return False
    return reading.stats is None or not non_finite_gradients(reading.stats)
