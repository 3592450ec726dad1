"""Lines of `lightning plan` for a sharded model: bytes that a rank stores, and sends in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_aigc.cli.quantities import with_scale
from lightning_aigc.cluster.workload import Job, Shape

if TYPE_CHECKING:
    from lightning_aigc.sharding.stored_bytes import SentBytes, StoredBytes

STAGES = {"zero_1": 1, "zero_2": 2, "zero_3": 3}


def zero_strategy(config: Mapping[str, Any]) -> str | None:
    """The name of a config's ZeRO strategy; None for any other."""
    strategy = (config.get("trainer") or {}).get("strategy")
    if isinstance(strategy, dict) and str(strategy.get("class_path", "")).rpartition(".")[2] == "ZeROStrategy":
        strategy = f"zero_{(strategy.get('init_args') or {}).get('stage') or 3}"
    return strategy if isinstance(strategy, str) and strategy in STAGES else None


USUAL_TENSORS = 686
"""Weights of Stable Diffusion 1.5's U-Net, into which parameters are divided that were not counted."""


def _usual_shapes(parameters: int, ranks: int) -> list[tuple[int]]:
    """Equal tensors that have these parameters together: one alone would stay with one rank."""
    count = max(USUAL_TENSORS // ranks, 1) * ranks
    return [(parameters // count + (place < parameters % count),) for place in range(count)]


@dataclass(frozen=True)
class Sharing:
    """A model sharded by a ZeRO stage, compared with DDP; with AdamW and float32 weights."""

    strategy: str
    ranks: int
    is_exact: bool
    """Whether the parameters' shapes are known, and not their number alone."""
    stored: StoredBytes
    """Bytes of the rank that stores most."""
    sent: SentBytes
    """Bytes of the rank that sends most."""
    stored_by_ddp: int
    sent_by_ddp: float

    @classmethod
    def of(cls, strategy: str, job: Job, shape: Shape, shapes: Sequence[Sequence[int]]) -> Sharing:
        """Args: shapes: of the trained parameters; empty where they were not counted."""
        from lightning_aigc.sharding.stored_bytes import sent_bytes, stored_bytes

        stage, ranks = STAGES[strategy], shape.ranks
        # Stage 1 deals whole tensors out, the others cut each evenly.
        known = shapes or (_usual_shapes(int(job.trainable), ranks) if stage == 1 else ((int(job.trainable),),))
        each = range(ranks if shapes else 1)  # equal tensors: the first rank has as much as any
        return cls(
            strategy,
            ranks,
            bool(shapes),
            max((stored_bytes(known, stage, ranks, rank) for rank in each), key=lambda stored: stored.total),
            max(
                (sent_bytes(known, stage, ranks, rank) for rank in each),
                key=lambda sent: sent.total,
            ),
            stored_bytes(known, 0, 1).total,
            sent_bytes(known, 0, ranks).total,
        )

    def as_json(self) -> dict[str, Any]:
        """Both by name, with their totals."""
        parts: dict[str, StoredBytes | SentBytes] = {"stored_bytes": self.stored, "sent_bytes": self.sent}
        return {name: {"strategy": self.strategy, **asdict(of), "total": of.total} for name, of in parts.items()}

    def as_text(self) -> str:
        """A line on what is stored and one on what is sent."""
        stored, sent = self.stored, self.sent
        exact = "to the byte" if self.is_exact else "from the count of parameters alone"
        half = "" if STAGES[self.strategy] == 1 else ", half of that under bf16-mixed"
        return (
            f"{self.strategy} on {self.ranks} ranks stores {stored.total} bytes a rank at most ({exact}): parameters "
            f"{stored.parameters}, gradients {stored.gradients}, AdamW {stored.states}; "
            f"{1 - stored.total / self.stored_by_ddp:.0%} less than ddp's {self.stored_by_ddp}. Frozen weights and "
            "activations come on top.\n"
            f"{self.strategy} sends {with_scale(sent.total, 'B')} a rank and step at most (as rings): weights "
            f"{with_scale(sent.weights, 'B')}{half}, gradients {with_scale(sent.gradients, 'B')}; ddp sends "
            f"{with_scale(self.sent_by_ddp, 'B')}."
        )
