"""Gradient sync under DDP: what a bucket brings, what each parameter still owes, and when a step counts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.groups import Groups
from lightning_aigc.gradient_sync.layout import ALIGNMENT, Entry, Unit, entry_of_each_block, make_units
from lightning_aigc.gradient_sync.modes import make_reduction, own_part
from lightning_aigc.gradient_sync.options import SPARSE_MODES, SyncOptions
from lightning_aigc.gradient_sync.owed import owed_by_name, take_up
from lightning_aigc.gradient_sync.reductions import Reduction, Whole
from lightning_aigc.gradient_sync.runners import (
    Inline,
    Stream,
    SyncError,
    Thread,
    Work,
    at_the_end_of_backward,
    attach_hook,
    explain,
)
from lightning_aigc.gradient_sync.sparse import SharedBlocks, energies_of
from lightning_aigc.gradient_sync.traffic import dense_ring_bytes

STATE_VERSION = 1


@dataclass
class StepReport:
    """One optimizer step's gradient sync on this rank."""

    sent_bytes: dict[str, float]
    """By kind: values, index, protected, small, intra_node."""
    ratio: float
    """Bytes sent, but for those inside a node, over those of a dense float32 ring on as many ranks or nodes."""
    exposed_ms: float
    """How long the step waited: from the last gradient's arrival until everything had been added up. With
    `delay_one_step` from the next step's first gradient."""
    share_hidden: float
    """Of the time that sync took, the share that nothing waited for."""
    finite: bool

    @property
    def between_nodes_bytes(self) -> float:
        return sum(self.sent_bytes.values()) - self.sent_bytes["intra_node"]


class _OnItsWay:
    """A unit in this step: which gradients have come, and who waits for its end."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.gradients: dict[str, Tensor] = {}
        self.futures: list[_BucketFuture] = []


class _BucketFuture:
    """DDP's future for one bucket, done with the last unit that has a parameter in it."""

    def __init__(self, buffer: Tensor) -> None:
        self.future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buffer, self._left = buffer, 1

    def hold(self) -> None:
        self._left += 1

    def release(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.future.set_result(self._buffer)


class GradientSync:
    """Adds up gradients over the ranks in one mode; `attach` makes it DDP's communication hook.

    Every rank makes it with the same parameters and options. All state goes by parameter name.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        options: SyncOptions,
        groups: Groups,
        *,
        find_unused: bool = False,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Args: loss_scale: what this step's gradients are multiplied by; residuals are kept without it.

        Raises: ConfigError for options that do not fit the parameters.
        """
        if options.delay_one_step and find_unused:
            raise ConfigError(
                "delay_one_step wants a gradient for every parameter in each step, got DDP with find_unused_parameters "
                "or static_graph: a late gradient would be dropped where its parameter goes unused"
            )
        self.options, self.groups, self.find_unused, self._loss_scale = options, groups, find_unused, loss_scale
        self.parameters = [(name, p) for name, p in parameters if p.requires_grad]
        self.device = self.parameters[0][1].device
        self._on_cpu = self.device.type == "cpu"
        self.units = make_units(self.parameters, options, groups.world_size, self.ranks_inside)
        self._whole: Reduction = Whole()
        self.reduction: Reduction = make_reduction(options, self.units, groups, self.device)
        self._compressed = [unit for unit in self.units if not unit.whole]
        lengths = {unit.index: own_part(unit, groups)[1] for unit in self._compressed}
        self._owed = {index: torch.zeros(length, device=self.device) for index, length in lengths.items()}
        self._staged = {index: torch.zeros(length, device=self.device) for index, length in lengths.items()}
        self._late: dict[int, Tensor] = {}
        self._arriving: dict[int, Tensor] = {}
        self._held: list[Tensor] = []
        self._entry_of_block = {unit.index: self._own_entries(unit) for unit in self._compressed if find_unused}
        self._unit_of = {entry.name: unit for unit in self.units for entry in unit.entries}
        self._names = {id(p): name for name, p in self.parameters}
        self._numel = sum(p.numel() for _, p in self.parameters)
        if not options.overlap:
            self._runner = Inline(self._explain)
        elif self._on_cpu:
            self._runner = Thread(self._explain)
        else:
            self._runner = Stream(self._explain, self.device, late=options.delay_one_step)
        self.step = 0
        self.skipped_steps = 0
        self.report: StepReport | None = None
        self._open: dict[int, _OnItsWay] = {}
        self._checks: list[Tensor] = []
        self._scale: float | None = None
        self._concluded = True
        self._failed: SyncError | None = None
        self.choose_early = True
        """Sparse modes, with accumulation: choose by the sum of the micro-batches so far, not by the step before."""
        self._accumulating = False
        self._closed = False
        self._removable: list[Any] = []

    # A step, bucket by bucket

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Become the communication hook of this model."""
        attach_hook(ddp, self._on_bucket)
        if isinstance(self.reduction, SharedBlocks):
            self._removable.append(ddp.register_forward_pre_hook(lambda model, _: self._before_forward(model)))

    def _on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._closed:
            raise SyncError(
                f"rank {self.groups.rank}: this gradient sync is closed, and DDP still calls it. To train on, wrap the "
                "module in a new DistributedDataParallel, and hook that up"
            )
        if len(bucket.gradients()) < len(bucket.parameters()):
            names = ", ".join(self._names[id(parameter)] for parameter in bucket.parameters())
            raise SyncError(
                f"the gradient of {names} is sparse; gradient sync takes dense ones: make the module with sparse=False "
                "(torch.nn.Embedding, EmbeddingBag), or train it under plain ddp"
            )
        waiting = _BucketFuture(bucket.buffer())
        self._arrived(bucket.parameters(), bucket.gradients(), waiting, last=bucket.is_last())
        waiting.release()
        if bucket.is_last():
            at_the_end_of_backward(self._raise_failure)
        return waiting.future

    def _raise_failure(self) -> None:
        if not self.options.delay_one_step:
            self._runner.finish()
        if self._failed is not None:
            raise self._failed

    def _arrived(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], waiting: _BucketFuture, *, last: bool
    ) -> None:
        if not self._open:
            self._begin()
        complete = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = self._names[id(parameter)]
            on_its_way = self._open[self._unit_of[name].index]
            on_its_way.gradients[name] = gradient
            if waiting not in on_its_way.futures:
                waiting.hold()
                on_its_way.futures.append(waiting)
            if len(on_its_way.gradients) == len(on_its_way.unit.entries):
                complete.append(on_its_way)
        complete.sort(key=lambda one: one.unit.index)
        if last and not self.options.delay_one_step:
            self._runner.wanted()
        for i, one in enumerate(complete):
            del self._open[one.unit.index]
            is_last = last and i == len(complete) - 1  # its own parameters complete a unit, so there is one
            if self.options.delay_one_step:
                self._start_late(one, last=is_last)
            else:
                self._runner.submit(self._reduce(one), self._release(one), last=is_last)

    def _release(self, one: _OnItsWay) -> Callable[[SyncError | None], None]:
        def done(error: SyncError | None) -> None:
            self._failed = self._failed or error
            for waiting in one.futures:
                waiting.release()

        return done

    def _begin(self) -> None:
        """A new step: the one before is settled, and nothing has arrived."""
        self._conclude()
        self._open = {unit.index: _OnItsWay(unit) for unit in self.units}
        self._checks = []
        self._concluded = False
        self._scale = None
        self._runner.new_step()
        self._sent_before = dict(self.groups.traffic.sent)

    @property
    def compressing(self) -> bool:
        """Whether this step's gradients are compressed, or still whole."""
        first = 1 if self.options.mode in (*SPARSE_MODES, "two_four") else 0  # there is nothing to choose by yet
        return self.step >= max(self.options.warmup_steps, first)

    def _reduce(self, one: _OnItsWay) -> Work:
        """One unit from its gradients to their mean over the ranks."""
        total = yield from self._travel(one, self._flat(one))
        self._hand_out(one, total)

    def _travel(self, one: _OnItsWay, flat: Tensor) -> Generator[Any, None, Tensor]:
        """The sum over the ranks of `flat`, which holds what this rank owes too where nodes do not come first."""
        unit, inside = one.unit, self.groups.inside
        compresses = not unit.whole and self.compressing
        reduction = self.reduction if compresses else self._whole
        e_N = flat
        if inside is not None:
            e_N = flat.new_empty(unit.numel // inside.size) if unit.whole else self._staged[unit.index]
            yield inside.reduce_scatter(e_N, flat)
            if self.options.error_feedback and not unit.whole:
                e_N.add_(self._owed[unit.index])
        unused_N = yield from self._set_aside_unused(one, e_N)
        total, check = yield from reduction.reduce(unit, e_N, self.groups.between)
        if unused_N is not None:
            e_N.add_(unused_N)
        if not unit.whole and not compresses:
            self.reduction.observe(unit, total)
        total[0] += 0 * check  # what is not finite may have stayed behind: a loss scaler must find it all the same
        if inside is not None:
            yield inside.all_gather(flat, total)
            total, check = flat, flat.view(inside.size, -1)[:, 0].sum()  # the node's ranks decide as one
        self._checks.append(check)
        return total

    def _flat(self, one: _OnItsWay) -> Tensor:
        """The unit's share of the mean gradient in one vector, with what is owed where nodes do not come first."""
        if self._scale is None:
            self._scale = self._loss_scale()
        share = 1 / (self.groups.world_size * self._scale)
        unit, entries = one.unit, one.unit.entries
        flat = torch.zeros(unit.numel, device=self.device) if self._apart(unit) else self._staged[unit.index]
        if self._apart(unit) or not self.options.error_feedback:
            torch._foreach_copy_([_view(flat, e) for e in entries], [one.gradients[e.name] for e in entries])
            return flat.mul_(share)
        owed = self._owed[unit.index]
        if self._on_cpu:  # one pass in place of two
            for entry in entries:
                torch.add(_view(owed, entry), one.gradients[entry.name], alpha=share, out=_view(flat, entry))
        else:
            flat.copy_(owed)
            torch._foreach_add_(
                [_view(flat, e) for e in entries], [one.gradients[e.name] for e in entries], alpha=share
            )
        return flat

    def _apart(self, unit: Unit) -> bool:
        """Whether a unit's flat gradients have a vector of their own, not the one that what is owed is staged in."""
        return unit.whole or self.groups.inside is not None

    def _hand_out(self, one: _OnItsWay, total: Tensor) -> None:
        assert self._scale is not None
        if self._scale != 1.0:
            total.mul_(self._scale)
        entries = one.unit.entries
        torch._foreach_copy_([one.gradients[e.name] for e in entries], [_view(total, e) for e in entries])

    def _start_late(self, one: _OnItsWay, *, last: bool) -> None:
        """Hand out what the last step's gradients came to, zeros in the first, and send this step's off."""
        flat = self._flat(one)
        self._held.append(flat)  # it is made on one stream and read on another that this one does not wait for
        total = self._late.get(one.unit.index)
        self._hand_out(one, torch.zeros(one.unit.numel, device=self.device) if total is None else total)
        for waiting in one.futures:
            waiting.release()

        def work() -> Work:
            self._arriving[one.unit.index] = yield from self._travel(one, flat)

        def done(error: SyncError | None) -> None:
            self._failed = self._failed or error

        self._runner.submit(work(), done, last=last)

    # Accumulation: blocks chosen from the sum so far, while the last micro-batch runs

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        # The wrapped module's mode: Lightning brings that one back after validation, and leaves the wrapper in eval.
        if not (ddp.module.training and torch.is_grad_enabled() and self.choose_early):
            return
        if not ddp.require_backward_grad_sync:
            self._accumulating = True
        elif self._accumulating:
            self._accumulating = False
            self._conclude()
            if self.compressing and self._compressed and self.groups.inside is None:
                self._choose_from_sum_so_far()

    def _choose_from_sum_so_far(self) -> None:
        assert isinstance(self.reduction, SharedBlocks)
        share = 1 / (self.groups.world_size * self._loss_scale())
        reduction, by_name = self.reduction, dict(self.parameters)
        energies = []
        for unit in self._compressed:
            flat = self._staged[unit.index]
            flat.zero_()
            for entry in unit.entries:
                gradient = by_name[entry.name].grad
                if gradient is not None:
                    _view(flat, entry).copy_(gradient)
            energies.append(energies_of(flat.mul_(share).add_(self._owed[unit.index])))
        packed = torch.cat(energies)

        def work() -> Work:
            yield self.groups.between.all_reduce(packed, "index")
            parts = torch.split(packed, [energy.numel() for energy in energies])
            reduction.choose_by({unit.index: part for unit, part in zip(self._compressed, parts, strict=True)})

        def done(error: SyncError | None) -> None:
            self._failed = self._failed or error

        self._runner.submit(work(), done, last=True)

    # Parameters without a gradient on any rank

    def _set_aside_unused(self, one: _OnItsWay, e_N: Tensor) -> Generator[Any, None, Tensor | None]:
        """What is owed to parameters that no rank used in this step, taken out of e_N: DDP drops their gradients.

        A vector like e_N, or None where the host knows, without waiting for a device, that there is nothing.
        """
        if not self.find_unused or one.unit.whole:
            return None
        used = torch.stack([one.gradients[entry.name].count_nonzero() for entry in one.unit.entries]).to(torch.float32)
        yield self.groups.everyone.all_reduce(used, "index")
        unused = used == 0
        if self._on_cpu and not unused.any():
            return None
        unused_K1 = unused[self._entry_of_block[one.unit.index]].view(-1, 1)
        e_KB = e_N.view(-1, ALIGNMENT)
        aside_KB = torch.where(unused_K1, e_KB, 0.0)
        e_KB.masked_fill_(unused_K1, 0.0)
        return aside_KB.view(-1)

    def _own_entries(self, unit: Unit) -> Tensor:
        """Which of the unit's parameters each block belongs to, of those that this rank compresses."""
        start, length = own_part(unit, self.groups)
        return entry_of_each_block(unit)[start // ALIGNMENT : (start + length) // ALIGNMENT].to(self.device)

    # The end of a step

    def settle(self) -> StepReport | None:
        """End the step and say how it went; None before the first one.

        What the step changed is kept if every rank's gradients were finite, else forgotten. All ranks have the same
        sums and decide alike. Waits for the step's gradients, unless they are one step late: then the report is on
        those that were handed out.
        """
        if not self.options.delay_one_step:
            self._conclude()
        return self.report

    def _conclude(self) -> None:
        if self._concluded or self._open:
            return
        if self.options.delay_one_step:
            self._runner.wanted()
        self._runner.finish()
        if self._failed is not None:
            raise self._failed
        self._concluded = True
        finite = bool(torch.isfinite(torch.stack(self._checks)).all())
        if finite:
            if self.options.error_feedback:
                self._owed, self._staged = self._staged, self._owed
            self.reduction.commit()
            self.step += 1
        else:
            self.reduction.forget()
            self.skipped_steps += 1
            for staged in self._staged.values():  # NaN came into the padding too, which nothing else overwrites
                staged.zero_()
        self._late, self._arriving = self._arriving, {}
        self._held = []
        self.report = self._make_report(finite)

    def _make_report(self, finite: bool) -> StepReport:
        sent = {kind: total - self._sent_before[kind] for kind, total in self.groups.traffic.sent.items()}
        busy_ms, exposed_ms = self._runner.times_ms()
        between = sum(sent.values()) - sent["intra_node"]
        yardstick = dense_ring_bytes(self._numel, self.groups.between.size) / (
            1 if self.groups.inside is None else self.groups.inside.size
        )
        hidden = max(0.0, 1 - exposed_ms / busy_ms) if busy_ms else 0.0
        return StepReport(sent, between / yardstick, exposed_ms, hidden, finite)

    # State by name

    def state_dict(self) -> dict[str, Any]:
        """Plain CPU tensors and numbers: what this rank owes, by parameter name, and the mode's own state."""
        self._conclude()
        return {
            "version": STATE_VERSION,
            "world_size": self.groups.world_size,
            "ranks_inside": self.ranks_inside,
            "mode": self.options.mode,
            "step": self.step,
            "accumulating": self._accumulating,
            "owed": owed_by_name(self._compressed, self._owed, self.groups),
            "late": {
                entry.name: total[entry.start : entry.stop].cpu().clone()
                for index, total in self._late.items()
                for entry in self.units[index].entries
            },
            "reduction": self.reduction.state_dict(),
        }

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> list[str]:
        """Take up the states of all ranks that saved, one or more; what cannot be exact is returned as sentences.

        With as many ranks as before each takes its own; else, or where nodes came first in one of the two runs alone,
        the sum of all that was owed is shared out evenly.
        """
        notes = []
        same = len(states) == self.groups.world_size and states[0].get("ranks_inside", 1) == self.ranks_inside
        own = states[self.groups.rank if same else 0]
        mine = [own] if same else list(states)
        factor = 1.0 if same else 1 / self.groups.between.size
        if not same:
            notes.append(
                f"{len(states)} ranks saved and {self.groups.world_size} go on, on other nodes or in other numbers: "
                "what they owed is shared out evenly, its sum unchanged; the run is not bit for bit the same"
            )
        take_up(self._compressed, self._owed, self.groups, [state["owed"] for state in mine], factor)
        self.step = int(states[0]["step"])
        self._accumulating = bool(own.get("accumulating", False))
        if states[0]["mode"] == self.options.mode:
            self.reduction.load_state_dict(own["reduction"])
        else:
            notes.append(f"the checkpoint was written in mode {states[0]['mode']}, this run is in {self.options.mode}")
        self._load_late(own.get("late", {}))
        missing = [name for name in self._unit_of if name not in states[0]["owed"] and not self._unit_of[name].whole]
        if missing and same and self.groups.inside is None:
            notes.append(f"{len(missing)} parameters are not in the checkpoint's sync state and owe nothing")
        return notes

    def _load_late(self, late: dict[str, Tensor]) -> None:
        """Take up the sums that the next step hands out, and whether that step counts."""
        if not (late and self.options.delay_one_step):
            return
        self._late = {unit.index: torch.zeros(unit.numel, device=self.device) for unit in self.units}
        for unit in self.units:
            for entry in unit.entries:
                if entry.name in late:
                    self._late[unit.index][entry.start : entry.stop] = late[entry.name].to(self.device)
        finite = all(bool(torch.isfinite(total.sum())) for total in self._late.values())
        self.report = StepReport(dict.fromkeys(self.groups.traffic.sent, 0.0), 0.0, 0.0, 0.0, finite)

    @property
    def ranks_inside(self) -> int:
        """Ranks that add up among themselves first."""
        return 1 if self.groups.inside is None else self.groups.inside.size

    def close(self) -> None:
        """Let go of the thread, the hook on the model's forward, and the process groups; what is owed stays readable.

        DDP keeps its communication hook, so a backward pass after this is a SyncError.
        """
        self._closed = True
        for handle in self._removable:
            handle.remove()
        if self._runner.close():  # a thread that still waits for a lost rank uses them
            self.groups.destroy()

    def _explain(self, error: BaseException) -> SyncError:
        return explain(error, self.groups, self.step)


def _view(flat: Tensor, entry: Entry) -> Tensor:
    return flat[entry.start : entry.stop].view(entry.shape)
