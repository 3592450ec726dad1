"""make_sync: the gradient sync for the options and the ranks of this run; `auto` measures which mode is the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lightning_aigc.cluster.modes import FLAT_MODES, MODES, Mode, worthwhile_mode
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.base import Sync
from lightning_aigc.gradient_sync.modes.dense import Dense
from lightning_aigc.gradient_sync.modes.local_sgd import LocalSGD
from lightning_aigc.gradient_sync.modes.reductions import BFloat16, Quantized, Reduction, run_alone
from lightning_aigc.gradient_sync.options import SyncOptions, refuse_complex
from lightning_aigc.gradient_sync.sync import GradientSync
from lightning_aigc.gradient_sync.transport.collectives import CountedGroup, Traffic, dense_ring_bytes, synchronize
from lightning_aigc.gradient_sync.transport.process_groups import DEFAULT_TIMEOUT, ProcessGroups
from lightning_aigc.gradient_sync.units import FlatUnit
from lightning_aigc.gradient_sync.watch.dense_comparison import TRIES, DenseComparison


def make_sync(
    parameters: Sequence[tuple[str, nn.Parameter]],
    options: SyncOptions,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    find_unused: bool = False,
    loss_scale: Callable[[], float] = lambda: 1.0,
) -> tuple[Sync | None, Mode, str]:
    """Return the sync, its mode, and a sentence on the choice of the mode. Collective: every rank calls it.

    The sync is None if `auto` chose dense; DDP then stays unchanged, because a hook that checks for finite gradients
    costs 7 % of a step on a CPU.
    Raises: ConfigError for options that do not fit the parameters or the ranks.
    """
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    refuse_complex(options.mode, trained)
    flat = options.mode in FLAT_MODES
    if flat and options.hierarchical is True:
        raise ConfigError(f"mode {options.mode} adds up over all ranks at once; leave hierarchical at auto")
    groups = ProcessGroups(False if flat else options.hierarchical, timeout)
    if options.exchanges_rows:
        groups.chunk_on_slow_links()
    mode, why = options.mode, f"mode {options.mode}"
    if mode == "auto":
        numel = sum(p.numel() for _, p in trained)
        answer = [choose_mode(measure_modes(groups, trained[0][1].device), numel, groups.world_size)]
        dist.broadcast_object_list(answer, device=trained[0][1].device)  # one rank decides: modes must never differ
        mode, why = answer[0]
        if mode == "dense":
            groups.destroy()
            return None, mode, why
        options = replace(options, mode=mode)
    if mode == "dense":
        return Dense(groups), mode, why
    if mode == "local":
        local = LocalSGD(trained, options, groups)
        local.comparison = DenseComparison(measure_dense(groups, trained))
        return local, mode, why
    if options.overlap and trained[0][1].device.type == "cpu":
        groups.add_lanes(collectives_of_a_unit(mode, groups, find_unused=find_unused))
    return GradientSync(trained, options, groups, find_unused=find_unused, loss_scale=loss_scale), mode, why


def collectives_of_a_unit(mode: Mode, groups: ProcessGroups, *, find_unused: bool) -> int:
    """Return the largest number of collectives in which this mode reduces a unit, one after another."""
    between = 3 if MODES[mode].is_block_sparse and MODES[mode].value_bits else 2
    return between + (2 if groups.inside is not None else 0) + find_unused


TRIAL_VALUES = 1 << 20
"""Approximate length of the vector: 4 MB, enough to show a link's bandwidth."""
REPEATS = 8


@dataclass(frozen=True)
class ModeTimings:
    """Measured times of reducing one vector."""

    values: int
    seconds: dict[Mode, float]
    """Times by mode, from exact to coarse, with the copies to and from the vector, as in a real step."""


def measure_modes(groups: ProcessGroups, device: torch.device) -> ModeTimings:
    """Measure the modes. Collective: every rank gets the same numbers, the means of each rank's best."""
    everyone = groups.everyone
    group = CountedGroup(everyone.group, Traffic())  # these bytes are no gradients, and do not count
    group.chunked = list(everyone.chunked)
    values = -(-TRIAL_VALUES // (256 * group.size)) * 256 * group.size
    gradients = torch.randn(values, device=device)
    unit = FlatUnit(0, "values", entries=(), numel=values)

    def add_up(reduction: Reduction) -> None:
        flat = gradients / group.size
        gradients.copy_(run_alone(reduction.reduce(unit, flat, group))[0])

    zeros = torch.zeros_like(gradients)
    reductions: dict[Mode, Reduction] = {
        "bf16": BFloat16(),
        "int8": Quantized(8),
        "int4": Quantized(4),
        "int3": Quantized(3),
    }
    runs: dict[Mode, Callable[[], object]] = {"dense": lambda: group.all_reduce(zeros).wait()}
    for mode, reduction in reductions.items():
        runs[mode] = lambda r=reduction: add_up(r)  # type: ignore[misc]
    seconds = dict.fromkeys(runs, float("inf"))
    for _ in range(REPEATS):  # in turns, so that a moment of other load affects all modes
        for mode, run in runs.items():
            seconds[mode] = min(seconds[mode], _timed(run, device))
    means = torch.tensor(list(seconds.values()), dtype=torch.float32, device=device)
    group.all_reduce(means).wait()
    return ModeTimings(values, dict(zip(seconds, (means / group.size).cpu().tolist(), strict=True)))


def measure_dense(groups: ProcessGroups, parameters: Sequence[tuple[str, nn.Parameter]]) -> float:
    """Return the seconds of a dense sync of these parameters, from a part of it. Collective."""
    device, numel = parameters[0][1].device, sum(p.numel() for _, p in parameters)
    group = CountedGroup(groups.everyone.group, Traffic())
    zeros = torch.zeros(min(numel, TRIAL_VALUES), device=device)
    seconds = min(_timed(lambda: group.all_reduce(zeros).wait(), device) for _ in range(TRIES))
    return seconds * numel / zeros.numel()


def choose_mode(measured: ModeTimings, numel: int, ranks: int) -> tuple[Mode, str]:
    """Return the mode with the shortest wait, the more exact one when in doubt, and a sentence with the reason."""
    scale = numel / measured.values
    chosen = worthwhile_mode({mode: seconds * scale for mode, seconds in measured.seconds.items()})
    speed = dense_ring_bytes(measured.values, ranks) / measured.seconds["dense"] / 1e6
    estimates = ", ".join(f"{mode} {1e3 * seconds * scale:.0f} ms" for mode, seconds in measured.seconds.items())
    return chosen, (
        f"auto chose {chosen}: the link carries {speed:.0f} MB/s, and {numel / 1e6:.1f} M gradients would take "
        f"{estimates} a step (measured on {measured.values / 1e6:.0f} M, without overlap)"
    )


def _timed(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start
