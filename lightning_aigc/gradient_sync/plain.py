"""Syncs that compress nothing: dense all_reduce under the same rules, and local steps between averages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.gradient_sync.groups import Groups
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.runners import SyncError, at_the_end_of_backward, attach_hook, explain
from lightning_aigc.gradient_sync.sync import StepReport
from lightning_aigc.gradient_sync.traffic import KINDS, dense_ring_bytes


class _Plain:
    """A hook on DDP's buckets, and process groups that go with it."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.step = self.skipped_steps = 0
        self.report: StepReport | None = None
        self._is_closed = False

    def attach(self, ddp: DistributedDataParallel) -> None:
        attach_hook(ddp, self._on_bucket)

    def _on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the process groups, once; a backward pass that DDP syncs is an error from here on."""
        self._is_closed = True
        self.groups.destroy()

    def _check_open(self) -> None:
        if self._is_closed:
            raise SyncError("this gradient sync was closed, and DDP calls it still; make a new DistributedDataParallel")


class _Outcome:
    """How the collectives of a step ended, as Gloo's own threads note it down.

    They get this and never the sync: a thread of Gloo that held the last reference to its process group would have to
    wait for its own end.
    """

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        self.done = 0.0


class Dense(_Plain):
    """DDP's own all_reduce of each bucket, and a look at whether the sums are finite."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self._checks: list[torch.futures.Future[Any]] = []
        self._outcome = _Outcome()
        self._sent_before = dict(groups.traffic.sent)
        self._arrived = 0.0

    def settle(self) -> StepReport | None:
        if self._checks:
            finite = bool(torch.isfinite(torch.stack([check.value() for check in self._checks])).all())
            self._checks = []
            self.step += finite
            self.skipped_steps += not finite
            now = dict(self.groups.traffic.sent)
            sent, self._sent_before = {kind: now[kind] - self._sent_before[kind] for kind in KINDS}, now
            self.report = StepReport(sent, 1.0, 1e3 * max(0.0, self._outcome.done - self._arrived), 0.0, finite)
        return self.report

    def state_dict(self) -> dict[str, Any]:
        return {"mode": "dense", "step": self.step, "owed": {}, "reduction": {}, "world_size": self.groups.world_size}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> list[str]:
        self.step = int(states[0]["step"])
        owing = any(value["values"].any() for state in states for value in state["owed"].values())
        return (
            ["the checkpoint's run compressed gradients; what it still owed is dropped by mode dense"] if owing else []
        )

    def _on_bucket(self, bucket: GradBucket) -> Any:
        self._check_open()
        buffer = bucket.buffer().div_(self.groups.world_size)
        self._arrived = time.perf_counter()
        check: torch.futures.Future[Any] = torch.futures.Future()
        self._checks.append(check)
        if bucket.is_last():
            at_the_end_of_backward(self._raise_failure)
        travelling = self.groups.everyone.all_reduce(buffer).get_future()
        return travelling.then(_look_at_sum(buffer, check, self._outcome))

    def _raise_failure(self) -> None:
        for check in self._checks:
            check.wait()
        if self._outcome.error is not None:
            raise explain(self._outcome.error, self.groups, self.step)


def _look_at_sum(
    buffer: Tensor, check: torch.futures.Future[Any], outcome: _Outcome
) -> Callable[[torch.futures.Future[Any]], Tensor]:
    def finished(future: torch.futures.Future[Any]) -> Tensor:
        try:
            reduced: Tensor = future.value()[0]
        except RuntimeError as error:
            outcome.error, reduced = outcome.error or error, buffer
        check.set_result(reduced.sum(dtype=torch.float32))
        outcome.done = time.perf_counter()
        return reduced

    return finished


class LocalSteps(_Plain):
    """Each rank steps alone; every `local_steps` optimizer steps the parameters go to their average.

    Source: Douillard et al., DiLoCo, arXiv:2311.08105; with outer learning rate 1 and no momentum it is local SGD. The
    ranks' optimizer states stay apart. One number travels each step, so that all skip a step that is not finite.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], options: SyncOptions, groups: Groups) -> None:
        super().__init__(groups)
        self.options = options
        self.parameters = [(name, p) for name, p in parameters if p.requires_grad]
        self._anchor = {name: p.detach().clone().float() for name, p in self.parameters}
        self._momentum = (
            {name: torch.zeros_like(a) for name, a in self._anchor.items()} if options.outer_momentum else {}
        )
        self._checks: list[Tensor] = []
        self._numel = sum(p.numel() for _, p in self.parameters)
        self._since_average = 0

    def _on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self._check_open()
        self._checks.append(bucket.buffer().sum(dtype=torch.float32))
        if bucket.is_last():
            wrong = (~torch.isfinite(torch.stack(self._checks)).all()).to(torch.float32).view(1)
            self._checks = []
            self._all_reduce(wrong, "index")
            self._finite = wrong.item() == 0
            self.skipped_steps += not self._finite
            if not self._finite:  # one loss scaler a rank: all must see what one saw
                bucket.buffer().fill_(torch.nan)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def settle(self) -> StepReport | None:
        sent = dict.fromkeys(KINDS, 0.0)
        self.report = StepReport(sent, 0.0, 0.0, 0.0, self._finite)
        return self.report

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        """Average the parameters if it is time; every rank calls it after each step of the optimizer."""
        if not self._finite:
            return
        self.step += 1
        self._since_average += 1
        if self._since_average >= self.options.local_steps:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Send the parameters to their average now, if they left it: at the end of a run, and before a checkpoint."""
        steps, self._since_average = self._since_average, 0
        if steps == 0:  # momentum would carry them on
            return
        moved = torch.cat([(self._anchor[name] - p).view(-1) for name, p in self.parameters])
        moved /= self.groups.world_size
        start = time.perf_counter()
        before = dict(self.groups.traffic.sent)
        self._all_reduce(moved, "values")
        at = 0
        for name, parameter in self.parameters:
            step = moved[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
            if self._momentum:
                momentum = self._momentum[name].mul_(self.options.outer_momentum).add_(step)
                step = step.add(momentum, alpha=self.options.outer_momentum)
            self._anchor[name].sub_(step, alpha=self.options.outer_learning_rate)
            parameter.copy_(self._anchor[name])
        sent = {kind: total - before[kind] for kind, total in self.groups.traffic.sent.items()}
        ratio = sum(sent.values()) / dense_ring_bytes(self._numel, self.groups.world_size) / steps
        self.report = StepReport(sent, ratio, 1e3 * (time.perf_counter() - start), 0.0, True)

    def _all_reduce(self, tensor: Tensor, kind: str) -> None:
        try:
            self.groups.everyone.all_reduce(tensor, kind).wait()
        except RuntimeError as error:
            raise explain(error, self.groups, self.step) from error

    def state_dict(self) -> dict[str, Any]:
        return {
            "mode": "local",
            "step": self.step,
            "since_average": self._since_average,
            "owed": {},
            "world_size": self.groups.world_size,
            "reduction": {
                "anchor": {name: value.cpu().clone() for name, value in self._anchor.items()},
                "momentum": {name: value.cpu().clone() for name, value in self._momentum.items()},
            },
        }

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> list[str]:
        state = states[0]
        self.step = int(state["step"])
        if state["mode"] != "local":
            return [f"the checkpoint was written in mode {state['mode']}; averages start from its parameters"]
        self._since_average = int(state["since_average"])
        for kind, own in (("anchor", self._anchor), ("momentum", self._momentum)):
            for name, value in own.items():
                if name in state["reduction"][kind]:
                    value.copy_(state["reduction"][kind][name])
        return []

    _finite = True
