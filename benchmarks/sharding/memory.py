"""Memory of stages 2 and 3 during a step, over their stored bytes, and memory of an export.

    OMP_NUM_THREADS=1 python -m benchmarks.sharding.memory steps [--output FILE]    # gathered weights, kept activations
    OMP_NUM_THREADS=1 python -m benchmarks.sharding.memory export [--output FILE]   # SD 1.5's shapes, 7 GB of disk

Steps: the U-Net of zero.py on 2 and 4 gloo ranks. Gathered: maximum bytes of full weights, including those prefetched
for the next block, each time a block's weights are gathered. Activations: bytes that autograd keeps on rank 0, and
those of the same U-Net unsharded. Host peak of an export: maximum growth of the process's resident memory, over the
largest written tensor.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common.rows import keep_row
from benchmarks.sharding.zero import ROWS, Noise, loss_of, unet
from fakes.processes.gathered_bytes import watch_gathered
from fakes.processes.ranks import run_ranks
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.pipeline.saving import save_folder, save_single_file
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.context import count_saved
from lightning_aigc.precision.memory.saved_tensors import owned_by
from lightning_aigc.sharding.layout import shard_model


class Holder(nn.Module):
    """Root module that a step calls, like a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = unet()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return loss_of(self.unet, batch)


def step_memory(rank: int, ranks: int, stage: int, memory: Any) -> dict[str, Any]:
    """Run one rank's step."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept = []
    batch = [torch.stack(values) for values in zip(*(Noise()[4 * rank + i] for i in range(4)), strict=True)]
    seen: list[int] = []
    for is_sharded in (False, True):
        holder = Holder()
        FusedBackwardPrecision("32-true", memory=memory).convert_module(holder)
        if is_sharded:
            groups = shard_model(
                holder, init_device_mesh("cpu", (ranks,)), stage=stage, compute_dtype=None, offload=False,
                called=("training_step",),
            )  # fmt: skip
            seen = watch_gathered(holder)
        with count_saved(owned_by(holder)) as saved:
            loss = holder.training_step(batch)
        kept.append(saved.total())
        loss.backward()
    largest = sorted((4 * group.numel for group in groups), reverse=True)[:2]
    return {
        "gathered_bytes": max(seen), "two_largest_blocks": sum(largest), "kept_bytes": kept[1],
        "kept_bytes_of_one_device": kept[0],
    }  # fmt: skip


def resident(field: str) -> int:
    """Resident memory of this process in bytes: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def export() -> list[dict[str, Any]]:
    """Save a pipeline with a U-Net of Stable Diffusion 1.5's shapes as a folder and as a file."""
    from diffusers import UNet2DConditionModel

    parts = load_components("embedded:sd")
    parts.denoiser = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    trained = {"unet": parts.denoiser}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_folder(Path(folder, "sd15"), parts, trained, None)  # 28 MiB of imports and allocator stay after the first
        for name, save, place in (("folder", save_folder, "sd15"), ("file", save_single_file, "sd15.safetensors")):
            for dtype in (None, torch.float16):
                largest = max(p.numel() for p in parts.denoiser.parameters()) * (2 if dtype else 4)
                Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset VmHWM
                before = resident("VmRSS")
                save(Path(folder, place), parts, trained, dtype)
                rows.append({
                    "case": name, "save_dtype": str(dtype or torch.float32), "largest_tensor_bytes": largest,
                    "resident_over_largest": round((resident("VmHWM") - before) / largest, 3),
                })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "export"))
    parser.add_argument("--output", type=Path, default=ROWS)
    args = parser.parse_args()
    shared = {"device": "cpu", "torch": torch.__version__}
    if args.what == "export":
        for row in export():
            keep_row({"section": "export", **row, **shared}, args.output)
        return
    for ranks in (2, 4):
        for stage in (2, 3):
            for memory in ("off", "lean", "max"):
                with tempfile.TemporaryDirectory() as folder:
                    row = run_ranks(step_memory, ranks, Path(folder), ranks, stage, memory)[0]
                which = {"section": "memory", "strategy": f"zero_{stage}", "ranks": ranks, "memory": memory}
                keep_row(which | row | shared, args.output)


if __name__ == "__main__":
    main()
