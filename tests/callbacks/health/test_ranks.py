"""Two ranks on gloo: weights that differ, a fault on one rank alone, and a stop that both take."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from fakes.models.denoisers import CHANNELS, Denoiser, batches, fit
from fakes.processes.ranks import run_ranks
from lightning_aigc.callbacks.health import GradientHealthMonitor


class Nudge(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4 and trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.blocks[1].down.weight.add_(1e-3)  # type: ignore[index,union-attr]


class Zero(nn.Module):
    is_on = False

    def forward(self, x: Tensor) -> Tensor:
        return x / 0 if self.is_on else x


class BadOnRankOne(Denoiser):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].extra = Zero()

    def training_step(self, batch_BSC: Tensor, batch_idx: int) -> Tensor:
        self.blocks[1].extra.is_on = self.global_rank == 1 and batch_idx == 5
        return super().training_step(batch_BSC, batch_idx)


class OneRow(Denoiser):
    """A weight of one row, of which a rank of two has no entry under `zero_2` and `zero_3`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(CHANNELS, 1)

    def training_step(self, batch_BSC: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch_BSC, batch_idx) + (self.gate(batch_BSC) - 3).square().mean()


def run(folder: Path, module: Denoiser, *callbacks: Callback, strategy: Any = None, **arguments: Any) -> dict[str, Any]:
    monitor = GradientHealthMonitor(dirpath=folder, **arguments)
    trainer = fit(
        module, [*callbacks, monitor], steps=20, data=batches(32), devices=2, use_distributed_sampler=False,
        strategy=strategy or DDPStrategy(process_group_backend="gloo"), default_root_dir=str(folder),
    )  # fmt: skip
    finite = all(bool(torch.isfinite(p).all()) for p in module.parameters())
    said = [[a.step, a.check, a.layer, a.level, a.rank] for a in monitor.alerts]
    return {"said": said, "steps": trainer.global_step, "finite": finite}


def work(rank: int, root: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    folder = Path(root)
    return {
        "nudged": run(folder / "nudged", Denoiser(), Nudge()),
        "warned": run(folder / "warned", BadOnRankOne()),
        "stopped": run(folder / "stopped", BadOnRankOne(), on_error="stop"),
        "sparse": run(folder / "sparse", BadOnRankOne(), strategy="npu_sparse"),
        "zero_2": run(folder / "zero_2", OneRow(), strategy="zero_2", every_n_steps=1, on_error="stop"),
        "zero_3": run(folder / "zero_3", OneRow(), strategy="zero_3", every_n_steps=1, on_error="stop"),
    }


def test_ranks_agree_on_what_they_saw_and_name_the_rank_and_the_layer(tmp_path: Path) -> None:
    for found in run_ranks(work, 2, tmp_path / "ranks", str(tmp_path), gloo=False):
        [diverged] = [said for said in found["nudged"]["said"] if said[1] == "rank_divergence"]
        assert diverged[:4] == [10, "rank_divergence", "blocks.1.down.weight", "error"]
        # The bad forward was on rank one, and gradient sync carried it to all: every rank learns where it began.
        origin = [6, "non_finite", "blocks.1.extra", "error", 1]
        assert origin in found["warned"]["said"]
        assert not found["warned"]["finite"]
        assert origin in found["stopped"]["said"]
        assert (found["stopped"]["steps"], found["stopped"]["finite"]) == (6, True)
        assert origin in found["sparse"]["said"]
        assert found["sparse"]["finite"]
        for sharded in (found["zero_2"], found["zero_3"]):
            assert sharded["steps"] == 20 and "no_update" not in [said[1] for said in sharded["said"]]
    written = (tmp_path / "warned" / "health.jsonl").read_text().splitlines()
    assert any(json.loads(line)["rank"] == 1 for line in written)
