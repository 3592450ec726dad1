"""Trainer(accelerator="npu", strategy="zero_3" and the like) on the fake npu with the fake hccl: DDP's steps."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_aigc.strategies.zero.stage_1  # noqa: F401 - torch compiles on its import, with no fake npu yet
from fakes.kept_bytes import npu_storages
from fakes.models.small_lightning import WIDTH, Small, make_batches
from fakes.models.small_models import call_unet, make_unet
from fakes.npu import fake_npu
from fakes.processes.ranks import run_ranks
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.sharding.full_parameters import fsdp_groups, full_parameters
from lightning_aigc.sharding.layout import is_sharded, sharded_parts
from lightning_aigc.sharding.local_parts import local_part
from lightning_aigc.strategies import ZeROStrategy

STEPS = 4
RANKS = 2
PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


class Four(Small):
    """Four layers, and what each step lost and where."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH))  # type: ignore[assignment]
        self.losses: list[float] = []
        self.seen: set[tuple[str, torch.dtype]] = set()
        self.net[0].register_forward_hook(lambda m, given, out: self.seen.add((out.device.type, out.dtype)))

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch_NC, batch_idx)
        self.losses.append(loss.item())
        return loss

    def on_train_end(self) -> None:  # teardown may move them
        optimizer: Any = self.trainer.optimizers[0]
        states = getattr(optimizer, "optim", optimizer).state.values()
        self.moments = [local_part(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]
        self.weights_on = {local_part(p.detach()).device.type for p in self.parameters()}


class Drawing(Four):
    """Rank zero alone runs the model before the first step and after each, as it does for sample images."""

    def on_train_start(self) -> None:
        with full_parameters(self):
            if self.global_rank == 0:
                with torch.no_grad():
                    self.head(self.net(torch.zeros(1, WIDTH, device=self.device)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.on_train_start()


class Noise(LightningModule):
    """A small U-Net, and what each step lost and kept on the device for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = make_unet()
        self.losses: list[float] = []
        self.kept: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        before = npu_storages()
        loss = call_unet(self.unet).square().mean()
        self.kept.append(sum(nbytes for address, nbytes in npu_storages().items() if address not in before))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit_unet(rank: int, offload: bool) -> Noise:
    os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    module = Noise()
    trainer = Trainer(
        accelerator="npu", num_nodes=RANKS, devices=1, strategy="zero_3", max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[FusedBackwardPrecision("32-true", memory="max", offload=offload)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.zeros(RANKS * 2, 1)))
    return module


def fit(
    rank: int, accelerator: str, strategy: Any, precision: Any = "32-true", kind: type[Four] = Four
) -> dict[str, Any]:
    module = kind()
    # Two nodes of one card: the fake npu calls every card npu:0, and `fully_shard` compares with the rank's own.
    os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    trainer = Trainer(
        accelerator=accelerator, num_nodes=RANKS, devices=1, strategy=strategy, precision=precision, max_steps=STEPS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(make_batches(rank, STEPS), batch_size=None))
    weights = [p.detach() for p in module.parameters()]
    groups = [group for part, _ in sharded_parts(module) for group in fsdp_groups(part)] if is_sharded(module) else []
    return {
        "losses": module.losses,
        "seen": module.seen,
        "states on": {moment.device.type for moment in module.moments},
        "state bytes": sum(moment.nbytes for moment in module.moments),
        "weights on": module.weights_on,
        "weights": [(w.full_tensor() if hasattr(w, "full_tensor") else w).cpu() for w in weights],
        "sums": [group.force_sum_reduction_for_comms for group in groups],
        "backend": getattr(trainer.strategy, "_process_group_backend", None),
    }


def on_cpu(rank: int) -> dict[Any, Any]:
    warnings.simplefilter("ignore")
    found: dict[Any, Any] = {}
    for precision in PRECISIONS:
        found["ddp", precision] = fit(rank, "cpu", "ddp", precision)
    found["zero_3"] = fit(rank, "cpu", "zero_3")
    found["offload"] = fit(rank, "cpu", ZeROStrategy(stage=3, offload_optimizer=True))
    return found


def on_npu(rank: int) -> dict[Any, Any]:
    warnings.simplefilter("ignore")
    fake_npu.install()
    fake_npu.pin_everything()
    fake_npu.keep_gathered_weights()
    found: dict[Any, Any] = {}
    for precision in PRECISIONS:
        for name in ("zero_1", "zero_2", "zero_3"):
            found[name, precision] = fit(rank, "npu", name, precision)
    for stage in (2, 3):
        found["offload", stage] = fit(rank, "npu", ZeROStrategy(stage=stage, offload_optimizer=True))  # type: ignore[arg-type]
    for name in ("zero_2", "zero_3"):
        found["drawing", name] = fit(rank, "npu", name, kind=Drawing)
    for offload in (False, True):
        module = fit_unet(rank, offload)
        found["U-Net", offload] = {"losses": module.losses, "kept": module.kept}
    return found


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(on_cpu, RANKS, tmp_path_factory.mktemp("cpu"), gloo=False)


@pytest.fixture(scope="module")
def npu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(on_npu, RANKS, tmp_path_factory.mktemp("npu"), gloo=False)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["zero_1", "zero_2", "zero_3"])
def test_every_stage_trains_on_the_npu_over_hccl(
    name: str, precision: str, npu: list[dict[Any, Any]], cpu: list[dict[Any, Any]]
) -> None:
    tolerance = {"32-true": 1e-6, "bf16-mixed": 2e-2}[precision]
    for ours, theirs in zip(npu, cpu, strict=True):
        found = ours[name, precision]
        assert found["seen"] == {("npu", PRECISIONS[precision])} and found["backend"] == "hccl"
        assert found["weights on"] == found["states on"] == {"npu"}
        wanted = theirs["ddp", precision]
        torch.testing.assert_close(found["losses"], wanted["losses"], rtol=tolerance, atol=0)
        assert all(torch.equal(a, b) for a, b in zip(found["weights"], npu[0][name, precision]["weights"], strict=True))


@pytest.mark.parametrize("name", ["zero_2", "zero_3"])
def test_gradients_are_summed_on_the_npu_because_hccl_has_no_mean(name: str, npu: list[dict[Any, Any]]) -> None:
    found = npu[0][name, "32-true"]["sums"]
    assert found and all(found)


@pytest.mark.parametrize("name", ["zero_2", "zero_3"])
def test_a_forward_of_one_rank_between_steps_leaves_their_collectives_alike(
    name: str, npu: list[dict[Any, Any]]
) -> None:
    for of_rank in npu:
        assert of_rank["drawing", name]["losses"] == of_rank[name, "32-true"]["losses"]


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_states_are_in_host_memory_and_change_nothing(stage: int, npu: list[dict[Any, Any]]) -> None:
    for of_rank in npu:
        found, without = of_rank["offload", stage], of_rank[f"zero_{stage}", "32-true"]
        assert found["states on"] == found["weights on"] == {"cpu"} and found["seen"] == without["seen"]
        assert found["state bytes"] == without["state bytes"]
        assert found["losses"] == without["losses"]
        assert all(torch.equal(a, b) for a, b in zip(found["weights"], without["weights"], strict=True))


def test_what_blocks_keep_leaves_the_npu_under_zero_3_too(npu: list[dict[Any, Any]]) -> None:
    for of_rank in npu:
        found, without = of_rank["U-Net", True], of_rank["U-Net", False]
        assert found["losses"] == without["losses"] and len(set(found["losses"])) == 2
        assert all(less < 0.8 * more for less, more in zip(found["kept"], without["kept"], strict=True))


def test_on_a_cpu_offload_changes_nothing(cpu: list[dict[Any, Any]]) -> None:
    for of_rank in cpu:
        assert of_rank["offload"]["losses"] == of_rank["zero_3"]["losses"]
