"""Cost model of gradient sync: bytes, seconds and memory of each mode from the link's latency and bandwidth.

Nothing here is measured: an alpha-beta model of ring collectives, one machine's share of the link between nodes, and
buckets that travel while backward runs. Its error on one machine: `benchmarks/gradient_sync/scaling_model.py`.
N ranks are M nodes of L. Needs no torch.

Sources: Thakur et al., Optimization of Collective Communication Operations in MPICH, for the ring's 2(N-1)/N; Li et
al., PyTorch Distributed, arXiv:2006.15704, for the buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_aigc.cluster.modes import AVERAGE_HOPS, EXACT_MODES, FLAT_MODES, MODES, TOP_K_POSITIONS, Average
from lightning_aigc.cluster.workload import (
    BF16_BYTES,
    COMPRESSION_BPS,
    FP32_BYTES,
    PAYLOAD_SHARE,
    Job,
    Links,
    Shape,
    slowest_of,
)
from lightning_aigc.errors import ConfigError

QUANTIZATION_BLOCK, SCALE_BITS = 32, 16
"""Values that share a scale, and the scale's bits: a bfloat16."""
ENERGY_BLOCK, ENERGY_BYTES = 256, 2
"""Values of a block of a sparse mode, and the bytes of its energy: a bfloat16."""
TWO_FOUR_DENSITY = 2 / 4
SPARSE_PACKING = 1.5
"""Time of a block-sparse mode's compression on a CPU over that of few-bit integers: it also gathers, scatters and
selects blocks (plan_error.jsonl)."""
POSITIONS_PACKING, BITMAP_PACKING = 5.0, 11.0
"""CPU time of an average in top_k over that of few-bit integers: with positions from 3 at 64 of 4,096 values on, with a
bitmap 11 at 1,712 (packing.jsonl)."""
TERNARY_BYTES = (52 + 2) / 256
"""A block of 256 values of three levels, five a byte, and its scale."""

BACKWARD_SHARE = 2 / 3
"""Share of a step's arithmetic that is backward; more with gradient checkpointing."""
LAUNCH_S = {"cpu": 0.0, "cuda": 5e-6, "npu": 5e-6}
"""Seconds to launch a kernel: assumed. On a CPU it is part of the measured bytes a second."""
LAUNCHES = {
    "bf16": 15, "int8": 22, "int4": 22, "int3": 22, "sparse": 28, "sparse_int8": 37, "sparse_int4": 37,
    "ternary": 137, "two_four": 50,
}  # fmt: skip
"""Kernels that a bucket takes on any number of ranks, counted as torch's operators and Triton's kernels; without Triton
few-bit integers take about 140, and one more for each rank."""


@dataclass(frozen=True)
class Cost:
    """A mode's modelled cost of one step, for one rank."""

    mode: str
    local_bytes: float
    """Bytes sent inside the node."""
    between_bytes: float
    """Bytes that this rank sends between nodes; in flat modes the mean over ranks."""
    wire_s: float
    compression_s: float
    """Seconds of packing and unpacking, with the launches of their kernels."""
    exposed_s: float
    """Part that backward does not hide."""
    step_s: float
    efficiency: float
    """One card's step time over this one: 1 is linear scaling."""


def bytes_per_element(mode: str, job: Job) -> float:
    """Return the bytes that a compressible gradient entry is sent as, scales and indices included.

    Raises: ConfigError for an unknown mode.
    """
    scale = SCALE_BITS / QUANTIZATION_BLOCK
    density, energy = 1 - job.sparsity, ENERGY_BYTES / ENERGY_BLOCK
    traits = MODES.get(mode)
    if traits is None:
        raise ConfigError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if traits.value_bits is not None:
        quantized = (traits.value_bits + scale) / 8
        return density * quantized + energy if traits.is_block_sparse else quantized
    return {
        "dense": FP32_BYTES,
        "bf16": BF16_BYTES,
        "sparse": density * BF16_BYTES + energy,
        "ternary": TERNARY_BYTES,
        "two_four": TWO_FOUR_DENSITY * (8 + scale) / 8,
        "local": job.average_bytes / job.local_steps,
    }[mode]


def average_packing(average: Average, top_k: int) -> float:
    """Return the CPU time of an average in this format over that of few-bit integers."""
    if average == "top_k":
        return POSITIONS_PACKING if top_k <= TOP_K_POSITIONS else BITMAP_PACKING
    return 0.0 if average == "float32" else 1.0


def payload_bytes(mode: str, job: Job) -> float:
    """Return the bytes of one step's gradient as it is sent, before the collective's factor."""
    values = bytes_per_element(mode, job)
    if mode == "local":
        return values * job.trainable
    small = FP32_BYTES if MODES[mode].is_exact else BF16_BYTES if mode == "bf16" else bytes_per_element("int8", job)
    return FP32_BYTES * job.protected + small * job.small + values * job.compressible


def ring_factor(ranks: int) -> float:
    """Return the bytes that a rank sends in an allreduce, over its payload: 2(N-1)/N."""
    return 2 * (ranks - 1) / ranks


def sent_bytes(mode: str, job: Job, shape: Shape) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step: inside its node, and between nodes."""
    payload = payload_bytes(mode, job)
    if nodes_first(mode, shape):
        return ring_factor(shape.devices) * job.node_bytes * job.trainable, ring_factor(
            shape.nodes
        ) * payload / shape.devices
    flat = ring_factor(shape.ranks) * payload
    leaves = 1 / shape.devices if shape.nodes > 1 else 0.0  # of a node's cards one has its neighbour in another node
    return flat * (1 - leaves), flat * leaves


def nodes_first(mode: str, shape: Shape) -> bool:
    """Whether this mode reduces inside a node first, and sends each card's shard of the sum between nodes."""
    return shape.hierarchical and mode not in FLAT_MODES


def predict(mode: str, job: Job, shape: Shape, links: Links) -> Cost:
    """Return one step's cost in a mode. Raises: ConfigError as `bytes_per_element` does."""
    local, between = sent_bytes(mode, job, shape)
    buckets = max(1, math.ceil(FP32_BYTES * job.trainable / job.bucket_bytes))
    rounds = buckets / (job.local_steps if mode == "local" else 1)
    # Backends divide an all_reduce over all ranks by nodes themselves, so it has no more hops than a hierarchical one.
    inside_steps = 2 * (shape.devices - 1) if local else 0
    between_steps = 2 * (shape.nodes - 1) if between else 0
    inside = local / links.local_Bps + rounds * inside_steps * links.latency_local_s
    between_s = shape.devices * between / (links.slowest_between_Bps(shape.nodes) * PAYLOAD_SHARE[job.device])
    wire = inside + between_s + rounds * between_steps * links.latency_between_s
    compressed = mode not in EXACT_MODES and shape.ranks > 1
    compression = 0.0
    if compressed:
        compression = FP32_BYTES * compressed_share(mode, job, shape) / COMPRESSION_BPS[job.device]
        if job.device == "cpu" and MODES[mode].is_block_sparse:
            compression *= SPARSE_PACKING
        compression += buckets * LAUNCHES[mode] * LAUNCH_S[job.device]
    if mode == "local" and shape.ranks > 1:
        compression = job.packing * FP32_BYTES * job.trainable / COMPRESSION_BPS[job.device] / job.local_steps
    busy = wire + compression
    if mode == "local":
        # Between steps nothing runs that could hide it; overlapped, its collectives have a step each to arrive.
        hidden = AVERAGE_HOPS * job.compute_s / job.local_steps if job.overlap_average else 0.0
        exposed = max(0.0, wire - hidden) + compression
    else:
        # A CPU's cores compress, and sum inside their node, instead of computing: only the wire between nodes can hide
        # behind backward.
        unhidden = compression + inside if job.device == "cpu" else 0.0
        busy -= unhidden
        started, of_backward = _share_that_hides(mode, job, shape)
        exposed = busy - min(started * busy, min(job.overlap_share, of_backward) * job.backward_s) + unhidden
    step = job.compute_s * (1 + job.spread * slowest_of(shape.ranks)) + exposed
    return Cost(mode, local, between, wire, compression, exposed, step, job.compute_s / step)


def _share_that_hides(mode: str, job: Job, shape: Shape) -> tuple[float, float]:
    """Return the fraction of the traffic that starts during backward, and the fraction of backward still to run then.

    All buckets but the last start during backward. Where ranks of a node sum up first and share its cores, their sync
    gets a core late: a bucket's exchange between nodes starts one bucket later, and the sums return another one later
    (plan_error.jsonl).
    """
    full = max(1.0, FP32_BYTES * job.trainable / job.bucket_bytes)
    if job.device != "cpu" or MODES[mode].is_exact or not nodes_first(mode, shape):
        until_last = 1 - 1 / math.ceil(full)
        return until_last, until_last
    return sum(max(0.0, full - late) for late in (2, 3)) / (2 * full), 1 - 1 / full


@dataclass(frozen=True)
class Measured:
    """A run whose step was timed, from which other sizes of it are predicted."""

    shape: Shape
    batch: float
    """Samples of a card in a step."""
    step_s: float


def job_of(measured: Measured, mode: str, job: Job, links: Links, batch: float) -> Job:
    """Return `job` with the times of a step of `batch` samples a card, from those of the measured run.

    What a step takes apart from traffic is `fixed_s` and a time for each sample, which is what the measured step
    leaves for it. Raises: ConfigError if the fixed part and the traffic already take longer than the measured step.
    """

    def timed(sample_s: float, samples: float) -> Job:
        seconds = sample_s * samples
        return replace(job, forward_s=seconds * (1 - BACKWARD_SHARE), backward_s=seconds * BACKWARD_SHARE)

    def measured_step(sample_s: float) -> float:
        return predict(mode, timed(sample_s, measured.batch), measured.shape, links).step_s

    low, high = 1e-9, measured.step_s / measured.batch
    if measured_step(low) > measured.step_s:
        raise ConfigError(
            f"a measured step of {measured.step_s:g} s on {measured.shape.ranks} cards is shorter than its traffic and"
            " optimizer alone are modelled; look at the links, the trained parameters and the mode"
        )
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if measured_step(middle) >= measured.step_s else (middle, high)
    return timed(high, batch)


def memory_bytes(mode: str, job: Job, shape: Shape) -> dict[str, float]:
    """Return the bytes on one card by kind, with AdamW in float32 and without activations."""
    compressed = 0.0 if mode in EXACT_MODES or shape.ranks == 1 else compressed_share(mode, job, shape)
    return {
        "weights": FP32_BYTES * job.trainable + job.frozen_bytes * job.frozen,
        "gradients": FP32_BYTES * job.trainable,
        "optimizer": 2 * FP32_BYTES * job.trainable,
        "residuals": 2 * FP32_BYTES * compressed,  # the current one, and the next if the step turns out finite
    }


def compressed_share(mode: str, job: Job, shape: Shape) -> float:
    """Return the number of gradient entries that a rank compresses: its shard of them if nodes reduce first."""
    return job.compressible / (shape.devices if nodes_first(mode, shape) else 1)


def link_for_efficiency(mode: str, job: Job, shape: Shape, links: Links, efficiency: float) -> float | None:
    """Return the bytes a second between nodes that this efficiency needs; None if no link is fast enough.

    Raises: ConfigError for an efficiency outside (0, 1).
    """
    return _least(lambda x: predict(mode, job, shape, replace(links, between_Bps=x)).efficiency, efficiency, 1e6, 1e15)


def step_time_for_efficiency(mode: str, job: Job, shape: Shape, links: Links, efficiency: float) -> float | None:
    """Return the seconds that a step must take for this efficiency; None if a day is not long enough.

    Raises: ConfigError for an efficiency outside (0, 1).
    """

    def reached(seconds: float) -> float:
        scale = seconds / job.compute_s
        parts = {name: getattr(job, name) * scale for name in ("forward_s", "backward_s", "fixed_s")}
        return predict(mode, replace(job, **parts), shape, links).efficiency

    return _least(reached, efficiency, 1e-6, 86_400.0)


def _least(reached: Callable[[float], float], wanted: float, low: float, high: float) -> float | None:
    """Return the least value in [low, high] at which the increasing function `reached` is `wanted`."""
    if not 0 < wanted < 1:
        raise ConfigError(f"efficiency must be between 0 and 1, got {wanted}; 0.927 is 92.7 % of linear")
    if reached(high) < wanted:
        return None
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) >= wanted else (middle, high)
    return high
