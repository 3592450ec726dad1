"""Peak memory of a Stable Diffusion 1.5 LoRA step, compared with diffusers' text-to-image LoRA script.

    python -m benchmarks.precision.step_memory WORKDIR [--batch 4] [--rank 64] [--device cpu|cuda]
        [--variants diffusers lean max] [--timed_steps 20] [--pixels 512] [--model sd15|sdxl]

A pipeline of SD 1.5's or SDXL's shapes with random weights (created in WORKDIR, 2.1 or 6.9 GB) takes two steps in each
variant, each in a separate process; the second step is measured: forward, backward, clipping and AdamW, with everything
resident. Ours is `Trainer.fit` with configs/sd_lora.yaml, `NAME-uncached` without its caches, and `NAME-int8`,
`NAME-nf4` and `NAME-nf4-all` with a quantized base (`base_quantization`), `NAME-graph` by graphs, whose peak is that
of an eager step, as the third is captured; diffusers runs in bf16, and
`diffusers-float32` is its script's default precision. On CUDA the figure is the allocator's. On a CPU every storage
that is alive when an operator returns is counted, except memory that an operator frees internally, and encoders that
were moved to host memory. `--timed_steps` adds steps, timed from the end of one batch to the end of the next, with
their median in the row. Prints one JSON object per line.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common.diffusers_loop import diffusers_steps
from benchmarks.common.rows import keep_row
from benchmarks.end_to_end.real_size import build_pipeline, build_sdxl_pipeline
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc_kernels import PackedWeight

MIB = 2**20
VARIANTS = (
    *("diffusers", "off", "balanced", "lean", "max"),
    *("diffusers-float32", "off-uncached", "lean-uncached", "max-uncached"),
    *(f"{memory}-{kind}" for memory in ("off", "balanced", "lean", "max") for kind in ("int8", "nf4", "nf4-all")),
    *("off-graph", "lean-graph", "max-graph"),
)


class PeakOfStorages(TorchDispatchMode):
    """Maximum of the bytes alive at the end of any operator between `start` and `stop`, including resident ones."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.resident_bytes = self.peak_bytes = 0

    def start(self, elsewhere: list[torch.nn.Module]) -> None:
        """Count all existing tensors as resident, except those of modules that a device would not hold."""
        parked = {
            inner.untyped_storage()._cdata
            for part in elsewhere
            for t in (*part.parameters(), *part.buffers())
            for inner in ((t.packed, t.scales) if isinstance(t, PackedWeight) else (t,))
        }
        gc.collect()
        # A quantized weight has no storage of its own: the two tensors inside it are counted.
        tensors = [h for h in gc.get_objects() if issubclass(type(h), Tensor) and type(h) is not PackedWeight]
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
            if type(tensor) is not PackedWeight and (known is None or known[0].expired()):
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _count(self) -> int:
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self.alive.values())


class SecondStep(Callback):
    """Measure our second step, and time the steps after it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.row: dict[str, float] = {}
        self.ends: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == 1:
            assert isinstance(pl_module, DiffusionLoRA)
            parts = pl_module.loaded()
            parked = [*parts.text_encoders] if "prompt_embeds" in batch else []
            parked += [parts.vae] if "latent_moments" in batch else []
            self.watch = begin(self.device, parked)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.total_batch_idx == 1:
            self.row = end(self.device, self.watch)
        elif trainer.fit_loop.total_batch_idx > 1:
            self.ends.append(now(self.device))


def now(device: str) -> Any:
    """The time, or on a card an event: the host does not wait for it."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def timed(row: dict[str, float], ends: list[Any]) -> dict[str, float]:
    """Add the median time from the end of one step to the end of the next, ms; the first four steps are warm-up.

    On a card that is the time at which the card reached the ends. The third step with graphs records them.
    """
    if ends and not isinstance(ends[0], float):
        torch.cuda.synchronize()
    steps_ms = [
        1000 * (after - before) if isinstance(after, float) else before.elapsed_time(after)
        for before, after in itertools.pairwise(ends[2:])
    ]
    return row if not steps_ms else row | {"step_ms": round(statistics.median(steps_ms), 2)}


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


def photos(folder: Path, count: int, pixels: int) -> Path:
    """Write enough square images for all steps."""
    import random

    from tools.embedded.drawing import draw_brand

    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        draw_brand("mug", random.Random(i), pixels).save(folder / f"mug {i}.png")
        (folder / f"mug {i}.txt").write_text("a photo of a zorp mug", encoding="utf-8")
    return folder


def watched(variant: str, given: argparse.Namespace) -> dict[str, float]:
    count = (2 + given.timed_steps) * given.batch
    pictures = photos(given.workdir / f"photos-{given.pixels}-{count}", count, given.pixels)
    theirs = variant.startswith("diffusers")
    cached = not theirs and not variant.endswith("-uncached")
    data = ImageCaptionData(
        str(pictures),
        resolution=given.pixels,
        train_batch_size=given.batch,
        cache_latents=cached,
        cache_text_embeddings=cached,
        cache_dir=str(given.workdir / "cache"),
        num_workers=0,
    )
    pipeline = given.workdir / f"{given.model}_random"
    if theirs:
        precision = "32-true" if variant.endswith("float32") else "bf16-mixed"
        steps = diffusers_steps(data, given.workdir, precision, pipeline, given.rank, given.device)
        next(steps)
        watch = begin(given.device, [])
        next(steps)
        row, ends = end(given.device, watch), []
        for _ in range(given.timed_steps):
            next(steps)
            ends.append(now(given.device))
        return timed(row, ends)
    steps_in_all = 2 + given.timed_steps
    memory: Any
    memory, _, kind = variant.removesuffix("-uncached").partition("-")
    graph = kind == "graph"
    module = DiffusionLoRA(
        str(pipeline), rank=given.rank, max_train_steps=steps_in_all, checkpointing_steps=10**9,
        base_quantization=None if graph else kind or None,
    )  # fmt: skip
    callback = SecondStep(given.device)
    trainer = Trainer(
        accelerator=given.device,
        devices=1,
        plugins=[FusedBackwardPrecision("bf16-mixed", memory=memory, graph=graph)],
        default_root_dir=given.workdir / "run",
        gradient_clip_val=1.0,
        callbacks=[callback],
        logger=False,
    )
    trainer.fit(module, data)
    return timed(callback.row, callback.ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--timed_steps", type=int, default=0, help="further steps to time: at least 5, or 0")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=["sd15", "sdxl"], default="sd15")
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
    pipeline = given.workdir / f"{given.model}_random"
    if not (pipeline / "model_index.json").is_file():
        (build_sdxl_pipeline if given.model == "sdxl" else build_pipeline)(pipeline, torch.bfloat16)
    baseline: dict[str, Any] = {}
    for variant in given.variants:
        command = [
            sys.executable,
            "-m",
            "benchmarks.precision.step_memory",
            str(given.workdir),
            "--variants",
            variant,
            "--alone",
        ]
        for name in ("device", "batch", "rank", "pixels", "timed_steps", "model"):
            command += [f"--{name}", str(getattr(given, name))]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        row = json.loads(printed.strip().splitlines()[-1])
        baseline = row if variant == "diffusers" else baseline
        for ratio, figure in (("ratio", "peak_mib"), ("step_ratio", "step_ms")):
            if figure in row and figure in baseline:
                row[ratio] = round(row[figure] / baseline[figure], 3)
        header = {
            "benchmark": "step_memory",
            "model": given.model,
            "variant": variant,
            "batch": given.batch,
            "rank": given.rank,
            "pixels": given.pixels,
            "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu, storages counted",
            "torch": torch.__version__,
        }
        keep_row(header | row, given.output)


if __name__ == "__main__":
    main()
