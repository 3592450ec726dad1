"""Pick a mode by measuring the link and the packing for a second: what `mode="auto"` does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_aigc.gradient_sync.block_integers import BLOCK, BlockIntegers
from lightning_aigc.gradient_sync.groups import Groups
from lightning_aigc.gradient_sync.options import Mode
from lightning_aigc.gradient_sync.traffic import CountedGroup, dense_ring_bytes, synchronize

PROBE_VALUES = 1 << 20
"""Values of the vector that is sent and packed: 4 MB, enough for a link's bandwidth to show."""
REPEATS = 9
WORTHWHILE = 0.7
"""A less exact mode must bring gradient sync below this share of the time before it is picked."""
NOT_WORTH_MS = 2.0
"""Below this a dense sync stays as it is."""
BITS = {"int8": 8, "int4": 4, "int3": 3}


@dataclass(frozen=True)
class Probe:
    """Seconds for one pass of PROBE_VALUES."""

    dense: float
    """An all_reduce in float32."""
    bfloat16: float
    packing: dict[str, float]
    """Packing and unpacking, by mode."""


def probe(groups: Groups, device: torch.device) -> Probe:
    """Measure; collective, and the same numbers on every rank: the means of all."""
    x = torch.zeros(PROBE_VALUES, device=device)  # zeros stay what they are when they are added up again and again
    group = CountedGroup(groups.everyone.group, type(groups.traffic)())  # its bytes are not the gradients'
    dense = _time(lambda: group.all_reduce(x).wait(), device)
    half = x.bfloat16()
    bfloat16 = _time(lambda: (half.copy_(x), group.all_reduce(half).wait(), x.copy_(half)), device)
    packing = {}
    x.normal_()
    for mode, bits in BITS.items():
        code = BlockIntegers(bits)
        wire = torch.zeros(code.wire_bytes(PROBE_VALUES), dtype=torch.uint8, device=device)
        packing[mode] = _time(lambda c=code, w=wire: (c.encode_(x, w), c.decode(w, x)), device)  # type: ignore[misc]
    numbers = torch.tensor([dense, bfloat16, *packing.values()], dtype=torch.float32, device=device)
    group.all_reduce(numbers).wait()
    dense, bfloat16, *rest = (numbers / groups.world_size).tolist()
    return Probe(dense, bfloat16, dict(zip(packing, rest, strict=True)))


def choose_mode(measured: Probe, numel: int, ranks: int) -> tuple[Mode, str]:
    """The mode with the least to wait for, the more exact one when in doubt, and the sentence that says why."""
    times: dict[Mode, float] = {"dense": measured.dense, "bf16": measured.bfloat16}
    for mode, packing in measured.packing.items():
        share = (BITS[mode] + 16 / BLOCK) / 32
        times[mode] = measured.dense * share + packing  # type: ignore[index]
    scale = numel / PROBE_VALUES
    chosen: Mode = "dense"
    for mode, seconds in times.items():  # from exact to coarse
        if 1e3 * scale * measured.dense > NOT_WORTH_MS and seconds < WORTHWHILE * times[chosen]:
            chosen = mode
    speed = dense_ring_bytes(PROBE_VALUES, ranks) / measured.dense / 1e6
    estimates = ", ".join(f"{mode} {1e3 * seconds * scale:.0f} ms" for mode, seconds in times.items())
    return chosen, (
        f"auto chose {chosen}: the link carries {speed:.0f} MB/s, and {numel / 1e6:.1f} M gradients "
        f"would take {estimates} a step (measured on {PROBE_VALUES / 1e6:.0f} M, without overlap)"
    )


def _time(run: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
