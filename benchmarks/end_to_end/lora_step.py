"""Step time of DiffusionLoRA, compared with diffusers' text-to-image LoRA loop on the same work.

    OMP_NUM_THREADS=1 python -m benchmarks.end_to_end.lora_step
    OMP_NUM_THREADS=1 python -m benchmarks.end_to_end.lora_step --precision bf16-mixed --steps 120

The baseline reimplements the loop of diffusers' examples/text_to_image/train_text_to_image_lora.py: accelerate,
a DataLoader that decodes and tokenizes, VAE and text encoder in every step, AdamW, clipping, a constant schedule, a
TensorBoard log and a progress bar. Ours is a real `Trainer.fit` with a config's default callbacks, logger and bar.
Both use the same pipeline, LoRA weights, batches and noise: torch is seeded with the number of each step. Blocks of
steps alternate in one process. A step is timed from the end of one batch to the end of the next, so it includes the
loader, the hooks and the logging.

Prints one JSON row per case and appends it to the rows file: median, quartiles, ratio (the median over blocks of our
time over diffusers'), the same in CPU time, which other processes hardly disturb, and the difference of the two loss
curves. Needs no network.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import lightning.pytorch
import peft
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import RESULTS
from benchmarks.common.diffusers_loop import LEARNING_RATE, MAX_GRAD_NORM, RANK, SEED_OF_STEPS, diffusers_steps
from benchmarks.common.rows import keep_row
from lightning_aigc.callbacks import RunProgress
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.embedded import resolve

MODEL, PICTURES = "embedded:sd", "embedded:brand"


class Alternate(Callback):
    """Time our steps, and after every block run and time the same number of baseline steps."""

    def __init__(self, theirs: Iterator[float], block: int) -> None:
        self.theirs, self.block = theirs, block
        self.ours_s: list[list[float]] = [[]]
        self.theirs_s: list[list[float]] = []
        self.ours_cpu_s: list[float] = []
        self.theirs_cpu_s: list[float] = []
        self.our_losses: list[torch.Tensor] = []
        self.their_losses: list[float] = []
        self.loss: torch.Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last_end, self.last_cpu = time.perf_counter(), time.process_time()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(SEED_OF_STEPS + trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.our_losses.append(outputs["loss"].detach())
        self.ours_s[-1].append(time.perf_counter() - self.last_end)
        self.ours_cpu_s.append(time.process_time() - self.last_cpu)
        if len(self.ours_s[-1]) == self.block:
            block = []
            for _ in range(self.block):
                start, start_cpu = time.perf_counter(), time.process_time()
                self.their_losses.append(next(self.theirs))
                block.append(time.perf_counter() - start)
                self.theirs_cpu_s.append(time.process_time() - start_cpu)
            self.theirs_s.append(block)
            self.ours_s.append([])
        self.last_end, self.last_cpu = time.perf_counter(), time.process_time()


def make_data(
    pictures: str, root: str, given: argparse.Namespace, *, cached: bool, conditions: Path | None = None
) -> ImageCaptionData:
    """The image data, with both caches or none, and with condition files if a folder is given."""
    return ImageCaptionData(
        pictures,
        resolution=64,
        train_batch_size=given.batch,
        cache_latents=cached,
        cache_text_embeddings=cached,
        cache_dir=f"{root}/cache",
        num_workers=0,
        conditioning_data_dir=None if conditions is None else str(conditions),
    )


def run(case: str, cached: bool, given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        plain = make_data(PICTURES, root, given, cached=False)
        theirs = diffusers_steps(plain, Path(root), given.precision, resolve(MODEL))
        alternate = Alternate(theirs, given.block)
        module = DiffusionLoRA(
            MODEL, rank=RANK, learning_rate=LEARNING_RATE, checkpointing_steps=10**9, max_train_steps=given.steps
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            precision=given.precision,
            default_root_dir=root,
            gradient_clip_val=MAX_GRAD_NORM,
            log_every_n_steps=10,
            callbacks=[alternate, RunProgress()],
        )
        torch.manual_seed(0)
        trainer.fit(module, make_data(PICTURES, root, given, cached=cached))
    return summarize(case, alternate, given)


def summarize(case: str, measured: Alternate, given: argparse.Namespace) -> dict[str, Any]:
    warm = given.warmup_blocks
    ours_s, theirs_s = measured.ours_s[warm : len(measured.theirs_s)], measured.theirs_s[warm:]
    ratios = [statistics.median(o) / statistics.median(t) for o, t in zip(ours_s, theirs_s, strict=True)]
    skipped = warm * measured.block
    cpu = [statistics.median(seconds[skipped:]) for seconds in (measured.ours_cpu_s, measured.theirs_cpu_s)]
    ours = torch.stack(measured.our_losses)[: len(measured.their_losses)].double()
    theirs = torch.tensor(measured.their_losses).double()
    apart = (ours - theirs).abs()

    def milliseconds(blocks: list[list[float]]) -> dict[str, float]:
        low, middle, high = statistics.quantiles([1000 * s for block in blocks for s in block], n=4)
        return {"median": round(middle, 1), "quartiles": [round(low, 1), round(high, 1)]}  # type: ignore[dict-item]

    return {
        "case": case,
        "ours_ms": milliseconds(ours_s),
        "theirs_ms": milliseconds(theirs_s),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_blocks": [round(min(ratios), 3), round(max(ratios), 3)],
        "cpu_ms": {"ours": round(1000 * cpu[0], 1), "theirs": round(1000 * cpu[1], 1)},
        "cpu_ratio": round(cpu[0] / cpu[1], 3),
        "loss_max_abs_difference": float(f"{apart.max():.2e}"),
        "loss_mean_relative_difference": float(f"{(apart / theirs).mean():.2e}"),
        "loss_mean_ours": round(float(ours.mean()), 5),
        "loss_mean_theirs": round(float(theirs.mean()), 5),
        "steps": given.steps,
        "block": given.block,
        "warmup_blocks": warm,
        "batch": given.batch,
        "precision": given.precision,
        "device": f"cpu {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {m.__name__: m.__version__ for m in (torch, lightning.pytorch, diffusers, peft, accelerate)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--warmup_blocks", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--case", choices=("caches off", "caches on"), help="one case only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "end_to_end" / "lora_step.jsonl")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore")
    for case in ("caches off", "caches on"):
        if given.case in (None, case):
            keep_row(run(case, case == "caches on", given), given.output)


if __name__ == "__main__":
    main()
