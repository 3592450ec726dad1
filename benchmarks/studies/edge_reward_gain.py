"""Gain of the reward for edges: the ControlNet demo with and without it, with equal seed, noise and steps.

    python -m benchmarks.studies.edge_reward_gain [--output benchmarks/results/studies/edge_reward_gain.jsonl]

The reward begins at `--start`, about where control appears, as in ControlNet++. A run takes ~13 minutes; existing
rows are not computed again. Needs no network.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.edge_run import run_demo
from benchmarks.common.rows import keep_row, read_rows

FIGURES = (
    "edge_f1", "edge_f1_floor", "edge_f1_ceiling", "edge_f1_normalised", "edge_ssim", "control_gap",
    "control_appeared_at_step", "final_loss", "seconds",
)  # fmt: skip


def run(wanted: dict[str, Any], cache: Path) -> dict[str, Any]:
    began = time.perf_counter()
    overrides = {
        "--seed_everything": wanted["seed"],
        "--data.init_args.cache_dir": str(cache),
        "--model.init_args.max_train_steps": wanted["steps"],
        "--model.init_args.validation_steps": 10 * wanted["steps"],
        "--model.init_args.checkpoints_total_limit": 0,
        "--model.init_args.validation_prompts": "[]",
        "--model.init_args.reward_weight": wanted["reward_weight"],
        "--model.init_args.reward_start_step": wanted["reward_start_step"],
        "--model.init_args.reward_max_timestep": wanted["reward_max_timestep"],
    }
    callbacks = {"GradientHealthMonitor": None, "EdgeReport": {"every_n_steps": 0}}  # scores at the end
    summary, _ = run_demo(overrides, callbacks, f"reward {wanted['reward_weight']}, seed {wanted['seed']}")
    return {
        "benchmark": "edge_reward_gain", **wanted, "wall_s": round(time.perf_counter() - began),
        **{name: summary.get(name) for name in FIGURES},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=560)
    parser.add_argument("--start", type=int, default=340, help="the reward's first step")
    parser.add_argument("--max_timestep", type=int, default=200)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42], help="the demo uses 42")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "edge_reward_cache")
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the rows to")
    given = parser.parse_args()
    known = read_rows(given.output) if given.output else []
    for seed in given.seeds:
        for weight in given.weights:
            wanted = {
                "seed": seed, "steps": given.steps, "reward_weight": weight, "reward_start_step": given.start,
                "reward_max_timestep": given.max_timestep,
            }  # fmt: skip
            if not any(wanted.items() <= row.items() for row in known):
                keep_row(run(wanted, given.cache), given.output)


if __name__ == "__main__":
    main()
