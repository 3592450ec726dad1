"""Report of one step's gradient sync: bytes, wait, and whether the gradients were finite."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_aigc.gradient_sync.executors import StepTimes
from lightning_aigc.gradient_sync.transport.collectives import dense_ring_bytes
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups


@dataclass
class StepReport:
    """One optimizer step's gradient sync on this rank."""

    sent_bytes: dict[str, float]
    """Bytes by kind: values, index, protected, small, intra_node."""
    ratio: float
    """Bytes sent, except inside a node, over those of a dense float32 ring on as many ranks or nodes."""
    exposed_ms: float
    """Wait of the step: from the moment its last gradient was ready until all sums were there."""
    share_hidden: float
    """Share of the sync's time that the step did not wait for."""
    finite: bool
    packing_ms: float = 0.0
    """CPU time of packing, adding and unpacking; on an accelerator, where the host only starts that, 0."""
    waiting_ms: float = 0.0
    """Wait of the sync for collectives, hidden or not; on an accelerator 0."""

    @property
    def between_nodes_bytes(self) -> float:
        return sum(self.sent_bytes.values()) - self.sent_bytes["intra_node"]


class StepMeter:
    """Counts the bytes that a step sends between `start` and `report`."""

    def __init__(self, groups: ProcessGroups, numel: int) -> None:
        """Args: numel: values of all gradients, for the dense ring that bytes are compared with."""
        self._groups, self._numel = groups, numel
        self._sent_before = dict(groups.traffic.sent)

    def start(self) -> None:
        self._sent_before = dict(self._groups.traffic.sent)

    def report(self, times: StepTimes, *, finite: bool) -> StepReport:
        """Return the step's report."""
        groups = self._groups
        sent = {kind: total - self._sent_before[kind] for kind, total in groups.traffic.sent.items()}
        between = sum(sent.values()) - sent["intra_node"]
        yardstick = dense_ring_bytes(self._numel, groups.between.size) / groups.ranks_inside
        hidden = max(0.0, 1 - times.exposed_ms / times.busy_ms) if times.busy_ms else 0.0
        return StepReport(
            sent, between / yardstick, times.exposed_ms, hidden, finite, times.packing_ms, times.waiting_ms
        )


def describe(report: StepReport | None, steps: int, skipped: int) -> str:
    """Return one line on a step's bytes and times."""
    if report is None:
        return "no step yet"
    parts = ", ".join(f"{kind} {sent / 1e6:.2f} MB" for kind, sent in report.sent_bytes.items() if sent)
    return (
        f"step {steps}: sent {parts or 'nothing'}; {report.ratio:.3f} of a dense float32 ring; "
        f"{report.exposed_ms:.0f} ms exposed, {100 * report.share_hidden:.0f} % hidden"
        + (f"; {skipped} steps skipped for values that are not finite" if skipped else "")
    )
