"""Image scores of each gradient sync mode: the embedded Stable Diffusion learns the demo's brand on several ranks.

Two jobs: the full U-Net on four ranks, and its LoRA on two, or both on `--ranks`. All modes take equal steps with the
same images, noise and fixed rate (the best of `--rates` for dense, with a seed outside the table). A row has CLIP-T and
CLIP-I of three prompts that no training image shows, and the loss on held-out images at fixed noise. The ranks are real
processes of one thread that communicate over loopback. Existing rows are not computed again.

    python -m benchmarks.gradient_sync.image_quality [--jobs full lora] [--modes dense int3 ...] [--seeds 0 1 2]
        [--output FILE]
    python -m benchmarks.gradient_sync.image_quality --jobs lora --modes dense "local 15 top_k 1712" --steps 480
    python -m benchmarks.gradient_sync.image_quality --rates 2e-4 5e-4 1e-3 --jobs full      # rates of dense, seed 9
    python -m benchmarks.gradient_sync.image_quality --table                                 # Markdown from the rows
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from benchmarks import RESULTS
from benchmarks.common.forked_child import import_once
from benchmarks.common.rows import keep_row, read_rows
from benchmarks.end_to_end.article_jobs import FEW_STEPS, TARGETS
from benchmarks.end_to_end.article_ours import FullUNet, LoRA
from benchmarks.end_to_end.article_table import free_port
from lightning_aigc.callbacks.sampling.judges import PromptJudge
from lightning_aigc.callbacks.sampling.pairs import make_pairs, sample_on_all_ranks
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.strategies import NPUSparseStrategy

ROWS = RESULTS / "gradient_sync" / "image_quality.jsonl"
TOP_K: dict[str, Any] = {"mode": "local", "local_steps": 15, "average": "top_k", "top_k": 1712}
MODES: dict[str, dict[str, Any]] = {
    "dense": {"mode": "dense"},
    "int8": {"mode": "int8"},
    "int4": {"mode": "int4"},
    "int3": {"mode": "int3"},
    "ternary": {"mode": "ternary"},
    "two_four": {"mode": "two_four"},
    "sparse 0.75": {"mode": "sparse"},
    "sparse_int8 0.95": {"mode": "sparse_int8", "sparsity": 0.95},
    "local 1": {"mode": "local", "local_steps": 1},
    "local 4 int3": {"mode": "local", "local_steps": 4, "average": "int3"},
    "local 5": {"mode": "local", "local_steps": 5},
    "local 8": {"mode": "local", "local_steps": 8},
    "local 15": {"mode": "local", "local_steps": 15},
    "local 15, momentum 0.5": {"mode": "local", "local_steps": 15, "outer_momentum": 0.5},
    "local 30": {"mode": "local", "local_steps": 30},
    "local 15, momentum 0.3": {"mode": "local", "local_steps": 15, "outer_momentum": 0.3},
    "local 15 top_k 1712": TOP_K,
    "local 15 top_k 1712, momentum 0.1": TOP_K | {"outer_momentum": 0.1},
    "local 15 top_k 1712, momentum 0.3": TOP_K | {"outer_momentum": 0.3},
    "local 15 top_k 1712, momentum 0.4": TOP_K | {"outer_momentum": 0.4},
    "local 15 top_k 1712, momentum 0.5": TOP_K | {"outer_momentum": 0.5},
    "local 15 top_k 1712, outer rate 1.7": TOP_K | {"outer_learning_rate": 1.7},
    "local 15 top_k 1712, outer rate 2": TOP_K | {"outer_learning_rate": 2.0},
    "local 15 top_k 1712, outer rate 2.5": TOP_K | {"outer_learning_rate": 2.5},
    "local 15 top_k 1712, outer rate 3": TOP_K | {"outer_learning_rate": 3.0},
    "local 15 top_k 1712, outer rate 1.3 at 1.5 of the rate": TOP_K | {"outer_learning_rate": 1.3},
    "local 15 top_k 1712, outer rate 0.7, momentum 0.6": TOP_K | {"outer_learning_rate": 0.7, "outer_momentum": 0.6},
    "local 15 top_k 1712, overlapped": TOP_K | {"overlap_average": True},
}
TIMES_THE_RATE = {"local 15 top_k 1712, outer rate 1.3 at 1.5 of the rate": 1.5}
"""Modes whose ranks step at another rate than the row's."""
RANKS = {"full": 4, "lora": 2}
RATES = {"full": 1e-3, "lora": 6e-3}
"""Learning rate with the best CLIP-T for dense with seed 9, of three."""
BATCH = 4
"""Images of a rank in a step."""
PROMPTS = ["a zorp umbrella", "a zorp teapot", "a zorp guitar"]
IMAGES = 24
"""Images per prompt; one in a short training, which only checks that everything runs."""
LIMIT_S = 3600
JOB = ("job", "ranks", "batch_per_rank", "steps", "rate")
"""Fields in which the rows of a table are alike."""


def train(cell: dict[str, Any], row_file: Path) -> None:
    """One rank of one training; rank 0 writes the row."""
    warnings.simplefilter("ignore")
    scores: dict[str, list[float]] = {}

    class Score(Callback):
        """Score the last weights, and count the bytes that one rank sent."""

        sent = 0.0

        def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
            judge = PromptJudge("embedded:clip", None)
            judge.begin(trainer, 64, pl_module.device)
            strategy: Any = trainer.strategy
            self.sent = float(strategy.sync.groups.traffic.total()) if strategy.sync is not None else 0.0
            seeds = range(7000, 7000 + (IMAGES if steps >= FEW_STEPS else 1))
            drawn = sample_on_all_ranks(trainer, pl_module, make_pairs(PROMPTS, seeds), judge)
            scores.update({name: values.tolist() for name, values in drawn.scores.items()})

    seed, steps, world = int(cell["seed"]), int(cell["steps"]), int(cell["ranks"])
    seed_everything(seed, verbose=False)
    shared: dict[str, Any] = {
        "learning_rate": cell["rate"] * TIMES_THE_RATE.get(cell["mode"], 1.0), "lr_scheduler": "cosine",
        "lr_warmup_steps": 10, "max_train_steps": steps,
        "snr_gamma": 5.0, "use_ema": False, "validation_prompts": PROMPTS, "num_inference_steps": 10,
        "guidance_scale": 3.0, "validation_steps": steps, "sample_time_limit_s": 1e6,
    }  # fmt: skip
    module = (
        FullUNet(pretrained_model_name_or_path="embedded:sd", **shared)
        if cell["job"] == "full"
        else LoRA("embedded:sd", rank=16, lora_targets=TARGETS, **shared)
    )
    data = ImageCaptionData(
        "embedded:brand", class_data_dir="embedded:prior", prior_ratio=0.5, resolution=64,
        train_batch_size=int(cell["batch_per_rank"]), trigger_word="zorp", cache_dir=cell["cache"], num_workers=0,
        seed=seed, validation_split=0.1,
    )  # fmt: skip
    score = Score()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            default_root_dir=folder, accelerator="cpu", devices=1, num_nodes=world, max_steps=steps, max_epochs=-1,
            strategy=NPUSparseStrategy(process_group_backend="gloo", hierarchical=False, **MODES[cell["mode"]]),
            gradient_clip_val=1.0, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, callbacks=[score], use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, data)
    dense = 8 * (world - 1) / world * sum(p.numel() for p in module.trainable_parameters()) * steps
    if trainer.global_rank == 0:
        row = {"benchmark": "picture_quality", **cell}
        del row["cache"]
        row |= {"device": "cpu", "torch": torch.__version__}
        row |= {name: round(statistics.mean(values), 4) for name, values in scores.items()}
        row |= {"clip_t_se": round(statistics.stdev(scores["clip_t"]) / len(scores["clip_t"]) ** 0.5, 4)}
        row |= {"val_loss": round(float(trainer.callback_metrics["val_loss"]), 5)}
        row |= {"sent_ratio": round(score.sent / dense, 4) if cell["mode"] != "dense" else 1.0}
        row_file.write_text(json.dumps(row), encoding="utf-8")
    trainer.strategy.barrier()
    os._exit(0)


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Train on all ranks, forked so that they share the imports. Raises: SystemExit with the logs if a rank failed."""
    world, port = int(cell["ranks"]), free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(world)]
        ranks = [fork_rank(cell, rank, world, port, logs[rank], Path(folder, "row.json")) for rank in range(world)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        if any(codes):
            raise SystemExit("\n".join(f"rank {i}: {log.read_text()[-1500:]}" for i, log in enumerate(logs)))
        row: dict[str, Any] = json.loads(Path(folder, "row.json").read_text(encoding="utf-8"))
        return row


def fork_rank(cell: dict[str, Any], rank: int, world: int, port: int, log: Path, row_file: Path) -> int:
    """Start one rank. Returns: its process id."""
    child = os.fork()
    if child:
        return child
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ |= {
            "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
            "RANK": str(rank), "NODE_RANK": str(rank), "LOCAL_RANK": "0",
        }  # fmt: skip
        signal.alarm(LIMIT_S)
        train(cell, row_file)
    except BaseException:  # a forked child must never return into its parent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)  # `train` ends a finished rank


def markdown(rows: list[dict[str, Any]]) -> str:
    """One table per job, ranks, batch and steps: means over the seeds, with their range."""
    lines = []
    rows = [row for row in rows if row["seed"] != 9]
    for key in dict.fromkeys(tuple(row[name] for name in JOB) for row in rows):
        of_job = [row for row in rows if tuple(row[name] for name in JOB) == key]
        job, ranks, batch, steps, rate = key
        lines += [
            f"**{job}, {ranks} ranks of {batch} images, {steps} steps at {rate:g}**",
            "",
            "| mode | seeds | bytes / dense | CLIP-T | CLIP-I | held-out loss / dense |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        dense = {row["seed"]: row["val_loss"] for row in of_job if row["mode"] == "dense"}
        for mode in dict.fromkeys([*MODES, *(row["mode"] for row in of_job)]):  # those of older formats, too
            found = [row for row in of_job if row["mode"] == mode]
            if not found:
                continue
            ratios = [row["val_loss"] / dense[row["seed"]] for row in found if row["seed"] in dense]
            cells = [mode, str(len(found)), f"{statistics.mean(row['sent_ratio'] for row in found):.4f}"]
            cells += [spread([row[name] for row in found if name in row]) for name in ("clip_t", "clip_i")]
            cells += [spread(ratios)]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Mean and range, such as `0.612 (0.601 to 0.623)`; empty for no values."""
    return "" if not values else f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=list(RANKS), choices=list(RANKS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, help="try these for dense, with seed 9")
    parser.add_argument("--rate", type=float, help="learning rate of every job; each job's own where left out")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--ranks", type=int, help="ranks of every job; each job's own where left out")
    parser.add_argument("--batch", type=int, default=BATCH, help="images of a rank in a step")
    parser.add_argument("--output", type=Path, default=ROWS)
    parser.add_argument("--table", action="store_true", help="print the existing rows as Markdown")
    options = parser.parse_args()
    if options.table:
        print(markdown(read_rows(options.output)))
        return 0
    wanted = [
        {
            "job": job,
            "mode": mode,
            "rate": rate,
            "seed": seed,
            "steps": options.steps,
            "ranks": options.ranks or RANKS[job],
            "batch_per_rank": options.batch,
        }
        for seed in ([9] if options.rates else options.seeds)
        for job in options.jobs
        for mode in (["dense"] if options.rates else options.modes)
        for rate in options.rates or [options.rate or RATES[job]]
    ]
    torch.set_num_threads(1)
    import_once()
    with tempfile.TemporaryDirectory() as cache:
        for cell in wanted:
            if any(all(row[key] == value for key, value in cell.items()) for row in read_rows(options.output)):
                continue
            row = run_cell(cell | {"cache": cache})
            keep_row(row, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
