"""Import time of lightning_aigc, compared with lightning.pytorch and diffusers.

    python -m benchmarks.end_to_end.import_time

Each import runs in a fresh interpreter; the cases alternate, so that other load affects all of them alike. The baseline
imports the same libraries as a hand-written script: lightning.pytorch, and from diffusers a pipeline and a U-Net (which
import transformers and peft). If torchvision cannot load, the baseline declares its two operators, as lightning_aigc
does. A warm-up pass fills the disk cache and the byte code.

Prints one JSON row per case and appends it to its file: median, minimum and maximum seconds, and the ratio of the
medians.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.common.rows import keep_row

DECLARE_OPERATORS = """
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
BASELINE = """
import lightning.pytorch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
"""
CASES = {
    "import lightning_aigc": "import lightning_aigc",
    "import DiffusionLoRA": "from lightning_aigc.diffusion import DiffusionLoRA",
}


def torchvision_fails() -> bool:
    """Whether `import torchvision` fails in this environment."""
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode != 0


def seconds_of(code: str) -> float:
    """Wall time of the code in a fresh interpreter, without the interpreter's start."""
    timed = f"import time; start = time.perf_counter()\n{code}\nprint(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "end_to_end" / "import_time.jsonl")
    given = parser.parse_args()
    baseline = (DECLARE_OPERATORS if torchvision_fails() else "") + BASELINE
    cases = {"baseline: lightning.pytorch and diffusers": baseline, **CASES}
    for code in cases.values():
        seconds_of(code)
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(given.repeats):
        for case, code in cases.items():
            seconds[case].append(seconds_of(code))
    of_baseline = statistics.median(next(iter(seconds.values())))
    for case, measured in seconds.items():
        row = {
            "case": case,
            "median_s": round(statistics.median(measured), 2),
            "least_s": round(min(measured), 2),
            "most_s": round(max(measured), 2),
            "ratio": round(statistics.median(measured) / of_baseline, 3),
            "repeats": given.repeats,
            "device": f"cpu {platform.machine()}, {os.cpu_count()} cores",
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("torch", "lightning", "diffusers", "peft", "transformers")
            },
        }
        keep_row(row, given.output)


if __name__ == "__main__":
    main()
