"""Error of a U-Net's gradients against float64 at each memory level, compared with native autograd in the same dtype.

    python -m benchmarks.precision.accuracy [--lora 64|0] [--pixels 256] [--precision bf16-true 32-true] [--seeds 3]

The SD 1.5 U-Net of unet_step.py in each precision's dtype, with random weights and inputs per seed. The reference is
native autograd on the same weights and inputs in float64. `error` is the relative L2 error of all gradients together,
`worst_error` that of the worst parameter whose gradient is not negligible, `ratio` the error over native autograd's
error: geometric mean and range over seeds. A ratio of 1 means no loss of accuracy; rounding makes ratios scatter about
1. Appends one JSON object per line to `--output`.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.rows import keep_row
from benchmarks.common.unet_variants import Variant, build, inputs_of

PRECISIONS = {"bf16-true": torch.bfloat16, "32-true": torch.float32, "bf16-mixed": torch.float32}
NEGLIGIBLE = 1e-4
"""Parameters with a gradient norm below this share of the largest one are not candidates for the worst."""


def gradients(
    unet: nn.Module, given: dict[str, Any], target: Tensor, autocast: bool, kept: torch.dtype
) -> dict[str, Tensor]:
    """Gradient of the mean squared error for every trained parameter, moved to `kept` as it arrives."""
    found: dict[str, Tensor] = {}
    handles = []
    for name, parameter in unet.named_parameters():
        if parameter.requires_grad:

            def move(p: Tensor, name: str = name) -> None:
                assert p.grad is not None
                found[name], p.grad = p.grad.to(kept), None

            handles.append(parameter.register_post_accumulate_grad_hook(move))
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        output = unet(**given).sample
    (output.to(target.dtype) - target).square().mean().backward()
    for handle in handles:
        handle.remove()
    return found


def cast(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs with their floating-point tensors in another dtype."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }


def errors(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, float, str]:
    """Relative L2 error of all gradients together and of the worst parameter, and that parameter's name."""
    if ours.keys() != truth.keys():
        sys.exit(f"gradients are missing: {sorted(ours.keys() ^ truth.keys())[:5]}")
    distance = {name: (ours[name].double() - exact.double()).norm().item() for name, exact in truth.items()}
    length = {name: exact.double().norm().item() for name, exact in truth.items()}
    longest = max(length.values())
    each = {name: distance[name] / length[name] for name in truth if length[name] > NEGLIGIBLE * longest}
    worst = max(each, key=each.__getitem__)
    together = sum(d**2 for d in distance.values()) ** 0.5 / sum(n**2 for n in length.values()) ** 0.5
    return together, each[worst], worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", type=int, default=64, help="LoRA rank; 0 trains every weight")
    parser.add_argument("--pixels", type=int, default=256, help="from 184 on attention is long enough to be remembered")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16-true", "32-true"])
    parser.add_argument("--variants", nargs="+", default=["native", "balanced", "lean", "max"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    if options.variants[0] != "native":
        sys.exit(f"native must come first, every ratio is to it; got {options.variants}")

    for precision in options.precision:
        dtype = PRECISIONS[precision]
        # All weights' gradients in float64 take 7 GB; float32 holds them to 6e-8, far below any error measured.
        kept = torch.float64 if options.lora else torch.float32
        found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in options.variants}
        for seed in range(options.seeds):
            unet = build("sd15", options.lora, dtype, seed)
            given = inputs_of("sd15", 1, options.pixels, dtype, "cpu")
            target = torch.randn(1, 4, options.pixels // 8, options.pixels // 8, dtype=torch.float64)
            truth = gradients(unet.double(), cast(given, torch.float64), target, False, kept)
            unet.to(dtype)  # exact: the weights came from this dtype
            for name in options.variants:
                with Variant(unet, name):
                    made = gradients(unet, given, target.float(), precision == "bf16-mixed", kept)
                found[name].append(errors(made, truth))
                del made
        for name, per_seed in found.items():
            ratios = [ours[0] / native[0] for ours, native in zip(per_seed, found["native"], strict=True)]
            row = {
                "benchmark": "accuracy",
                "model": "sd15",
                "batch": 1,
                "lora_rank": options.lora,
                "pixels": options.pixels,
                "precision": precision,
                "device": f"cpu ({platform.machine()})",
                "torch": torch.__version__,
                "seeds": options.seeds,
                "variant": name,
                "error": float(f"{statistics.median(e[0] for e in per_seed):.4g}"),
                "worst_error": float(f"{statistics.median(e[1] for e in per_seed):.4g}"),
                "worst_parameter": max(per_seed, key=lambda e: e[1])[2],
                "ratio": round(statistics.geometric_mean(ratios), 3),
                "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
            }
            keep_row(row, options.output)


if __name__ == "__main__":
    main()
