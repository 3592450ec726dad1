"""make_sync: the gradient sync for the options and the ranks of this run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from lightning_aigc.cluster.modes import FLAT_MODES, Mode
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.autotune import choose_mode, measure_modes
from lightning_aigc.gradient_sync.base import Sync
from lightning_aigc.gradient_sync.model_checks import refuse_complex
from lightning_aigc.gradient_sync.modes.dense import Dense
from lightning_aigc.gradient_sync.modes.local_sgd import LocalSGD
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.sync import GradientSync
from lightning_aigc.gradient_sync.transport.process_groups import DEFAULT_TIMEOUT, ProcessGroups


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
        return LocalSGD(trained, options, groups), mode, why
    return GradientSync(trained, options, groups, find_unused=find_unused, loss_scale=loss_scale), mode, why
