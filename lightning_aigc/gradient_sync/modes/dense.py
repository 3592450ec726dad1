"""Mode dense: DDP's own all_reduce of each bucket, under the same rules as the modes that compress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lightning_aigc.gradient_sync.base import Sync
from lightning_aigc.gradient_sync.hook import after_backward
from lightning_aigc.gradient_sync.transport.collectives import KINDS
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups, explain
from lightning_aigc.gradient_sync.watch.step_report import StepReport


class _Outcome:
    """Result of a step's collectives, written by Gloo's own threads.

    They hold this object and never the sync: a Gloo thread with the last reference to its process group would wait for
    its own end.
    """

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        self.done_at = 0.0


class Dense(Sync):
    """Sync by DDP's own all_reduce of each bucket, with a check that the sums are finite."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__(groups)
        self._checks: list[torch.futures.Future[Any]] = []
        self._outcome = _Outcome()
        self._sent_before = dict(groups.traffic.sent)
        self._last_bucket_at = 0.0

    def end_step(self) -> StepReport | None:
        if self._checks:
            finite = bool(torch.isfinite(torch.stack([check.value() for check in self._checks])).all())
            self._checks = []
            self.step += finite
            self.skipped_steps += not finite
            now = dict(self.groups.traffic.sent)
            sent, self._sent_before = {kind: now[kind] - self._sent_before[kind] for kind in KINDS}, now
            exposed_ms = 1e3 * max(0.0, self._outcome.done_at - self._last_bucket_at)
            self.report = StepReport(sent, 1.0, exposed_ms, 0.0, finite)
        return self.report

    def state_dict(self) -> dict[str, Any]:
        return {
            "mode": "dense",
            "step": self.step,
            "residuals": {},
            "reduction": {},
            "world_size": self.groups.world_size,
        }

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> list[str]:
        self.step = int(states[0]["step"])
        if any(part["values"].any() for state in states for part in state["residuals"].values()):
            return ["the checkpoint's run compressed gradients; its residuals are dropped by mode dense"]
        return []

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(self.groups.world_size)
        self._last_bucket_at = time.perf_counter()
        check: torch.futures.Future[Any] = torch.futures.Future()
        self._checks.append(check)
        if bucket.is_last():
            after_backward(self._raise_failure)
        future: torch.futures.Future[Any] = self.groups.everyone.all_reduce(buffer).start().get_future()
        return future.then(_check_sum(buffer, check, self._outcome))

    def _raise_failure(self) -> None:
        for check in self._checks:
            check.wait()
        if self._outcome.error is not None:
            raise explain(self._outcome.error, self.groups, self.step)


def _check_sum(
    buffer: Tensor, check: torch.futures.Future[Any], outcome: _Outcome
) -> Callable[[torch.futures.Future[Any]], Tensor]:
    def finished(future: torch.futures.Future[Any]) -> Tensor:
        try:
            reduced: Tensor = future.value()[0]
        except RuntimeError as error:
            outcome.error, reduced = outcome.error or error, buffer
        check.set_result(reduced.sum(dtype=torch.float32))
        outcome.done_at = time.perf_counter()
        return reduced

    return finished
