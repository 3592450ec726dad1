"""Parameter groups with separate learning rates, and learning-rate schedules by name or class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from diffusers.optimization import get_scheduler
from torch import nn
from torch.optim import Optimizer

from lightning_aigc.diffusion.averaging import is_schedule_free
from lightning_aigc.errors import ModelError
from lightning_aigc.schedulers.deepspeed_rates import DeepSpeedSchedule

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")


def check_schedule_name(name: str) -> None:
    """Raise ModelError, with the closest match, for a name that is not in `SCHEDULES`."""
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=1)
        raise ModelError(
            f"model.init_args.lr_scheduler must be one of {', '.join(SCHEDULES)}, or a class; got {name!r}"
            + (f"; did you mean {near[0]}?" if near else "")
        )


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
        return made
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
    return get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=steps)
