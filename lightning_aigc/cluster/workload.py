"""Inputs of the cost model: one card's part of a step, the links, and the number of nodes and cards.

Needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from lightning_aigc.errors import ConfigError

FP32_BYTES, BF16_BYTES = 4, 2
OVERLAP_SHARE = 0.9
"""Share of backward during which buckets can travel, after the first one is full."""
COMPRESSION_BPS = {"cpu": 0.72e9, "cuda": 160e9, "npu": 160e9}
"""Bytes of float32 gradient that are packed and unpacked per second. The CPU's is that of one thread that also
runs Gloo and backward, which it slows, fitted by benchmarks/gradient_sync/plan_error.py; the cards' is derived: ten
passes at 1.6 TB/s."""

PAYLOAD_SHARE = {"cpu": 1448 / 1538, "cuda": 1.0, "npu": 1.0}
"""Share of the bytes on a link between nodes that are gradients. Gloo's TCP has 1448 bytes in an Ethernet frame, which
takes as long as 1538 with headers, preamble and gap (RFC 9293, RFC 7323, IEEE 802.3); what cards add is taken as 0."""


CARD_SPREAD, LINK_SPREAD = 0.025, 0.05
"""Spread of a card's step and of a node's bandwidth where nobody has measured them. The first brings the model to
within 3 points of FLUX.1 on 32 to 128 B200 (benchmarks/gradient_sync/published_scaling.py); the second is assumed."""


def slowest_of(count: int) -> float:
    """Expected largest of `count` draws of a standard normal distribution: 0 for one, 3.0 for 384.

    Source: Blom, Statistical Estimates and Transformed Beta-Variables, 1958.
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


MOST_PARAMETERS = 1e15
"""Largest count that is not taken for a mistake; beyond it torch's counts overflow."""


@dataclass(frozen=True)
class Job:
    """One card's part of a training step. Raises: ConfigError for a value outside what its field says."""

    trainable: float
    """Parameters that are trained."""
    forward_s: float
    backward_s: float
    protected: float = 0
    """Trainable parameters that are always sent uncompressed, in float32."""
    small: float = 0
    """Trainable biases, norms and tensors of few values, sent in eight bits."""
    frozen: float = 0
    """Parameters that are not trained; they cost memory alone."""
    frozen_bytes: float = BF16_BYTES
    sparsity: float = 0.75
    local_steps: int = 8
    average_bytes: float = FP32_BYTES
    """local: bytes of a value in an average, with its share of scales and positions."""
    packing: float = 0.0
    """local: time to compress an average over that of few-bit integers; 0 for float32."""
    overlap_average: bool = False
    """local: whether an average travels while the ranks step on."""
    bucket_bytes: float = 25 * 2**20
    overlap_share: float = OVERLAP_SHARE
    """0 if the transport takes its time from backward, like gloo on cores that are all busy."""
    device: str = "npu"
    """Device that compresses: npu, cuda or cpu."""
    fixed_s: float = 0.0
    """Seconds of a step that no batch size changes, such as the optimizer's, and in which nothing travels."""
    spread: float = 0.0
    """Standard deviation of a card's step, as a share of it: all ranks wait for the slowest."""
    node_bytes: float = FP32_BYTES
    """Bytes of a gradient entry inside a node, where nodes reduce first."""

    def __post_init__(self) -> None:
        if not 0 < self.trainable <= MOST_PARAMETERS:
            raise ConfigError(f"trainable parameters must be above 0 and at most 1e15, got {self.trainable:g}")
        if self.protected < 0 or self.small < 0:
            raise ConfigError(
                f"protected and small parameters must be 0 or more, got {self.protected:g} and {self.small:g}"
            )
        if self.protected + self.small > self.trainable:
            raise ConfigError(
                f"protected ({self.protected:,.0f}) and small ({self.small:,.0f}) parameters are part of the trainable"
                f" ones, got only {self.trainable:,.0f} of those"
            )
        if self.forward_s < 0 or self.backward_s < 0 or self.compute_s <= 0:
            raise ConfigError(f"a step must take time, got forward {self.forward_s} s and backward {self.backward_s} s")
        if not 0 <= self.sparsity < 1:
            raise ConfigError(f"sparsity must be in [0, 1), got {self.sparsity}")
        if self.fixed_s < 0:
            raise ConfigError(f"fixed_s must be 0 or more, got {self.fixed_s}")
        if not 0 <= self.spread < 1:
            raise ConfigError(f"spread must be at least 0 and below 1, got {self.spread}")
        if not 0 <= self.overlap_share <= 1:
            raise ConfigError(f"overlap_share must be in [0, 1], got {self.overlap_share}")
        if self.local_steps < 1:
            raise ConfigError(f"local_steps must be at least 1, got {self.local_steps}")
        if not 0 < self.bucket_bytes < math.inf:
            raise ConfigError(f"a bucket must hold more than 0 MB, got {self.bucket_bytes / 1e6:g}; set 25, DDP's own")
        if self.device not in COMPRESSION_BPS:
            raise ConfigError(f"device must be one of {', '.join(COMPRESSION_BPS)}; got {self.device!r}")

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.fixed_s

    @property
    def compressible(self) -> float:
        return self.trainable - self.protected - self.small


@dataclass(frozen=True)
class Links:
    """Bandwidth and latency of one card inside its node, and of one node to others.

    Raises: ConfigError for a bandwidth of nothing or a negative latency.
    """

    local_Bps: float  # noqa: N815  bytes a second, as the unit is written
    between_Bps: float  # noqa: N815
    """Bandwidth of a node, which its cards share."""
    latency_local_s: float = 5e-6
    latency_between_s: float = 30e-6
    spread: float = 0.0
    """Standard deviation of a node's bandwidth to others, as a share of it: links that others use too."""

    def __post_init__(self) -> None:
        if min(self.local_Bps, self.between_Bps) <= 0 or min(self.latency_local_s, self.latency_between_s) < 0:
            raise ConfigError(f"bandwidths must be above 0 and latencies at least 0, got {self}")
        if not 0 <= self.spread < 1:
            raise ConfigError(f"the spread of a link must be in [0, 1), got {self.spread}")

    def slowest_between_Bps(self, nodes: int) -> float:  # noqa: N802  bytes a second, as the unit is written
        """Expected bandwidth of the slowest of these nodes, which a collective waits for; a tenth at least."""
        return self.between_Bps * max(0.1, 1 - self.spread * slowest_of(nodes))


@dataclass(frozen=True)
class Shape:
    """Number of nodes, and of cards in each. Raises: ConfigError below 1."""

    nodes: int
    devices: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices < 1:
            raise ConfigError(f"nodes and devices must be at least 1, got {self.nodes} and {self.devices}")

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices

    @property
    def hierarchical(self) -> bool:
        """Whether ranks first reduce inside their node: only with several nodes of several cards."""
        return self.nodes > 1 and self.devices > 1
