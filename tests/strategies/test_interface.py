"""Interface of the strategy and the syncs, which does not depend on the mode."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from fakes.processes.echoing_groups import EchoingGroups
from lightning_aigc.gradient_sync.base import Sync
from lightning_aigc.gradient_sync.modes.dense import Dense
from lightning_aigc.gradient_sync.modes.local_sgd import LocalSGD
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.sync import GradientSync
from lightning_aigc.protocols import HasSnapshotState
from lightning_aigc.strategies import NPUSparseStrategy


def make_syncs() -> dict[str, Sync]:
    parameters = [("matrix", nn.Parameter(torch.zeros(32, 40)))]
    return {
        "int3": GradientSync(parameters, SyncOptions(overlap=False), EchoingGroups()),
        "dense": Dense(EchoingGroups()),
        "local": LocalSGD(parameters, SyncOptions(mode="local", local_steps=2), EchoingGroups()),
    }


def test_the_strategy_has_what_a_snapshot_asks_for() -> None:
    strategy = NPUSparseStrategy()
    assert isinstance(strategy, HasSnapshotState)
    assert strategy.ranks_differ is False
    assert strategy.snapshot_state() == {"sync": None, "optimizer_steps": 0}


def test_only_local_sgd_has_parameters_of_each_rank() -> None:
    assert {mode: sync.has_rank_local_parameters for mode, sync in make_syncs().items()} == {
        "int3": False,
        "dense": False,
        "local": True,
    }


def test_every_sync_can_be_told_of_optimizer_steps_and_averages() -> None:
    for sync in make_syncs().values():
        sync.after_optimizer_step()
        sync.average_parameters()
        sync.set_early_selection(False)
    assert not any(sync.needs_all_states({"ranks_inside": 1}) for sync in make_syncs().values())


def test_local_sgd_averages_every_so_many_steps() -> None:
    sync = make_syncs()["local"]
    assert isinstance(sync, LocalSGD) and sync.sync_every == 2
    started = sync.groups.everyone.started  # type: ignore[attr-defined]
    sync.after_optimizer_step()
    assert started == []
    sync.after_optimizer_step()
    assert started == ["all_reduce"]


def test_a_hierarchical_state_is_read_from_all_ranks_by_the_modes_that_have_residuals() -> None:
    needed = {mode: sync.needs_all_states({"ranks_inside": 2}) for mode, sync in make_syncs().items()}
    assert needed == {"int3": True, "dense": False, "local": False}


def test_every_option_is_an_argument_of_the_strategy_with_its_default_and_help() -> None:
    shown = inspect.signature(NPUSparseStrategy).parameters
    helped = [line.split(":")[0].strip() for line in (NPUSparseStrategy.__doc__ or "").splitlines()]
    for name, option in inspect.signature(SyncOptions).parameters.items():
        assert shown[name].default == option.default
        assert helped.count(name) == 1
