"""The table of faults: every check on both models, in three precisions, just above and just below its threshold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fakes.faults.injection import (
    Act,
    Broken,
    Fault,
    all_gradients,
    gradient,
    gradient_norm,
    loss_times,
    scale_of,
    weight,
)

ATTENTION = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
LAYERS = {
    ("net", "full"): "blocks.1.up.weight",
    ("net", "lora"): "blocks.1.up.lora_B.default.weight",
    ("sd", "full"): f"{ATTENTION}.weight",
    ("sd", "lora"): f"{ATTENTION}.lora_B.default.weight",
}
MODULES = {"net": "blocks.1.up", "sd": ATTENTION}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
HISTORY = 31
"""A step by which looks at every second step have made a history."""


def one_nan(g: Tensor) -> Tensor:
    g.view(-1)[g.numel() // 3] = float("nan")
    return g


def alike(name: str, share: float) -> Act:
    """Give a share of a gradient's values one size, and the gradient the norm 1."""

    def act(module: Any) -> None:
        g = module.get_parameter(name).grad
        values = 1 + torch.rand(g.numel())
        values[torch.randperm(len(values))[: round(share * len(values))]] = 1.0
        g.copy_((values * scale_of(module) / values.norm()).view_as(g))

    return act


def wrap(phase: str, path: str) -> Act:
    """Put a module behind another one's output that breaks it once it is on."""

    def prepare(module: Any) -> None:
        parent, _, name = path.rpartition(".")
        inside = module.get_submodule(parent)
        setattr(inside, name, Broken(phase, getattr(inside, name)))

    return prepare


def switch(path: str) -> Act:
    def act(module: Any) -> None:
        module.get_submodule(path).is_on = True

    return act


def times(name: str, factor: float) -> Act:
    return gradient(name, lambda g: g * factor)


def undo(name: str) -> Act:
    """After a step, put one weight back."""
    kept: dict[str, Tensor] = {}

    def act(module: Any) -> None:
        p = module.get_parameter(name)
        with torch.no_grad():
            p.copy_(kept.setdefault(name, p.detach().clone()))

    return act


def move(name: str, ratio: float) -> Act:
    """After each step, one weight moves by a share of its size."""
    return weight(
        name,
        lambda w: w + ratio * w.norm() * torch.nn.functional.normalize(torch.randn_like(w).flatten(), dim=0).view_as(w),
    )


def far_apart(a_name: str, b_name: str, ratio: float) -> Act:
    """Give a LoRA's B so many times the norm of its A, without a product that is large."""

    def act(module: Any) -> None:
        a, b = module.get_parameter(a_name), module.get_parameter(b_name)
        with torch.no_grad():
            a.mul_(0.05)
            b.copy_(torch.randn_like(b))
            b.mul_(ratio * a.norm() / b.norm())

    return act


def lora_adds(module_name: str, share: float) -> Act:
    """Give a LoRA's product a size relative to its base weight's."""

    def act(module: Any) -> None:
        layer = module.get_submodule(module_name)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        with torch.no_grad():
            b.copy_(torch.randn_like(b))
            product = layer.scaling["default"] * (b.double() @ a.double()).norm()
            b.mul_(share * layer.base_layer.weight.norm() / product)

    return act


def skip(count: int) -> Act:
    """Make the gradients of so many steps overflow."""

    def act(module: Any) -> None:
        module.overflows = getattr(module, "overflows", 0) + 1
        if module.overflows <= count:
            next(p for p in module.parameters() if p.grad is not None).grad.view(-1)[0] = float("inf")

    return act


def low_scale(scale: float) -> Act:
    def act(module: Any) -> None:
        module.trainer.precision_plugin.scaler._scale.fill_(scale)

    return act


def leave_out(name: str) -> Act:
    def prepare(module: Any) -> None:
        def configure() -> torch.optim.Optimizer:
            others = [p for n, p in module.named_parameters() if n != name and p.requires_grad]
            return torch.optim.AdamW(others, lr=1e-3)

        vars(module)["configure_optimizers"] = configure

    return prepare


def of_any_kind(on: dict[str, Any], layer: str, module: str) -> list[Fault]:
    """Faults of LoRA and full fine-tuning alike."""
    late = {"at": HISTORY, "every": 2}
    norm = {"at": 3, "rate": 1e-4}
    spike = {"at": 45, "rate": 1e-4}
    return [
        Fault("gradient of 0.8e-6", "vanishing", layer, gradient_norm(layer, 0.8e-6), **norm, **on),
        Fault("gradient of 1.3e-6", "vanishing", layer, gradient_norm(layer, 1.3e-6), says=False, **norm, **on),
        Fault("gradient of 12", "exploding", layer, gradient_norm(layer, 12), **norm, **on),
        Fault("gradient of 8", "exploding", layer, gradient_norm(layer, 8), says=False, **norm, **on),
        Fault("gradient of 1e8", "exploding", layer, gradient_norm(layer, 1e8), **norm, **on),
        Fault("gradient 30 times", "exploding", layer, times(layer, 30), rate=1e-4, **late, **on),
        Fault("gradient 3 times", "exploding", layer, times(layer, 3), rate=1e-4, says=False, **late, **on),
        Fault("93 % alike", "saturated", layer, alike(layer, 0.93), **norm, **on),
        Fault("86 % alike", "saturated", layer, alike(layer, 0.86), says=False, **norm, **on),
        Fault("gradient None", "no_gradient", layer, gradient(layer, lambda g: None), **on),
        Fault("gradient zero", "no_gradient", layer, gradient(layer, torch.zeros_like), rate=1e-4, **on),
        Fault("one NaN in a gradient", "non_finite", layer, gradient(layer, one_nan), 13, **on),
        Fault("forward not finite", "non_finite", module, switch(module), 5, "once", prepare=wrap("forward",
              module), **on),
        Fault("backward not finite", "non_finite", module, switch(module), 6, "once", prepare=wrap("backward",
              module), **on),
        Fault("the loss 30 times", "loss_spike", "loss", prepare=loss_times(30, 45), also="exploding", **spike, **on),
        Fault("the loss 3 times", "loss_spike", "loss", prepare=loss_times(3, 45), says=False, **spike, **on),
        Fault("clipped 12 times", "clip_share", "all", all_gradients(lambda n: 1.2), options={"gradient_clip_val": 0.1},
              at=1, rate=1e-4, **on),
        Fault("clipped 8 times", "clip_share", "all", all_gradients(lambda n: 0.8), options={"gradient_clip_val": 0.1},
              says=False, at=1, rate=1e-4, **on),
        Fault("clipped in 17 of 20", "clip_share", "all", all_gradients(lambda n: 1.2 if n % 20 > 2 else 0.09),
              options={"gradient_clip_val": 0.1}, says=False, at=1, rate=1e-4, **on),
        Fault("left out of the optimizer", "not_in_optimizer", layer, at=0, prepare=leave_out(layer), **on),
        Fault("a weight that is put back", "no_update", LAYER_A.get(layer, layer), undo(LAYER_A.get(layer, layer)), 1,
              "after_step", rate=1e-4, **on),
        Fault("a step of 30 %", "update_ratio", LAYER_A.get(layer, layer), move(LAYER_A.get(layer, layer),
              0.3), 1, "after_step", **on),
        Fault("a step of 20 %", "update_ratio", LAYER_A.get(layer, layer), move(LAYER_A.get(layer, layer),
              0.2), 1, "after_step",
              says=False, **on),
    ]  # fmt: skip


LAYER_A = {layer: layer.replace("lora_B", "lora_A") for layer in LAYERS.values()}


def of_a_lora(on: dict[str, Any], layer: str, module: str) -> list[Fault]:
    a, base = layer.replace("lora_B", "lora_A"), f"{module}.base_layer.weight"
    return [
        Fault("frozen weight moved", "frozen_moved", base, weight(base, lambda w: w * 1.01), 5, "once", **on),
        Fault("B without a gradient", "lora_b_zero", layer, weight(layer, torch.zeros_like), 1, "after_step",
              rate=1e-4, **on),
        Fault("B 36 times A", "lora_imbalance", layer, far_apart(a, layer, 36), 4, "once", rate=1e-6, **on),
        Fault("B 25 times A", "lora_imbalance", layer, far_apart(a, layer, 25), 4, "once", rate=1e-6, says=False, **on),
        Fault("LoRA of 1.2 times its base", "lora_delta", module, lora_adds(module, 1.2), 4, "once", rate=1e-4, **on),
        Fault("LoRA of 0.8 times its base", "lora_delta", module, lora_adds(module, 0.8), 4, "once", rate=1e-4,
              says=False, **on),
    ]  # fmt: skip


def of_a_scaler(on: dict[str, Any]) -> list[Fault]:
    return [
        Fault("8 of 20 steps skipped", "loss_scale", "all", skip(8), rate=1e-4, **on),
        Fault("7 of 20 steps skipped", "loss_scale", "all", skip(7), rate=1e-4, says=False, **on),
        Fault("loss scale 0.5", "loss_scale", "all", low_scale(0.5), 4, "once", rate=1e-4, **on),
        Fault("loss scale 2", "loss_scale", "all", low_scale(2), 4, "once", rate=1e-4, says=False, **on),
    ]


def _faults() -> list[Fault]:
    found = []
    for (model, kind), layer in LAYERS.items():
        for precision in PRECISIONS if (model, kind) != ("net", "lora") else PRECISIONS[:1]:
            on: dict[str, Any] = {"model": model, "kind": kind, "precision": precision}
            if model == "net" or kind == "lora" or precision == "bf16-mixed":
                found += of_any_kind(on, layer, MODULES[model])
            found += of_a_lora(on, layer, MODULES[model]) if kind == "lora" else []
            found += of_a_scaler(on) if precision == "16-mixed" else []
            if model == "net":
                of_bucket = loss_times(30, 45, 4)
                found.append(
                    Fault("a bucket's loss 30 times", "loss_spike", "loss.timesteps_", prepare=of_bucket, at=45, **on)
                )
    on = {"model": "sd", "kind": "full", "precision": "bf16-true"}
    return found + of_any_kind(on, LAYERS["sd", "full"], MODULES["sd"])[:11]


def _as_known(fault: Fault) -> Fault:
    """A loss scaler skips steps whose gradients are not finite, and after some of them the scale is what is said."""
    if fault.precision == "16-mixed" and fault.name in ("one NaN in a gradient", "backward not finite"):
        fault.check, fault.layer = "loss_scale", "all"
    fault.is_missed = (fault.model, fault.kind) == ("sd", "lora") and fault.name in (
        "gradient 30 times",
        "the loss 30 times",
    )
    return fault


FAULTS = [_as_known(fault) for fault in _faults()]
QUICK = [
    f
    for f in FAULTS
    if f.model == "net" and (f.precision == "32-true" or (f.kind == "full" and f.precision == "16-mixed"))
]
"""Faults of a short test run; the rest runs with the long tests."""
