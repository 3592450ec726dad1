"""Verdict of an unedited `lightning init` on folders of photographs that no constant was tuned on.

    python -m benchmarks.end_to_end.photographs            # the config of `lightning init` on two folders
    python -m benchmarks.end_to_end.photographs --targets  # the same steps with other layers and rates

The photographs are crops of scikit-image's; the base is the tiny Stable Diffusion, which was trained without any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
import yaml
from PIL import Image

from benchmarks.common.rows import keep_row

FOLDERS = {
    "cup": (skimage.data.coffee, 18, (230, 390), ["a zorp cup on a table"]),
    "cat": (skimage.data.chelsea, 24, (150, 290), ["a blimp cat looking", "close photo of a blimp cat"]),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "attention, 1e-4": {"lora_targets": ["attention"], "learning_rate": 1e-4},
    "attention, 1e-3": {"lora_targets": ["attention"], "learning_rate": 1e-3},
    "all layers, 1e-3": {},
}


def make_folder(name: str, root: Path) -> Path:
    """Write crops of one photograph, with captions."""
    photograph, count, sides, captions = FOLDERS[name]
    image, draw = Image.fromarray(photograph()), np.random.default_rng(5)
    folder = root / name
    folder.mkdir()
    for number in range(count):
        side = int(draw.integers(*sides))
        left, top = (int(draw.integers(0, whole - side)) for whole in image.size)
        crop = image.crop((left, top, left + side, top + side))
        if number % 2:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        crop.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(captions[number % len(captions)])
    return folder


def lightning(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "lightning_aigc", *map(str, words)], check=True, capture_output=True)


def run(name: str, variant: str, root: Path) -> dict[str, Any]:
    """Run once. Returns: a row with the verdict and the figures behind it."""
    folder, config = make_folder(name, root), root / "my.yaml"
    lightning("init", folder, "-o", config, "--base", "embedded:sd")
    values = yaml.safe_load(config.read_text())
    values["trainer"]["default_root_dir"] = str(root / "run")
    values["model"]["init_args"] |= VARIANTS.get(variant, {})
    config.write_text(yaml.safe_dump(values))
    start = time.perf_counter()
    lightning("fit", "-c", config)
    record = json.loads((root / "run" / "report.json").read_text())
    summary = json.loads((root / "run" / "summary.json").read_text())
    return {
        "folder": name, "variant": variant, "verdict": summary["verdict_kind"], "sentence": summary["verdict"],
        "steps": summary["steps"], "seconds": round(time.perf_counter() - start), "best_step": summary["best_step"],
        "recognition": record["looks"]["recognition"], "recognition_stderr": record["looks"]["recognition_stderr"],
        "others_changed": record["looks"]["others_changed"], "ruined_after": record["looks"]["ruined_after"],
        "clip_i": [summary["clip_i_before"], summary["clip_i_after"]], "rate_changes": record["rate_changes"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--targets", action="store_true", help="other layers and rates on the first folder")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append a row per run to")
    args = parser.parse_args()
    for name in ["cup"] if args.targets else list(FOLDERS):
        for variant in VARIANTS if args.targets else ["unedited"]:
            with tempfile.TemporaryDirectory() as root:
                row = run(name, variant, Path(root))
            keep_row(row, args.output)


if __name__ == "__main__":
    main()
