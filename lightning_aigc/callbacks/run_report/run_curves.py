"""RunCurves: loss, learning rate, validation loss and sent bytes of a run by step, across resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc._lightning import Trainer
from lightning_aigc.report.record import Curve

NAMES = ("loss", "lr", "val_loss", "sync_mb", "sync_ratio")


@runtime_checkable
class MeasuresSync(Protocol):
    """Measures how gradients travel between the ranks, for RunReport's curves."""

    def sync_metrics(self) -> Mapping[str, float]:
        """Return the last step's numbers by the names that loggers get; empty where nothing was sent."""
        ...


class RunCurves:
    """The curves of one run; nothing here waits for the device before they are read."""

    def __init__(self) -> None:
        self._curves = {name: StepCurve() for name in NAMES}
        self._has_logged_loss: bool | None = None

    @property
    def losses(self) -> Tensor:
        """All losses, float32 [steps], on their device."""
        return self._curves["loss"].packed()

    def before_step(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Take the rate of the coming step; call it after AdaptiveLR has set it."""
        if optimizer is trainer.optimizers[0]:
            rate = optimizer.param_groups[0]["lr"]  # a tensor is written to in place
            if rate is not None:  # transformers' Adafactor finds its rate in the step and shows it nowhere
                self._curves["lr"].add(trainer.global_step + 1, rate.clone() if isinstance(rate, Tensor) else rate)

    def after_batch(self, trainer: Trainer, outputs: Any) -> None:
        """Take the loss of a batch, and how it was sent. `outputs` is what `on_train_batch_end` gets."""
        loss = self._loss(trainer, outputs)
        step = trainer.global_step
        if loss is not None:
            self._curves["loss"].add(step, loss)
        strategy: Any = trainer.strategy
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if isinstance(strategy, MeasuresSync) and every and step % every == 0:
            sent = strategy.sync_metrics()
            if sent:
                kinds = ("values", "index", "protected", "small", "intra_node")
                self._curves["sync_mb"].add(step, sum(sent.get(f"sync/{kind}_mb", 0.0) for kind in kinds))
                self._curves["sync_ratio"].add(step, sent["sync/ratio_to_dense"])

    def _loss(self, trainer: Trainer, outputs: Any) -> Tensor | None:
        """The metric `loss`, or where the first batch logs none the loss that training_step returns."""
        logged = trainer.callback_metrics.get("loss")
        returned = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not trainer.lightning_module.automatic_optimization or not isinstance(returned, Tensor):
            return logged  # under manual optimization a module may return anything
        if self._has_logged_loss is None:
            self._has_logged_loss = logged is not None
        if self._has_logged_loss:
            return logged
        return returned.detach().reshape(()) * trainer.accumulate_grad_batches  # Lightning divides by it

    def after_validation(self, trainer: Trainer) -> None:
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None and not trainer.sanity_checking:
            self._curves["val_loss"].add(trainer.global_step, loss)

    def record(self) -> dict[str, Curve]:
        """The curves that have points; waits for the device."""
        return {name: curve.curve() for name, curve in self._curves.items() if curve.steps}

    def state_dict(self) -> dict[str, Any]:
        return {name: curve.state_dict() for name, curve in self._curves.items() if name != "loss"}

    def load_state_dict(self, losses: dict[str, Any], others: dict[str, Any]) -> None:
        """Load what `state_dict` returned, and the losses, which checkpoints have always kept apart."""
        for name, state in {**others, "loss": losses}.items():
            self._curves[name].load_state_dict(state)

    def loss_state(self) -> dict[str, Any]:
        return self._curves["loss"].state_dict()


class StepCurve:
    """A run's losses, or another number, by step. Adding one waits for nothing; the state is two flat tensors."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._packed = torch.empty(0)
        self._new: list[Tensor] = []

    def add(self, step: int, value: Tensor | float) -> None:
        """Add the first value of a step; later values of the same step are dropped."""
        if not self.steps or self.steps[-1] != step:
            self.steps.append(step)
            self._new.append(value.detach() if isinstance(value, Tensor) else torch.tensor(float(value)))

    def packed(self) -> Tensor:
        """Return all values, float32 [steps], on the device."""
        if self._new:
            new = torch.stack(self._new).float()
            self._packed, self._new = torch.cat([self._packed.to(new.device), new]), []
        return self._packed

    def curve(self) -> Curve:
        """Return the steps and values; waits for the device."""
        return Curve(list(self.steps), self.packed().tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": torch.tensor(self.steps, dtype=torch.int64), "losses": self.packed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._packed, self._new = state["steps"].tolist(), state["losses"], []
