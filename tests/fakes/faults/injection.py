"""Inject a fault into a training and collect the monitor's alerts."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.models.denoisers import Denoiser, FullSD, LeanSD, batches
from lightning_aigc.callbacks.health import Alert, GradientHealthMonitor
from lightning_aigc.precision import FusedBackwardPrecision

WITHIN = 20
"""Steps within which a fault must be caught."""
Act = Callable[[Any], None]


@dataclass
class Fault:
    """A fault that is injected from a step on, and the expected alert.

    `says` is False for what lies just short of a threshold: then nothing may be said above an info.
    """

    name: str
    check: str
    layer: str
    act: Act = lambda module: None
    at: int = 3
    moment: str = "on_after_backward"
    """Also `once`, at the start of a batch, and `after_step`, at its end."""
    model: str = "net"
    """`net` is Denoiser, `sd` the embedded Stable Diffusion."""
    kind: str = "full"
    precision: str = "32-true"
    prepare: Act = lambda module: None
    rate: float = 1e-3
    options: dict[str, Any] = field(default_factory=dict)
    every: int = 10
    says: bool = True
    is_missed: bool = False
    """On some seeds it stays an info: it is lost in the spread of a diffusion gradient at batch 2."""
    also: str = ""
    """Another check that is right: a loss of 30 times has gradients of 30 times."""
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.model}-{self.kind}-{self.precision}"


class Inject(Callback):
    """Runs `act(module)` at a moment, from a step on."""

    def __init__(self, fault: Fault) -> None:
        self.act, self.at, self.moment = fault.act, fault.at, fault.moment

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.moment == "on_after_backward" and trainer.global_step + 1 >= self.at:
            self.act(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.moment == "once" and trainer.global_step + 1 == self.at:
            self.act(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.moment == "after_step" and trainer.global_step >= self.at:
            self.act(pl_module)


class Broken(nn.Module):
    """Passes its input on, until it is switched on: then the forward or the backward value is not finite."""

    def __init__(self, phase: str, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.phase, self.inner, self.is_on = phase, inner, False

    def forward(self, x: Tensor, *given: Any, **named: Any) -> Any:
        x = x if self.inner is None else self.inner(x, *given, **named)
        if not self.is_on:
            return x
        if self.phase == "forward":
            return x / torch.zeros_like(x)
        if self.phase == "detached":
            return x.detach()
        # The derivative of a root at zero is infinite, its value is not.
        return x + (x - x.detach()).abs().sqrt()


def scale_of(module: Any) -> float:
    """The loss scale that gradients are under."""
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None or scaler._scale is None else float(scaler._scale)


def gradient(name: str, change: Callable[[Tensor], Tensor | None]) -> Act:
    def act(module: Any) -> None:
        parameter = module.get_parameter(name)
        if parameter.grad is not None:
            parameter.grad = change(parameter.grad)

    return act


def gradient_norm(name: str, norm: float) -> Act:
    """Give one gradient a norm, whatever the loss scale."""

    def act(module: Any) -> None:
        g = module.get_parameter(name).grad
        g = torch.randn_like(g) if not g.any() else g
        module.get_parameter(name).grad = (g.double() * (norm * scale_of(module) / g.double().norm())).to(g.dtype)

    return act


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Act:
    def act(module: Any) -> None:
        with torch.no_grad():
            module.get_parameter(name).copy_(change(module.get_parameter(name)))

    return act


def all_gradients(norm: Callable[[int], float]) -> Act:
    """Give all gradients together a norm, by the step's number."""

    def act(module: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        total = torch.stack([g.double().norm() for g in gradients]).norm()
        for g in gradients:
            g.mul_(norm(module.trainer.global_step + 1) * scale_of(module) / total)

    return act


def loss_times(factor: float, since: int, bucket: int | None = None) -> Act:
    """From a step on, multiply the loss, or the reported losses of one bucket of timesteps."""

    def prepare(module: Any) -> None:
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = step(batch, batch_idx)
            is_on = module.trainer.global_step + 1 >= since
            if bucket is None:
                module.last_example_losses = None
                return loss * (factor if is_on else 1)
            is_hit = (module.last_timesteps // 100 == bucket) & is_on
            module.last_example_losses = torch.where(is_hit, factor, 1.0) * module.last_example_losses
            return loss

        vars(module)["training_step"] = training_step

    return prepare


@functools.cache
def _cache() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="latents")


def make(fault: Fault) -> LightningModule:
    seed_everything(3 + fault.seed, verbose=False)
    module: LightningModule
    if fault.model == "sd":
        module = (FullSD if fault.kind == "full" else LeanSD)("embedded:sd", rank=4, learning_rate=fault.rate)
        module.configure_model()
    else:
        module = Denoiser(fault.kind, fault.rate, seed=3 + fault.seed)
    fault.prepare(module)
    return module


def alerts_of(fault: Fault, folder: Path) -> list[Alert]:
    """Train until the fault must have been caught, and give what the monitor said."""
    from lightning_aigc.data import ImageCaptionData

    monitor, module = GradientHealthMonitor(page=False, every_n_steps=fault.every), make(fault)
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_steps=max(fault.at, 1) + WITHIN, default_root_dir=str(folder),
        plugins=[FusedBackwardPrecision(fault.precision, memory="off")],  # type: ignore[arg-type]
        callbacks=[Inject(fault), monitor], **fault.options,
    )  # fmt: skip
    seed_everything(5 + fault.seed, verbose=False)
    if fault.model == "sd":
        data: Any = ImageCaptionData(
            "embedded:brand", resolution=64, train_batch_size=2, cache_dir=_cache().name, num_workers=0
        )
    else:
        data = DataLoader(batches(8), batch_size=None)
    trainer.fit(module, data)
    return monitor.alerts


def first_alert(alerts: list[Alert]) -> Alert | None:
    """The first that is more than an info."""
    return next((alert for alert in alerts if alert.level != "info"), None)


def is_right(fault: Fault, alerts: list[Alert]) -> bool:
    """Whether the first alert is the fault's own and in time; of what lies just short of a threshold, whether none."""
    first = first_alert(alerts)
    if not fault.says or first is None:
        return fault.says == (first is not None)
    is_its_own = first.check == fault.check and first.layer.startswith(fault.layer)
    is_its_own = is_its_own or first.check == fault.also
    return is_its_own and fault.at <= first.since <= first.step <= fault.at + WITHIN
