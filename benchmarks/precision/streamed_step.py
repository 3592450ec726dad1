"""Time and memory of a step whose frozen blocks wait in host memory, compared with all of them on the device.

    python -m benchmarks.precision.streamed_step [--model flux] [--share 0.5] [--base int8] [--pixels 1024]
        [--memory lean] [--device cuda]

A transformer with random weights in bf16 and a LoRA of rank 16. `--share` is the share of the blocks that stays on the
device (`base_location: {device: SHARE}`). Medians over rounds, after warm-up. `without_copies_s` is the streamed step
with its copies left out: the same arithmetic, on wrong bytes. What a copy's time adds to it is exposed; `hidden_share`
is the part of the copies' own time that is not. `gradient_difference` is relative, to the resident step's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.denoisers import DENOISERS, denoiser_on, few_blocks, inputs_of, random_inputs
from benchmarks.common.kept_memory import peak_mib
from benchmarks.common.rows import keep_row
from benchmarks.precision.graph_step import difference, gradients_of, seconds_of
from benchmarks.precision.unet_step import synchronize
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.memory.streamed_blocks import Link, StreamedBlocks, blocks_of, has_skips
from lightning_aigc.quantization.frozen import quantize_frozen_

GIB = 2**30


def step_s(model: Any, given: dict[str, Any], device: str, rounds: int) -> float:
    """Median seconds of a step."""
    found = [seconds_of(model, [given], device, 1) for _ in range(rounds + 1)]
    return round(statistics.median(found[1:]), 5)


def peak_gib(model: Any, given: dict[str, Any], device: str) -> float | None:
    found = peak_mib(device, lambda: gradients_of(model, given))
    return None if found is None else round(found / 1024, 2)


def copies_s(streamed: StreamedBlocks, device: str) -> float:
    """Seconds in which the link alone copies a step's bytes."""
    slot, host = streamed.free[0], max(streamed.hosts, key=lambda block: block.nbytes).host
    seconds = []
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        slot.data[: host.numel()].copy_(host, non_blocking=True)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) / host.numel() * streamed.step_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[name for name in DENOISERS if not name.startswith("sd1")], default="flux")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--base", choices=["int8", "nf4", "fp8"])
    parser.add_argument("--memory", default="lean", choices=["off", "balanced", "lean", "max"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--text", type=int, default=512)
    parser.add_argument("--blocks", type=int, help="blocks of a kind; unset: as published")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the row to")
    options = parser.parse_args()
    device = options.device
    model = denoiser_on(device, options.model, 16, **few_blocks(options.model, options.blocks))
    model.bfloat16()
    if options.base:
        quantize_frozen_(model, options.base)
    given = random_inputs(inputs_of(model.config, options.model, options.batch, options.pixels, options.text), device)
    FusedBackwardPrecision("bf16-true", memory=options.memory).convert_module(model)
    row: dict[str, Any] = {
        "benchmark": "streamed_step", "model": options.model, "share": options.share, "base": options.base,
        "memory": options.memory, "batch": options.batch, "pixels": options.pixels, "text": options.text,
        "device": torch.cuda.get_device_name() if device == "cuda" else device, "torch": torch.__version__,
        "rounds": options.rounds,
    }  # fmt: skip
    row["resident_s"] = step_s(model, given, device, options.rounds)
    row["resident_peak_gib"] = peak_gib(model, given, device)
    wanted, again = gradients_of(model, given), gradients_of(model, given)
    row["resident_difference"] = difference(again, wanted)
    streamed = StreamedBlocks(blocks_of(model), options.share, torch.device(device), has_skips=has_skips(model))
    row["streamed_blocks"], row["step_copies_gib"] = len(streamed.chosen), round(streamed.step_bytes / GIB, 2)
    row["gradient_difference"] = difference(gradients_of(model, given), wanted)
    row["streamed_s"] = step_s(model, given, device, options.rounds)
    row["streamed_peak_gib"] = peak_gib(model, given, device)
    row["copies_s"] = round(copies_s(streamed, device), 5)
    row["link_gb_s"] = round(streamed.step_bytes / row["copies_s"] / 1e9, 1)
    send, Link.send = Link.send, lambda *_: None  # type: ignore[method-assign]
    row["without_copies_s"] = step_s(model, given, device, options.rounds)
    Link.send = send  # type: ignore[method-assign]
    row["streamed_over_resident"] = round(row["streamed_s"] / row["resident_s"], 3)
    exposed = max(0.0, row["streamed_s"] - row["without_copies_s"])
    row["hidden_share"] = round(1 - min(1.0, exposed / row["copies_s"]), 3)
    keep_row(row, options.output)


if __name__ == "__main__":
    main()
