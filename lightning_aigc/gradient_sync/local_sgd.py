"""Mode local: each rank steps alone, and every few optimizer steps the parameters go to their average."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from lightning_aigc.cluster.modes import AVERAGE_BITS
from lightning_aigc.gradient_sync.base import BucketSync
from lightning_aigc.gradient_sync.collectives import KINDS, dense_ring_bytes
from lightning_aigc.gradient_sync.flat_units import one_unit, view_of
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.process_groups import ProcessGroups
from lightning_aigc.gradient_sync.reductions import Quantized, Reduction, Uncompressed
from lightning_aigc.gradient_sync.residual import Residuals
from lightning_aigc.gradient_sync.step_report import StepReport
from lightning_aigc.gradient_sync.sync_error import explain
from lightning_aigc.host_state import to_cpu


class LocalSGD(BucketSync):
    """Averages the parameters every `sync_every` optimizer steps, by an outer step with momentum.

    Source: Douillard et al., DiLoCo, arXiv:2311.08105; with outer learning rate 1 and no momentum it is local SGD. The
    ranks' optimizer states are never averaged. Each step sends one number, so that all ranks skip a step that is not
    finite. What few-bit averages round off is added to the next one.
    """

    has_rank_local_parameters = True

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], options: SyncOptions, groups: ProcessGroups
    ) -> None:
        super().__init__(groups)
        self.sync_every = options.local_steps
        self._outer_learning_rate, self._outer_momentum = options.outer_learning_rate, options.outer_momentum
        self.parameters = [(name, p) for name, p in parameters if p.requires_grad]
        self._anchor = {name: p.detach().clone().float() for name, p in self.parameters}
        self._momentum = (
            {name: torch.zeros_like(a) for name, a in self._anchor.items()} if options.outer_momentum else {}
        )
        bits = AVERAGE_BITS[options.average]
        self._reduction: Reduction = Quantized(bits) if bits else Uncompressed()
        self._unit = one_unit(self.parameters, groups.world_size)
        device = self.parameters[0][1].device
        has_residual = bits is not None and options.error_feedback
        self.residuals = Residuals([self._unit] if has_residual else [], groups, device, error_feedback=has_residual)
        self._checks: list[Tensor] = []
        self._numel = sum(p.numel() for _, p in self.parameters)
        self._steps_since_average = 0
        self._is_finite = True

    def finish_step(self) -> StepReport | None:
        self.report = StepReport(dict.fromkeys(KINDS, 0.0), 0.0, 0.0, 0.0, self._is_finite)
        return self.report

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        """Average the parameters if it is time; every rank calls it after each step of the optimizer."""
        if not self._is_finite:
            return
        self.step += 1
        self._steps_since_average += 1
        if self._steps_since_average >= self.sync_every:
            self.average_parameters()

    @torch.no_grad()
    def average_parameters(self) -> None:
        """Take the outer step now, if the ranks have stepped since the last outer step."""
        steps, self._steps_since_average = self._steps_since_average, 0
        if steps == 0:  # momentum would move them nevertheless
            return
        start = time.perf_counter()
        before = dict(self.groups.traffic.sent)
        try:
            for collective in self.averaging():
                collective.wait()
        except RuntimeError as error:
            raise explain(error, self.groups, self.step) from error
        sent = {kind: total - before[kind] for kind, total in self.groups.traffic.sent.items()}
        ratio = sum(sent.values()) / dense_ring_bytes(self._numel, self.groups.world_size) / steps
        self.report = StepReport(sent, ratio, 1e3 * (time.perf_counter() - start), 0.0, True)

    @torch.no_grad()
    def averaging(self) -> Generator[Any, None, None]:
        """Take the outer step, and yield each collective that it has started, to be waited for."""
        e_N = self._owed_and_moved()
        total_N, _ = yield from self._reduction.reduce(self._unit, e_N, self.groups.everyone)
        self.residuals.commit()
        for entry, (name, parameter) in zip(self._unit.entries, self.parameters, strict=True):
            step = view_of(total_N, entry)
            if self._momentum:
                momentum = self._momentum[name].mul_(self._outer_momentum).add_(step)
                step = step.add(momentum, alpha=self._outer_momentum)
            self._anchor[name].sub_(step, alpha=self._outer_learning_rate)
            parameter.copy_(self._anchor[name])

    def _owed_and_moved(self) -> Tensor:
        """Return this rank's share of the mean way from the anchor, with its residual, as one vector."""
        if self.residuals.units:
            e_N = self.residuals.next_of(self._unit).copy_(self.residuals.of(self._unit))
        else:
            e_N = torch.zeros(self._unit.numel, device=self.parameters[0][1].device)
        for entry, (name, parameter) in zip(self._unit.entries, self.parameters, strict=True):
            view_of(e_N, entry).add_(self._anchor[name] - parameter, alpha=1 / self.groups.world_size)
        return e_N

    def state_dict(self) -> dict[str, Any]:
        return {
            "mode": "local",
            "step": self.step,
            "since_average": self._steps_since_average,
            "owed": self.residuals.by_name(),
            "world_size": self.groups.world_size,
            "reduction": to_cpu({"anchor": self._anchor, "momentum": self._momentum}, clone=True),
        }

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> list[str]:
        state = states[0]
        self.step = int(state["step"])
        if state["mode"] != "local":
            return [f"the checkpoint was written in mode {state['mode']}; averages start from its parameters"]
        self._steps_since_average = int(state["since_average"])
        for kind, tensors in (("anchor", self._anchor), ("momentum", self._momentum)):
            for name, tensor in tensors.items():
                if name in state["reduction"][kind]:
                    tensor.copy_(state["reduction"][kind][name])
        if len(states) == self.groups.world_size:
            self.residuals.load_residuals([states[self.groups.rank]["owed"]], 1.0)
        else:
            self.residuals.load_residuals([each["owed"] for each in states], 1 / self.groups.world_size)
        return []

    def _on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self._checks.append(bucket.buffer().sum(dtype=torch.float32))
        if bucket.is_last():
            wrong = (~torch.isfinite(torch.stack(self._checks)).all()).to(torch.float32).view(1)
            self._checks = []
            self._all_reduce(wrong, "index")
            self._is_finite = wrong.item() == 0
            self.skipped_steps += not self._is_finite
            if not self._is_finite:  # each rank has a loss scaler, and all must see what one of them saw
                bucket.buffer().fill_(torch.nan)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _all_reduce(self, tensor: Tensor, kind: str) -> None:
        try:
            self.groups.everyone.all_reduce(tensor, kind).wait()
        except RuntimeError as error:
            raise explain(error, self.groups, self.step) from error
