"""Repeated FLOPs against kept activations: FusedBackwardPrecision's budget, its levels and torch.compile's budget.

    python -m benchmarks.precision.memory_budget [--model sd15|sdxl] [--pixels 512] [--width 0.5] [--batch 1]
        [--lora 64|0] [--kept 0.11 0.25 ...] [--torch 0.1 0.5 ...] [--output FILE]

Both sides run the same U-Net on fake tensors: nothing is computed and no device is needed. FLOPs are those of matrix
products, convolutions and attention, forward and backward, by torch's FlopCounterMode; kept bytes are the storages that
operators made in forward and that are still alive after it. A first step makes the plan, the second is counted.
`--torch` compiles the U-Net with AOTAutograd's partitioner at `activation_memory_budget`, and counts its two graphs.
Prints one JSON object per line.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.kept_memory import kept_mib
from benchmarks.common.rows import keep_row
from benchmarks.common.unet_variants import Variant, build, inputs_of
from benchmarks.precision.repeated_flops import OF_THE_CPU, open_ops
from lightning_aigc.precision.memory.budget import MemoryBudget
from lightning_aigc.precision.swaps import swap_forwards

LEVELS = ("balanced", "lean", "max", "checkpointing")


def with_fakes(unet: nn.Module, given: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """The U-Net with fake parameters, and its fake inputs; call it within a FakeTensorMode."""
    for module in unet.modules():  # peft cannot build its layers from fake tensors
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
    return unet, inputs_of(given.model, given.batch, given.pixels, torch.bfloat16, "cpu")


def counted(unet: nn.Module, inputs: dict[str, Any]) -> tuple[float, float]:
    """Measure kept MiB and FLOPs of one step."""
    with open_ops():
        kept = kept_mib(unet, inputs)
        with FlopCounterMode(display=False, custom_mapping=OF_THE_CPU) as counter:
            unet(**inputs).sample.float().square().mean().backward()
    return kept, float(counter.get_total_flops())


def of_ours(given: argparse.Namespace, report: Callable[..., None]) -> tuple[float, float]:
    """Print a row per level and budget. Returns: native's kept MiB and FLOPs."""
    unet = build(given.model, given.lora, torch.bfloat16, device="meta", width=given.width)
    with FakeTensorMode():
        unet, inputs = with_fakes(unet, given)
        native = counted(unet, inputs)
        report("native", *native, *native)
        for kept in given.kept:
            swapped = swap_forwards(unet, memory=MemoryBudget(kept=kept))
            try:
                started = time.perf_counter()
                unet(**inputs).sample.float().square().mean().backward()
                planned_s = time.perf_counter() - started
                report("budget", *counted(unet, inputs), *native, budget=kept, planned_s=round(planned_s, 1))
            finally:
                swapped.restore()
        for level in LEVELS:
            with Variant(unet, level):
                report(level, *counted(unet, inputs), *native)
    return native


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["sd15", "sdxl"], default="sd15")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lora", type=int, default=64, help="LoRA rank; 0 trains every weight")
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--width", type=float, default=1.0, help="scales every channel count")
    parser.add_argument("--kept", type=float, nargs="*", default=[0.11, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7])
    parser.add_argument("--torch", type=float, nargs="*", default=[], help="budgets of torch.compile's partitioner")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    given = parser.parse_args()

    def report(variant: str, kept: float, flops: float, native_kept: float, native_flops: float, **more: Any) -> None:
        row = {
            "benchmark": "memory_budget",
            "torch": torch.__version__,
            **{name: getattr(given, name) for name in ("model", "batch", "lora", "pixels", "width")},
            "variant": variant,
            "kept_mib": round(kept, 2),
            "kept_ratio": round(kept / native_kept, 4),
            "tflops": round(flops / 1e12, 5),
            "flops_ratio": round(flops / native_flops, 4),
            **more,
        }
        keep_row(row, given.output)

    of_ours(given, report)


if __name__ == "__main__":
    main()
