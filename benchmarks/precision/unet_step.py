"""Saved memory and step time of a diffusion U-Net at each memory level, compared with native and checkpointing.

    python -m benchmarks.precision.unet_step [--model sd15|sdxl] [--batch 1] [--lora 64|0] [--pixels 512] [--rounds 7]
        [--width 0.5] [--device cuda]

A U-Net with random weights from its config, in bf16 (`--dtype`) and with lora_alpha equal to the rank, runs every
variant in each round, so that changes of the machine's speed affect all of them; figures are medians over rounds after
a warm-up round. `kept` is the exact size of the storages that the forward pass saves for backward; for `compile`
(torch.compile; runs only if named, because it compiles for minutes) of those that the compiled code saves. `lean-int8`
and similar names run on a quantized base and are also compared with `lean`.
`--width` scales every channel count. On a card, a step's time is the mean of `--steps` consecutive steps with one
synchronisation, and the allocator's peak is reported too. There the step is also captured as a CUDA graph and replayed:
`device_time_s` is the card's time, `step_time_s` includes the host. Nothing is reported unless the loss of each variant
equals native's within bf16 rounding, or on a quantized base within PACKING_MOVES. Appends one JSON object per line to
`--output`.
"""
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common.denoisers import loss_of
from benchmarks.common.kept_memory import kept_by_compiled_mib, kept_mib, peak_mib
from benchmarks.common.rows import keep_row
from benchmarks.common.unet_variants import LEVELS, VARIANTS, Variant, build, inputs_of
from benchmarks.kernels.bandwidth import replay_seconds

PACKING_MOVES = 0.1
"""Largest relative change of the loss of random weights on a quantized base."""


def synchronize(device: str) -> None:
    if device != "cpu":
        getattr(torch, device).synchronize()


def one_step(unet: nn.Module, given: dict[str, Any], device: str, steps: int = 1) -> tuple[float, float, float]:
    """Run `steps` forward and backward passes. Returns: loss, mean wall seconds, mean CPU seconds of the process."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loss = loss_of(unet, given)
        loss.backward()
        unet.zero_grad(set_to_none=True)
    synchronize(device)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return loss.item(), wall / steps, cpu / steps


def device_time_s(unet: nn.Module, given: dict[str, Any], replays: int) -> float | None:
    """Median seconds of a replayed CUDA graph of the step; None if it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one_step(unet, given, "cuda")
    torch.cuda.current_stream().wait_stream(stream)
    graph, seconds = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph):
            loss_of(unet, given).backward()
        seconds = replay_seconds(graph, replays)
    except RuntimeError as error:
        print(f"no CUDA graph of the step: {str(error).splitlines()[0]}", file=sys.stderr)
    unet.zero_grad(set_to_none=True)
    return seconds


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["sd15", "sdxl"], default="sd15")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lora", type=int, default=64, help="LoRA rank; 0 trains every weight")
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--width", type=float, default=1.0, help="scales every channel count")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, help="steps per round of a variant; unset: 1 on a CPU, 5 on a card")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; 0 omits the host's times")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(LEVELS[:-1]))
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    return parser.parse_args()


@dataclass
class Figures:
    """Measurements of each variant, by name."""

    kept: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    walls: dict[str, list[float]] = field(default_factory=dict)
    cpus: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, float | None] = field(default_factory=dict)
    device_s: dict[str, float | None] = field(default_factory=dict)


def measure(unet: nn.Module, given: dict[str, Any], options: argparse.Namespace, steps: int) -> Figures:
    """Run all variants in every round."""
    found = Figures()
    variants = {name: Variant(unet, name) for name in options.variants}
    for name in options.variants:
        with variants[name]:
            found.kept[name] = (kept_by_compiled_mib if name == "compile" else kept_mib)(unet, given)
        found.walls[name], found.cpus[name] = [], []
    for round_ in range(options.rounds + 1 if options.rounds else 0):
        for name in options.variants:
            with variants[name]:
                found.losses[name], wall, cpu = one_step(unet, given, options.device, steps)
                if round_ == 0:
                    found.peaks[name] = peak_mib(options.device, lambda: one_step(unet, given, options.device))
                else:
                    found.walls[name].append(wall)
                    found.cpus[name].append(cpu)
    if options.device == "cuda":
        for name in options.variants:
            with variants[name]:
                found.device_s[name] = device_time_s(unet, given, replays=15)
    return found


def main() -> None:
    options = read_options()
    dtype = getattr(torch, options.dtype)
    steps = options.steps or (1 if options.device == "cpu" else 5)
    unet = build(options.model, options.lora, dtype, device=options.device, width=options.width).to(options.device)
    given = inputs_of(options.model, options.batch, options.pixels, dtype, options.device)
    found = measure(unet, given, options, steps)
    if not losses_agree(found.losses):
        sys.exit(f"the variants' losses differ, nothing is reported: {found.losses}")
    header = {
        "benchmark": "unet_step",
        "model": options.model,
        "batch": options.batch,
        "lora_rank": options.lora,
        "width": options.width,
        "pixels": options.pixels,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "steps_a_round": steps,
    }
    for name in options.variants:
        row = header | row_of(name, found, options.rounds)
        keep_row(row, options.output)


def row_of(name: str, found: Figures, rounds: int) -> dict[str, Any]:
    """Figures of one variant, with ratios to native's."""
    row: dict[str, Any] = {"variant": name, "kept_mib": round(found.kept[name], 1)}
    row["kept_ratio"] = round(found.kept[name] / found.kept["native"], 3)
    walls = found.walls[name]
    level, _, packed = name.partition("-")
    if rounds and packed and level in found.walls:
        row["step_time_over_whole_base"] = median_ratio(found.walls, name, level)
        row["cpu_time_over_whole_base"] = median_ratio(found.cpus, name, level)
    if rounds:
        row["step_time_s"] = round(statistics.median(walls), 5)
        row["step_time_ratio"] = median_ratio(found.walls, name)
        row["cpu_time_ratio"] = median_ratio(found.cpus, name)
        row["step_time_spread_s"] = [round(min(walls), 5), round(max(walls), 5)]
    took, native = found.device_s.get(name), found.device_s.get("native")
    if took and native:
        row |= {"device_time_s": round(took, 5), "device_time_ratio": round(took / native, 3)}
    if peak := found.peaks.get(name):
        row["peak_mib"] = round(peak, 1)
        row["peak_ratio"] = round(peak / (found.peaks["native"] or 1), 3)
    return row


def losses_agree(losses: dict[str, float]) -> bool:
    """Whether variants on the same base have equal losses within bf16 rounding, and quantized bases a close one."""
    by_base: dict[str, list[float]] = {}
    for name, loss in losses.items():
        by_base.setdefault(name.partition("-")[2], []).append(loss)
    spreads = [max(of_base) - min(of_base) for of_base in by_base.values()]
    return not losses or (
        max(spreads) <= 0.02 * losses["native"]
        and max(losses.values()) - min(losses.values()) <= PACKING_MOVES * losses["native"]
    )


def median_ratio(seconds: dict[str, list[float]], name: str, other: str = "native") -> float:
    """Median over rounds of the ratio of two variants' times in the same round."""
    return round(statistics.median(own / its for own, its in zip(seconds[name], seconds[other], strict=True)), 3)


if __name__ == "__main__":
    main()
