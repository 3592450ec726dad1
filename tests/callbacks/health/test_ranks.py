"""Two ranks on gloo: weights that differ, a fault on one rank alone, and a stop that both take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
from pathlib import Path
import torch
import lightning_aigc
from fakes.denoisers import Denoiser, fit, batches
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from lightning_aigc.callbacks.health import GradientHealthMonitor

folder = Path(sys.argv[1])

class Nudge(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 4 and trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.blocks[1].down.weight.add_(1e-3)

class Zero(nn.Module):
    is_on = False
    def forward(self, x):
        return x / 0 if self.is_on else x

class BadOnRankOne(Denoiser):
    def __init__(self):
        super().__init__()
        self.blocks[1].extra = Zero()
    def training_step(self, batch, batch_idx):
        self.blocks[1].extra.is_on = self.global_rank == 1 and batch_idx == 5
        return super().training_step(batch, batch_idx)

def run(name, module, callbacks, strategy=None, **arguments):
    monitor = GradientHealthMonitor(dirpath=folder / name, **arguments)
    strategy = strategy or DDPStrategy(process_group_backend="gloo")
    trainer = fit(module, [*callbacks, monitor], steps=20, data=batches(32), strategy=strategy, devices=2,
                  use_distributed_sampler=False, default_root_dir=str(folder / name))
    finite = all(bool(torch.isfinite(p).all()) for p in module.parameters())
    said = [[a.step, a.check, a.layer, a.level, a.rank] for a in monitor.alerts]
    return {"said": said, "steps": trainer.global_step, "finite": finite, "rank": trainer.global_rank}

found = {
    "nudged": run("nudged", Denoiser(), [Nudge()]),
    "warned": run("warned", BadOnRankOne(), []),
    "stopped": run("stopped", BadOnRankOne(), [], on_error="stop"),
    "sparse": run("sparse", BadOnRankOne(), [], strategy="npu_sparse"),
}
(folder / f"rank{found['nudged']['rank']}.json").write_text(json.dumps(found))
torch.distributed.destroy_process_group()  # gloo's threads may abort a process that ends first (pytorch#179291)
"""


def test_ranks_agree_on_what_they_saw_and_name_the_rank_and_the_layer(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(SCRIPT)
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), str(root / "kernels"), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for found in ranks:
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
    written = (tmp_path / "warned" / "health.jsonl").read_text().splitlines()
    assert any(json.loads(line)["rank"] == 1 for line in written)
