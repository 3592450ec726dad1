"""The demo with and without `preserve`: how far its class images move, and what its trigger word learns.

    OMP_NUM_THREADS=1 python -m benchmarks.end_to_end.preservation [--seeds 1 2 3] [--arms none "class 0.3"]
        [--output benchmarks/results/end_to_end/preservation.jsonl]

Each arm is configs/sd_lora_demo.yaml with its class images, and other values of `preserve` and its weight.
`class_moved` is the rise of the class prompts' CLIP-I to the training images, from FineTuneCheck; `learned` the rise of
CLIP-T on prompts of things that no training image shows, from RunReport, with its standard error over 24 images.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common.rows import keep_row
from lightning_aigc.callbacks.fine_tune.check import FILE

CONFIG = Path(__file__).parents[2] / "configs/sd_lora_demo.yaml"
ARMS = ("none", "class 0.3", "class 1.0", "blank 0.3")
"""Kind and weight of what is held."""
MOVED = re.compile(r"class prompts \S+ clip_t (\S+) clip_i")


def run(arm: str, seed: int, root: Path) -> dict[str, Any]:
    """Train once. Returns: a row."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    kind, _, weight = arm.partition(" ")
    model = config["model"]["init_args"]
    del model["preserve"], model["class_word"], model["preserve_weight"]
    if kind != "none":
        model |= {"preserve": kind, "preserve_weight": float(weight)} | ({"class_word": ""} if kind == "class" else {})
    if kind == "blank":
        config["data"]["init_args"]["caption_dropout_rate"] = 0.0
    config["seed_everything"] = seed
    config["trainer"]["default_root_dir"] = str(root / "run")
    config["data"]["init_args"]["cache_dir"] = str(root / "cache")
    (root / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    start = time.perf_counter()
    words = [sys.executable, "-m", "lightning_aigc", "fit", "-c", str(root / "config.yaml")]
    subprocess.run(words, check=True, capture_output=True)
    summary = json.loads((root / "run/summary.json").read_text(encoding="utf-8"))
    found = MOVED.search(json.loads((root / "run" / FILE).read_text(encoding="utf-8"))["summary"])
    assert found is not None
    return {
        "benchmark": "preservation", "device": "cpu", "torch": torch.__version__, "arm": arm, "seed": seed,
        "class_moved": float(found[1]), "learned": round(summary["clip_t_after"] - summary["clip_t_before"], 4),
        "learned_stderr": summary["clip_t_stderr"], "steps": summary["steps"], "verdict": summary["verdict"],
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--output", type=Path, help="a .jsonl file to append a row per run to")
    args = parser.parse_args()
    for seed in args.seeds:
        for arm in args.arms:
            with tempfile.TemporaryDirectory() as root:
                keep_row(run(arm, seed, Path(root)), args.output)


if __name__ == "__main__":
    main()
