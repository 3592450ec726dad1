"""Trained weights and file size of a ControlNet-LoRA and of a full ControlNet, counted without weights.

    python -m benchmarks.controlnet.lora [--output benchmarks/results/controlnet/lora.jsonl]
    python -m benchmarks.controlnet.lora --train 16 [--output ...]    # train the demo with rank 16, ~10 minutes

SD 1.5's and SDXL's U-Nets on the meta device. AdamW in float32 takes 16 bytes per trained weight (weight, gradient,
two moments) and 4 per frozen weight. Needs no network.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel

from benchmarks.common.edge_run import run_demo
from benchmarks.common.rows import keep_row
from lightning_aigc.diffusion.controlnet.lora import add_lora, control_lora_tensors

BASES: dict[str, dict[str, Any]] = {
    "SD 1.5": {"cross_attention_dim": 768, "attention_head_dim": 8},
    "SDXL": {
        "cross_attention_dim": 2048, "attention_head_dim": [5, 10, 20], "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "transformer_layers_per_block": [1, 2, 10], "use_linear_projection": True, "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
    },
}  # fmt: skip
"""Arguments of ControlNetModel that differ from its defaults."""
MIB = 2**20
FIGURES = (
    "edge_f1", "edge_f1_floor", "edge_f1_ceiling", "edge_f1_normalised", "edge_ssim", "control_gap",
    "control_appeared_at_step", "final_loss", "seconds",
)  # fmt: skip


def count(base: str, rank: int | None) -> dict[str, Any]:
    with torch.device("meta"):
        controlnet: Any = ControlNetModel(**BASES[base])
        whole = sum(p.numel() for p in controlnet.parameters())
        if rank is not None:
            add_lora(controlnet, rank)
    trained = sum(p.numel() for p in controlnet.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in controlnet.parameters() if not p.requires_grad)
    small = None if rank is None else sum(t.numel() for t in control_lora_tensors(controlnet).values())
    return {
        "benchmark": "controlnet_lora", "base": base, "rank": rank, "trained_millions": round(trained / 1e6, 1),
        "trained_of_whole": round(trained / whole, 3), "adamw_float32_mib": round((16 * trained + 4 * frozen) / MIB),
        "merged_float16_mib": round(2 * whole / MIB),
        "small_float16_mib": None if small is None else round(2 * small / MIB),
    }  # fmt: skip


def train(rank: int, given: argparse.Namespace) -> dict[str, Any]:
    """Train the demo with this rank. Returns: its row, with the scores of the end."""
    began = time.perf_counter()
    overrides = {
        "--data.init_args.cache_dir": str(given.cache),
        "--model.init_args.rank": rank,
        "--model.init_args.learning_rate": given.learning_rate,
        "--model.init_args.max_train_steps": given.steps,
        "--model.init_args.validation_steps": 10 * given.steps,
        "--model.init_args.checkpoints_total_limit": 0,
        "--model.init_args.validation_prompts": "[]",
    }
    summary, _ = run_demo(overrides, {"EdgeReport": {"every_n_steps": 0}}, f"rank {rank}")
    return {
        "benchmark": "controlnet_lora", "base": "embedded", "rank": rank, "learning_rate": given.learning_rate,
        "steps": given.steps, "wall_s": round(time.perf_counter() - began),
        **{name: summary.get(name) for name in FIGURES},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--train", type=int, metavar="RANK", help="train the demo with this rank instead")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="the demo uses 2e-3")
    parser.add_argument("--steps", type=int, default=560)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "controlnet_lora_cache")
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the rows to")
    given = parser.parse_args()
    if given.train is not None:
        keep_row(train(given.train, given), given.output)
        return
    for base in BASES:
        for rank in (None, *given.ranks):
            keep_row(count(base, rank), given.output)


if __name__ == "__main__":
    main()
