"""Throughput of ImageCaptionData, cold, warm and uncached, compared with a plain dataset as in diffusers' script.

    python -m benchmarks.data.loader --resolution 64 --images 480 --batch 16
    python -m benchmarks.data.loader --resolution 512 --images 64 --batch 4 --photo 2000 1500

Prints one JSON row per case: images per second (median, minimum and maximum of the repeats), seconds per batch,
versions and device. The baseline decodes each image with Pillow in __getitem__, resizes, crops and scales it, and
collates with the default DataLoader, as diffusers' train_text_to_image_lora.py does through torchvision. The encoder of
the cached cases is one convolution, so `cold` measures decoding and disk, not a VAE. Needs no network.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.rows import keep_row
from lightning_aigc.data import ImageCaptionData


class OneConvolution:
    """Cheapest encoder with the right shapes: latents 8 times smaller, 77 tokens."""

    def __init__(self, width: int = 64) -> None:
        self.width = width
        self.weight = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)) / 14

    def encoder_identity(self) -> dict[str, str]:
        return {"vae": "one convolution float32", "text": f"lengths {self.width}"}

    def encode_pixels(self, pixels_B3HW: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(pixels_B3HW, self.weight, stride=8)

    def encode_captions(self, captions: list[str]) -> dict[str, Tensor]:
        return {
            "prompt_embeds": torch.tensor([len(c) for c in captions]).float()[:, None, None].expand(-1, 77, self.width)
        }


class PlainDataset(Dataset[dict[str, Any]]):
    """Baseline dataset: every image is opened, resized, cropped and scaled on access."""

    def __init__(self, folder: Path, resolution: int) -> None:
        self.paths = sorted(folder.glob("*.jpg"))
        self.resolution = resolution

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, side = self.paths[index], self.resolution
        image = Image.open(path).convert("RGB")
        scale = side / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
        return {"pixel_values": pixels, "captions": path.with_suffix(".txt").read_text()}


def draw_photos(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Write JPEGs of coloured noise at several scales, portrait and landscape, each with a caption."""
    random = np.random.default_rng(0)
    for number in range(count):
        shape = size if number % 3 else size[::-1]
        coarse = Image.fromarray(random.integers(0, 255, (24, 24, 3), dtype=np.uint8)).resize(
            shape, Image.Resampling.BICUBIC
        )
        fine = random.integers(-12, 12, (shape[1], shape[0], 3))
        pixels = np.clip(np.asarray(coarse) + fine, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:05}.jpg", quality=90)
        (folder / f"{number:05}.txt").write_text(f"a photo of thing {number}")


def one_epoch(loader: Iterable[dict[str, Any]]) -> tuple[int, int, float]:
    """Iterate once. Returns: images, batches, seconds."""
    images, batches, start = 0, 0, time.perf_counter()
    for batch in loader:
        images += len(batch["captions"])
        batches += 1
    return images, batches, time.perf_counter() - start


def report(case: str, passes: list[tuple[int, int, float]], given: argparse.Namespace) -> None:
    rates = sorted(images / seconds for images, _, seconds in passes)
    row = {
        "case": case,
        "images_per_s": round(statistics.median(rates), 1),
        "least": round(rates[0], 1),
        "most": round(rates[-1], 1),
        "ms_per_batch": round(1000 * statistics.median(seconds / batches for _, batches, seconds in passes), 3),
        "repeats": len(passes),
        "resolution": given.resolution,
        "images": given.images,
        "batch": given.batch,
        "photo": given.photo,
        "workers": given.workers,
        "device": f"cpu {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "pillow": PIL.__version__,
    }
    keep_row(row, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--images", type=int, default=480)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--photo", type=int, nargs=2, default=[96, 72], metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--workers", type=int, default=0, help="for the uncached cases and the baseline")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "photos"
        folder.mkdir()
        draw_photos(folder, given.images, tuple(given.photo))

        def data(cached: bool, check_again: bool = False) -> ImageCaptionData:
            cache = Path(root) / ("cache-2" if check_again else "cache")
            return ImageCaptionData(
                str(folder),
                resolution=given.resolution,
                train_batch_size=given.batch,
                bucket_reso_steps=min(64, max(8, given.resolution // 4 // 8 * 8)),
                cache_latents=cached,
                cache_text_embeddings=cached,
                cache_dir=str(cache),
                num_workers=None if cached else given.workers,
            )

        time_loaders(folder, data, given)


def time_loaders(folder: Path, data: Callable[..., ImageCaptionData], given: argparse.Namespace) -> None:
    """Time the image check, the plain dataset, and `data(cached)` without and with caches; print a row for each."""
    start = time.perf_counter()
    data(False, check_again=True).prepare()
    report("check every image before training", [(given.images, 1, time.perf_counter() - start)], given)

    plain = DataLoader(
        PlainDataset(folder, given.resolution), batch_size=given.batch, shuffle=True, num_workers=given.workers
    )
    one_epoch(plain)
    report("baseline: plain Pillow dataset", [one_epoch(plain) for _ in range(given.repeats)], given)

    uncached = data(False)
    uncached.prepare()
    loader = uncached.loader()
    one_epoch(loader)
    report("uncached", [one_epoch(loader) for _ in range(given.repeats)], given)

    start = time.perf_counter()
    data(True).prepare(OneConvolution())
    report("cold: fill both caches", [(given.images, 1, time.perf_counter() - start)], given)
    start = time.perf_counter()
    warm = data(True)
    warm.prepare(OneConvolution())
    report("warm start: index, checks and caches into memory", [(given.images, 1, time.perf_counter() - start)], given)
    loader = warm.loader()
    one_epoch(loader)
    report("warm: batches from memory", [one_epoch(loader) for _ in range(given.repeats)], given)
    for cache in (warm.caches.latents, warm.caches.embeddings):
        assert cache is not None
        cache._memory.clear()
    report("warm: batches from disk", [one_epoch(loader) for _ in range(given.repeats)], given)


if __name__ == "__main__":
    main()
