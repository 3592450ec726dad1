"""Layers that are unfrozen or frozen on the way, and parameters of odd kinds: DDP's mean, or a refusal."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.processes.given_gradients import MODES
from fakes.processes.ranks import run_ranks
from lightning_aigc.strategies import NPUSparseStrategy

WIDTH, STEPS = 12, 6
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
SHARDED = ("zero_2", "zero_3")


class Layers(LightningModule):
    """`late` says when the backbone begins to be trained: "in" the third step, or "frozen" when the head is frozen."""

    def __init__(self, late: str = "", middle: nn.Module | None = None) -> None:
        super().__init__()
        seed_everything(1, verbose=False)
        self.backbone = nn.Linear(WIDTH, WIDTH)
        self.middle = middle or nn.Identity()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 4))
        self.late = late
        self.backbone.requires_grad_(late != "in")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.late == "in" and self.global_step == 2:
            self.backbone.requires_grad_(True)
        generator = torch.Generator().manual_seed(1000 * self.global_rank + batch_idx)
        given_NC = torch.randn(8, WIDTH, generator=generator)
        loss: Tensor = (self.head(self.middle(self.backbone(given_NC))) - given_NC[:, :4]).square().mean()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.late == "frozen" and self.global_step == 2:
            self.head[0].requires_grad_(False)  # type: ignore[operator]

    def configure_optimizers(self) -> Any:
        trained = self.parameters() if self.late != "callback" else filter(lambda p: p.requires_grad, self.parameters())
        return torch.optim.Adam(trained, 1e-2)


class Odd(nn.Module):
    """A module with a parameter of the kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        torch.manual_seed(2)
        made = {
            "complex": torch.randn(WIDTH, WIDTH, dtype=torch.complex64),
            "without dimension": torch.tensor(0.5),
            "without value": torch.zeros(0, WIDTH),
            "float64": torch.randn(WIDTH, WIDTH, dtype=torch.float64),
            "strided": torch.randn(WIDTH, 2 * WIDTH)[:, ::2],
        }
        self.w = nn.Parameter(made[kind])

    def forward(self, given_NC: Tensor) -> Tensor:
        if self.kind == "without dimension":
            return given_NC * self.w
        if self.kind == "without value":
            return given_NC + self.w.sum()
        out: Tensor = given_NC.to(self.w.dtype) @ self.w
        return (torch.view_as_real(out).sum(-1) if out.is_complex() else out).float()


ODD = ("complex", "without dimension", "without value", "float64", "strided")


def fit(module: Layers, strategy: Any, callbacks: Any = ()) -> Any:
    """The whole parameters that a fit leaves, or its error in words."""
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=STEPS, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    try:
        trainer.fit(module, DataLoader(torch.zeros(4, 1)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in module.parameters()]


def dense() -> NPUSparseStrategy:
    return NPUSparseStrategy(mode="dense")


def late(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in ("npu_sparse", "zero_1", *SHARDED):
        found[f"in {name}"] = fit(Layers("in"), dense() if name == "npu_sparse" else name)
        tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3, verbose=False)
        found[f"callback {name}"] = fit(Layers("callback"), name, [tuning])
    for mode in ("int3", "local"):
        found[f"in {mode}"] = fit(Layers("in"), NPUSparseStrategy(mode=mode, local_steps=3, checksum_every_n_steps=1))
    found["frozen npu_sparse"] = fit(Layers("frozen"), "npu_sparse")
    return found


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(late, 2, tmp_path_factory.mktemp("late"), gloo=False)


@pytest.mark.parametrize(
    "run",
    [f"{when} {name}" for when in ("in", "callback") for name in ("npu_sparse", "zero_1")] + ["in int3", "in local"],
)
def test_a_layer_that_is_unfrozen_on_the_way_stays_equal_on_all_ranks(run: str, joined: list[dict[str, Any]]) -> None:
    first, second = (of_one[run] for of_one in joined)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), first
    assert not torch.equal(first[0], Layers().backbone.weight)


def test_it_takes_the_mean_gradient_of_all_ranks(joined: list[dict[str, Any]]) -> None:
    wanted = mean_training()
    for name in ("npu_sparse", "zero_1"):
        for got, value in zip(joined[0][f"in {name}"], wanted, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)


def mean_training() -> list[Tensor]:
    """The same fit in one process, on the batches of both ranks."""
    module = Layers("in")
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    for step in range(STEPS):
        module.backbone.requires_grad_(step >= 2)
        losses = []
        for rank in range(2):
            given_NC = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step % 2))
            losses.append((module.head(module.backbone(given_NC)) - given_NC[:, :4]).square().mean())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("name", SHARDED)
def test_stages_2_and_3_say_that_a_layer_joins_too_late(name: str, joined: list[dict[str, Any]]) -> None:
    for of_one in joined:
        assert "backbone.weight, backbone.bias began to be trained after the weights were cut" in of_one[f"in {name}"]
        assert "BackboneFinetuning begins to train more later; leave it out" in of_one[f"callback {name}"]


def test_a_layer_that_is_frozen_on_the_way_is_refused(joined: list[dict[str, Any]]) -> None:
    for of_one in joined:
        assert "head.0.weight, head.0.bias was frozen after the first step was set up" in of_one["frozen npu_sparse"]


def odd(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found = {}
    for kind in ODD:
        for name in ("ddp", "zero_1", *SHARDED, *MODES):
            strategy: Any = NPUSparseStrategy(mode=name, local_steps=3) if name in MODES else name
            if name in MODES and kind != "complex" and name not in ("dense", "int3", "local"):
                continue
            found[f"{kind} {name}"] = fit(Layers(middle=Odd(kind)), strategy)
    return found


@pytest.fixture(scope="module")
def odds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(odd, 2, tmp_path_factory.mktemp("odd"), gloo=False)


REFUSED = {
    "complex": "has complex values",
    "without dimension": "has no dimension",
    "without value": "has no value",
}


@pytest.mark.parametrize("kind", ODD)
def test_parameters_of_odd_kinds_are_trained_right_or_refused(kind: str, odds: list[dict[str, Any]]) -> None:
    ddp = odds[0][f"{kind} ddp"]
    for run in (run for run in odds[0] if run.startswith(kind)):
        name = run.removeprefix(f"{kind} ")
        first, second = (of_one[run] for of_one in odds)
        is_refused = name in SHARDED if kind != "complex" else name not in ("ddp", "zero_1", "dense")
        if kind in REFUSED and is_refused:
            assert first == second and REFUSED[kind] in first and first.startswith("ConfigError"), run
            continue
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), f"{run}: {first}"
        if name in (*SHARDED, "zero_1", "dense"):
            for got, value in zip(first, ddp, strict=True):
                torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)
