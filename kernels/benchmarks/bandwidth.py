"""How near group_norm_silu comes to the memory's own speed, and to native GroupNorm with SiLU, forward and backward.

    python kernels/benchmarks/bandwidth.py [--device cuda] [--dtype bfloat16] [--trained] [--output FILE.jsonl]

Bytes are the fewest that any implementation moves: forward reads x and writes y, backward reads x and dy and writes
dx. Their rate is set beside a copy's in the same run, a tensor of 512 MiB read and written. Every call takes the next
of several input sets, together larger than any cache. Before a shape is timed, its gradient must agree with float64 as
well as native's does. Medians after warm-up; one JSON object a line.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.calling import kernel_for
from lightning_aigc_kernels.group_norm_silu import group_norm_silu

SHAPES = {  # [N, C, H, W] of the norms that hold the most pixels
    "sd15 512 px, batch 4": (4, 320, 64, 64),
    "sd15 512 px, batch 4, second level": (4, 640, 32, 32),
    "sd15 512 px, batch 1": (1, 320, 64, 64),
    "sdxl 1024 px, batch 1": (1, 320, 128, 128),
    "sdxl 1024 px, batch 4": (4, 320, 128, 128),
    "vae 512 px, batch 1": (1, 128, 512, 512),
}
GROUPS, COPY_MIB, CACHE_MIB, AS_GOOD = 32, 512, 256, 1.1


def seconds_of(call: Callable[[], object], device: str, repeats: int) -> float:
    """Median of `repeats` calls after a tenth as many."""
    times = []
    for _ in range(repeats + max(repeats // 10, 2)):
        if device == "cpu":
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        else:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / 1000)
    return statistics.median(times[-repeats:])


def copy_rate(device: str) -> float:
    """GB that a copy reads and writes in a second."""
    source = torch.randn(COPY_MIB * 2**18, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_MIB * 2**20 / seconds_of(lambda: target.copy_(source), device, 20) / 1e9


def native(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, GROUPS, weight, bias))


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return group_norm_silu(x, weight, bias, GROUPS)


def error(of: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> float:
    """Relative error of x's gradient against native's in float64."""
    x, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    (got,) = torch.autograd.grad(of(x, weight, bias), x, dy)
    (true,) = torch.autograd.grad(native(exact, weight.double(), bias.double()), exact, dy.double())
    return float((got.double() - true).norm() / true.norm())


def measure(name: str, shape: tuple[int, ...], given: argparse.Namespace, copy_gb_s: float) -> dict[str, object]:
    dtype = getattr(torch, given.dtype)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    sets = []
    for seed in range(min(max(CACHE_MIB * 2**20 // (2 * nbytes), 1) + 1, 64)):
        torch.manual_seed(seed)
        sets.append([torch.randn(shape, device=given.device).to(dtype) for _ in range(2)])
    weight, bias = (torch.randn(shape[1], device=given.device).to(dtype) for _ in range(2))
    weight.requires_grad_(given.trained), bias.requires_grad_(given.trained)
    errors = [error(of, *sets[0], weight.detach(), bias.detach()) for of in (ours, native)]
    if errors[0] > AS_GOOD * errors[1]:
        sys.exit(f"{name}: the gradient's error is {errors[0]:.2e}, native's {errors[1]:.2e}; nothing is reported")
    row: dict[str, object] = {"shape": name, "N_C_H_W": shape, "copy_gb_s": round(copy_gb_s, 1)}
    for label, of in (("native", native), ("ours", ours)):
        graphs = []
        for x, dy in sets:
            x = x.detach().requires_grad_()
            graphs.append((of(x, weight, bias), (x, weight, bias) if given.trained else (x,), dy))
        turns, inputs = itertools.cycle(graphs), itertools.cycle(sets)

        def forward(of: Callable[..., Tensor] = of, inputs: itertools.cycle = inputs) -> None:  # type: ignore[type-arg]
            with torch.no_grad():
                of(next(inputs)[0], weight, bias)

        def backward(turns: itertools.cycle = turns) -> None:  # type: ignore[type-arg]
            y, wanted, dy = next(turns)
            torch.autograd.grad(y, wanted, dy, retain_graph=True)

        for direction, call, passes in (("forward", forward, 2), ("backward", backward, 3)):
            seconds = seconds_of(call, given.device, given.repeats)
            row[f"{label}_{direction}_us"] = round(1e6 * seconds, 1)
            row[f"{label}_{direction}_of_copy"] = round(passes * nbytes / seconds / 1e9 / copy_gb_s, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--trained", action="store_true", help="the affine's gradients too, as in full fine-tuning")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    given = parser.parse_args()
    copy_gb_s = copy_rate(given.device)
    header = {
        "benchmark": "bandwidth",
        "op": "group_norm_silu",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": given.dtype,
        "trained": given.trained,
        "kernel": "reference"
        if kernel_for("group_norm_silu", torch.empty(0, device=given.device)) is None
        else "triton",
    }
    for name, shape in list(SHAPES.items())[: given.shapes]:
        row = json.dumps(header | measure(name, shape, given, copy_gb_s))
        print(row, flush=True)
        if given.output:
            with given.output.open("a") as file:
                file.write(row + "\n")


if __name__ == "__main__":
    main()
