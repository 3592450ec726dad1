"""Time and memory of a step by graphs, and eagerly, at each memory level.

    python -m benchmarks.precision.graph_step [--model sd15|sdxl|sd35|flux|z_image] [--batch 1 4] [--pixels 512]
        [--shapes 1] [--base int8|nf4] [--levels native lean] [--device cuda]

A denoiser with random weights in bf16 and a LoRA on its attention, of rank 64 in U-Nets and 16 in transformers. Eager
and graphed steps alternate in each round; figures are medians after warm-up. `device_time_s` is the time of one
captured graph of the whole step, which no Python can undercut. `--shapes 5` gives five shapes in turn. A row is printed
as soon as it is measured, for a machine with little time.
`reserved` is the allocator's memory after eager steps alone, and after graphed steps with the graphs' pool.
`gradient_difference` is the relative difference of all gradients of a graphed step and an eager one,
`eager_difference` that of two eager ones, as some kernels do not repeat their bits. On a CPU the eager steps alone are
measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common.denoisers import DENOISERS, denoiser_on, few_blocks, inputs_of, loss_of, random_inputs
from benchmarks.common.rows import keep_row
from benchmarks.common.unet_variants import build
from benchmarks.precision.unet_step import device_time_s, synchronize
from lightning_aigc.diffusion.training.native_attention import avoid_misread_gradients
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.context import without_graphs
from lightning_aigc.precision.graph.graphed_root import EAGER_CALLS
from lightning_aigc.quantization.frozen import quantize_frozen_

LEVELS = {"native": "off", "balanced": "balanced", "lean": "lean", "max": "max"}


def gradients_of(unet: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    loss_of(unet, given).backward()  # type: ignore[no-untyped-call]
    found = [p.grad for p in unet.parameters() if p.grad is not None]
    unet.zero_grad(set_to_none=True)
    return found


def difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Relative difference of all gradients together; 0 for equal bits."""
    if all(map(torch.equal, found, wanted)):
        return 0.0
    squares = [
        torch.stack([x.double().square().sum() for x in tensors]).sum()
        for tensors in ([a - b for a, b in zip(found, wanted, strict=True)], wanted)
    ]
    return float(f"{(squares[0] / squares[1]).sqrt().item():.2g}")


def seconds_of(unet: nn.Module, shapes: list[dict[str, Any]], device: str, steps: int) -> float:
    """Mean wall seconds of a step."""
    synchronize(device)
    start = time.perf_counter()
    for i in range(steps):
        gradients_of(unet, shapes[i % len(shapes)])
    synchronize(device)
    return (time.perf_counter() - start) / steps


def reserved_mib(device: str) -> float | None:
    return None if device == "cpu" else round(getattr(torch, device).memory_reserved() / 2**20, 1)


def free_cache(device: str) -> None:
    if device != "cpu":
        getattr(torch, device).empty_cache()


def measure(unet: nn.Module, shapes: list[dict[str, Any]], level: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one memory level."""
    plugin = FusedBackwardPrecision("bf16-true", memory=LEVELS[level])  # type: ignore[arg-type]
    plugin.convert_module(unet)
    device, steps = options.device, options.steps * len(shapes)
    row: dict[str, Any] = {"variant": level}
    try:
        free_cache(device)
        seconds_of(unet, shapes, device, len(shapes))
        row["eager_reserved_mib"] = reserved_mib(device)
        if device == "cuda":
            row["device_time_s"] = device_time_s(unet, shapes[0], replays=15)
        free_cache(device)
        if device != "cpu":
            plugin.record_graphs(unet, torch.device(device))
            start = time.perf_counter()
            seconds_of(unet, shapes, device, (EAGER_CALLS + 1) * len(shapes))
            row["warm_up_and_capture_s"] = round(time.perf_counter() - start, 2)
            row["graphed_reserved_mib"] = reserved_mib(device)
        eager: list[float] = []
        graphed: list[float] = []
        for _ in range(options.rounds):
            with without_graphs():
                eager.append(seconds_of(unet, shapes, device, steps))
            if device != "cpu":
                graphed.append(seconds_of(unet, shapes, device, steps))
        row["eager_step_s"] = round(statistics.median(eager), 5)
        if graphed:
            row["graphed_step_s"] = round(statistics.median(graphed), 5)
            with without_graphs():
                wanted, again = (gradients_of(unet, shapes[0]) for _ in range(2))
            row["gradient_difference"] = difference(gradients_of(unet, shapes[0]), wanted)
            row["eager_difference"] = difference(again, wanted)
            (graphed_root,) = plugin._graphed
            row["replays"] = graphed_root.replays
    finally:
        plugin.teardown()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DENOISERS, default="sd15")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="several are measured one after another")
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--text", type=int, default=512, help="text tokens of a transformer")
    parser.add_argument("--base", choices=["int8", "nf4", "fp8"], help="quantize the frozen weights")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS), help="native comes first")
    parser.add_argument("--shapes", type=int, default=1, help="buckets in turn, each 64 pixels larger")
    parser.add_argument("--width", type=float, default=1.0, help="scales every channel count of a U-Net")
    parser.add_argument("--blocks", type=int, help="blocks of a transformer; unset: as published")
    parser.add_argument("--steps", type=int, default=5, help="steps of a shape in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    model, device = options.model, options.device
    unet: Any
    if model in ("sd15", "sdxl"):
        unet = build(model, 64, torch.bfloat16, device=device, width=options.width)
    else:
        unet = denoiser_on(device, model, 16, **few_blocks(model, options.blocks))
        unet.bfloat16()
    if options.base:
        quantize_frozen_(unet, options.base)
    avoid_misread_gradients(unet, torch.device(device))
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    for batch in options.batch:
        shapes = [
            random_inputs(inputs_of(unet.config, model, batch, options.pixels + 64 * i, options.text), device)
            for i in range(options.shapes)
        ]
        native: dict[str, Any] = {}
        for level in options.levels:
            row = measure(unet, shapes, level, options)
            native = native or row
            if "graphed_step_s" in row:
                first = options.levels[0]
                row[f"graphed_over_eager_{first}"] = round(row["graphed_step_s"] / native["eager_step_s"], 3)
                row["reserved_ratio"] = round(row["graphed_reserved_mib"] / row["eager_reserved_mib"], 3)
            if row.get("device_time_s") and native.get("device_time_s"):
                row["device_time_ratio"] = round(row["device_time_s"] / native["device_time_s"], 3)
            if row.get("device_time_s") and "graphed_step_s" in row:
                row["graphed_over_device_time"] = round(row["graphed_step_s"] / row["device_time_s"], 3)
            header = {
                "benchmark": "graph_step", "model": options.model, "batch": batch, "pixels": options.pixels,
                "shapes": options.shapes, "width": options.width, "base": options.base, "device": name,
                "torch": torch.__version__, "rounds": options.rounds,
            }  # fmt: skip
            keep_row(header | row, options.output)


if __name__ == "__main__":
    main()
