"""Speed of one CPU thread that compresses gradients to few-bit integers, decompresses and adds them: GB/s of float32.

    python -m benchmarks.gradient_sync.packing [--values 6553600] [--repeats 15]
        [--output benchmarks/results/gradient_sync/packing.jsonl]

One unit of gradient sync at a time, as in a step, from several buffers that together exceed the cache. The backends
alternate with each other and with a copy, which measures the memory's speed. Backends: Numba's compiled code, and the
plain torch reference. A backend is timed only if its result is bit-identical to the reference's. Medians; one JSON
object per line.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.rows import keep_row
from lightning_aigc.gradient_sync.modes.top_k import TopKQuantizer
from lightning_aigc_kernels.dispatch import cpu_kernel_for
from lightning_aigc_kernels.quantize_blocks import packed_bytes, reference

BUFFERS = 4
BITS = (3, 4, 8)
KEPT = (64, 1712)
"""Values of each 4,096 that an average in top_k sends."""


class Buffers:
    """Buffers of values and of compressed rows; each call uses the next one."""

    def __init__(self, values: int, bits: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.values = [torch.randn(1, values, generator=generator) for _ in range(BUFFERS)]
        self.packed = [torch.empty(1, packed_bytes(values, bits), dtype=torch.uint8) for _ in range(BUFFERS)]
        for value, packed in zip(self.values, self.packed, strict=True):
            reference.quantize_blocks(value.clone(), packed, bits)
        self.at = 0

    def next(self) -> tuple[Tensor, Tensor]:
        self.at = (self.at + 1) % BUFFERS
        return self.values[self.at], self.packed[self.at]


def operations(backend: Any, buffers: Buffers, bits: int) -> dict[str, Callable[[], object]]:
    """The timed calls; each processes one buffer."""

    def encode() -> None:
        values, packed = buffers.next()
        backend.quantize_blocks(values, packed, bits)

    def decode() -> None:
        values, packed = buffers.next()
        backend.dequantize_blocks(packed, values, bits)

    def add() -> None:
        values, packed = buffers.next()
        backend.add_quantized_rows(packed, values[0], bits)

    return {"encode": encode, "decode": decode, "add": add}


def check(backend: Any, bits: int) -> None:
    """Stop if a backend's result is not bit-identical to the reference's."""
    values = torch.randn(3, 2560, generator=torch.Generator().manual_seed(bits))
    both = []
    for of in (backend, reference):
        left, packed = values.clone(), torch.zeros(3, packed_bytes(2560, bits), dtype=torch.uint8)
        of.quantize_blocks(left, packed, bits)
        read, added = torch.empty_like(values), torch.ones(2560)
        of.dequantize_blocks(packed, read, bits)
        of.add_quantized_rows(packed, added, bits)
        both.append([left, packed, read, added])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*both, strict=True)), backend


def seconds_of(call: Callable[[], object]) -> float:
    """CPU seconds of the thread: other jobs affect them only through memory bandwidth."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=6_553_600, help="float32 values per buffer, a multiple of 256")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backends = {"numba": cpu_kernel_for("quantize_blocks"), "torch": reference}
    for bits in BITS:
        buffers = Buffers(options.values, bits)
        calls: dict[tuple[str, str], Callable[[], object]] = {}
        for name, backend in backends.items():
            if backend is not None:
                check(backend, bits)
                calls |= {(name, op): call for op, call in operations(backend, buffers, bits).items()}
        calls["torch", "copy"] = lambda b=buffers: b.next()[0].copy_(b.next()[0])  # type: ignore[misc]
        times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for _ in range(options.repeats + 1):  # all in each round, so that load affects them alike; first is warm-up
            for key, call in calls.items():
                times[key].append(seconds_of(call))
        for (name, op), taken in times.items():
            keep_speed({"op": op, "bits": bits, "backend": name}, taken[1:], options)
    for kept in KEPT:
        time_top_k(kept, options)


def time_top_k(kept: int, options: argparse.Namespace) -> None:
    """The same for averages in top_k."""
    quantizer, chunks = TopKQuantizer(kept), options.values // TopKQuantizer.multiple * TopKQuantizer.multiple
    values = [torch.randn(1, chunks, generator=torch.Generator().manual_seed(i)) for i in range(BUFFERS)]
    packed = torch.empty(1, quantizer.wire_bytes(chunks), dtype=torch.uint8)
    times: dict[str, list[float]] = {"encode": [], "decode": [], "add": []}
    for i in range(options.repeats + 1):
        value = values[i % BUFFERS]
        times["encode"].append(seconds_of(lambda v=value: quantizer.encode_(v, packed)))  # type: ignore[misc]
        times["add"].append(seconds_of(lambda v=value: quantizer.add_rows_(packed, v[0])))  # type: ignore[misc]
        times["decode"].append(seconds_of(lambda v=value: quantizer.decode(packed, v)))  # type: ignore[misc]
        value.copy_(torch.randn_like(value))
    for op, taken in times.items():
        keep_speed({"op": op, "bits": f"top_k {kept}", "backend": "torch"}, taken[1:], options)


def keep_speed(about: dict[str, Any], seconds: list[float], options: argparse.Namespace) -> None:
    rates = [4e-9 * options.values / taken for taken in seconds]
    row = {
        "benchmark": "packing", **about,
        "values": options.values, "threads": 1, "torch": torch.__version__, "machine": platform.machine(),
        "gb_s": round(statistics.median(rates), 2),
        "gb_s_spread": [round(min(rates), 2), round(max(rates), 2)],
    }  # fmt: skip
    keep_row(row, options.output)


if __name__ == "__main__":
    main()
