"""Mode local among ranks that come and go between averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.gradient_sync.elastic.groups import ElasticGroups
from lightning_aigc.gradient_sync.elastic.quorum import Meeting
from lightning_aigc.gradient_sync.modes.local_sgd import LocalSGD
from lightning_aigc.gradient_sync.modes.reductions import run_alone
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.transport.process_groups import explain, reason_of
from lightning_aigc.gradient_sync.watch.replica_check import PRIME, bits_of
from lightning_aigc.gradient_sync.watch.stall_watchdog import print_line

ATTEMPTS = 5
"""Averages that may break off among the same ranks, all of them alive, before it is an error."""
NOT_WHOLE = -1
"""Averages that a rank reports whose copy of another's weights broke off."""


class ElasticLocalSGD(LocalSGD):
    """LocalSGD of a rank that is a run of its own, and averages with the ranks that are present each time.

    A rank that died is left out of the average, which the others repeat without it. A rank that comes, or comes back,
    copies anchor and outer momentum of one that was there, and contributes from the next average on. Its optimizer and
    its schedule are its own. No gradients travel, and a step that is not finite is this rank's own matter.
    """

    groups: ElasticGroups

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], options: SyncOptions, groups: ElasticGroups
    ) -> None:
        super().__init__(parameters, options, groups)
        self._options = options
        self._averages = 0
        self._present: tuple[int, ...] = ()

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Gradients stay on this rank."""

    @torch.no_grad()
    def join(self) -> None:
        """Meet the other ranks before the first step, and copy their weights if they are ahead."""
        self._meet(0)

    @torch.no_grad()
    def average_parameters(self) -> None:
        steps, self._steps_since_average = self._steps_since_average, 0
        if steps:
            with self._reported(steps):
                self._meet(steps)

    def describe_wait(self) -> list[str]:
        present = f"{self.groups.everyone.size} rank(s) in the last average, this one is number {self.groups.quorum.id}"
        return [*super().describe_wait(), present]

    def _meet(self, steps: int) -> None:
        """Average with all ranks that are present, as often as it takes until it arrives at all of them."""
        if steps and not self._is_moved_finite():
            steps = 0
        broken: list[tuple[int, ...]] = []
        while True:
            meeting = self.groups.quorum.meet(self._averages, self._bits(), steps)
            if meeting is None:
                self._steps_since_average = steps  # a resumed run averages them
                return
            total_N, is_there = None, False
            try:
                self.groups.gather(meeting)
                self._lay_out(len(meeting.members))
                if self._copies_leader(meeting):
                    steps = 0  # also if this average has to be repeated
                total_N = self._sum(meeting)
                is_there = True
            except RuntimeError as error:
                print_line(f"the average of {len(meeting.members)} runs broke off: {reason_of(error)}")
                self.groups.disconnect()
                broken.append(meeting.ids)
                if broken.count(meeting.ids) == ATTEMPTS:
                    self.groups.quorum.settle(meeting, arrived=False)
                    raise explain(error, self.groups, self.step) from error
            if self.groups.quorum.settle(meeting, arrived=is_there):
                break
            self.groups.disconnect()
        self._note_changes(meeting)
        if total_N is not None:
            self.residuals.commit()
            self._step_outwards(total_N, None)
            self._averages += 1
            self._steps_since_average = 0

    def _note_changes(self, meeting: Meeting) -> None:
        """Note the runs that came and left since the last average."""
        before, self._present = self._present, meeting.ids
        if not before:
            return
        quorum = self.groups.quorum
        changes = [f"run {rank} {quorum.why_left(rank)}" for rank in before if rank not in meeting.ids]
        changes += [f"run {rank} takes part" for rank in meeting.ids if rank not in before]
        if changes:
            self._notes.append(f"{', '.join(changes)}; {len(meeting.ids)} run(s) now")

    def end_training(self) -> None:
        """Take the last average, and tell the others that this run has finished."""
        super().end_training()
        self.groups.quorum.leave(has_finished=True)

    def _is_moved_finite(self) -> bool:
        """Whether this rank's parameters are finite; if not, it returns to the last average."""
        if all(bool(p.isfinite().all()) for _, p in self.parameters):
            return True
        print_line(f"parameters are not finite in step {self.step}; this run goes back to the last average")
        for name, parameter in self.parameters:
            parameter.copy_(self._anchor[name])
        return False

    def _sum(self, meeting: Meeting) -> Tensor | None:
        """Return the contributors' mean difference from the anchor; None if nobody has taken a step."""
        contributors = meeting.contributors
        if not contributors:
            return None
        self._share = 1 / len(contributors) if meeting.place in contributors else 0.0
        reducing = self._reduction.reduce(self._unit, self._residual_and_moved(), self.groups.everyone)
        return run_alone(reducing)[0]

    def _copies_leader(self, meeting: Meeting) -> bool:
        """Send the leader's anchor and outer momentum to members that are behind. Returns: whether this one was."""
        if not meeting.behind:
            return False
        averages, is_behind = self._averages, meeting.place in meeting.behind
        if is_behind:
            self._averages = NOT_WHOLE
        for tensors in (self._anchor, self._momentum):
            for tensor in tensors.values():
                self.groups.present.broadcast(tensor, meeting.leader)
        if is_behind:
            averages = meeting.members[meeting.leader].averages
            for name, parameter in self.parameters:
                parameter.copy_(self._anchor[name])
            for unit in self.residuals.units:
                self.residuals.of(unit).zero_()
            self._steps_since_average = 0
        self._averages = averages
        return is_behind

    def _lay_out(self, ranks: int) -> None:
        """Make unit and residuals for this number of ranks, by name as after a resume."""
        if ranks == self._ranks:
            return
        residuals = self.residuals.by_name()
        self._make_unit(self._options, ranks)
        self.residuals.load_residuals([residuals], 1.0)

    def _bits(self) -> int:
        """Return a checksum of the anchor."""
        total = 0
        for place, anchor in enumerate(self._anchor.values(), 1):
            total = (total + place * int(bits_of(anchor))) % PRIME
        return total

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"averages": self._averages}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> list[str]:
        notes = super().load_state_dict(states)
        self._averages = int(states[0].get("averages", 0))
        return notes
