"""On the fake npu with the fake hccl: runs that meet by `rendezvous`, and shards by node, train as on a CPU."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_aigc.strategies.zero.stage_1  # noqa: F401 - torch compiles on its import, with no fake npu yet
from fakes.models.small_lightning import Small, fit
from fakes.npu import fake_npu
from fakes.processes.ranks import run_ranks
from lightning_aigc.gradient_sync.transport import process_groups
from lightning_aigc.strategies import NPUSparseStrategy, ZeROStrategy

STEPS = 6
pytestmark = pytest.mark.long


class Noting(Small):
    """Notes each step's loss and the device of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.devices: set[str] = set()

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch_NC, batch_idx)
        self.losses.append(loss.item())
        self.devices.add(batch_NC.device.type)
        return loss


def train(rank: int, accelerator: str, strategy: Any, **arguments: Any) -> Noting:
    steps = {"max_steps": STEPS, "max_epochs": -1}
    module, _ = fit(rank, Noting(), batches=STEPS, accelerator=accelerator, strategy=strategy, **steps, **arguments)
    assert isinstance(module, Noting) and module.devices == {accelerator}
    return module


def prepare(accelerator: str) -> None:
    warnings.simplefilter("ignore")
    if accelerator == "npu":
        fake_npu.install()
        fake_npu.pin_everything()
        fake_npu.keep_gathered_weights()


def meeting(rank: int, accelerator: str) -> list[Any]:
    """A run that is a world of its own and meets the other for averages."""
    prepare(accelerator)
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    strategy = NPUSparseStrategy(
        rendezvous=address, min_ranks=2, timeout=timedelta(seconds=60), mode="local", local_steps=3, average="top_k",
        top_k=1712, outer_momentum=0.3,
    )  # fmt: skip
    module = train(rank, accelerator, strategy)
    return [module.losses, module.flat()]


def sharded_by_node(rank: int, accelerator: str, stage: Any, mode: Any) -> list[float]:
    """A rank of two nodes of two. The fake npu calls every card npu:0, so that to Lightning each rank is a node."""
    prepare(accelerator)
    os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    process_groups.node_key = lambda: f"node {rank // 2}"
    return train(rank, accelerator, ZeROStrategy(stage=stage, between_nodes=mode), num_nodes=4).losses


def test_two_runs_that_meet_end_on_the_npu_as_on_a_cpu(tmp_path: Path) -> None:
    cpu, npu = (run_ranks(meeting, 2, tmp_path / where, where, gloo=False) for where in ("cpu", "npu"))
    for (losses, weights), (losses_on_npu, weights_on_npu) in zip(cpu, npu, strict=True):
        torch.testing.assert_close(losses_on_npu, losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(weights_on_npu, weights)
    assert torch.equal(npu[0][1], npu[1][1])


@pytest.mark.parametrize(("stage", "mode"), [(2, "int8"), (3, "int3")])
def test_shards_by_node_train_on_the_npu_as_on_a_cpu(stage: int, mode: str, tmp_path: Path) -> None:
    cpu, npu = (
        run_ranks(sharded_by_node, 4, tmp_path / where, where, stage, mode, gloo=False) for where in ("cpu", "npu")
    )
    assert npu == cpu
