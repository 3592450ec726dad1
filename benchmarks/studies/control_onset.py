"""Step at which control appears, by ControlGuard and by the edges of sampled images: one run of the ControlNet demo.

    python -m benchmarks.studies.control_onset [--output benchmarks/results/studies/control_onset.jsonl]

The guard compares losses and samples no images. Here images are also sampled and scored every `--every` steps. The jump
of the edge F1 is the first score above the mean of the first and the last score. Needs no network.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.edge_run import run_demo
from benchmarks.common.rows import keep_row

MUST_AGREE_WITHIN = 100
"""Steps between the guard's answer and the jump."""


def jump_step(scores: list[tuple[int, float]]) -> int:
    """Step of the first score above the mean of the first and the last score.

    >>> jump_step([(40, 0.4), (80, 0.41), (120, 0.6), (160, 0.7)])
    120
    """
    (_, first), (_, last) = scores[0], scores[-1]
    return next(step for step, score in scores if score >= (first + last) / 2)


def logged(rows: list[dict[str, str]], name: str) -> list[tuple[int, float]]:
    """Steps and values of a logged metric."""
    return [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]


def run(given: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    overrides = {
        "--seed_everything": given.seed,
        "--trainer.logger": "CSVLogger",
        "--trainer.logger.init_args.save_dir": ".",
        "--data.init_args.cache_dir": str(given.cache),
        "--model.init_args.max_train_steps": given.steps,
        "--model.init_args.validation_steps": 10 * given.steps,
        "--model.init_args.checkpoints_total_limit": 0,
        "--model.init_args.validation_prompts": "[]",
        "--model.init_args.num_inference_steps": given.inference_steps,
    }
    report = {"every_n_steps": given.every, "num_images": given.images, "shown": 0}
    summary, rows = run_demo(overrides, {"GradientHealthMonitor": None, "EdgeReport": report}, f"seed {given.seed}")
    scores, guard = logged(rows, "edge_f1"), summary["control_appeared_at_step"]
    jump = jump_step(scores)
    return {
        "benchmark": "control_onset", "seed": given.seed, "steps": given.steps, "images": given.images,
        "inference_steps": given.inference_steps, "guard_step": guard, "f1_jump_step": jump,
        "apart": None if guard is None else abs(guard - jump), "edge_f1": [[s, round(v, 4)] for s, v in scores],
        "edge_f1_floor": summary["edge_f1_floor"], "edge_f1_ceiling": summary["edge_f1_ceiling"],
        "control_gap": [[step, round(value, 4)] for step, value in logged(rows, "control_gap")],
        "wall_s": round(time.perf_counter() - began),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=560)
    parser.add_argument("--seed", type=int, default=42, help="the demo uses 42")
    parser.add_argument("--every", type=int, default=40, help="steps between scores")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--inference_steps", type=int, default=8)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "control_onset_cache")
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the row to")
    given = parser.parse_args()
    row = run(given)
    keep_row(row, given.output)
    raise SystemExit(row["apart"] is None or row["apart"] > MUST_AGREE_WITHIN)


if __name__ == "__main__":
    main()
