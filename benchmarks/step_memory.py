"""The most memory that one Stable Diffusion 1.5 LoRA step holds, ours beside diffusers' text-to-image LoRA script.

    python benchmarks/step_memory.py WORKDIR [--batch 4] [--rank 64] [--device cpu|cuda] [--variants diffusers lean max]

A pipeline of SD 1.5's shapes with random weights (made in WORKDIR, 2.1 GB) takes two steps in each variant, every one
in a process of its own; the second is watched: forward, backward, clipping and AdamW, with all that is resident. Ours
is `Trainer.fit` with what configs/sd_lora.yaml says, and `NAME-uncached` without its caches; theirs is bf16, and
`diffusers-float32` what their script does when nobody names a precision. On CUDA the figure is the
allocator's. On a CPU every storage is counted that is alive when an operator returns. That leaves out what an operator
allocates and frees inside itself; encoders that are parked in host memory are not counted either. One JSON object a
line.
"""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split

import argparse
import gc
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lora_step import diffusers_steps
from real_size import build_pipeline
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.precision import FusedBackwardPrecision

MIB = 2**20
VARIANTS = (
    *("diffusers", "off", "balanced", "lean", "max"),
    *("diffusers-float32", "off-uncached", "lean-uncached", "max-uncached"),
)


class PeakOfStorages(TorchDispatchMode):
    """Between `start` and `stop`: the most bytes alive at the end of any operator, what was resident included."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.resident_bytes = self.peak_bytes = 0

    def start(self, elsewhere: list[torch.nn.Module]) -> None:
        """Take every tensor there is as resident, but for those of modules that a device would not hold."""
        parked = {t.untyped_storage()._cdata for part in elsewhere for t in (*part.parameters(), *part.buffers())}
        gc.collect()
        tensors = [held for held in gc.get_objects() if issubclass(type(held), Tensor)]
        self._add([tensor for tensor in tensors if tensor.untyped_storage()._cdata not in parked])
        self.resident_bytes = self.peak_bytes = self._count()
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self._add([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        self.peak_bytes = max(self.peak_bytes, self._count())
        return result

    def _add(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self.alive.get(storage._cdata)
            if known is None or known[0].expired():
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _count(self) -> int:
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self.alive.values())


class SecondStep(Callback):
    """Watches our second step."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.row: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            parts = pl_module._loaded()
            parked = [*parts.text_encoders] if "prompt_embeds" in batch else []
            parked += [parts.vae] if "latent_moments" in batch else []
            self.watch = begin(self.device, parked)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            self.row = end(self.device, self.watch)


def begin(device: str, parked: list[torch.nn.Module]) -> PeakOfStorages:
    watch = PeakOfStorages()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        watch.resident_bytes = torch.cuda.memory_allocated()
    else:
        watch.start(parked)
    return watch


def end(device: str, watch: PeakOfStorages) -> dict[str, float]:
    if device == "cuda":
        watch.peak_bytes = torch.cuda.max_memory_allocated()
    else:
        watch.stop()
    return {"resident_mib": round(watch.resident_bytes / MIB, 1), "peak_mib": round(watch.peak_bytes / MIB, 1)}


def photos(folder: Path, count: int) -> Path:
    """As many square pictures as the two steps take."""
    import random

    from lightning_aigc.tiny.drawing import draw_brand

    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        draw_brand("mug", random.Random(i), 512).save(folder / f"mug {i}.png")
        (folder / f"mug {i}.txt").write_text("a photo of a zorp mug", encoding="utf-8")
    return folder


def watched(variant: str, given: argparse.Namespace) -> dict[str, float]:
    pictures = photos(given.workdir / f"photos-{2 * given.batch}", 2 * given.batch)
    theirs = variant.startswith("diffusers")
    cached = not theirs and not variant.endswith("-uncached")
    data = ImageCaptionData(
        str(pictures),
        resolution=512,
        train_batch_size=given.batch,
        cache_latents=cached,
        cache_text_embeddings=cached,
        cache_dir=str(given.workdir / "cache"),
        num_workers=0,
    )
    pipeline = given.workdir / "sd15_random"
    if theirs:
        precision = "32-true" if variant.endswith("float32") else "bf16-mixed"
        steps = diffusers_steps(data, given.workdir, precision, pipeline, given.rank, given.device)
        next(steps)
        watch = begin(given.device, [])
        next(steps)
        return end(given.device, watch)
    module = StableDiffusionLoRA(str(pipeline), rank=given.rank, max_train_steps=2, checkpointing_steps=10**9)
    callback = SecondStep(given.device)
    trainer = Trainer(
        accelerator=given.device,
        devices=1,
        plugins=[FusedBackwardPrecision("bf16-mixed", memory=variant.removesuffix("-uncached"))],
        default_root_dir=given.workdir / "run",
        gradient_clip_val=1.0,
        callbacks=[callback],
        logger=False,
    )
    trainer.fit(module, data)
    return callback.row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["diffusers", "off", "balanced", "lean", "max"]
    )
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        warnings.filterwarnings("ignore")
        print(json.dumps(watched(given.variants[0], given)))
        return
    if not (given.workdir / "sd15_random" / "model_index.json").is_file():
        build_pipeline(given.workdir / "sd15_random", torch.bfloat16)
    rows: dict[str, dict[str, Any]] = {}
    for variant in given.variants:
        command = [
            sys.executable,
            __file__,
            str(given.workdir),
            "--variants",
            variant,
            "--alone",
            "--device",
            given.device,
        ]
        command += ["--batch", str(given.batch), "--rank", str(given.rank)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows[variant] = json.loads(printed.strip().splitlines()[-1])
    for variant, row in rows.items():
        if "diffusers" in rows:
            row["ratio"] = round(row["peak_mib"] / rows["diffusers"]["peak_mib"], 3)
        header = {
            "benchmark": "step_memory",
            "date": time.strftime("%Y-%m-%d"),
            "variant": variant,
            "batch": given.batch,
            "rank": given.rank,
            "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu, storages counted",
            "torch": torch.__version__,
        }
        print(json.dumps(header | row), flush=True)
        if given.output:
            with given.output.open("a") as file:
                file.write(json.dumps(header | row) + "\n")


if __name__ == "__main__":
    main()
