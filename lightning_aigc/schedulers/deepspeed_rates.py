"""DeepSpeed's learning-rate schedules, step for step, as torch schedulers for `model.lr_scheduler`.

A number of steps that is None is the run's: `lr_warmup_steps` and the steps that it trains, by `take_run`.
Source: DeepSpeed, deepspeed/runtime/lr_schedules.py. Its iteration -1 is the rate of the first step, torch's epoch 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

WarmupType = Literal["log", "linear"]
Rates = float | Sequence[float]


class DeepSpeedSchedule(LRScheduler):
    """Base class of the schedules that warm up.

    Args:
        optimizer: Whose rates are set.
        warmup_num_steps: Steps of warm-up, at least 2 as in DeepSpeed; None is the run's.
        warmup_type: log or linear.
        total_num_steps: Step at which the rate has fallen; None is the run's last.
        last_epoch: As torch's schedulers.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_num_steps: int | None = 1000,
        warmup_type: WarmupType = "log",
        total_num_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        self.warmup_num_steps, self.total_num_steps = warmup_num_steps, total_num_steps
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch)

    def take_run(self, warmup_steps: int, total_steps: float) -> None:
        """Take the run's numbers of steps where the schedule was given none."""
        if self.warmup_num_steps is None:
            self.warmup_num_steps = warmup_steps
        if self.total_num_steps is None and math.isfinite(total_steps):
            self.total_num_steps = int(total_steps)

    @property
    def needs_end(self) -> bool:
        """Whether the schedule falls to an end that is not known yet."""
        return self.total_num_steps is None

    @property
    def _warmup(self) -> int:
        return max(2, int(self.warmup_num_steps or 0))

    def _warmed(self, iteration: int) -> float | None:
        """The share of the warm-up in 0..1; None when it is over."""
        if iteration >= self._warmup:
            return None
        return (
            math.log(iteration + 1) / math.log(self._warmup) if self.warmup_type == "log" else iteration / self._warmup
        )

    def state_dict(self) -> dict[str, Any]:
        """Torch's own state; numbers of steps are the config's or the run's, which may have grown."""
        own = ("warmup_num_steps", "total_num_steps", "warmup_type")
        return {key: value for key, value in super().state_dict().items() if key not in own}

    def _rates(self, value: Rates) -> list[float]:
        return list(value) if isinstance(value, Sequence) else [value] * len(self.optimizer.param_groups)


class WarmupLR(DeepSpeedSchedule):
    """From `warmup_min_lr` to `warmup_max_lr`, which is kept; None is the optimizer's rate."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int | None = 1000,
        warmup_type: WarmupType = "log",
        total_num_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        self.warmup_min_lr, self.warmup_max_lr = warmup_min_lr, warmup_max_lr
        super().__init__(optimizer, warmup_num_steps, warmup_type, total_num_steps, last_epoch)

    @property
    def needs_end(self) -> bool:
        return False

    def get_lr(self) -> list[float | Tensor]:
        lowest = self._rates(self.warmup_min_lr)
        highest = self.base_lrs if self.warmup_max_lr is None else self._rates(self.warmup_max_lr)
        iteration = self.last_epoch - 1
        share = 0.0 if iteration < 0 else self._warmed(iteration)
        share = self._after_warmup(iteration) if share is None else share
        return [low + (high - low) * share for low, high in zip(lowest, highest, strict=True)]

    def _after_warmup(self, iteration: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a line from `warmup_max_lr` to 0 at `total_num_steps`."""

    @property
    def needs_end(self) -> bool:
        return self.total_num_steps is None

    def _after_warmup(self, iteration: int) -> float:
        total = self._warmup if self.total_num_steps is None else self.total_num_steps
        return max(0.0, (total - iteration) / max(1.0, total - self._warmup))


class WarmupCosineLR(DeepSpeedSchedule):
    """Shares of the optimizer's rate: from `warmup_min_ratio` to 1, then half a cosine to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int | None = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: WarmupType = "log",
        total_num_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, warmup_num_steps, warmup_type, total_num_steps, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        return [rate * self._ratio(self.last_epoch - 1) for rate in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        share = self._warmed(iteration)
        if share is not None:
            return self.warmup_min_ratio + share * (1 - self.warmup_min_ratio)
        total = self._warmup if self.total_num_steps is None else self.total_num_steps
        progress = min(1.0, (iteration - self._warmup + 1) / max(1, total - self._warmup))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


class OneCycle(LRScheduler):
    """From `cycle_min_lr` to `cycle_max_lr` and back, Adam's first beta the other way, then a decay.

    Args:
        optimizer: Whose rates and betas are set.
        cycle_min_lr, cycle_max_lr: Rates at the ends and in the middle of the cycle.
        cycle_first_step_size, cycle_second_step_size: Steps up and down; None is as many down as up.
        cycle_first_stair_count, cycle_second_stair_count: Stairs of each half; 0 is a line, None as the first.
        decay_step_size, decay_lr_rate, decay_mom_rate: Decay after the cycle; a step size of 0 is none.
        cycle_momentum, cycle_min_mom, cycle_max_mom: Whether and between what the first beta moves.
        last_epoch: As torch's schedulers.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.rates, self.momenta = (cycle_min_lr, cycle_max_lr), (cycle_min_mom, cycle_max_mom)
        self.first = float(cycle_first_step_size)
        self.total = self.first + float(cycle_second_step_size or cycle_first_step_size)
        second = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = (cycle_first_stair_count, second)
        self.decay_step_size, self.decay_rates = decay_step_size, (decay_lr_rate, decay_mom_rate)
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        iteration = self.last_epoch - 1
        lowest, highest = self.rates
        least, most = self.momenta
        if iteration < 0:
            rate, momentum = lowest, least
        elif iteration < self.total:
            share = self._share(iteration + 1)
            rate, momentum = lowest + (highest - lowest) * share, most - (most - least) * share
        else:
            decays = (iteration - self.total + 1) / self.decay_step_size if self.decay_step_size else 0.0
            rate, momentum = lowest / (1 + self.decay_rates[0] * decays), most * (1 + self.decay_rates[1] * decays)
        for group in self.optimizer.param_groups if self.cycle_momentum else ():
            group["betas"] = (momentum, 0.99)
        return [rate] * len(self.optimizer.param_groups)

    def _share(self, iteration: int) -> float:
        """The height in the cycle, 0..1."""
        into = iteration % self.total
        is_first = into <= self.first
        height = into / self.first if is_first else (self.total - into) / (self.total - self.first)
        stairs = self.stairs[0 if is_first else 1]
        return math.floor(height * stairs) / stairs if stairs else height
