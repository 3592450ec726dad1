"""Measure group_norm_silu against the memory bandwidth and native GroupNorm with SiLU, forward and backward.

    python -m benchmarks.kernels.bandwidth [--device cuda] [--dtype bfloat16] [--trained] [--output FILE.jsonl]

Bytes are the fewest that any implementation moves: forward reads x and writes y, backward reads x and dy and writes
dx. Their rate is compared with a copy's in the same run, of a tensor as large as x: a small one moves fewer bytes a
second than the memory could. Every call takes the next of several input sets, together larger than any cache. On a card
one call of each set is captured in a CUDA graph and the replay is timed, so `_us` is the card's own time; `_host_us` is
what one call takes the host. Before a shape is timed, its gradient must agree with float64 as well as native's does.
Medians after warm-up; one JSON object a line.
"""
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import argparse
import contextlib
import functools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.rows import keep_row
from lightning_aigc_kernels.dispatch import kernel_for
from lightning_aigc_kernels.group_norm_silu import group_norm_silu

SHAPES = {  # [N, C, H, W] of the norms that hold the most pixels
    "sd15 512 px, batch 4": (4, 320, 64, 64),
    "sd15 512 px, batch 4, second level": (4, 640, 32, 32),
    "sd15 512 px, batch 1": (1, 320, 64, 64),
    "sdxl 1024 px, batch 1": (1, 320, 128, 128),
    "sdxl 1024 px, batch 4": (4, 320, 128, 128),
    "vae 512 px, batch 1": (1, 128, 512, 512),
}
GROUPS, CACHE_MIB, AS_GOOD = 32, 256, 1.1


def seconds_of(calls: Sequence[Callable[[], object]], device: str, repeats: int) -> tuple[float, float]:
    """Median seconds of one of the calls, on the device and on the host, after warm-up."""
    for call in calls[:3]:
        call()
    if device == "cpu":
        times = []
        for i in range(repeats + 1):
            started = time.perf_counter()
            calls[i % len(calls)]()
            times.append(time.perf_counter() - started)
        return (statistics.median(times[1:]),) * 2
    torch.cuda.synchronize()
    started = time.perf_counter()
    for call in calls:
        call()
    host = (time.perf_counter() - started) / len(calls)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for call in calls:
            kept.append(call())  # results that were freed would share one place, and stay in the cache
    return replay_seconds(graph, repeats) / len(calls), host


def replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Median seconds that the card takes for a captured graph, after warm-up."""
    times = []
    for _ in range(repeats + 3):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1000)
    return statistics.median(times[3:])


def copy_rate(shape: tuple[int, ...], count: int, dtype: torch.dtype, device: str, repeats: int) -> float:
    """GB a second that copies of such a tensor read and write."""
    sources = [torch.randn(shape, device=device).to(dtype) for _ in range(count)]
    copies = [source.clone for source in sources]
    return 2 * sources[0].nbytes / seconds_of(copies, device, repeats)[0] / 1e9


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


def measure(name: str, shape: tuple[int, ...], given: argparse.Namespace) -> dict[str, object]:
    dtype = getattr(torch, given.dtype)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    sets = []
    for seed in range(min(max(CACHE_MIB * 2**20 // (2 * nbytes), 1) + 1, 64)):
        torch.manual_seed(seed)
        sets.append([torch.randn(shape, device=given.device).to(dtype) for _ in range(2)])
    weight, bias = (torch.randn(shape[1], device=given.device).to(dtype) for _ in range(2))
    weight.requires_grad_(given.trained), bias.requires_grad_(given.trained)
    x, dy = sets[0]
    errors = [error(of, x, dy, weight.detach(), bias.detach()) for of in (ours, native)]
    if errors[0] > AS_GOOD * errors[1]:
        sys.exit(f"{name}: the gradient's error is {errors[0]:.2e}, native's {errors[1]:.2e}; nothing is reported")
    copy_gb_s = copy_rate(shape, len(sets), dtype, given.device, given.repeats)
    row: dict[str, object] = {"shape": name, "N_C_H_W": shape, "copy_gb_s": round(copy_gb_s, 1)}
    for label, of in (("native", native), ("ours", ours)):
        forwards, backwards = [], []
        for x, dy in sets:
            leaf = x.detach().requires_grad_()
            wanted = (leaf, weight, bias) if given.trained else (leaf,)
            y = of(leaf, weight, bias)
            forwards.append(functools.partial(without_gradients, of, x, weight, bias))
            backwards.append(functools.partial(torch.autograd.grad, y, wanted, dy, retain_graph=True))
        for direction, calls, passes in (("forward", forwards, 2), ("backward", backwards, 3)):
            seconds, host = seconds_of(calls, given.device, given.repeats)
            row[f"{label}_{direction}_us"] = round(1e6 * seconds, 1)
            row[f"{label}_{direction}_host_us"] = round(1e6 * host, 1)
            row[f"{label}_{direction}_of_copy"] = round(passes * nbytes / seconds / 1e9 / copy_gb_s, 3)
    return row


def without_gradients(of: Callable[..., Tensor], *given: Tensor) -> Tensor:
    with torch.no_grad():
        return of(*given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--trained", action="store_true", help="the affine's gradients too, as in full fine-tuning")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="number of shapes to run")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if given.device == "cuda":  # a graph takes a stream of its own, and backward runs on the stream of its forward
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        measure_all(given)


def measure_all(given: argparse.Namespace) -> None:
    header = {
        "benchmark": "bandwidth",
        "op": "group_norm_silu",
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
        keep_row(header | measure(name, shape, given), given.output)


if __name__ == "__main__":
    main()
