"""Keys and tensors of a sync's state on disk: what `state_dict` returns, and what `load_state_dict` makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.processes.echoing_groups import EchoingGroups
from lightning_aigc.gradient_sync.hook import BucketFuture
from lightning_aigc.gradient_sync.modes.dense import Dense
from lightning_aigc.gradient_sync.modes.local_sgd import LocalSGD
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.sync import GradientSync

SHAPE = (32, 40)
RESIDUAL = torch.linspace(-1, 1, 1280)
ANCHOR = torch.linspace(2, 3, 1280).view(SHAPE)
REDUCTIONS: dict[str, dict[str, Any]] = {
    "int3": {},
    "bf16": {},
    "sparse": {
        "energy": {"0": torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])},
        "age": {"0": torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)},
    },
    "two_four": {
        "seen": {"0": torch.arange(1536).view(-1, 4).bfloat16()},
        "age": {"0": (torch.arange(1536) % 7).view(-1, 4).to(torch.uint8)},
    },
}
"""State of each mode's reduction, for one unit of a matrix of 1280 values, which two ranks pad to 1536."""


def saved_state(mode: str) -> dict[str, Any]:
    """Return a rank's state, key by key."""
    return {
        "version": 1,
        "world_size": 2,
        "ranks_inside": 1,
        "mode": mode,
        "step": 7,
        "has_reduced": True,
        "accumulating": False,
        "residuals": {"matrix": {"start": 0, "values": RESIDUAL.clone()}},
        "reduction": REDUCTIONS[mode],
    }


def make_sync(mode: Any, **arguments: Any) -> GradientSync:
    parameters = [("matrix", nn.Parameter(torch.zeros(SHAPE)))]
    options = SyncOptions(mode=mode, overlap=False, **arguments)
    return GradientSync(parameters, options, EchoingGroups())


def step(sync: GradientSync, gradient: Tensor) -> Tensor:
    """The gradient as the optimizer finds it."""
    found = gradient.clone()
    with torch.no_grad():
        sync.gradients_ready([sync.parameters[0][1]], [found], BucketFuture(found), last=True)
        sync.end_step()
    return found


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_same(found[key], wanted[key])
    else:
        assert found == wanted


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_a_state_loads_and_is_written_again_with_the_same_keys(mode: str) -> None:
    sync = make_sync(mode)
    assert sync.load_state_dict([saved_state(mode), saved_state(mode)]) == []
    assert_same(sync.state_dict(), saved_state(mode))


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_a_run_that_goes_on_without_a_state_has_had_its_warm_up_and_lacks_sums_to_select_by(mode: str) -> None:
    sync = make_sync(mode, warmup_steps=5)
    assert not sync.compressing
    sync.step = 7
    selects = mode in ("sparse", "two_four")
    assert sync.compressing != selects
    step(sync, torch.ones(SHAPE))
    assert sync.compressing and sync.step == 8
    old = {key: value for key, value in saved_state(mode).items() if key != "has_reduced"}
    for saved, is_ready in ((old, True), (old | {"mode": "bf16", "reduction": {}}, not selects)):
        loaded = make_sync(mode, warmup_steps=5)
        loaded.load_state_dict([saved] * 2)
        assert loaded.compressing == is_ready, saved["mode"]


def test_a_loaded_residual_goes_into_the_next_sum() -> None:
    sync = make_sync("bf16")
    sync.load_state_dict([saved_state("bf16")] * 2)
    found = step(sync, torch.zeros(SHAPE))
    assert torch.equal(found, 2 * RESIDUAL.bfloat16().float().view(SHAPE))  # both ranks have it
    assert sync.step == 8


def test_a_run_in_mode_dense_says_that_it_drops_residuals() -> None:
    sync = Dense(EchoingGroups())
    (note,) = sync.load_state_dict([saved_state("int3")])
    assert "residuals are dropped" in note and sync.step == 7
    assert sync.state_dict() == {"mode": "dense", "step": 7, "residuals": {}, "reduction": {}, "world_size": 2}


def test_a_state_of_mode_local_loads() -> None:
    saved = {
        "mode": "local",
        "step": 9,
        "since_average": 3,
        "residuals": {},
        "world_size": 2,
        "reduction": {"anchor": {"matrix": ANCHOR.clone()}, "momentum": {"matrix": ANCHOR / 2}},
    }
    parameters = [("matrix", nn.Parameter(torch.zeros(SHAPE)))]
    sync = LocalSGD(parameters, SyncOptions(mode="local", outer_momentum=0.9), EchoingGroups())
    assert sync.load_state_dict([saved]) == []
    assert_same(sync.state_dict(), saved)
