"""DeepSpeed's optimizer and scheduler sections as `model.optimizer` and `model.lr_scheduler`, with its defaults."""

from __future__ import annotations

from typing import Any

from lightning_aigc.errors import ConfigError
from lightning_aigc.strategies.deepspeed.keys import AUTO, ONE_BIT

SCHEDULES = "lightning_aigc.schedulers.deepspeed_rates"
WARMUP = ("warmup_num_steps", "warmup_type", "total_num_steps")
PARAMS = {
    "WarmupLR": (*WARMUP, "warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": (*WARMUP, "warmup_min_lr", "warmup_max_lr"),
    "WarmupCosineLR": (*WARMUP, "warmup_min_ratio", "cos_min_ratio"),
    "OneCycle": (
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
        "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom",
        "cycle_max_mom", "decay_mom_rate",
    ),
}  # fmt: skip
OF_THE_RUN = ("warmup_num_steps", "total_num_steps")
"""Numbers that the run sets where the file says auto."""
KEPT = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "dampening",
    "nesterov",
    "amsgrad",
    "alpha",
    "centered",
    "rho",
)
NO_EFFECT = ("torch_adam", "adam_w_mode", "fused", "foreach", "adamw_mode", "fp32_optimizer_states", "cuda_aware")


def take_optimizer(section: dict[str, Any], path: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the model's arguments for an optimizer section, and lines about them.

    Raises: ConfigError for an optimizer that is not built, or an option that changes what it computes.
    """
    kind, params = str(section["type"]), dict(section.get("params") or {})
    name = _optimizer_name(kind, params, path)
    if params.pop("bias_correction", True) is False:
        raise ConfigError(f"{path}: optimizer.params.bias_correction: false is not built; take it out")
    kept = {key: params[key] for key in KEPT if params.get(key, AUTO) not in (AUTO, None)}
    is_adam = name in ("Adam", "AdamW")
    lines = []
    if is_adam and "weight_decay" not in params and not params.get("torch_adam"):
        kept["weight_decay"] = 0.0  # torch's AdamW has 0.01
        lines.append("optimizer.params.weight_decay: not in the file: 0.0, as DeepSpeed's Adam")
    if "lr" not in params:
        kept["lr"] = 1e-2 if name in ("Adagrad", "RMSprop") else 1e-3
        lines.append(f"optimizer.params.lr: not in the file: {kept['lr']}, DeepSpeed's default")
    model: dict[str, Any] = {"optimizer": {"class_path": f"torch.optim.{name}", "init_args": kept}}
    if "lr" in kept:
        model["learning_rate"] = kept["lr"]
    mode = ", as adam_w_mode is true unless it is named" if name == "AdamW" and kind.lower() == "adam" else ""
    lines.insert(0, f"optimizer {kind}: model.optimizer torch.optim.{name} {kept}{mode}")
    for key in params.keys() - set(KEPT):
        known = "torch's optimizer is used" if key in NO_EFFECT else f"torch.optim.{name} has no {key}"
        if key != "max_grad_norm":  # gradient_clip_val
            lines.append(f"optimizer.params.{key}: no effect here: {known}")
    return model, lines


def _optimizer_name(kind: str, params: dict[str, Any], path: Any) -> str:
    import torch

    short = kind.lower().replace("_", "")
    if short in ONE_BIT:
        raise ConfigError(
            f"{path}: optimizer.type {kind} is not built: use AdamW, and between_nodes: int3 for few bits on the wire"
        )
    if short in ("adam", "adamw"):  # DeepSpeed's Adam decays weights apart from gradients unless adam_w_mode is false
        return "AdamW" if short == "adamw" or params.get("adam_w_mode", True) else "Adam"
    named = {
        name.lower(): name
        for name, each in vars(torch.optim).items()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    if short not in named or short == "muon":
        raise ConfigError(
            f"{path}: optimizer.type {kind} is not known here; use one of Adam, AdamW, SGD and Adagrad, or take the "
            "section out and set model.optimizer to a class"
        )
    return named[short]


def take_scheduler(section: dict[str, Any], path: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the model's arguments for a scheduler section, and its line.

    Raises: ConfigError for a schedule that is not built, and a parameter that it does not have.
    """
    kind, params = str(section["type"]), dict(section.get("params") or {})
    if kind not in PARAMS:
        raise ConfigError(
            f"{path}: scheduler.type {kind} is not built; use one of {', '.join(PARAMS)}, or take the section out and "
            "set model.lr_scheduler"
        )
    params.pop("last_batch_iteration", None)
    unknown = sorted(params.keys() - set(PARAMS[kind]))
    if unknown:
        raise ConfigError(f"{path}: scheduler.params.{unknown[0]} is none of {kind}'s: {', '.join(PARAMS[kind])}")
    given = {key: value for key, value in params.items() if value is not None and value != AUTO}
    given |= {key: None for key in OF_THE_RUN if params.get(key) == AUTO}
    for key in ("warmup_num_steps", "total_num_steps", "cycle_first_step_size", "cycle_second_step_size"):
        if given.get(key) is not None:
            given[key] = int(given[key])
    if kind == "WarmupDecayLR":
        if "warmup_max_lr" not in params:
            given["warmup_max_lr"] = 0.001  # DeepSpeed's default; auto is the optimizer's rate
        given.setdefault("total_num_steps", None)
    model: dict[str, Any] = {"lr_scheduler": {"class_path": f"{SCHEDULES}.{kind}", "init_args": given}}
    highest = given.get("warmup_max_lr", given.get("cycle_max_lr"))
    if isinstance(highest, float | int):
        model["learning_rate"] = highest  # which the schedule sets, whatever the optimizer's rate
    line = f"scheduler {kind}: model.lr_scheduler {SCHEDULES}.{kind} {given}"
    if any(given.get(key, 0) is None for key in OF_THE_RUN):
        line += "; null is the run's: lr_warmup_steps, max_train_steps"
    return model, [line]
