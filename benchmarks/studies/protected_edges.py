"""Gain of protecting the edge path: ControlNets trained with every lossy option, with protection and without.

    python -m benchmarks.studies.protected_edges [--output benchmarks/results/studies/protected_edges.jsonl]
    # print the table of controlnet.md
    python -m benchmarks.studies.protected_edges --table benchmarks/results/studies/protected_edges.jsonl

Each run is configs/controlnet_demo.yaml on two ranks, half the batch each. Lossy: attention_grad_density and
input_grad_density 0.05, npu_sparse in mode sparse with 0.75 of the gradient waiting, and, with --precision
bf16-forward-fp16-backward, float16 products in backward. Dense: none of these. A run takes ~15 minutes;
existing rows are not computed again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.edge_run import run_demo
from benchmarks.common.rows import keep_row, read_rows

VARIANTS = ("unprotected", "protected", "dense")
FIGURES = (
    "edge_f1", "edge_f1_floor", "edge_f1_ceiling", "edge_f1_normalised", "edge_ssim", "control_gap",
    "control_appeared_at_step", "final_loss", "seconds",
)  # fmt: skip


def overrides(variant: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Command-line arguments for one run."""
    plugin = "--trainer.plugins.init_args"
    wanted: dict[str, Any] = {
        "--seed_everything": seed,
        "--trainer.devices": 2,
        "--data.init_args.train_batch_size": 8,
        "--data.init_args.cache_dir": f"{given.cache}",
        "--data.init_args.validation_split": 0.1,
        "--model.init_args.max_train_steps": given.steps,
        "--model.init_args.validation_steps": 10 * given.steps,
        "--model.init_args.checkpoints_total_limit": 0,
        "--model.init_args.validation_prompts": "[]",
        "--model.init_args.protect_edges": "true" if variant == "protected" else "false",
        f"{plugin}.memory": "balanced",
        f"{plugin}.precision": given.precision,
    }
    if variant != "dense":
        wanted |= {f"{plugin}.input_grad_density": 0.05, f"{plugin}.attention_grad_density": 0.05}
        wanted |= {"--trainer.strategy": "NPUSparseStrategy", "--trainer.strategy.init_args.mode": "sparse"}
        wanted |= {"--trainer.strategy.init_args.sparsity": 0.75}
        if variant == "unprotected":
            wanted |= {"--trainer.strategy.init_args.protect": "[]"}
    else:
        wanted |= {"--trainer.strategy": "ddp"}
    return wanted


def run(variant: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    callbacks = {"GradientHealthMonitor": None, "EdgeReport": {"every_n_steps": 0}}  # scores at the end
    summary, _ = run_demo(overrides(variant, seed, given), callbacks, f"{variant}, seed {seed}")
    return {
        "benchmark": "protected_edges", "variant": variant, "seed": seed, "steps": given.steps,
        "precision": given.precision, "ranks": 2, "wall_s": round(time.perf_counter() - began),
        **{name: summary.get(name) for name in FIGURES},
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as Markdown, one line per variant with the mean of its seeds."""
    lines = ["| variant | edge F1 by seed | mean | normalised, mean | control appeared at |", "|" + "---|" * 5]
    for variant in reversed(VARIANTS):
        of = sorted((row for row in rows if row["variant"] == variant), key=lambda row: int(row["seed"]))
        if of:
            scores = [float(row["edge_f1"]) for row in of]
            normalised = statistics.mean(float(row["edge_f1_normalised"]) for row in of)
            steps = ", ".join(
                "-" if r["control_appeared_at_step"] is None else str(r["control_appeared_at_step"]) for r in of
            )
            by_seed = ", ".join(f"{score:.3f}" for score in scores)
            lines.append(f"| {variant} | {by_seed} | {statistics.mean(scores):.3f} | {normalised:.3f} | {steps} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "protected_edges_cache")
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the rows to")
    parser.add_argument("--table", type=Path, metavar="ROWS", help="print the Markdown table of these rows")
    given = parser.parse_args()
    if given.table:
        print(table(read_rows(given.table)))
        return
    known = read_rows(given.output) if given.output else []
    for seed in given.seeds:
        for variant in given.variants:
            wanted = {"variant": variant, "seed": seed, "steps": given.steps, "precision": given.precision}
            if not any(wanted.items() <= row.items() for row in known):
                keep_row(run(variant, seed, given), given.output)


if __name__ == "__main__":
    main()
