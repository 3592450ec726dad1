"""Bytes that a rank sends per step in fine-tuning a U-Net or its LoRA, over those of a dense float32 ring.

Counted at the collectives: 2 and 4 processes reduce random gradients of SD 1.5's (or SDXL's) shapes over Gloo, one unit
at a time, so that no rank holds all of them. For more ranks the same payloads are computed by formula.

    OMP_NUM_THREADS=1 python -m benchmarks.gradient_sync.sent_bytes [--model sdxl] [--lora RANK] [--modes int3 ...]
        [--output FILE]
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from diffusers import UNet2DConditionModel
from peft import LoraConfig

from benchmarks.common.rows import keep_row
from lightning_aigc.gradient_sync.modes.make_reductions import make_reductions
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.transport.collectives import dense_ring_bytes
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups
from lightning_aigc.gradient_sync.units import make_units

SDXL = {
    "sample_size": 128, "cross_attention_dim": 2048, "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
SD15 = {"sample_size": 64, "cross_attention_dim": 768}
MODES: dict[str, dict[str, Any]] = {
    "int3": {},
    "int4": {"mode": "int4"},
    "int8": {"mode": "int8"},
    "bf16": {"mode": "bf16"},
    "sparse": {"mode": "sparse"},
    "sparse_int8": {"mode": "sparse_int8"},
    "sparse_int8 0.95": {"mode": "sparse_int8", "sparsity": 0.95},
    "sparse_int8 0.95, nothing protected": {"mode": "sparse_int8", "sparsity": 0.95, "protect": ()},
    "sparse_int4": {"mode": "sparse_int4"},
    "two_four": {"mode": "two_four"},
}
FURTHER_RANKS = (8, 64, 384)


def trained(model: str, lora: int) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and meta parameters of a U-Net, or of a LoRA on its attention if `lora` is a rank."""
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(SD15 if model == "sd15" else SDXL)
        if lora:
            unet.requires_grad_(False)
            unet.add_adapter(LoraConfig(r=lora, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return [(name, p) for name, p in unet.named_parameters() if p.requires_grad]


def count(rank: int, ranks: int, store: str, model: str, lora: int, modes: list[str], found: Any) -> None:
    """Run one rank: reduce every unit once, and again if the first step is dense."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    named = trained(model, lora)
    numel = sum(p.numel() for _, p in named)
    for mode in modes:
        options = SyncOptions(**MODES[mode])
        groups = ProcessGroups(False)
        units = make_units(named, options, ranks)
        reductions = make_reductions(options, units, groups, torch.device("cpu"))
        for unit in units:
            e_N = torch.randn(unit.numel)
            for work in reductions[unit.kind].reduce(unit, e_N, groups.between):
                work.wait()
        if rank == 0:
            found.append((mode, numel, dict(groups.traffic.sent)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("sd15", "sdxl"), default="sd15")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    for ranks in options.ranks:
        with torch.multiprocessing.Manager() as manager, tempfile.TemporaryDirectory() as folder:
            found = manager.list()
            arguments = (ranks, f"{folder}/store", options.model, options.lora, options.modes, found)
            torch.multiprocessing.spawn(count, arguments, nprocs=ranks)  # type: ignore[attr-defined]
            for mode, numel, sent in found:
                ratio = sum(sent.values()) / dense_ring_bytes(numel, ranks)
                row = {
                    "benchmark": "sync_bytes", "torch": torch.__version__,
                    "model": options.model, "lora_rank": options.lora,
                    "parameters": numel, "mode": mode, "ranks": ranks, "how": "counted",
                    "sent_mb": {kind: round(value / 1e6, 1) for kind, value in sent.items() if value},
                    "ratio": round(ratio, 4),
                }  # fmt: skip
                rows = [row]
                if (
                    ranks == options.ranks[-1]
                ):  # payloads do not depend on the ranks, only 2 (N-1)/N does, on both sides
                    rows += [row | {"ranks": more, "how": "formula"} for more in FURTHER_RANKS]
                    for further in rows[1:]:
                        scale = (1 - 1 / further["ranks"]) / (1 - 1 / ranks)
                        further["sent_mb"] = {k: round(v * scale, 1) for k, v in row["sent_mb"].items()}
                for each in rows:
                    keep_row(each, options.output)


if __name__ == "__main__":
    main()
