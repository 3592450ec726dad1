"""Compare the attention kernels of a device at the models' shapes, forward and backward.

    python -m benchmarks.kernels.attention [--device cuda] [--shapes 2] [--repeats 20] [--output FILE.jsonl]

The kernels are those of `lightning_aigc_kernels.lora_attention.core`: cuDNN's, torch's flash and memory-efficient
attention on a card, torch's flash attention and plain products on a CPU; `chosen` is the one that the fused blocks run.
Inputs are bf16 rows with one head after the other, as projections give them. On a card a call is captured in a CUDA
graph and the replay is timed. A kernel that cannot run, or whose gradients are far from float32's, has no times but an
error. Medians after warm-up; one JSON object a line.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common.rows import keep_row
from benchmarks.kernels.bandwidth import seconds_of
from lightning_aigc_kernels.lora_attention import core

SHAPES = {  # [N, H, T, D] and the number of keys
    "sd15 512 px": ((1, 8, 4096, 40), 4096),
    "sd15 512 px, text": ((1, 8, 4096, 40), 77),
    "sd15 512 px, batch 4": ((4, 8, 4096, 40), 4096),
    "sd15 512 px, second level": ((1, 8, 1024, 80), 1024),
    "sdxl 1024 px": ((1, 10, 4096, 64), 4096),
    "flux 1024 px": ((1, 24, 4608, 128), 4608),
}
KERNELS = {"cuda": ("cudnn", "cuda_flash", "cuda_efficient"), "cpu": ("cpu_flash", "math")}
FARTHEST = 0.03
"""Largest relative difference of a gradient from float32's."""


def inputs(shape: tuple[int, ...], keys: int, device: str) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output, heads first."""
    samples, heads, queries, features = shape
    made = (torch.randn(samples, n, heads, features, device=device) for n in (queries, keys, keys, queries))
    return tuple(x.bfloat16().transpose(1, 2) for x in made)


def both(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    return core.attend_backward(do, q, k, v, *core.attend(q, k, v))


def measure(kernel: str, given: tuple[Tensor, ...], wanted: tuple[Tensor, ...], options: Any) -> dict[str, Any]:
    """Microseconds of forward and backward, or the error."""
    q, k, v, do = given
    with mock.patch.object(core, "_kernel", return_value=kernel):
        try:
            far = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(both(*given), wanted, strict=True))
            if not far < FARTHEST:
                return {"error": f"gradients differ by {far:.2g}"}
            made = core.attend(q, k, v)
            forward = functools.partial(core.attend, q, k, v)
            backward = functools.partial(core.attend_backward, do, q, k, v, *made)
            seconds = [seconds_of([call], options.device, options.repeats)[0] for call in (forward, backward)]
        except RuntimeError as error:
            return {"error": str(error).splitlines()[0]}
    return {"forward_us": round(1e6 * seconds[0], 1), "backward_us": round(1e6 * seconds[1], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=KERNELS, default="cpu")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first shapes only")
    parser.add_argument("--pixels", type=int, help="queries, and keys where these are as many; unset: the models'")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    for what, (shape, keys) in list(SHAPES.items())[: options.shapes]:
        torch.manual_seed(0)
        queries = options.pixels or shape[2]
        given = inputs((*shape[:2], queries, shape[3]), queries if keys == shape[2] else keys, options.device)
        wanted = both(*(x.float() for x in given))
        chosen = core._kernel(given[0], given[1], given[2])
        for kernel in KERNELS[options.device]:
            row = {
                "benchmark": "attention", "device": name, "torch": torch.__version__, "shape": what,
                "N_H_T_D": list(given[0].shape), "keys": given[1].shape[2], "kernel": kernel,
                "chosen": kernel == chosen,
            }  # fmt: skip
            keep_row(row | measure(kernel, given, wanted, options), options.output)


if __name__ == "__main__":
    main()
