"""Injected faults: each is caught within 20 optimizer steps, at a level above info, with the right layer named."""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from fakes.denoisers import Denoiser, FullSD, LeanSD, fit, sd_batches
from lightning_aigc.callbacks.health import Alert, GradientHealthMonitor
from lightning_aigc.precision import FusedBackwardPrecision

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*in eval mode at the start")
WITHIN = 20
ATTENTION = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


class Inject(Callback):
    """Runs `act(module)` at a moment, from a step on."""

    def __init__(self, act: Callable[[Any], None], at: int, moment: str = "on_after_backward") -> None:
        self.act, self.at, self.moment = act, at, moment

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.moment == "on_after_backward" and trainer.global_step + 1 >= self.at:
            self.act(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.moment == "once" and trainer.global_step + 1 == self.at:
            self.act(pl_module)


class Broken(nn.Module):
    """Passes its input on, until it is switched on: then the forward or the backward value is not finite, or huge."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase, self.is_on = phase, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_on:
            return x
        if self.phase == "forward":
            return x / torch.zeros_like(x)
        if self.phase == "detached":
            return x.detach()
        # The derivative of a root at zero is infinite, its value is not.
        return x + (x - x.detach()).abs().sqrt()


def gradient(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[LightningModule], None]:
    def act(module: LightningModule) -> None:
        parameter = module.get_parameter(name)
        if parameter.grad is not None:
            parameter.grad = change(parameter.grad)

    return act


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[LightningModule], None]:
    def act(module: LightningModule) -> None:
        with torch.no_grad():
            module.get_parameter(name).copy_(change(module.get_parameter(name)))

    return act


def one_nan(gradient: Tensor) -> Tensor:
    gradient.view(-1)[gradient.numel() // 3] = float("nan")
    return gradient


def switch(module: Any) -> None:
    module.blocks[1].extra.is_on = True


def with_extra(phase: str) -> Callable[[Any], None]:
    def prepare(module: Any) -> None:
        module.blocks[1].extra = Broken(phase)

    return prepare


@dataclass
class Fault:
    name: str
    check: str
    layer: str
    act: Callable[[Any], None] = lambda module: None
    at: int = 3
    moment: str = "on_after_backward"
    kind: str = "full"
    precision: str = "32-true"
    prepare: Callable[[Any], None] = lambda module: None
    rate: float = 1e-3
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "net"

    def __str__(self) -> str:
        return f"{self.name}-{self.model}-{self.kind}-{self.precision}"


def of_gradients(kind: str, precision: str, model: str, layer: str) -> list[Fault]:
    """What can befall one parameter's gradient, on one model."""
    common: dict[str, Any] = {"layer": layer, "kind": kind, "precision": precision, "model": model}
    return [
        Fault("tiny gradient", "vanishing", act=gradient(layer, lambda g: g / (g.norm() + 1e-20) * 1e-9), **common),
        Fault("huge gradient", "exploding", act=gradient(layer, lambda g: g / (g.norm() + 1e-20) * 1e8), **common),
        Fault("constant gradient", "saturated", act=gradient(layer, lambda g: torch.full_like(g, 1e-3)), **common),
        Fault("gradient None", "no_gradient", act=gradient(layer, lambda g: None), **common),
        Fault("gradient zero", "no_gradient", act=gradient(layer, torch.zeros_like), **common),
    ]


NET, LORA = "blocks.1.up.weight", "blocks.1.up.lora_B.default.weight"
SD, SD_LORA = f"{ATTENTION}.weight", f"{ATTENTION}.lora_B.default.weight"


def broken(phase: str, at: int, precision: str, kind: str = "full", layer: str = "blocks.1.extra") -> Fault:
    return Fault(f"{phase} not finite", "non_finite", layer, switch, at, "once", kind, precision, with_extra(phase))


def scale_bucket(module: Any) -> None:
    """From now on losses at timesteps 700 to 799 are 1000 times as large."""
    step = type(module).training_step

    def training_step(batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = step(module, batch, batch_idx)
        is_hit = (module.last_timesteps // 100) == 7
        module.last_example_losses = torch.where(is_hit, 1000.0, 1.0) * module.last_example_losses
        return loss

    if "training_step" not in vars(module):
        vars(module)["training_step"] = training_step


def scale_loss(module: Any) -> None:
    step = type(module).training_step

    def training_step(batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = step(module, batch, batch_idx)
        module.last_example_losses = None
        return loss * (1000 if module.trainer.global_step + 1 >= 45 else 1)

    vars(module)["training_step"] = training_step


def leave_out(module: Any) -> None:
    others = [p for name, p in module.named_parameters() if name != NET and p.requires_grad]
    vars(module)["configure_optimizers"] = lambda: torch.optim.AdamW(others, lr=1e-3)


def overflow_16(module: Any) -> None:
    """In float16 the outlet's gradient is beyond its range at any loss scale that torch starts with."""
    with torch.no_grad():
        module.outlet.weight.mul_(1e5)


def add_nan_once(module: Any) -> None:
    weight("blocks.2.down.weight", one_nan)(module)


FAULTS = [
    *of_gradients("full", "32-true", "net", NET),
    *of_gradients("lora", "bf16-mixed", "net", LORA),
    *of_gradients("full", "16-mixed", "net", NET),
    *of_gradients("lora", "32-true", "sd", SD_LORA)[:3],
    *of_gradients("full", "bf16-mixed", "sd", SD)[1:4],
    *of_gradients("full", "bf16-true", "net", NET)[:2],
    *[broken("forward", at, precision) for at, precision in ((5, "32-true"), (13, "bf16-mixed"), (7, "16-mixed"))],
    *[broken("backward", at, precision) for at, precision in ((5, "32-true"), (13, "bf16-mixed"), (7, "16-mixed"))],
    broken("forward", 4, "32-true", "lora"),
    broken("backward", 12, "bf16-mixed", "lora"),
    Fault("one NaN in a gradient", "non_finite", NET, gradient(NET, one_nan), 17),
    Fault("one NaN in a LoRA's gradient", "non_finite", LORA, gradient(LORA, one_nan), 13, kind="lora"),
    Fault("one NaN in a weight", "non_finite", "blocks.2.down", add_nan_once, 6, "once"),
    Fault("detached", "no_gradient", "blocks.1.up.weight", switch, 3, "once", prepare=with_extra("detached")),
    Fault("detached LoRA", "no_gradient", "blocks.1.up.lora_B.default.weight", switch, 3, "once", "lora",
          prepare=with_extra("detached")),
    Fault("rate far too high", "update_ratio", "inlet.weight", rate=10.0, at=1),
    Fault("rate far too high", "update_ratio", "blocks.", rate=10.0, at=1, kind="lora"),
    Fault("rate zero", "no_update", "blocks.1.up.weight", rate=0.0, at=1),
    Fault("rate lost in bfloat16", "no_update", "blocks.1.up.weight", rate=1e-9, at=1, precision="bf16-true"),
    Fault("clip value far too small", "clip_share", "all", at=1, options={"gradient_clip_val": 1e-4}),
    Fault("float16 overflow", "loss_scale", "all", overflow_16, 3, "once", precision="16-mixed"),
    Fault("a bucket's loss", "loss_spike", "loss.timesteps_700_799", scale_bucket, 45, "once"),
    Fault("the loss", "loss_spike", "loss", at=45, prepare=scale_loss),
    Fault("frozen weight moved", "frozen_moved", "blocks.1.up.base_layer.weight",
          weight("blocks.1.up.base_layer.weight", lambda w: w * 1.01), 5, "once", "lora"),
    Fault("frozen weight moved", "frozen_moved", f"{ATTENTION}.base_layer.weight",
          weight(f"{ATTENTION}.base_layer.weight", lambda w: w * 1.01), 5, "once", "lora", model="sd"),
    Fault("left out of the optimizer", "not_in_optimizer", NET, at=0, prepare=leave_out),
    Fault("left out of the optimizer", "no_update", NET, at=1, prepare=leave_out),
    Fault("B without a gradient", "lora_b_zero", LORA, gradient(LORA, torch.zeros_like), 1, kind="lora"),
    Fault("B without a gradient", "lora_b_zero", SD_LORA, gradient(SD_LORA, torch.zeros_like), 1, kind="lora",
          model="sd"),
    Fault("B far larger than A", "lora_imbalance", LORA, weight(LORA, lambda w: w * 0 + 100), 4, "once", "lora"),
    Fault("LoRA outgrows its base", "lora_delta", "blocks.1.up", weight(LORA, lambda w: w * 0 + 3), 4, "once", "lora"),
]  # fmt: skip


def make(fault: Fault) -> LightningModule:
    module: LightningModule
    if fault.model == "sd":
        kind = FullSD if fault.kind == "full" else LeanSD
        module = kind("embedded:sd", rank=4, learning_rate=fault.rate)
    else:
        module = Denoiser(fault.kind, fault.rate)
    fault.prepare(module)
    return module


def alerts_of(fault: Fault, folder: Path, steps: int) -> list[Alert]:
    monitor = GradientHealthMonitor(page=False)
    fit(
        make(fault),
        [Inject(fault.act, fault.at, fault.moment), monitor],
        steps=steps,
        data=sd_batches(4) if fault.model == "sd" else None,
        plugins=[FusedBackwardPrecision(fault.precision, memory="off")],
        default_root_dir=str(folder),
        **fault.options,
    )
    return monitor.alerts


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_caught_within_twenty_steps_with_its_layer_named(fault: Fault, tmp_path: Path) -> None:
    alerts = alerts_of(fault, tmp_path, steps=max(fault.at, 1) + WITHIN)
    caught = [a for a in alerts if a.check == fault.check and a.layer.startswith(fault.layer) and a.level != "info"]
    assert caught, [a.line() for a in alerts]
    assert fault.at <= caught[0].step <= fault.at + WITHIN
    assert fault.at <= caught[0].since <= caught[0].step
    assert caught[0].message and caught[0].cause and caught[0].remedy


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_same_training_without_a_fault_raises_neither_warning_nor_error(
    kind: str, precision: str, tmp_path: Path
) -> None:
    alerts = alerts_of(Fault("none", "", "", kind=kind, precision=precision, at=10**9), tmp_path, steps=70)
    assert [a.line() for a in alerts if a.level != "info"] == []


def test_there_are_thirty_faults_of_every_check_that_one_rank_can_have() -> None:
    from typing import get_args

    from lightning_aigc.callbacks.health.alert import Check

    assert len({str(fault) for fault in FAULTS}) >= 30
    assert {fault.check for fault in FAULTS} == set(get_args(Check)) - {"rank_divergence"}
