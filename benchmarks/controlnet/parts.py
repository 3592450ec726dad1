"""CPU time of each part of a step of diffusers' train_controlnet.py, and the share that caches can save.

    OMP_NUM_THREADS=1 python -m benchmarks.controlnet.parts [--output benchmarks/results/controlnet/parts.jsonl]

The tiny model, batches of 16, as in step.py. Caches replace reading, autoencoder and text encoder; forward, backward
and optimizer remain on both sides, and their share is the lowest ratio of step times that caches alone can reach. Needs
no network.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import ControlNetModel, DDPMScheduler, StableDiffusionPipeline
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms.functional import to_pil_image

from benchmarks.common.controlnet_loop import HINT_CHANNELS, PicturesAndConditions
from benchmarks.common.diffusers_loop import LEARNING_RATE, MAX_GRAD_NORM, collate
from benchmarks.common.embedded_images import embedded_images
from benchmarks.common.rows import keep_row
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.embedded import resolve
from lightning_aigc.metrics import canny

MODEL, PICTURES = "embedded:sd", "embedded:prior"
CACHED = ("read", "autoencoder", "text_encoder")
T = TypeVar("T")


class Timed:
    """CPU times of each part of a step, ms."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = {}

    def __call__(self, part: str, compute: Callable[[], T]) -> T:
        began = time.process_time()
        found = compute()
        self.ms.setdefault(part, []).append(1000 * (time.process_time() - began))
        return found


def measure(given: argparse.Namespace) -> Timed:
    pipeline = StableDiffusionPipeline.from_pretrained(str(resolve(MODEL)), safety_checker=None)
    schedule = DDPMScheduler.from_config(pipeline.scheduler.config)
    unet, vae, text_encoder = pipeline.unet, pipeline.vae, pipeline.text_encoder
    for module in (unet, vae, text_encoder):
        module.requires_grad_(False)
    controlnet: Any = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=HINT_CHANNELS).train()
    optimizer = torch.optim.AdamW(controlnet.parameters(), lr=LEARNING_RATE)
    timed = Timed()
    with tempfile.TemporaryDirectory() as root:
        files = sorted(resolve(PICTURES).glob("*.png"))
        for file, edge in zip(files, canny(embedded_images(PICTURES)), strict=True):
            to_pil_image(edge).save(Path(root) / file.name)
        data = ImageCaptionData(PICTURES, resolution=64, train_batch_size=given.batch, cache_dir=root)
        samples = data.index().samples
        items = [(Path(sample.path), sample.caption) for sample in samples]
        shown = PicturesAndConditions(items, Path(root), pipeline.tokenizer, 64)
        loader: Any = DataLoader(shown, batch_size=given.batch, collate_fn=collate, num_workers=0, drop_last=True)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for _ in range(given.steps):
            batch = timed("read", lambda: next(batches))
            step(timed, batch, controlnet, unet, vae, text_encoder, schedule, optimizer)
    return timed


def step(
    timed: Timed, batch: Any, controlnet: Any, unet: Any, vae: Any, text_encoder: Any, schedule: Any, optimizer: Any
) -> None:
    encoded = timed("autoencoder", lambda: vae.encode(batch["pixel_values"]).latent_dist.sample())
    latents = encoded * vae.config.scaling_factor
    hidden = timed("text_encoder", lambda: text_encoder(batch["input_ids"], return_dict=False)[0])
    noise, timesteps = torch.randn_like(latents), torch.randint(0, schedule.config.num_train_timesteps, (len(latents),))
    noisy = schedule.add_noise(latents, noise, timesteps)
    down, middle = timed(
        "controlnet_forward",
        lambda: controlnet(noisy, timesteps, hidden, controlnet_cond=batch["conditioning"], return_dict=False),
    )
    residuals = {"down_block_additional_residuals": list(down), "mid_block_additional_residual": middle}
    predicted = timed("unet_forward", lambda: unet(noisy, timesteps, hidden, return_dict=False, **residuals)[0])
    timed("backward", lambda: torch.autograd.backward(F.mse_loss(predicted, noise)))

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(controlnet.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    timed("optimizer", update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the row to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    parts = {name: statistics.median(ms[given.warmup :]) for name, ms in measure(given).ms.items()}
    whole = sum(parts.values())
    row = {
        "benchmark": "controlnet_parts", "batch": given.batch, "steps": given.steps,
        "cpu_ms": {name: round(ms, 1) for name, ms in parts.items()}, "whole_cpu_ms": round(whole, 1),
        "share_caches_save": round(sum(parts[name] for name in CACHED) / whole, 3),
        "share_both_do": round(sum(ms for name, ms in parts.items() if name not in CACHED) / whole, 3),
        "versions": {"torch": torch.__version__},
    }  # fmt: skip
    keep_row(row, given.output)


if __name__ == "__main__":
    main()
