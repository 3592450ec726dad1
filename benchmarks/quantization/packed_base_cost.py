"""Time and memory to quantize a U-Net of SDXL's or SD 1.5's shapes with random weights, without and with the cache.

    OMP_NUM_THREADS=1 python -m benchmarks.quantization.packed_base_cost [--model sdxl] [--kind nf4] [--output FILE]

`cpu_s` is the CPU time of one thread to quantize, `cached_cpu_s` to read the cache's files, including hashing.
`peak_over_source` is the process's peak resident memory during quantization over that before it, when all bf16 weights
are in memory. Both results must have the same digest. `unpack_cpu_s` is the time to dequantize every weight once to
bf16, one at a time as in a forward; `unpack_reference_cpu_s` the time of plain torch, measured alternately.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel

from benchmarks.common.rows import keep_row
from benchmarks.end_to_end.real_size import fill, sdxl_unet
from lightning_aigc.diffusion.pipeline.quantized_base import PackedCache
from lightning_aigc.quantization.frozen import PackedBase, quantize_layers
from lightning_aigc.quantization.layers import FORMATS, frozen_layers
from lightning_aigc_kernels.packed_weight import packed_weights, reference


def build(model: str) -> torch.nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        unet: Any = (
            sdxl_unet(UNet2DConditionModel)
            if model == "sdxl"
            else UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
        )
    torch.set_default_dtype(torch.float32)
    return fill(unet.to_empty(device="cpu")).requires_grad_(False)


def pack(unet: torch.nn.Module, kind: str, folder: Path) -> tuple[PackedBase, float]:
    """Quantize through the cache in `folder`. Returns: the quantized base, and the CPU time."""
    linear, convolution = FORMATS[kind]
    started = time.process_time()
    packed = quantize_layers(
        unet, frozen_layers(unet), lambda layer: linear if layer.is_linear else convolution, PackedCache(folder).pack
    )
    return packed, time.process_time() - started


def unpack(unet: torch.nn.Module, rounds: int = 5) -> tuple[float, float]:
    """Median CPU seconds to dequantize every weight once, and the same in plain torch."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for plain, seconds in taken.items():
            started = time.process_time()
            for _, weight in packed_weights(unet):
                if plain:
                    reference.unpack(weight.packed, weight.scales, weight.kind, torch.bfloat16)
                else:
                    weight.dequantize()
            seconds.append(time.process_time() - started)
    return statistics.median(taken[False]), statistics.median(taken[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["sd15", "sdxl"], default="sdxl")
    parser.add_argument("--kind", choices=list(FORMATS), default="nf4")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the row to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        unet = build(options.model)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        first, first_s = pack(unet, options.kind, Path(name))
        after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unpack_s, reference_s = unpack(unet)
        del unet
        second, second_s = pack(build(options.model), options.kind, Path(name))
    if first.digest != second.digest:
        raise SystemExit("error: the cache gave other bytes")
    row = {
        "benchmark": "packing", "model": options.model,
        "kind": options.kind, "torch": torch.__version__, "threads": torch.get_num_threads(),
        "weights_mib": round(first.bytes_before / 2**20, 1), "packed_mib": round(first.bytes_after / 2**20, 1),
        "cpu_s": round(first_s, 1), "cached_cpu_s": round(second_s, 1),
        "peak_over_source": round(after_kib / before_kib, 4), "unpack_cpu_s": round(unpack_s, 2),
        "unpack_reference_cpu_s": round(reference_s, 2),
    }  # fmt: skip
    keep_row(row, options.output)


if __name__ == "__main__":
    main()
