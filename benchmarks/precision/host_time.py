"""Host time of a step at each memory level, over native's.

    python -m benchmarks.precision.host_time [--rounds 21] [--output benchmarks/results/precision/host_time.jsonl]

Stable Diffusion 1.5's blocks with 64 channels on 8 x 8 latents, where arithmetic costs next to nothing, a LoRA of
rank 4, float32, one thread. A step is forward, backward and `zero_grad`. Every variant runs in each round; figures are
medians of CPU time over the rounds after three of warm-up. On an H100 a step of the real size has nearly the same
ratios, because the card waits for Python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model

from benchmarks.common.rows import keep_row
from lightning_aigc.precision import FusedBackwardPrecision

WARM_UP = 3
LEVELS = ("balanced", "lean", "max")


def build() -> Any:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, cross_attention_dim=32, block_out_channels=(64, 64, 64, 64), attention_head_dim=8
    )
    unet.requires_grad_(False)
    lora = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    return inject_adapter_in_model(lora, unet).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    unets = {"native": build(), "checkpointing": build()}
    unets["checkpointing"].enable_gradient_checkpointing()
    for level in LEVELS:
        unets[level] = FusedBackwardPrecision("32-true", memory=level).convert_module(build())  # type: ignore[arg-type]
    given = torch.randn(1, 4, 8, 8), torch.tensor([5]), torch.randn(1, 7, 32)
    seconds: dict[str, list[float]] = {name: [] for name in unets}
    for _ in range(WARM_UP + options.rounds):
        for name, unet in unets.items():
            start = time.process_time()
            unet(*given).sample.square().mean().backward()
            unet.zero_grad()
            seconds[name].append(time.process_time() - start)
    for name, took in seconds.items():
        ratios = [own / native for own, native in zip(took, seconds["native"], strict=True)][WARM_UP:]
        keep_row(
            {
                "benchmark": "host_time", "variant": name, "device": "cpu", "torch": torch.__version__,
                "diffusers": diffusers.__version__, "rounds": options.rounds,
                "cpu_time_ms": round(1e3 * statistics.median(took[WARM_UP:]), 1),
                "cpu_time_ratio": round(statistics.median(ratios), 3),
            },
            options.output,
        )  # fmt: skip


if __name__ == "__main__":
    main()
