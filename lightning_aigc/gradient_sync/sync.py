"""Compressed gradient sync under DDP: reduce units as they complete, then commit or roll back the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.cluster.modes import MODES
from lightning_aigc.gradient_sync.base import Sync
from lightning_aigc.gradient_sync.executors import make_executor
from lightning_aigc.gradient_sync.hook import CommunicationHook, UnitGradients
from lightning_aigc.gradient_sync.modes.block_selection import EarlyChoice
from lightning_aigc.gradient_sync.modes.block_sparse import BlockSparse
from lightning_aigc.gradient_sync.modes.make_reductions import make_reductions
from lightning_aigc.gradient_sync.modes.reductions import Reduction
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.residual import Residuals
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups
from lightning_aigc.gradient_sync.transport.sync_error import SyncError, explain
from lightning_aigc.gradient_sync.unit_reducer import UnitReducer, UnusedParameters
from lightning_aigc.gradient_sync.units import FlatUnit, make_units
from lightning_aigc.gradient_sync.watch.step_report import StepMeter, StepReport

STATE_VERSION = 1
"""Version of the dictionary that `state_dict` returns."""

MOST_DESCRIBED = 4


class GradientSync(Sync):
    """Adds up gradients over the ranks in one mode; `attach` makes it DDP's communication hook.

    Every rank makes it with the same parameters and options. All state goes by parameter name.
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
        """Args: loss_scale: what this step's gradients are multiplied by; residuals are kept without it.

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
        chosen = [unit for unit in compressed if unit.kind == "values"]
        self.early_choice = EarlyChoice(self.parameters, chosen, groups, self.residuals, loss_scale)
        self.hook = CommunicationHook(self.units, self.parameters, groups.rank, self)
        self.executor = make_executor(self._explain, self.device, overlap=options.overlap)
        self._meter = StepMeter(groups, sum(p.numel() for _, p in self.parameters))
        self._is_finished = True
        self._failed: SyncError | None = None
        self._submitted: dict[int, FlatUnit] = {}
        self._removable: list[Any] = []

    @property
    def compressing(self) -> bool:
        """Whether this step's gradients are compressed, or still sent whole."""
        first = int(MODES[self.options.mode].needs_dense_first_step)
        return self.step >= max(self.options.warmup_steps, first)

    def attach(self, ddp: DistributedDataParallel) -> None:
        self.hook.attach(ddp)
        if isinstance(self.reduction, BlockSparse):
            self._removable.append(ddp.register_forward_pre_hook(lambda model, _: self._before_forward(model)))

    # A step, unit by unit: what the hook calls

    def begin_step(self) -> None:
        self._finish()
        self._is_finished = False
        self.reducer.begin_step(compressing=self.compressing)
        self.executor.new_step()
        self._meter.start()

    def reduce_units(self, complete: Sequence[UnitGradients], *, last: bool) -> None:
        """Start to reduce units; with the last bucket there is at least one, which its own parameters complete."""
        if last:
            self.executor.wanted()
        for i, collected in enumerate(complete):
            is_last = last and i == len(complete) - 1
            self._submitted[collected.unit.index] = collected.unit
            self.executor.submit(self.reducer.reduce(collected), self._releasing(collected), last=is_last)

    def end_backward(self) -> None:
        self.executor.finish()
        if self._failed is not None:
            raise self._failed

    def _releasing(self, collected: UnitGradients) -> Callable[[SyncError | None], None]:
        def done(error: SyncError | None) -> None:
            self._note_failure(error)
            self._submitted.pop(collected.unit.index, None)
            collected.release()

        return done

    def _note_failure(self, error: SyncError | None) -> None:
        self._failed = self._failed or error

    def describe_wait(self) -> list[str]:
        submitted, incomplete = list(self._submitted.values()), self.hook.incomplete_units
        return [
            f"step {self.step} of gradient sync in mode {self.options.mode}: of {len(self.units)} units "
            f"{len(incomplete)} wait for this rank's backward pass, {len(submitted)} for the other ranks",
            *(f"handed over and not added up: {unit.describe()}" for unit in submitted[:MOST_DESCRIBED]),
            *self.groups.traffic.describe_recent(),
        ]

    # Accumulation

    def set_early_choice(self, enabled: bool) -> None:
        self.early_choice.enabled = enabled

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        if not self.early_choice.is_due(ddp):
            return
        self._finish()
        if self.compressing and self.early_choice.units and self.groups.inside is None:
            assert isinstance(self.reduction, BlockSparse)
            self.executor.submit(self.early_choice.choose(self.reduction), self._note_failure, last=True)

    # The end of a step

    def finish_step(self) -> StepReport | None:
        """End the step and say how it went; None before the first one.

        What the step changed is kept if every rank's gradients were finite, else rolled back. All ranks have the same
        sums and decide alike. Waits for the step's gradients.
        """
        self._finish()
        return self.report

    def _finish(self) -> None:
        if self._is_finished or self.hook.is_within_step:
            return
        self.executor.finish()
        if self._failed is not None:
            raise self._failed
        self._is_finished = True
        finite = self.reducer.is_finite()
        if finite:
            self.residuals.commit()
            self.reduction.commit()
            self.step += 1
        else:
            self.reduction.rollback()
            self.residuals.rollback()
            self.skipped_steps += 1
        self.report = self._meter.report(self.executor.times(), finite=finite)

    # State by name

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, and the mode's own state."""
        self._finish()
        return {
            "version": STATE_VERSION,
            "world_size": self.groups.world_size,
            "ranks_inside": self.groups.ranks_inside,
            "mode": self.options.mode,
            "step": self.step,
            "accumulating": self.early_choice.is_accumulating,
            "residuals": self.residuals.by_name(),
            "reduction": self.reduction.state_dict(),
        }

    def needs_all_states(self, state: dict[str, Any]) -> bool:
        return bool(state.get("ranks_inside", 1) != self.groups.ranks_inside)

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> list[str]:
        """Load the states of all ranks that saved; returns sentences on what cannot be exact.

        With as many ranks as before each loads its own residuals; else, or where nodes came first in only one of the
        two runs, the sum of all residuals is shared out evenly.
        """
        notes = []
        same = len(states) == self.groups.world_size and not self.needs_all_states(states[0])
        own = states[self.groups.rank if same else 0]
        if same:
            self.residuals.load_residuals([own["residuals"]], 1.0)
        else:
            self.residuals.load_residuals([state["residuals"] for state in states], 1 / self.groups.between.size)
            notes.append(
                f"{len(states)} ranks saved and {self.groups.world_size} go on, on other nodes or in other numbers: "
                "their residuals are shared out evenly, their sum unchanged; the run is not bit for bit the same"
            )
        self.step = int(states[0]["step"])
        self.early_choice.is_accumulating = bool(own.get("accumulating", False))
        if states[0]["mode"] == self.options.mode:
            self.reduction.load_state_dict(own["reduction"])
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

        DDP keeps its communication hook, so a backward pass after this is a SyncError.
        """
        self.hook.close()
        for handle in self._removable:
            handle.remove()
        if self.executor.close():  # a thread that still waits for a lost rank uses the groups
            self.groups.destroy()

    def _explain(self, error: BaseException) -> SyncError:
        return explain(error, self.groups, self.step)
