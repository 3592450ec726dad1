"""Stored bytes and step times of each ZeRO stage, compared with DDP and DeepSpeed, on gloo ranks of this machine.

python -m benchmarks.sharding.zero bytes                 # stored bytes by stage and number of ranks
python -m benchmarks.sharding.zero steps                 # step times and losses of DDP and the stages, side by side
python -m benchmarks.sharding.zero losses --steps 200    # losses of DDP and the stages, and their largest difference
PYTHON -m benchmarks.sharding.zero deepspeed --repeats 3 # the stages and DeepSpeed; PYTHON's environment has it
python -m benchmarks.sharding.zero share                 # share of SD 1.5's and SDXL's model states that a stage saves
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks import RESULTS
from benchmarks.common.rows import keep_row

ROWS = RESULTS / "sharding" / "zero.jsonl"
STAGES = {"ddp": 0, "zero_1": 1, "zero_2": 2, "zero_3": 3}
UNET = {
    "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "cross_attention_dim": 64,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (64, 128, 128), "attention_head_dim": 8, "norm_num_groups": 32,
}  # fmt: skip
WARM_UP = 2
HALF = {1: 4, 2: 2, 3: 0}
"""Bytes per value that a stage with separate half weights and gradients does not shard."""
MODELS = {"Stable Diffusion 1.5": 859_520_964, "SDXL": 2_567_463_684}
"""Numbers of trained parameters of the U-Nets."""


class Noise(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Random latents, timesteps and embeddings for a small U-Net."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(i)
        return (
            torch.randn(4, 16, 16, generator=generator),
            torch.randint(0, 1000, (), generator=generator),
            torch.randn(8, 64, generator=generator),
        )


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(**UNET)


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    latents, timesteps, embeddings = batch
    return nn.functional.mse_loss(model(latents, timesteps, embeddings).sample.float(), latents.roll(1, 0).float())


def train(strategy: str, steps: int) -> dict[str, Any]:
    """Run one rank under Lightning."""
    from lightning.pytorch import LightningModule, Trainer

    from lightning_aigc.sharding.local_parts import local_part
    from lightning_aigc.sharding.stored_bytes import stored_bytes

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.unet = unet()
            self.losses: list[float] = []
            self.times: list[float] = []
            self.processor_times: list[float] = []
            self.gradient_bytes = 0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.times.append(time.perf_counter())
            self.processor_times.append(time.process_time())
            loss = loss_of(self.unet, batch)
            self.losses.append(loss.item())
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.gradient_bytes:  # checking each gradient would be timed as part of each step
                return
            kept = [local_part(p.grad).untyped_storage() for p in self.parameters() if p.grad is not None]
            self.gradient_bytes = sum({storage._cdata: storage.nbytes() for storage in kept}.values())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    module = Module()
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Noise(), batch_size=4))
    optimizer: Any = trainer.optimizers[0]
    states = [v for of in getattr(optimizer, "optim", optimizer).state.values() for v in of.values()]
    formula = stored_bytes([tuple(p.shape) for p in module.parameters()], STAGES[strategy], ranks, rank)
    return {
        "strategy": strategy,
        "ranks": ranks,
        "rank": rank,
        "parameters": sum(local_part(p.detach()).untyped_storage().nbytes() for p in module.parameters()),
        "gradients": module.gradient_bytes,
        "states": sum(local_part(v).nbytes for v in states),
        "formula": [formula.parameters, formula.gradients, formula.states],
    } | timed(module.times, module.processor_times, module.losses)


def train_deepspeed(stage: int, steps: int) -> dict[str, Any]:
    """Run one rank under DeepSpeed, in float32."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = unet()
    zero = {"stage": stage, "contiguous_gradients": True, "overlap_comm": False, "reduce_bucket_size": 5e7}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}}
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "zero_optimization": zero,
        "gradient_clipping": 0.0,  # the default is 1
    }  # fmt: skip
    engine, shared, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sampler: Any = torch.utils.data.DistributedSampler(Noise(), shuffle=True, seed=0)  # as under Lightning
    times, cpu, losses = [], [], []
    for i, batch in enumerate(DataLoader(Noise(), batch_size=4, sampler=sampler)):
        if i == steps:
            break
        times.append(time.perf_counter())
        cpu.append(time.process_time())
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    states = [v for of in shared.optimizer.state.values() for v in of.values() if torch.is_tensor(v) and v.numel() > 1]
    groups = shared.optimizer.param_groups
    masters = sum(p.nbytes for p in (shared.fp32_partitioned_groups_flat if stage == 3 else groups[0]["params"]))
    assert len(groups) == 1
    own = [p.ds_tensor if stage == 3 else p.data for p in model.parameters()]
    parameters = sum(p.nbytes for p in own)
    return {
        "strategy": f"deepspeed {deepspeed.__version__} stage {stage}", "ranks": ranks, "rank": rank,
        "parameters": parameters, "masters": masters, "states": sum(v.nbytes for v in states),
    } | timed(times, cpu, losses)  # fmt: skip


def timed(times: list[float], cpu: list[float], losses: list[float]) -> dict[str, Any]:
    def median_ms(marks: list[float]) -> float | None:
        gaps = [1e3 * (after - before) for before, after in itertools.pairwise(marks)][WARM_UP:]
        return round(statistics.median(gaps), 1) if gaps else None

    # On a busy machine CPU time is more reliable than wall time.
    return {"step_ms": median_ms(times), "cpu_ms": median_ms(cpu), "steps": len(losses), "losses": losses}


def run_ranks(what: str, ranks: int, steps: int) -> list[dict[str, Any]]:
    """Run one strategy on processes of this machine. Returns: each rank's row."""
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w", encoding="utf-8") as quiet:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 2000), "OMP_NUM_THREADS": "1"}
        processes = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
            environment = {**os.environ, **where, **own, "NODE_RANK": "0"}
            command = [
                sys.executable,
                "-m",
                "benchmarks.sharding.zero",
                "rank",
                what,
                str(steps),
                f"{folder}/{rank}.pt",
            ]
            processes.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=None))
        codes = [process.wait() for process in processes]
        assert not any(codes), f"a rank of {what} failed"
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(ranks)]


def losses_of(name: str, steps: int) -> Tensor:
    """Losses [rank, step] of two ranks."""
    return torch.tensor([row["losses"] for row in run_ranks(name, 2, steps)], dtype=torch.float64)


def compared(name: str, losses: Tensor, ddp: Tensor) -> dict[str, Any]:
    """Losses of ten steps and DDP's, with the largest relative differences over all ranks."""
    difference = ((losses - ddp) / ddp).abs().amax(0)
    ten = range(len(difference) // 10 - 1, len(difference), len(difference) // 10)
    return {
        "strategy": name, "ranks": len(losses), "steps": len(difference), "shown_steps": [i + 1 for i in ten],
        "losses": [round(float(losses[0, i]), 8) for i in ten],
        "losses_of_ddp": [round(float(ddp[0, i]), 8) for i in ten],
        "difference_at": [float(difference[i]) for i in ten],
        "largest_relative_difference_to_ddp": float(difference.max()), "equal_steps": int((difference == 0).sum()),
    }  # fmt: skip


def beside_deepspeed(stage: int, steps: int, repeats: int) -> dict[str, Any]:
    """Alternate runs of both: step times, bytes between steps without gradients, losses."""
    runs: dict[str, list[list[dict[str, Any]]]] = {f"zero_{stage}": [], f"deepspeed{stage}": []}
    for repeat in range(repeats):
        for name in sorted(runs, reverse=bool(repeat % 2)):
            runs[name].append(run_ranks(name, 2, steps))
    ours, theirs = runs.values()
    ratios = {
        clock: [mine[0][clock] / other[0][clock] for mine, other in zip(ours, theirs, strict=True)]
        for clock in ("step_ms", "cpu_ms")
    }
    losses = [torch.tensor([row["losses"] for row in of[0]]) for of in (ours, theirs)]
    return {
        "strategy": f"zero_{stage}", "beside": theirs[0][0]["strategy"], "ranks": 2, "steps": steps,
        "device": "cpu, one thread a rank", "torch": torch.__version__,
        "step_ms": [row[0]["step_ms"] for row in ours], "step_ms_of_deepspeed": [row[0]["step_ms"] for row in theirs],
        "step_ratio": round(statistics.median(ratios["step_ms"]), 3),
        "step_ratio_spread": [round(pick(ratios["step_ms"]), 3) for pick in (min, max)],
        "cpu_ratio": round(statistics.median(ratios["cpu_ms"]), 3),
        "stored_bytes": ours[0][0]["parameters"] + ours[0][0]["states"],
        "stored_bytes_of_deepspeed": sum(theirs[0][0][key] for key in ("parameters", "masters", "states")),
        "largest_relative_difference": float(((losses[0] - losses[1]) / losses[1]).abs().max()),
    }  # fmt: skip


def work(what: str, steps: int, output: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name, _, stage = what.partition("deepspeed")
    torch.save(train_deepspeed(int(stage), steps) if not name else train(what, steps), output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bytes", "steps", "losses", "deepspeed", "share", "rank"))
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES)[1:], default=list(STAGES)[1:],
                        help="steps of `losses` and `deepspeed`")  # fmt: skip
    args = parser.parse_args()
    if args.what == "rank":
        work(args.rest[0], int(args.rest[1]), args.rest[2])
    elif args.what == "bytes":
        for ranks in (2, 4):
            for name in STAGES:
                for row in run_ranks(name, ranks, 2):
                    found = [row["parameters"], row["gradients"], row["states"]]
                    assert found == row["formula"], row
                    of_time = ("losses", "step_ms", "cpu_ms", "steps")
                    keep_row({"section": "bytes", **{k: v for k, v in row.items() if k not in of_time}}, ROWS)
    elif args.what == "deepspeed":
        for stage in (STAGES[name] for name in args.stages):
            keep_row({"section": "deepspeed", **beside_deepspeed(stage, args.steps, args.repeats)}, ROWS)
    elif args.what == "losses":
        reference = losses_of("ddp", args.steps)
        for name in args.stages:
            keep_row({"section": "losses", **compared(name, losses_of(name, args.steps), reference)}, ROWS)
    elif args.what == "share":
        from lightning_aigc.sharding.stored_bytes import share_saved

        for model, values in MODELS.items():
            for stage in (1, 2, 3):
                for ranks in (2, 4, 8):
                    saved = share_saved(stage, ranks)
                    row = {"model": model, "stage": stage, "ranks": ranks, "saved": round(saved, 4)}
                    row["stored_mib"] = round(16 * values * (1 - saved) / 2**20)
                    # DeepSpeed keeps half weights in addition: 4N + 12N/K, 2N + 14N/K, 16N/K.
                    row["saved_with_half_weights"] = round(1 - HALF[stage] / 16 - (1 - HALF[stage] / 16) / ranks, 4)
                    keep_row({"section": "share", **row}, ROWS)
    else:
        for repeat in range(args.repeats):
            reference = None
            for name in STAGES:
                of_ranks = run_ranks(name, 2, args.steps)
                losses = torch.tensor([row["losses"] for row in of_ranks])
                reference = losses if name == "ddp" else reference
                row = {k: v for k, v in of_ranks[0].items() if k not in ("losses", "rank", "formula")}
                row |= {"repeat": repeat, "last_loss": float(losses[:, -1].mean())}
                if reference is not None:
                    row["largest_relative_difference_to_ddp"] = float(((losses - reference) / reference).abs().max())
                keep_row({"section": "steps", **row}, ROWS)


if __name__ == "__main__":
    main()
