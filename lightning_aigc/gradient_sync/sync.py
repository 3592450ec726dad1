"""GradientSync: compressed gradient sync under DDP, which reduces units as they complete and commits or rolls back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.cluster.modes import MODES
from lightning_aigc.gradient_sync.base import Sync
from lightning_aigc.gradient_sync.executors import make_executor
from lightning_aigc.gradient_sync.hook import BucketFuture, UnitCollector, UnitGradients, after_backward
from lightning_aigc.gradient_sync.modes.block_selection import BlockSelection
from lightning_aigc.gradient_sync.modes.block_sparse import BlockSparse
from lightning_aigc.gradient_sync.modes.make_reductions import make_reductions
from lightning_aigc.gradient_sync.modes.reductions import Reduction
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.residual import Residuals
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups, SyncError, explain
from lightning_aigc.gradient_sync.unit_reducer import UnitReducer, UnusedParameters
from lightning_aigc.gradient_sync.units import FlatUnit, make_units
from lightning_aigc.gradient_sync.watch.step_report import StepMeter, StepReport

STATE_VERSION = 1
"""Version of the dictionary that `state_dict` returns."""

MOST_DESCRIBED = 4


class GradientSync(Sync):
    """Sums gradients over the ranks in one mode.

    Every rank makes it with the same parameters and options. All state is stored by parameter name.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        options: SyncOptions,
        groups: ProcessGroups,
        *,
        find_unused: bool = False,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Args: loss_scale: factor in this step's gradients; residuals are stored without it.

        Raises: ConfigError for options that do not fit the parameters.
        """
        super().__init__(groups)
        self.options = options
        self.parameters = [(name, p) for name, p in parameters if p.requires_grad]
        self.device = self.parameters[0][1].device
        self.units = make_units(self.parameters, options, groups.world_size, groups.ranks_inside)
        compressed = [unit for unit in self.units if not unit.uncompressed]
        reductions = make_reductions(options, self.units, groups, self.device)
        self.reduction: Reduction = reductions["values"]
        self.residuals = Residuals(compressed, groups, self.device, error_feedback=options.error_feedback)
        unused = UnusedParameters(compressed, groups, self.device) if find_unused else None
        self.reducer = UnitReducer(groups, reductions, self.residuals, unused, self.device, loss_scale)
        selected = [unit for unit in compressed if unit.kind == "values"]
        self.selection = BlockSelection(self.parameters, selected, groups, self.residuals, loss_scale)
        self.collector = UnitCollector(self.units, self.parameters)
        self.executor = make_executor(self._explain, self.device, overlap=options.overlap, lanes=groups.lanes)
        self._meter = StepMeter(groups, sum(p.numel() for _, p in self.parameters))
        self._is_drained = True
        self._has_reduced = False  # a sparse mode selects by an earlier step's sums
        self._failed: SyncError | None = None
        self._submitted: dict[int, FlatUnit] = {}
        self._removable: list[Any] = []

    @property
    def compressing(self) -> bool:
        """Whether this step's gradients are compressed; otherwise they are sent uncompressed."""
        is_first = MODES[self.options.mode].needs_dense_first_step and not self._has_reduced
        return not is_first and self.step >= self.options.warmup_steps

    def attach(self, ddp: DistributedDataParallel) -> None:
        super().attach(ddp)
        if isinstance(self.reduction, BlockSparse):
            self._removable.append(ddp.register_forward_pre_hook(lambda model, _: self._before_forward(model)))

    # A step, bucket by bucket

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        parameters, gradients = bucket.parameters(), bucket.gradients()
        if len(gradients) < len(parameters):
            raise SyncError(
                f"the gradient of {', '.join(self.collector.names_of(parameters))} is sparse; gradient sync takes "
                "dense ones: make the module with sparse=False (torch.nn.Embedding, EmbeddingBag), or train it under "
                "plain ddp"
            )
        future = BucketFuture(bucket.buffer())
        self.gradients_ready(parameters, gradients, future, last=bucket.is_last())
        future.release()
        if bucket.is_last():
            after_backward(self._end_backward)
        return future.future

    def gradients_ready(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], bucket: BucketFuture, *, last: bool
    ) -> None:
        """Start to reduce the units that the gradients of a bucket complete.

        The last bucket of a step completes at least one unit, because it completes those of its own parameters.
        """
        if not self.collector.is_within_step:
            self._begin_step()
        complete = self.collector.collect(parameters, gradients, bucket)
        if last:
            self.executor.wanted()
        for i, collected in enumerate(complete):
            self._submitted[collected.unit.index] = collected.unit
            done = partial(self._unit_done, collected)
            self.executor.submit(self.reducer.reduce(collected), done, last=last and i == len(complete) - 1)

    def _begin_step(self) -> None:
        self._drain()
        self._is_drained = False
        self.reducer.begin_step(compressing=self.compressing)
        self.executor.new_step()
        self._meter.start()

    def _unit_done(self, collected: UnitGradients, error: SyncError | None) -> None:
        self._note_failure(error)
        self._submitted.pop(collected.unit.index, None)
        collected.release()

    def _note_failure(self, error: SyncError | None) -> None:
        self._failed = self._failed or error

    def _end_backward(self) -> None:
        self.executor.join()
        if self._failed is not None:
            raise self._failed

    def describe_wait(self) -> list[str]:
        submitted, incomplete = list(self._submitted.values()), self.collector.incomplete_units
        return [
            f"step {self.step} of gradient sync in mode {self.options.mode}: of {len(self.units)} units "
            f"{len(incomplete)} wait for this rank's backward pass, {len(submitted)} for the other ranks",
            *(f"submitted and not reduced: {unit.describe()}" for unit in submitted[:MOST_DESCRIBED]),
            *self.groups.traffic.describe_recent(),
        ]

    # Accumulation

    def set_early_selection(self, enabled: bool) -> None:
        self.selection.enabled = enabled

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        if not self.selection.is_due(ddp):
            return
        self._drain()
        if self.compressing and self.selection.units and self.groups.inside is None:
            assert isinstance(self.reduction, BlockSparse)
            self.executor.submit(self.selection.select(self.reduction), self._note_failure, last=True)

    # The end of a step

    def end_step(self) -> StepReport | None:
        """Wait for the step's gradients. Returns: the step's report; None before the first step.

        The step's changes of state are kept if every rank's gradients were finite, and rolled back otherwise. All ranks
        hold the same sums and decide alike.
        """
        self._drain()
        return self.report

    def _drain(self) -> None:
        if self._is_drained or self.collector.is_within_step:
            return
        self._end_backward()
        self._is_drained = True
        finite = self.reducer.is_finite()
        if finite:
            self.residuals.commit()
            self.reduction.commit()
            self.step += 1
            self._has_reduced = True
        else:
            self.reduction.rollback()
            self.residuals.rollback()
            self.skipped_steps += 1
        self.report = self._meter.report(self.executor.times(), finite=finite)

    # State by name

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, and the mode's own state."""
        self._drain()
        return {
            "version": STATE_VERSION,
            "world_size": self.groups.world_size,
            "ranks_inside": self.groups.ranks_inside,
            "mode": self.options.mode,
            "step": self.step,
            "has_reduced": self._has_reduced,
            "accumulating": self.selection.is_accumulating,
            "residuals": self.residuals.by_name(),
            "reduction": self.reduction.state_dict(),
        }

    def needs_all_states(self, state: dict[str, Any]) -> bool:
        return bool(state.get("ranks_inside", 1) != self.groups.ranks_inside)

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> list[str]:
        """Load the states of all ranks that saved. Returns: sentences on what cannot be exact.

        With as many ranks as before each rank loads its own residuals. Otherwise, or where nodes reduced first in only
        one of the two runs, the sum of all residuals is divided evenly.
        """
        notes = []
        same = len(states) == self.groups.world_size and not self.needs_all_states(states[0])
        state = states[self.groups.rank if same else 0]
        if same:
            self.residuals.load_residuals([state["residuals"]], 1.0)
        else:
            self.residuals.load_residuals([each["residuals"] for each in states], 1 / self.groups.between.size)
            notes.append(
                f"{len(states)} ranks saved and {self.groups.world_size} load, on other nodes or in other numbers: "
                "their residuals are shared out evenly, their sum unchanged; the run is not bit for bit the same"
            )
        self.step = int(states[0]["step"])
        self.selection.is_accumulating = bool(state.get("accumulating", False))
        if states[0]["mode"] == self.options.mode:
            self.reduction.load_state_dict(state["reduction"])
            self._has_reduced = bool(state.get("has_reduced", self.step > 0))
        else:
            notes.append(f"the checkpoint was written in mode {states[0]['mode']}, this run is in {self.options.mode}")
        names = [entry.name for unit in self.residuals.units for entry in unit.entries]
        missing = [name for name in names if name not in states[0]["residuals"]]
        if missing and same and self.groups.inside is None:
            notes.append(
                f"{len(missing)} parameters are not in the checkpoint's sync state and start without a residual"
            )
        return notes

    def close(self) -> None:
        """Stop the executor, and destroy the process groups; residuals stay readable.

        DDP keeps its communication hook, so a later backward pass is a SyncError.
        """
        self._is_closed = True
        for handle in self._removable:
            handle.remove()
        if self.executor.close():  # a thread that still waits for a lost rank uses the groups
            self.groups.destroy()

    def _explain(self, error: BaseException) -> SyncError:
        return explain(error, self.groups, self.step)
