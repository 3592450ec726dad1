"""ZeROStrategy(between_nodes=...): two nodes of two gloo ranks shard inside, and send few bits between them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.models.small_lightning import WIDTH, Small
from fakes.processes.ranks import run_ranks
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.transport import process_groups
from lightning_aigc.sharding.local_parts import local_part
from lightning_aigc.strategies import ZeROStrategy

STEPS = 200
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Wide(Small):
    """Matrices that are large enough to be sent in few bits, and what the last steps lost."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, WIDTH)
        )
        self.losses: list[float] = []

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        # As in a diffusion model, part of the target cannot be predicted.
        seed = 1000 * self.global_step + self.global_rank
        noise_NC = torch.randn(batch_NC.shape, generator=torch.Generator().manual_seed(seed))
        loss = nn.functional.mse_loss(self.head(self.net(batch_NC)), batch_NC + noise_NC)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


class Protecting(Wide):
    """A module that protects a part of itself, as a ControlNet does."""

    protected_gradients = ("net.2",)


def fit(rank: int, strategy: Any, steps: int = STEPS, of: type[Wide] = Wide, **arguments: Any) -> tuple[Wide, Any]:
    module = of()
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, max_steps=steps, max_epochs=99, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, strategy=strategy,
        **arguments,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    mixing = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)) / WIDTH**0.5
    batches = [torch.randn(16, WIDTH, generator=generator) @ mixing for _ in range(20)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module, trainer


def work(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    process_groups.node_key = lambda: f"node {rank // 2}"
    results: dict[str, Any] = {"ddp": fit(rank, "ddp")[0].losses[-40:]}
    for mode, keywords in {"int3": {}, "protected": {"protect": ["net.2"]}}.items():
        sent = Sent(stage=3, between_nodes="int3", **keywords)
        module, _ = fit(rank, sent, STEPS if mode == "int3" else 3)
        results[mode] = {"losses": module.losses[-40:], "sent": sent.sent, "parts": [
            local_part(p.detach()).clone() for p in module.parameters()
        ]}  # fmt: skip
    results["own"] = Sent(stage=3, between_nodes="int3")
    fit(rank, results["own"], 3, of=Protecting)
    results["own"] = results["own"].sent
    accumulated = Sent(stage=2, between_nodes="int8")
    results["accumulated"] = fit(rank, accumulated, 4, accumulate_grad_batches=2)[0].losses
    results["accumulated sent"] = accumulated.sent
    results["accumulated by ddp"] = fit(rank, "ddp", 4, accumulate_grad_batches=2)[0].losses
    results["values"] = sum(p.numel() for p in Wide().parameters())
    return results


def Sent(**arguments: Any) -> Any:  # noqa: N802  # stands for a class
    """A strategy that keeps what each step sent between nodes."""
    strategy: Any = ZeROStrategy(**arguments)
    strategy.sent = []
    step = strategy.optimizer_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        strategy.sent.append(dict(strategy.sync.sent_bytes))
        return result

    strategy.optimizer_step = counted
    return strategy


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, 4, tmp_path_factory.mktemp("nodes"), gloo=False)


def on_one_node(rank: int) -> str:
    warnings.simplefilter("ignore")
    try:
        fit(rank, ZeROStrategy(stage=2, between_nodes="int3"), 1)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_one_node_is_refused_in_the_argument_s_own_words(tmp_path: Path) -> None:
    (said, _) = run_ranks(on_one_node, 2, tmp_path, gloo=False)
    wanted = "between_nodes: int3 wants several nodes with equally many ranks, two or more; got 2 ranks on 1 node(s)"
    assert wanted in said and said.endswith("; leave between_nodes out") and "hierarchical" not in said


def test_a_rank_sends_a_seventh_of_its_shards_gradient_between_nodes(ranks: list[dict[str, Any]]) -> None:
    for of_rank in ranks:
        dense = 2 * (2 - 1) / 2 * 4 * of_rank["values"] / 2  # a ring of two nodes for half of the values
        assert sum(of_rank["int3"]["sent"][-1].values()) <= dense / 7


def test_protected_parameters_travel_whole(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["int3"]["sent"][-1]["protected"] == 0
    assert ranks[0]["protected"]["sent"][-1]["protected"] == pytest.approx(4 * 256 * 257 / 2, rel=0.01)


def test_what_a_module_protects_itself_travels_whole(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["own"][-1]["protected"] == ranks[0]["protected"]["sent"][-1]["protected"]


def test_the_nodes_hold_the_same_shards_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for here, there in ((0, 2), (1, 3)):
        for mine, other in zip(ranks[here]["int3"]["parts"], ranks[there]["int3"]["parts"], strict=True):
            assert torch.equal(mine, other)


def test_the_loss_after_200_steps_is_within_a_hundredth_of_the_dense_ones(ranks: list[dict[str, Any]]) -> None:
    few = torch.tensor([of_rank["int3"]["losses"] for of_rank in ranks]).mean()
    dense = torch.tensor([of_rank["ddp"] for of_rank in ranks]).mean()
    assert few <= 1.01 * dense


def test_a_window_of_micro_batches_is_sent_once(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    losses = torch.tensor([[of_rank["accumulated"], of_rank["accumulated by ddp"]] for of_rank in ranks])
    torch.testing.assert_close(losses[:, 0], losses[:, 1], rtol=2e-3, atol=0)
    sent = [sum(step.values()) for step in ranks[0]["accumulated sent"]]
    assert len(set(sent)) == 1
