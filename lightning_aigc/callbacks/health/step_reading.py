"""One optimizer step: what the monitor knows of it, and its numbers on the host, which the checks judge."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor, cat

from lightning_aigc.callbacks.health.history.history import History
from lightning_aigc.callbacks.health.history.optimizer_history import OptimizerHistory
from lightning_aigc.callbacks.health.parameter_names import lora_pairs
from lightning_aigc.callbacks.health.parameter_stats import ParameterStats
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.thresholds import HealthThresholds
from lightning_aigc.callbacks.health.training_stage import TrainingStage


@dataclass(frozen=True)
class StepInputs:
    """The monitor's inputs for an optimizer step, before anything is read from the device."""

    step: int
    """From 1."""
    is_due: bool
    """Whether to look at every parameter, and not only for values that are not finite."""
    loss: Tensor | None
    """Under the loss scale."""
    optimizer: int = 0
    """The place of its optimizer among the run's."""
    examples: tuple[Tensor, Tensor] | None = None
    """Losses and timesteps of its examples."""
    scale: Tensor | None = None
    """The loss scale."""
    is_scaled: bool = False
    """Whether gradients are still under it."""
    clip: float | None = None
    """The norm that all gradients are going to be clipped to."""

    def inverse_scale(self) -> Tensor | None:
        """Multiplier for gradients that are still under the loss scale."""
        return self.scale.reciprocal() if self.scale is not None and self.is_scaled else None


@dataclass
class StepReading:
    """Values of one optimizer step that checks read, between backward and the step itself."""

    step: int
    """From 1."""
    is_due: bool
    """Whether this is a look at every parameter, which comes every `every_n_steps`."""
    limits: HealthThresholds
    remedies: Remedies
    history: OptimizerHistory
    """History of the same optimizer."""
    layer_norms: Mapping[str, History]
    """Gradient norms of earlier looks, by parameter."""
    numbers: dict[str, list[float]]
    """Everything that was read from the device, by name."""
    loss: float
    """Without the loss scale; NaN where it is not known."""
    norm: float
    """L2 norm of all gradients, without the loss scale; for a large model between looks only a probe of it."""
    is_every_norm_exact: bool
    """Whether every step reads the norm of all gradients, which a large model's steps between looks do not."""
    scale: float | None
    """The loss scale."""
    clip: float | None
    """The norm that all gradients are going to be clipped to."""
    is_last_step_skipped: bool = False
    """Whether the loss scale has fallen: its scaler skipped the last step."""
    has_several_optimizers: bool = False
    taken_steps: int = 0
    """Steps of the first optimizer that were finite, this one included."""
    stage: TrainingStage = field(default_factory=TrainingStage)
    stats: ParameterStats | None = None
    """Each parameter's numbers, at a look or where the norm of all gradients is a spike."""
    too_high: str | None = None
    """The standing warning, as `check of layer`, that says that the learning rate is too high."""
    is_spike: bool = False
    """Whether the norm of all gradients stands out of its history."""

    @property
    def is_norm_exact(self) -> bool:
        """Whether `norm` is that of all gradients."""
        return self.is_every_norm_exact or self.stats is not None

    def layers_of(self, names: Collection[str]) -> Collection[str] | None:
        """The layers that a look at these parameters covers; None, which is all, where there is one optimizer."""
        return {*names, *lora_pairs(tuple(names))} if self.has_several_optimizers else None


class BatchedReadback:
    """Collects tensors by name; `read` copies them to the host together, as float32."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor | None) -> None:
        """Add a tensor; None adds nothing."""
        if tensor is not None:
            self._parts[name] = tensor.detach().reshape(-1).float()

    def read(self) -> dict[str, list[float]]:
        """Return every tensor's values by its name. Waits for the device once."""
        if not self._parts:
            return {}
        device = next(iter(self._parts.values())).device
        numbers = cat([p if p.device == device else p.to(device) for p in self._parts.values()]).tolist()
        values, at = {}, 0
        for name, part in self._parts.items():
            values[name] = numbers[at : at + part.numel()]
            at += part.numel()
        return values
