"""Parameter groups with separate learning rates, and learning-rate schedules by name or class."""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, _enable_get_lr_call

from lightning_aigc._lightning import Trainer, rank_zero_info, rank_zero_warn
from lightning_aigc.diffusion.training.averaging import is_schedule_free
from lightning_aigc.errors import ModelError
from lightning_aigc.schedulers.deepspeed_rates import DeepSpeedSchedule

FINDS_ITS_RATE = ("Prodigy", "DAdapt")
"""Beginnings of the names of optimizers that multiply the rate which they find by `lr`."""
UNSET_EPOCHS = 1000
"""Lightning's max_epochs where a Trainer is given no limit."""
FUSED_DEVICES = ("cuda",)
"""Devices on which torch has a fused step; a CPU's is no faster for a LoRA."""
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")


def read_scheduler(given: str | Callable[[Optimizer], Any]) -> str | Callable[[Optimizer], Any]:
    """The given scheduler; a class path without arguments, such as from a command line, becomes the class.

    Raises: ModelError, with the closest match, for a name that is not in `SCHEDULES`, and for a class that cannot be
        imported or needs arguments.
    """
    if not isinstance(given, str) or given in SCHEDULES:
        return given
    key = "model.init_args.lr_scheduler"
    module, _, name = given.rpartition(".")
    if not module:
        near = get_close_matches(given, SCHEDULES, n=1)
        raise ModelError(
            f"{key} must be one of {', '.join(SCHEDULES)}, or a class; got {given!r}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    try:
        found: Callable[[Optimizer], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{key}: {given!r} cannot be imported ({error}); check the class path") from error
    first, *others = inspect.signature(found).parameters.values()
    kinds = (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD, first.KEYWORD_ONLY)
    if needed := [each.name for each in others if each.default is each.empty and each.kind in kinds]:
        raise ModelError(f"{key}: {name} needs {', '.join(needed)}; set {key}.init_args.{needed[0]}")
    return found


def parameter_groups(
    groups: Sequence[list[nn.Parameter]], learning_rates: Sequence[float | None]
) -> list[dict[str, Any]]:
    """The non-empty groups, each with its rate; None keeps the optimizer's rate."""
    pairs = zip(groups, learning_rates, strict=True)
    return [{"params": group} | ({} if rate is None else {"lr": rate}) for group, rate in pairs if group]


def build_schedule(
    optimizer: Optimizer, scheduler: str | Callable[[Optimizer], Any], warmup_steps: int, total_steps: float
) -> Any:
    """The learning-rate scheduler, to be stepped once per optimizer step; None for a schedule-free optimizer.

    Raises: ModelError if the schedule needs an end and `total_steps` is infinite, or if the optimizer is schedule-free.
    """
    if not isinstance(scheduler, str):
        made = scheduler(optimizer)
        if isinstance(made, DeepSpeedSchedule):
            made.take_run(warmup_steps, total_steps)
            if made.needs_end:
                raise ModelError(
                    f"model.init_args.lr_scheduler: {type(made).__name__} needs an end; set its total_num_steps, or"
                    " model.init_args.max_train_steps"
                )
        elif warmup_steps:
            rank_zero_warn(
                f"model.init_args.lr_warmup_steps: {warmup_steps} changes nothing for a scheduler that is given as a"
                " class; set model.init_args.lr_scheduler: constant or cosine, or remove lr_warmup_steps"
            )
        return made
    if any(group["lr"] is None for group in optimizer.param_groups):  # transformers' Adafactor by relative_step
        if scheduler != "constant" or warmup_steps:
            raise ModelError(
                f"{type(optimizer).__name__} sets its own rate; set model.init_args.lr_scheduler: constant and"
                " lr_warmup_steps: 0, or give it a learning_rate and relative_step: false"
            )
        return None
    if is_schedule_free(optimizer):
        if scheduler != "constant" or warmup_steps:
            raise ModelError(
                f"{type(optimizer).__name__} schedules itself; set model.init_args.lr_scheduler: constant and"
                " lr_warmup_steps: 0, and give the optimizer its own warmup_steps"
            )
        return None
    name = "constant_with_warmup" if scheduler == "constant" and warmup_steps else scheduler
    has_end = math.isfinite(total_steps)
    if not has_end and not name.startswith("constant"):
        raise ModelError(f"model.init_args.lr_scheduler: {name} needs an end; set model.init_args.max_train_steps")
    steps = int(total_steps) if has_end else None
    if steps is not None and warmup_steps >= steps > 1:  # one step is a dry run
        rank_zero_warn(
            f"the learning rate stays low: it rises over model.init_args.lr_warmup_steps: {warmup_steps}, and"
            f" the run has {steps} steps; set lr_warmup_steps: {steps // 10}, or train longer"
        )
    from diffusers.optimization import get_scheduler

    return get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=steps)


def limit_steps(trainer: Trainer, max_train_steps: int | None) -> None:
    """End the run at this step, unless the Trainer has a `max_steps`; a `max_epochs` that comes first ends it there."""
    loop = trainer.fit_loop
    if loop.max_steps == -1 and max_train_steps is not None:
        loop.epoch_loop.max_steps = max_train_steps
        if loop.max_epochs == UNSET_EPOCHS:
            loop.max_epochs = -1
    elif max_train_steps not in (None, loop.max_steps) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rank_zero_info(
            f"the run ends at step {loop.max_steps}, trainer.max_steps, and not at model.init_args.max_train_steps="
            f"{max_train_steps}"
        )


def steps_to_train(trainer: Trainer) -> float:
    """The optimizer steps of the run, which becomes the Trainer's `max_steps` where `max_epochs` ends it first.

    So what looks at `max_steps` for the last step finds it.
    """
    steps = float(trainer.estimated_stepping_batches)
    if trainer.max_epochs not in (None, -1) and math.isfinite(steps):
        trainer.fit_loop.epoch_loop.max_steps = int(steps)
    return steps


def lightning_config(optimizer: Optimizer, schedule: Any, validation_steps: int) -> dict[str, Any]:
    """The answer of `configure_optimizers`: the schedule steps with the optimizer, a plateau every `validation_steps`.

    A ReduceLROnPlateau without a `monitor` of its own, as torch's, looks at the loss.
    """
    config: dict[str, Any] = {"scheduler": schedule, "interval": "step"}
    if isinstance(schedule, ReduceLROnPlateau):
        config |= {"frequency": validation_steps, "monitor": getattr(schedule, "monitor", "loss"), "strict": False}
    return {"optimizer": optimizer, "lr_scheduler": config}


def step_by_one_kernel_(optimizer: Optimizer) -> None:
    """Let Adam and AdamW on a card step by torch's fused kernel, unless the user chose: the host launches one.

    The groups say so, not the constructor: with its argument the optimizer would unscale gradients itself, which
    Lightning refuses with clipping. A checkpoint of another device keeps this device's kernel.
    """
    groups = optimizer.param_groups
    if type(optimizer) not in (Adam, AdamW) or any(map(_is_chosen, groups)):
        return
    fused = all(_is_on_fused_device(weight) for group in groups for weight in group["params"]) or None
    for group in groups:
        group["fused"] = fused
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: state | {"param_groups": [group | {"fused": fused} for group in state["param_groups"]]}
    )


def _is_chosen(group: Mapping[str, Any]) -> bool:
    return group["foreach"] is not None or group["fused"] is not None or bool(group["differentiable"])


def _is_on_fused_device(weight: Tensor) -> bool:
    is_plain = type(weight) is nn.Parameter or type(weight) is Tensor
    return is_plain and weight.device.type in FUSED_DEVICES and weight.is_floating_point()


def check_rates(optimizer: Optimizer) -> None:
    """Check, before the first step, the rates of an optimizer that finds its own and takes them as a factor.

    Warns of a small one. Raises: ModelError for two, which the optimizer refuses in its step.
    """
    name = type(optimizer).__name__
    rates = [float(group["lr"]) for group in optimizer.param_groups if group["lr"] is not None]
    if not name.startswith(FINDS_ITS_RATE) or not rates:
        return
    if len(set(rates)) > 1:
        raise ModelError(
            f"{name} takes one rate for all weights, and got {' and '.join(f'{rate:g}' for rate in rates)}; set"
            f" model.init_args.text_encoder_lr: {rates[0]!r}, as learning_rate"
        )
    if min(rates) < 0.1:
        warnings.warn(
            f"{name} finds its rate itself and multiplies it by model.init_args.learning_rate, which is {min(rates):g},"
            " so that it hardly learns; set learning_rate: 1.0",
            stacklevel=2,
        )


def follow_new_end(trainer: Trainer) -> None:
    """Set the rates of schedules that a longer run resumes: their old end left its own in the optimizer for one step.

    Rates that something else has set since stay.
    """
    for config in trainer.lr_scheduler_configs:
        schedule: Any = config.scheduler
        if not isinstance(schedule, LambdaLR | DeepSpeedSchedule):  # whose rates are a function of the step alone
            continue
        groups = schedule.optimizer.param_groups
        if [float(group["lr"]) for group in groups] != [float(rate) for rate in schedule.get_last_lr()]:
            continue
        with _enable_get_lr_call(schedule):  # get_lr warns outside of a step
            schedule._last_lr = list(schedule.get_lr())
        for group, rate in zip(groups, schedule._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = rate
