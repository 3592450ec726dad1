"""Everything that is known about a run's health: takes each step's numbers, gives what is news."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_aigc.callbacks.health import gradients, lora, updates
from lightning_aigc.callbacks.health.alert import Alert, Finding
from lightning_aigc.callbacks.health.course import Course
from lightning_aigc.callbacks.health.frozen import FrozenSamples
from lightning_aigc.callbacks.health.gradients import check_gradients, non_finite_gradients, spike_of_all
from lightning_aigc.callbacks.health.history import History
from lightning_aigc.callbacks.health.ledger import Ledger
from lightning_aigc.callbacks.health.measurement import Look, Measurement, Named, sample_rows
from lightning_aigc.callbacks.health.names import frozen, lora_pairs, trained
from lightning_aigc.callbacks.health.origin import Replayed, finding_of_loss, finding_of_module, finding_of_parameter
from lightning_aigc.callbacks.health.ranks import check_ranks
from lightning_aigc.callbacks.health.reading import Gradients, read_step
from lightning_aigc.callbacks.health.record import Record
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.scaling import LossScale
from lightning_aigc.callbacks.health.thresholds import HealthThresholds

EXACT_BELOW = 50_000_000
"""Trainable values up to which every step takes every gradient's norm; above, a sample says whether it is finite."""
REPLAYS_IN_A_ROW = 2
"""Steps in a row that are run again where each is not finite: the first says it all."""

FindOrigin = Callable[[float], Replayed]


class Watch:
    """The checks, their histories and the ledger of one run."""

    def __init__(self, limits: HealthThresholds) -> None:
        self.limits = limits
        self.ledger, self.record = Ledger(), Record()
        self.loss_scale = LossScale()
        self.courses = [Course(limits)]
        self.histories: dict[str, History] = {}
        self.bad_steps_in_a_row = 0
        self.taken_steps = 0
        self.last_scale = 0.0
        self.named: Named = []

    def attach(self, model: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Take the parameters as they are when training starts."""
        averages = {id(p) for m in model.modules() if isinstance(m, AveragedModel) for p in m.parameters()}
        named = [(name, p) for name, p in model.named_parameters() if id(p) not in averages]
        self.named = trained(named)
        for i, optimizer in enumerate(optimizers):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            # One optimizer looks at what it does not hold too: those gradients say as much.
            own = [(name, p) for name, p in self.named if id(p) in held] if len(optimizers) > 1 else self.named
            self.course(i).attach(own)
        self.frozen = FrozenSamples(frozen(named), self.named)
        self.deltas = lora.Deltas(model)
        self.is_exact = sum(p.numel() for _, p in self.named) <= EXACT_BELOW
        self.gradients = [Gradients(course.named, self.is_exact) for course in self.courses]

    def course(self, number: int) -> Course:
        """What is remembered of an optimizer."""
        while number >= len(self.courses):
            self.courses.append(Course(self.limits, len(self.courses)))
        return self.courses[number]

    # A step ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look(
        self,
        step: int,
        remedies: Remedies,
        find_origin: FindOrigin,
        *,
        is_due: bool,
        loss: Tensor | None,
        optimizer: int = 0,
        examples: tuple[Tensor, Tensor] | None = None,
        scale: Tensor | None = None,
        is_scaled: bool = False,
        clip: float | None = None,
    ) -> tuple[list[Alert], dict[str, float], bool]:
        """Look at one optimizer step before it is taken.

        Args:
            step: Its number.
            find_origin: Runs the step again at a loss scale, to find the module.
            is_due: Whether to look at every parameter, and not only for values that are not finite.
            loss: Its loss, scaled.
            optimizer: The place of its optimizer among the run's.
            examples: Losses and timesteps of its examples.
            scale: The loss scale.
            is_scaled: Whether gradients are still under it.
            clip: The norm that all gradients will be clipped to.

        Returns: alerts, numbers for the logger, and whether the step would do harm.
        """
        course = self.course(optimizer)
        named = course.named
        inverse = scale.reciprocal() if scale is not None and is_scaled else None
        full = Look(named, self.limits.alike_share, inverse) if is_due else None
        changed = self.frozen.changed() if is_due else None
        read = read_step(
            course, full, changed, gradients=self.gradients[optimizer], loss=loss, examples=examples, scale=scale
        )

        alerts: list[Alert] = []
        scale_now = read["scale"][0] if scale is not None else 1.0
        loss_now = read["loss"][0] / scale_now if loss is not None else math.nan
        norm = read["gradient"][0] / (scale_now if is_scaled else 1.0) if "gradient" in read else 0.0
        now = full.read(read["look"]) if full is not None else None
        is_finite = math.isfinite(norm) and (loss is None or math.isfinite(loss_now))
        is_finite = is_finite and (now is None or not non_finite_gradients(now))
        if scale is not None:
            alerts += self._look_at_scale(step, scale_now, norm, course, read, remedies)
        alerts += self._after_last_step(step, course, read.get("ratios"), remedies)
        if not is_finite:
            course.drop_weights()
            is_overflow = scale is not None and math.isfinite(loss_now)  # the scaler's business, and it skips
            if not is_overflow or any(alert.check == "loss_scale" for alert in alerts):
                alerts += self._non_finite(step, now or _measured(named), remedies, find_origin, loss_now, scale_now)
            return alerts, {}, not is_overflow
        self.bad_steps_in_a_row = 0
        self.taken_steps += optimizer == 0
        alerts += self._look_at_loss(step, course, loss_now, read, remedies)
        is_spike = self.is_exact and course.all_norms.is_spike(
            norm, self.limits.exploding_z, self.limits.exploding_ratio
        )
        is_spike = is_spike and not course.trend.standing(loss_now).is_fitted
        if is_spike and now is None:
            now = _measured(named, inverse)
        numbers: dict[str, float] = {}
        if now is not None:
            if not self.is_exact:
                norm = math.sqrt(sum(n * n for n in now.gradient_norm if math.isfinite(n)))
            alerts += self._full_look(step, course, now, norm, is_spike, remedies, is_due=is_due, loss=loss_now)
            numbers = {"health/gradient_norm": norm}
            if "frozen" in read:
                alerts += self._tell(step, ["frozen_moved"], self.frozen.findings(read["frozen"]))
        if self.is_exact or now is not None:
            course.all_norms.add(norm)
            course.clipping.add(norm)
            alerts += self._tell(step, ["clip_share"], course.clipping.check(clip, self.limits, remedies))
        if is_due:
            course.take_weights()
        harm = any(a.check == "exploding" and a.level == "error" for a in alerts)
        return alerts, numbers, harm

    def after_step(self) -> None:
        """The step was taken: measure how far it went, to be read at the next look. Waits for nothing."""
        for course in self.courses:
            course.measure_step()

    def finish(self, step: int, remedies: Remedies) -> list[Alert]:
        """What the last step left to be read."""
        return [
            alert
            for course in self.courses
            if course.ratios is not None
            for alert in self._after_last_step(step, course, course.ratios.tolist(), remedies)
        ]

    def tell(self, step: int, findings: Sequence[Finding]) -> list[Alert]:
        """Alerts for what was found outside the steps."""
        return self._tell(step, [finding.check for finding in findings], findings)

    def look_at_ranks(self, step: int) -> list[Alert]:
        """Compare the ranks' weights. Collective."""
        rows = sample_rows([p for _, p in self.named])
        return self._tell(step, ["rank_divergence"], check_ranks([name for name, _ in self.named], rows))

    # Parts of a step -------------------------------------------------------------------------------------------------

    def _tell(self, step: int, checks: Any, findings: Sequence[Finding], layers: Any = None) -> list[Alert]:
        return self.ledger.update(step, checks, findings, layers)

    def _look_at_scale(
        self, step: int, scale: float, norm: float, course: Course, read: dict[str, list[float]], remedies: Remedies
    ) -> list[Alert]:
        has_fallen = scale < self.last_scale
        is_skipped = not math.isfinite(norm) if self.is_exact else has_fallen
        self.last_scale = scale
        if has_fallen:  # the last step was skipped
            course.ratios = None
            read.pop("ratios", None)
        return self._tell(step, ["loss_scale"], self.loss_scale.check(scale, is_skipped, self.limits, remedies))

    def _after_last_step(
        self, step: int, course: Course, ratios: Sequence[float] | None, remedies: Remedies
    ) -> list[Alert]:
        if ratios is None or course.samples is None:
            return []
        course.ratios = None
        names = [name for name, _ in course.samples.named]
        moving = course.moving or [True] * len(names)
        found = updates.check_updates(names, ratios, moving, self.limits, remedies)
        return self._tell(step - 1, updates.CHECKS, found, self._own(names))

    def _own(self, names: Collection[str]) -> Collection[str] | None:
        """The places that one of several optimizers has looked at; None, which is all, where there is one."""
        return None if len(self.courses) == 1 else {*names, *lora_pairs(tuple(names))}

    def _look_at_loss(
        self, step: int, course: Course, loss: float, read: dict[str, list[float]], remedies: Remedies
    ) -> list[Alert]:
        if not math.isfinite(loss) and "losses" not in read:
            return []
        course.trend.add_loss(loss)
        is_fitted = course.trend.standing(loss).is_fitted
        losses, timesteps = [loss], None
        if "losses" in read:
            losses, timesteps = read["losses"], [int(t) for t in read["timesteps"]]
        found, layers = course.losses.check(losses, timesteps, remedies, is_fitted=is_fitted)
        return self._tell(step, ["loss_spike"], found, layers)

    def _full_look(
        self,
        step: int,
        course: Course,
        now: Measurement,
        norm: float,
        is_spike: bool,
        remedies: Remedies,
        *,
        is_due: bool,
        loss: float,
    ) -> list[Alert]:
        if is_due:
            course.trend.add_norm(norm)
        found = check_gradients(now, self.limits, remedies, self.histories, course.trend.standing(loss))
        if is_spike and not any(f.check == "exploding" for f in found):
            found.append(spike_of_all(now, norm, course.all_norms, remedies))
        # Between scheduled looks only what is suspicious is news; the rest would be counted too often.
        checks = (*gradients.CHECKS, "non_finite") if is_due else ("exploding",)
        own = self._own(now.names)
        alerts = self._tell(step, checks, [f for f in found if f.check in checks], own)
        if is_due:
            found = lora.check_pairs(now, self.taken_steps - 1, self.limits, remedies)
            found += self.deltas.check(now, self.limits, remedies)
            alerts += self._tell(step, lora.CHECKS, found, own)
            self.record.add(step, now.names, now.gradient_norm, loss)
            for name, value in zip(now.names, now.gradient_norm, strict=True):
                self._history(name).add(value)
        return alerts

    def _history(self, name: str) -> History:
        if name not in self.histories:
            self.histories[name] = History(int(self.limits.history), max(2, int(self.limits.min_history) // 2))
        return self.histories[name]

    def _non_finite(
        self, step: int, now: Measurement, remedies: Remedies, find_origin: FindOrigin, loss: float, scale: float
    ) -> list[Alert]:
        self.bad_steps_in_a_row += 1
        if self.bad_steps_in_a_row > REPLAYS_IN_A_ROW:
            return []
        is_none = now.is_missing
        shown = [n if math.isfinite(n) or is_none[i] else math.inf for i, n in enumerate(now.gradient_norm)]
        self.record.add(step, now.names, shown, loss)
        with torch.enable_grad():
            replayed = find_origin(scale)
        if replayed.found is not None:
            finding = finding_of_module(replayed.found, self.named, remedies)
        elif bad := non_finite_gradients(now):
            finding = finding_of_parameter(bad, replayed.why_not, remedies)
        else:
            finding = finding_of_loss(math.isfinite(loss), loss, replayed.why_not, remedies)
        return self._tell(step, ["non_finite"], [finding])

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "ledger": self.ledger.state(),
            "record": self.record.state(),
            "loss_scale": self.loss_scale.state(),
            "courses": [course.state() for course in self.courses],
            "histories": {name: history.state() for name, history in self.histories.items()},
            "bad_steps_in_a_row": self.bad_steps_in_a_row,
            "taken_steps": self.taken_steps,
            "last_scale": self.last_scale,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take a state up; before two optimizers were told apart, it was one course's."""
        self.ledger.load(state["ledger"])
        self.record.load(state["record"])
        self.loss_scale.load(state["loss_scale"])
        for number, saved in enumerate(state.get("courses", [state])):
            self.course(number).load(saved)
        for name, logs in state["histories"].items():
            self._history(name).load(logs)
        self.bad_steps_in_a_row, self.taken_steps = int(state["bad_steps_in_a_row"]), int(state["taken_steps"])
        self.last_scale = float(state["last_scale"])


def _measured(named: Named, inverse_scale: Tensor | None = None) -> Measurement:
    look = Look(named, inverse_scale=inverse_scale)
    return look.read(look.numbers.tolist())
