"""A snapshot of any strategy and number of ranks goes on under any other, with equal weights and optimizer states."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.processes.ranks import run_ranks
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.checkpoint import resume
from lightning_aigc.strategies import NPUSparseStrategy, ZeROStrategy
from lightning_aigc.strategies.zero.stage_1 import own_states

WIDTH = 5
STEPS = 4
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
SHARED: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "npu_sparse": lambda: "npu_sparse",
    "local": lambda: NPUSparseStrategy(mode="local", local_steps=3),
    "overlapped": lambda: NPUSparseStrategy(mode="local", local_steps=3, overlap_average=True),
    "zero_1": lambda: ZeROStrategy(1),
    "zero_2": lambda: ZeROStrategy(2),
    "zero_3": lambda: ZeROStrategy(3),
}
ALONE: dict[str, Any] = {"one device": lambda: "auto", "npu_sparse": lambda: "npu_sparse"}
RUNS = [f"{name} on {ranks}" for ranks in (1, 2, 3) for name in (ALONE if ranks == 1 else SHARED)]
PAIRS = [(saved, resumed) for saved in RUNS for resumed in RUNS]
OFTEN = [
    ("ddp on 2", "zero_3 on 2"),
    ("zero_3 on 2", "one device on 1"),
    ("one device on 1", "zero_2 on 2"),
    ("local on 3", "zero_1 on 2"),
    ("zero_1 on 2", "npu_sparse on 2"),
    ("npu_sparse on 2", "zero_3 on 2"),
    ("zero_3 on 2", "local on 2"),
    ("local on 2", "ddp on 2"),
    ("local on 2", "local on 2"),
    ("overlapped on 3", "local on 2"),
    ("zero_1 on 2", "zero_1 on 2"),
]
"""Pairs that `make test` takes: each strategy on both sides."""


class Layers(LightningModule):
    """Layers whose rows no number of ranks divides, and one more batch in each step's window."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 7), nn.SiLU(), nn.Linear(7, 7), nn.SiLU(), nn.Linear(7, WIDTH))

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch_NC) - batch_NC).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(optimizer)}


class Seen(Callback):
    """The whole weights and optimizer states before each batch."""

    def __init__(self) -> None:
        self.before: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.before.append(state_of(trainer, pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before.append(state_of(trainer, pl_module))


def state_of(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    (optimizer,) = trainer.optimizers
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if hasattr(optimizer, "optim"):  # each rank has some parameters' states
        shares: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(shares, own_states(optimizer))
        states = {place: state for share in shares for place, state in share.items()}
    else:
        states = {place: optimizer.state.get(p, {}) for place, p in enumerate(parameters)}
    flat = {f"{place} {key}": whole(value) for place in sorted(states) for key, value in states[place].items()}
    sync: Any = getattr(trainer.strategy, "sync", None)
    return {
        "weights": {n: whole(p) for n, p in module.named_parameters()}, "states": flat, "step": trainer.global_step,
        "synced": trainer.global_step if sync is None else sync.step,
    }  # fmt: skip


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def fit(name: str, folder: Path, steps: int, accumulate: int = 1, callbacks: Any = (), **arguments: Any) -> Seen:
    warnings.simplefilter("ignore")
    seed_everything(1 + RANKS, verbose=False)
    seen = Seen()
    strategy = (ALONE if RANKS == 1 else SHARED)[name]()
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=steps, max_epochs=-1, logger=False,
        accumulate_grad_batches=accumulate, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[seen, ExactSnapshot(), *callbacks],
    )  # fmt: skip
    batches = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(3))
    trainer.fit(Layers(), DataLoader(batches, batch_size=2), **arguments)
    return seen


def save(rank: int, root: str, runs: list[str]) -> dict[str, Any]:
    return {run: fit(run[:-5], Path(root, run), STEPS).before[-1] for run in runs}


def go_on(rank: int, root: str, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        saved, run = pair
        folder = Path(root, f"{saved} then {run}")
        if rank == 0:  # the others look for it when rank 0 has chosen a snapshot
            shutil.copytree(Path(root, saved), folder)
        said: list[str] = []
        resume.rank_zero_warn = said.append
        found[" -> ".join(pair)] = fit(run[:-5], folder, STEPS + 2, ckpt_path="latest").before
        found[f"warnings of {' -> '.join(pair)}"] = said
    return found


@pytest.mark.parametrize("pairs", [OFTEN, pytest.param(PAIRS, marks=pytest.mark.long)], ids=["often", "all"])
def test_every_pair_of_strategies_and_ranks_goes_on_with_equal_states(
    tmp_path: Path, pairs: list[tuple[str, str]]
) -> None:
    saved: dict[str, list[dict[str, Any]]] = {}
    for ranks in (1, 2, 3):
        runs = list(dict.fromkeys(run for run, _ in pairs if run.endswith(f"on {ranks}")))
        if runs:
            found = run_ranks(save, ranks, tmp_path / f"save{ranks}", str(tmp_path), runs, gloo=False)
            saved |= {run: [of_one[run] for of_one in found] for run in runs}
    for ranks in (1, 2, 3):
        own = [pair for pair in pairs if pair[1].endswith(f"on {ranks}")]
        found = run_ranks(go_on, ranks, tmp_path / f"resume{ranks}", str(tmp_path), own, gloo=False, timeout_s=600)
        for source, target in own:
            pair = f"{source} -> {target}"
            drops = any(
                "what gradient compression had not sent yet" in line for line in found[0][f"warnings of {pair}"]
            )
            assert not drops or (source.startswith("npu_sparse") and source[-1] != "1") or is_local(source), pair
            assert drops or pair != "npu_sparse on 2 -> zero_3 on 2"
            keeps_own = source[-1] == target[-1] and is_local(source) and is_local(target)
            for rank, of_one in enumerate(found):
                assert_equal(of_one[pair][0], saved[source][rank] if keeps_own else mean(saved[source]), pair)
                assert of_one[pair][-1]["step"] == of_one[pair][-1]["synced"] == STEPS + 2, pair
                if not is_local(target):
                    assert_equal(of_one[pair][-1], found[0][pair][-1], pair)


class StopsInAWindow(Callback):
    """Ends the run with an error after the first micro-batch of the third window."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 4:
            raise RuntimeError("stopped")


def in_a_window(rank: int, root: str, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {"whole": fit("ddp", Path(root, "whole"), STEPS, accumulate=2).before[-1]}
    for first, then in pairs:
        folder = Path(root, f"{first} then {then}")
        with pytest.raises(RuntimeError, match="stopped"):
            fit(first, folder, STEPS, accumulate=2, callbacks=[StopsInAWindow()])
        found[f"{first} -> {then}"] = fit(then, folder, STEPS, accumulate=2, ckpt_path="latest").before[-1]
    return found


def test_the_gradients_of_an_open_window_go_along(tmp_path: Path) -> None:
    pairs = [("ddp", "zero_3"), ("zero_2", "ddp"), ("zero_1", "zero_2")]
    for of_rank in run_ranks(in_a_window, 2, tmp_path, str(tmp_path), pairs, gloo=False):
        whole = of_rank.pop("whole")
        for pair, end in of_rank.items():
            for name, value in whole["weights"].items():
                torch.testing.assert_close(
                    end["weights"][name], value, rtol=1e-5, atol=1e-6, msg=lambda m, p=pair: p + m
                )


def is_local(run: str) -> bool:
    """Whether each rank of the run has a model of its own."""
    return run.startswith(("local", "overlapped"))


def mean(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean of the models that ranks of local SGD had; else every rank had the same."""
    first = of_ranks[0]
    means = {
        kind: {
            name: torch.stack([of_one[kind][name].double() for of_one in of_ranks]).mean(0).float()
            for name in first[kind]
        }
        for kind in ("weights", "states")
    }
    return first | means


def assert_equal(got: dict[str, Any], wanted: dict[str, Any], pair: str) -> None:
    for kind in ("weights", "states"):
        assert got[kind].keys() == wanted[kind].keys(), pair
        for name, value in wanted[kind].items():
            assert torch.equal(got[kind][name].float(), value), f"{pair}: {kind} {name}"
