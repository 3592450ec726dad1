"""Optimizers that step on local parts of sharded parameters, and gloo's reduce-scatter."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fakes.processes.ranks import run_ranks
from lightning_aigc.sharding.gloo_reduce_scatter import GlooReduceScatter
from lightning_aigc.sharding.groups import make_groups, modules_to_join
from lightning_aigc.strategies.zero.local_shard_optimizer import ELEMENTWISE, steps_on_local_parts

OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, centered=True),
}
STEPS = 3


class Sharded(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 7), nn.Linear(7, 1))  # uneven rows, and a rank without a row


def step_each(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        weights = []
        for is_local in (False, True):
            model = Sharded()
            fully_shard(model, mesh=mesh)
            parameters = list(model.parameters())
            optimizer = make(parameters)
            for step in range(STEPS):
                if step == 2:  # as after a resume
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if is_local:
                    with steps_on_local_parts(optimizer):
                        optimizer.step()
                else:
                    optimizer.step()
            assert optimizer.param_groups[0]["params"] == parameters and "step" not in vars(optimizer)
            weights.append([p.detach().full_tensor() for p in parameters])
        kinds = {
            type(value)
            for p in parameters
            for value in optimizer.state[p].values()
            if getattr(value, "shape", 0) == p.shape
        }
        found[name] = {"weights": weights, "kinds": kinds, "keys": all(p in optimizer.state for p in parameters)}
    return found


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(step_each, 2, tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_local_parts_step_to_the_same_bits(stepped: list[dict[str, Any]], name: str) -> None:
    for of_rank in stepped:
        sharded, local = of_rank[name]["weights"]
        assert all(torch.equal(a, b) for a, b in zip(sharded, local, strict=True))
        assert of_rank[name]["keys"]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop"])
def test_states_stay_sharded_tensors(stepped: list[dict[str, Any]], name: str) -> None:
    assert stepped[0][name]["kinds"] == {DTensor}


def test_an_optimizer_that_reduces_over_a_tensor_keeps_the_whole_one() -> None:
    assert torch.optim.Adafactor not in ELEMENTWISE and torch.optim.AdamW in ELEMENTWISE


def reduce_both(rank: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    values = torch.randn(ranks * 5, generator=torch.Generator().manual_seed(rank))
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        whole = values.clone()
        dist.all_reduce(whole)
        whole /= ranks if op == dist.ReduceOp.AVG else 1
        ours = torch.empty(5)
        GlooReduceScatter()(ours, values.clone(), dist.group.WORLD, op)  # type: ignore[arg-type]
        found.append((ours, whole[rank * 5 : rank * 5 + 5]))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_reduce_scatter_over_gloo_is_a_part_of_the_all_reduce(ranks: int, tmp_path: Path) -> None:
    for of_rank in run_ranks(reduce_both, ranks, tmp_path, ranks):
        for ours, wanted in of_rank:
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


def test_small_blocks_are_joined_under_the_module_that_calls_them() -> None:
    class Block(nn.Sequential):
        pass

    class Stage(nn.Sequential):
        _no_split_modules = ("Block",)

    root = nn.Module()
    root.small = Stage(Block(nn.Linear(32, 32)), Block(nn.Linear(32, 32)), nn.Linear(32, 1))
    root.large = Stage(Block(nn.Linear(256, 256)), Block(nn.Linear(256, 256)))
    groups = make_groups(root)
    assert [group.name for group in groups if group.is_block] == ["large.1", "large.0", "small.1", "small.0"]
    joined = modules_to_join(root, groups, 64 * 1024)
    assert joined == [root.small]
    again = make_groups(root, joined)
    assert [group.name for group in again if group.name.startswith("small")] == ["small"]
    assert sum(group.numel for group in again) == sum(group.numel for group in groups)
    assert modules_to_join(root, groups, 0) == []
