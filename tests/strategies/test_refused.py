"""Optimizers, callbacks and settings of the Trainer that a strategy takes, or refuses before the first step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.processes.ranks import run_ranks
from lightning_aigc.callbacks import AdaptiveLR
from lightning_aigc.strategies import NPUSparseStrategy

WIDTH, STEPS = 16, 4
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Layers(LightningModule):
    """`make` makes the optimizer; a transformer layer of torch reads the weights of modules inside."""

    def __init__(self, make: Callable[[Any], Any] | None = None, middle: nn.Module | None = None) -> None:
        super().__init__()
        seed_everything(1, verbose=False)
        self.make = make or (lambda parameters: torch.optim.AdamW(parameters, 1e-2))
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), middle or nn.Identity(), nn.Linear(WIDTH, 4)
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        given_NC = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * self.global_rank + batch_idx))
        loss: Tensor = (self.last(self.middle(self.first(given_NC))) - given_NC[:, :4]).square().mean()
        return loss

    def on_train_start(self) -> None:
        for optimizer in self.trainer.optimizers:
            if "train_mode" in optimizer.param_groups[0]:
                optimizer.train()  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, given_NC: Tensor) -> Tensor:
        out: Tensor = self.inside(given_NC[None], given_NC[None], given_NC[None])[0][0]
        return out


def schedule_free(parameters: Any) -> Any:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(parameters, lr=1e-2)


def prodigy(parameters: Any) -> Any:
    from prodigyopt import Prodigy

    return Prodigy(parameters)


MAKE: dict[str, Callable[[Any], Any]] = {
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, 0.1, max_iter=2),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, 1e-2),
    "AdamWScheduleFree": schedule_free,
    "Prodigy": prodigy,
}
SHARED = ("ddp", "npu_sparse", "zero_1", "zero_2", "zero_3")
TAKES = {
    "LBFGS": ("ddp", "dense"),
    "Adafactor": ("ddp", "npu_sparse", "zero_1"),
    "AdamWScheduleFree": ("ddp", "npu_sparse", "zero_2", "zero_3"),
    "Prodigy": ("ddp", "npu_sparse"),
}


def fit(module: Layers, strategy: Any, **arguments: Any) -> Any:
    """The whole parameters that a fit leaves, or its error in words with the steps that were taken."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=STEPS, **(quiet | arguments))
    try:
        trainer.fit(module, DataLoader(torch.zeros(2 * STEPS, 1)))
    except Exception as error:
        return f"{module.steps} steps, {type(error).__name__}: {error}"
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in module.parameters()]


def fit_all(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for optimizer in TAKES:
        for name in (*SHARED, "dense"):
            strategy: Any = NPUSparseStrategy(mode="dense") if name == "dense" else name
            found[f"{optimizer} {name}"] = fit(Layers(MAKE[optimizer]), strategy)
    for name in ("zero_1", "zero_3"):
        found[f"averages {name}"] = fit(Layers(), name, callbacks=[StochasticWeightAveraging(1e-3, swa_epoch_start=1)])
        found[f"moving averages {name}"] = fit(Layers(), name, callbacks=[EMAWeightAveraging()])
    layer = {"attention": Attention, "layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0)}
    for name, make in layer.items():
        for strategy in ("ddp", "zero_3"):
            torch.manual_seed(2)
            found[f"{name} {strategy}"] = fit(Layers(middle=make()), strategy)
    for name in SHARED:
        found[f"barebones {name}"] = fit(Layers(), name, barebones=True)
        found[f"no interval {name}"] = fit(Layers(), name, log_every_n_steps=0, callbacks=[AdaptiveLR()])
    trainer: Any = Trainer(accelerator="cpu", devices=RANKS, strategy="zero_1", max_steps=1, barebones=True)
    trainer.fit(Layers(), DataLoader(torch.zeros(2, 1)))
    found["name"] = type(trainer.optimizers[0]).__name__
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(fit_all, 2, tmp_path_factory.mktemp("refused"), gloo=False)


@pytest.mark.parametrize("optimizer", TAKES)
def test_an_optimizer_trains_all_ranks_alike_or_is_refused_by_its_name(
    optimizer: str, ranks: list[dict[str, Any]]
) -> None:
    for name in (*SHARED, "dense"):
        first, second = (of_one[f"{optimizer} {name}"] for of_one in ranks)
        if name in TAKES[optimizer] or name == "dense":
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), f"{name}: {first}"
        else:
            assert first == second and first.startswith("0 steps, ConfigError"), name
            assert f"cannot train with {optimizer}, which" in first and "; use " in first


def test_averages_of_a_copy_are_refused_where_weights_are_cut(ranks: list[dict[str, Any]]) -> None:
    for of_one in ranks:
        assert "and StochasticWeightAveraging averages a copy of the full module" in of_one["averages zero_3"]
        assert "and EMAWeightAveraging averages a copy of the full module" in of_one["moving averages zero_3"]
        assert isinstance(of_one["averages zero_1"], list) and isinstance(of_one["moving averages zero_1"], list)


@pytest.mark.parametrize("layer", ["attention", "layer"])
def test_layers_of_torch_that_read_weights_inside_are_one_group(layer: str, ranks: list[dict[str, Any]]) -> None:
    for got, wanted in zip(ranks[0][f"{layer} zero_3"], ranks[0][f"{layer} ddp"], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SHARED)
def test_a_trainer_that_logs_nothing_trains(name: str, ranks: list[dict[str, Any]]) -> None:
    for run in ("barebones", "no interval"):
        assert isinstance(ranks[0][f"{run} {name}"], list), ranks[0][f"{run} {name}"]


def test_an_optimizer_that_is_shared_out_keeps_its_class_name(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["name"] == "AdamW"
