"""Mode local: each rank steps alone, and the parameters are averaged every few optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from lightning_aigc.cluster.modes import AVERAGE_BITS, AVERAGE_HOPS
from lightning_aigc.gradient_sync.base import Sync
from lightning_aigc.gradient_sync.modes.reductions import Quantized, Reduction, Uncompressed
from lightning_aigc.gradient_sync.modes.top_k import TopK, TopKQuantizer
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.residual import Residuals
from lightning_aigc.gradient_sync.transport.collectives import KINDS, dense_ring_bytes
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups, SyncError, explain
from lightning_aigc.gradient_sync.units import FlatUnit, one_unit, view_of
from lightning_aigc.gradient_sync.watch.dense_comparison import DenseComparison
from lightning_aigc.gradient_sync.watch.step_report import StepReport
from lightning_aigc.host_state import to_cpu


@dataclass
class Flight:
    """Average that travels while the ranks continue stepping."""

    start: dict[str, Tensor]
    """This rank's parameters at its start, by name."""
    hops: Generator[Any, None, Tensor] | None
    """Remaining collectives; None once the sum has arrived."""
    waiting_for: Any = None
    total: Tensor | None = None
    """Mean difference from the anchor, float32 [N]."""
    steps_left: int = AVERAGE_HOPS
    """Optimizer steps until it is applied, the same on every rank and after a resume."""

    def advance(self) -> None:
        """Wait for the running collective, and start the next."""
        if self.hops is None:
            return
        try:
            if self.waiting_for is not None:
                self.waiting_for.wait()
            self.waiting_for = next(self.hops).start()
        except StopIteration as end:
            self.total, self.hops = end.value, None

    def land(self) -> Tensor:
        """Wait for all remaining collectives, and return the sum."""
        while self.hops is not None:
            self.advance()
        assert self.total is not None
        return self.total


class LocalSGD(Sync):
    """Averages the parameters every `sync_every` optimizer steps, by an outer step with momentum.

    Source: Douillard et al., DiLoCo, arXiv:2311.08105; with outer learning rate 1 and no momentum it is local SGD. The
    ranks' optimizer states are never averaged. Each step sends one number, so that all ranks skip a step that is not
    finite. The rounding error of a few-bit average is added to the next one.

    With `overlap_average` the ranks continue stepping while an average travels, one of its collectives per step, and
    move by the difference that it makes when it arrives (Douillard et al., Streaming DiLoCo, arXiv:2501.18512).
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
        self._decay = options.error_feedback_decay
        self._make_unit(options, groups.everyone.size)
        self._is_overlapped = options.overlap_average
        self._flight: Flight | None = None
        self._checks: list[Tensor] = []
        self._numel = sum(p.numel() for _, p in self.parameters)
        self._steps_since_average = 0
        self._is_finite = True
        self.comparison: DenseComparison | None = None
        """Comparison with a dense sync, where that could be timed."""
        self._notes: list[str] = []

    def _make_unit(self, options: SyncOptions, ranks: int) -> None:
        """Make the reduction of the averages of this many ranks, their flat vector, and its residuals."""
        self._ranks, self._share = ranks, 1 / ranks
        self._reduction, self._unit = _reduction_of(options, self.parameters, ranks)
        device = self.parameters[0][1].device
        has_residual = options.average != "float32" and options.error_feedback
        units = [self._unit] if has_residual else []
        self.residuals = Residuals(units, self.groups, device, error_feedback=has_residual)

    def end_step(self) -> StepReport | None:
        self.report = StepReport(dict.fromkeys(KINDS, 0.0), 0.0, 0.0, 0.0, self._is_finite)
        return self.report

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        """Average the parameters if it is time; every rank calls it after each optimizer step."""
        if not self._is_finite:
            return
        self.step += 1
        self._steps_since_average += 1
        if self._flight is not None:
            self._continue_flight()
        if self._steps_since_average < self.sync_every:
            return
        if self._is_overlapped:
            self._take_off()
        else:
            self.average_parameters()

    @torch.no_grad()
    def average_parameters(self) -> None:
        """Take the outer step now if the ranks have stepped since the last one; an average that travels comes first."""
        if self._flight is not None:
            with self._reported(self.sync_every):
                self._land()
        steps, self._steps_since_average = self._steps_since_average, 0
        if steps == 0:  # momentum would move the parameters anyway
            return
        with self._reported(steps):
            for collective in self.averaging():
                collective.wait()

    @torch.no_grad()
    def averaging(self) -> Generator[Any, None, None]:
        """Take the outer step; yields each collective that it starts, for the caller to wait for."""
        total_N = yield from self._summing()
        self._step_outwards(total_N, None)

    def _summing(self) -> Generator[Any, None, Tensor]:
        """Return the ranks' mean difference from the anchor."""
        total_N, _ = yield from self._reduction.reduce(self._unit, self._residual_and_moved(), self.groups.everyone)
        self.residuals.commit()
        return total_N

    def _step_outwards(self, total_N: Tensor, start: dict[str, Tensor] | None) -> None:
        """Move the anchor by the outer step, and the parameters to it plus their own change since `start`."""
        for entry, (name, parameter) in zip(self._unit.entries, self.parameters, strict=True):
            step = view_of(total_N, entry)
            if self._momentum:
                momentum = self._momentum[name].mul_(self._outer_momentum).add_(step)
                step = step.add(momentum, alpha=self._outer_momentum)
            self._anchor[name].sub_(step, alpha=self._outer_learning_rate)
            parameter.copy_(self._anchor[name] if start is None else self._anchor[name] + (parameter - start[name]))

    # An average that travels while the ranks step on

    def _take_off(self) -> None:
        self._steps_since_average = 0
        self._flight = Flight({name: p.detach().clone() for name, p in self.parameters}, self._summing())
        with self._reported(self.sync_every):
            self._flight.advance()

    def _continue_flight(self) -> None:
        """Start the next collective of the travelling average, or apply the average when its step has come."""
        assert self._flight is not None
        self._flight.steps_left -= 1
        with self._reported(self.sync_every):
            if self._flight.steps_left > 0:
                self._flight.advance()
            else:
                self._land()

    def _land(self) -> None:
        assert self._flight is not None
        flight, self._flight = self._flight, None
        self._step_outwards(flight.land(), flight.start)

    @contextmanager
    def _reported(self, steps: int) -> Iterator[None]:
        """Report the block's bytes and time as those of an average after `steps` steps."""
        start, before = time.perf_counter(), dict(self.groups.traffic.sent)
        try:
            yield
        except SyncError:
            raise
        except RuntimeError as error:
            raise explain(error, self.groups, self.step) from error
        sent = {kind: total - before[kind] for kind, total in self.groups.traffic.sent.items()}
        dense = dense_ring_bytes(self._numel, self._ranks) * steps
        ratio = sum(sent.values()) / dense if dense else 0.0
        self.report = StepReport(sent, ratio, 1e3 * (time.perf_counter() - start), 0.0, True)
        if self.comparison is not None and self._flight is None:
            self._notes += filter(None, [self.comparison.note_average(start, steps)])

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def _residual_and_moved(self) -> Tensor:
        """Return this rank's share of the mean difference from the anchor, plus its residual, as one vector."""
        if self.residuals.units:
            e_N = self.residuals.next_of(self._unit).copy_(self.residuals.of(self._unit))
            if self._decay != 1:
                e_N.mul_(self._decay)
            e_N[self._unit.entries[-1].stop :].zero_()  # a resumed run's padding has no residual
        else:
            e_N = torch.zeros(self._unit.numel, device=self.parameters[0][1].device)
        for entry, (name, parameter) in zip(self._unit.entries, self.parameters, strict=True):
            view_of(e_N, entry).add_(self._anchor[name] - parameter, alpha=self._share)
        return e_N

    def state_dict(self) -> dict[str, Any]:
        flight = {} if self._flight is None else {"flight": self._landed(self._flight)}  # landing writes the residual
        return {
            "mode": "local",
            "step": self.step,
            "since_average": self._steps_since_average,
            "residuals": self.residuals.by_name(),
            "world_size": self.groups.world_size,
            "reduction": to_cpu({"anchor": self._anchor, "momentum": self._momentum}, clone=True),
            **flight,
        }

    def _landed(self, flight: Flight) -> dict[str, Any]:
        """Return the travelling average as a state. It lands for that, and is still applied at its own step."""
        total_N = flight.land()
        return {
            "start": to_cpu(flight.start, clone=True),
            "total": {e.name: view_of(total_N, e).cpu().clone() for e in self._unit.entries},
            "steps_left": flight.steps_left,
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
        self._load_flight(states)
        if len(states) == self.groups.world_size:
            self.residuals.load_residuals([states[self.groups.rank]["residuals"]], 1.0)
        else:
            self.residuals.load_residuals([each["residuals"] for each in states], 1 / self.groups.world_size)
        return []

    def _load_flight(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the average that was travelling, to be applied at its step.

        On another number of ranks all continue from rank 0's parameters, and from its parameters at the start.
        """
        is_same = len(states) == self.groups.world_size
        state, self._flight = states[self.groups.rank if is_same else 0].get("flight"), None
        if state is None:
            return
        total_N = torch.zeros(self._unit.numel, device=self.parameters[0][1].device)
        for entry in self._unit.entries:
            view_of(total_N, entry).copy_(state["total"][entry.name])
        start = {name: state["start"][name].to(p.device) for name, p in self.parameters}
        self._flight = Flight(start, None, total=total_N, steps_left=int(state["steps_left"]))

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self._checks.append(bucket.buffer().sum(dtype=torch.float32))
        if bucket.is_last():
            wrong = (~torch.isfinite(torch.stack(self._checks)).all()).to(torch.float32).view(1)
            self._checks = []
            self._all_reduce(wrong, "index")
            self._is_finite = wrong.item() == 0
            self.skipped_steps += not self._is_finite
            if not self._is_finite:  # each rank has a loss scaler, and all scalers must see the overflow of one
                bucket.buffer().fill_(torch.nan)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _all_reduce(self, tensor: Tensor, kind: str) -> None:
        try:
            self.groups.everyone.all_reduce(tensor, kind).wait()
        except RuntimeError as error:
            raise explain(error, self.groups, self.step) from error


def _reduction_of(
    options: SyncOptions, parameters: Sequence[tuple[str, nn.Parameter]], ranks: int
) -> tuple[Reduction, FlatUnit]:
    """Return the reduction of the averages, and all parameters as one unit of a length for it."""
    if options.average == "top_k":  # parameters without gaps: of a chunk's padding some would be chosen
        return TopK(options.top_k), one_unit(parameters, ranks, alignment=1, shard=TopKQuantizer.multiple)
    bits = AVERAGE_BITS[options.average]
    return Quantized(bits) if bits else Uncompressed(), one_unit(parameters, ranks)
