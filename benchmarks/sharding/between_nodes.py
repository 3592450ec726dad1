"""Loss of stage 3 with few bits between nodes, over float32's: the small denoiser on two nodes of two ranks.

The task of gradient_quality.py, with real gloo ranks under Lightning: four ranks as two nodes of two. Its constants
were chosen on the shifted distribution 1000 and seeds 0 to 2; here each seed has another distribution and other
batches. Float32 is stage 3 over all four ranks. The loss is on 4,096 samples that no training saw.

    OMP_NUM_THREADS=1 python -m benchmarks.sharding.between_nodes [--seeds 11 12 13] [--steps 400] [--output FILE]
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.common.rows import keep_row
from benchmarks.common.toy_denoiser import Denoiser, Latents, evaluate, pretrain
from fakes.processes.ranks import run_ranks
from lightning_aigc.gradient_sync.transport import process_groups
from lightning_aigc.sharding.local_parts import local_part
from lightning_aigc.strategies import ZeROStrategy

BATCH, RATE = 16, 1e-3
"""Settings of gradient_quality.py, with dense's best rate."""
MODES: dict[str, dict[str, Any]] = {"float32": {}, "int8": {"between_nodes": "int8"}, "int3": {"between_nodes": "int3"}}
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
"""Read at the start of a rank: Lightning removes the variable after a fit."""


class FineTuning(LightningModule):
    """The pretrained denoiser on a shifted distribution."""

    def __init__(self, start: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = Denoiser()
        self.model.load_state_dict(start)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        noisy, noise, timestep, label = batch
        return torch.nn.functional.mse_loss(self.model(noisy, timestep, label), noise)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), RATE)


def work(rank: int, start: dict[str, Tensor], mode: str, seed: int, steps: int) -> dict[str, Any]:
    """Fine-tune on one rank. Returns: the loss on new samples, and its shards."""
    warnings.simplefilter("ignore")
    vars(process_groups)["node_key"] = lambda: f"node {rank // 2}"
    torch.manual_seed(0)
    make: Any = ZeROStrategy  # creates an object of the stage's class
    strategy = make(stage=3, **MODES[mode])
    module, data = FineTuning(start), Latents(1000 + seed, Latents(0))
    generator = torch.Generator().manual_seed(100 * seed + rank)
    batches: Any = [data.sample(BATCH, generator) for _ in range(steps)]
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, max_steps=steps, logger=False, enable_checkpointing=False, strategy=strategy,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    parts = [local_part(p.detach()).clone() for p in module.parameters()]
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in module.model.state_dict().items()}
    model = Denoiser()
    model.load_state_dict(whole)
    return {"loss": evaluate(model, data), "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[11, 12, 13])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = pretrain()
    losses: dict[str, list[float]] = {mode: [] for mode in MODES}
    equal = dict.fromkeys(MODES, True)
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for mode in MODES:
                place = Path(folder, f"{mode}{seed}")
                ranks = run_ranks(work, 4, place, start, mode, seed, options.steps, gloo=False, timeout_s=300)
                losses[mode].append(ranks[0]["loss"])
                if mode != "float32":
                    pairs = [(mine, other) for a, b in ((0, 2), (1, 3))
                             for mine, other in zip(ranks[a]["parts"], ranks[b]["parts"], strict=True)]  # fmt: skip
                    equal[mode] &= all(torch.equal(*pair) for pair in pairs)
                print(seed, mode, ranks[0]["loss"], flush=True)
    untuned = Latents(1000 + options.seeds[0], Latents(0))
    before = Denoiser()
    before.load_state_dict(start)
    for mode, found in losses.items():
        ratios = [ours / theirs for ours, theirs in zip(found, losses["float32"], strict=True)]
        row = {
            "section": "between_nodes", "torch": torch.__version__,
            "device": "cpu, 4 gloo ranks, 2 a node", "mode": mode, "steps": options.steps, "seeds": options.seeds,
            "losses": [round(loss, 5) for loss in found], "before": round(evaluate(before, untuned), 5),
            "loss_to_float32": round(statistics.mean(ratios), 5), "worst_seed": round(max(ratios), 5),
            "nodes_equal_to_the_bit": equal[mode] if mode != "float32" else None,
        }  # fmt: skip
        keep_row(row, options.output)


if __name__ == "__main__":
    main()
