"""Few-bit gradient sync between nodes whose ranks shard the model among themselves.

Each rank exchanges its shard's gradient with the ranks that hold the same shard on the other nodes. torch's sharding
calls a hook with a flat, padded gradient for each group of parameters, once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_aigc.gradient_sync.hook import UnitGradients
from lightning_aigc.gradient_sync.modes.make_reductions import make_reductions
from lightning_aigc.gradient_sync.options import SyncOptions, check_protect
from lightning_aigc.gradient_sync.residual import Residuals
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups, SyncError
from lightning_aigc.gradient_sync.unit_reducer import UnitReducer
from lightning_aigc.gradient_sync.units import make_units
from lightning_aigc.gradient_sync.watch.replica_check import RanksDivergedError, bits_of, first_difference


class _Peers:
    """Process groups for a reducer: ranks with the same shard, and none inside a node."""

    inside = None
    ranks_inside = 1

    def __init__(self, groups: ProcessGroups) -> None:
        self.between, self.traffic = groups.between, groups.traffic
        self.world_size, self.rank = groups.between.size, groups.between.rank


class ShardGroup:
    """Parameters of one sharded group on this rank: their places in the flat gradient, and its reducer."""

    def __init__(self, named: Sequence[tuple[str, Any]], options: SyncOptions, peers: _Peers) -> None:
        """Args: named: names from the root and torch's FSDPParams, in the group's order."""
        self._parameters = [of for _, of in named]
        self.padded = [of.padded_sharded_param_size.numel() for of in self._parameters]
        parts = [(name, of.sharded_param._local_tensor) for name, of in named]
        self.parts = [(name, part) for name, part in parts if part.numel()]
        device = parts[0][1].device
        groups = cast(ProcessGroups, peers)  # a _Peers has the attributes that these read
        self._units = make_units(self.parts, options, peers.world_size)
        compressed = [unit for unit in self._units if not unit.uncompressed]
        self.residuals = Residuals(compressed, groups, device, error_feedback=options.error_feedback)
        reductions = make_reductions(options, self._units, groups, device)
        self._reducer = UnitReducer(groups, reductions, self.residuals, None, device, lambda: 1.0)

    def reduce(self, flat: Tensor) -> None:
        """Replace this rank's part of the flat gradient by its mean over the nodes."""
        if flat.numel() != sum(self.padded):
            raise SyncError(
                f"a group's gradient has {flat.numel()} values where its parameters have {sum(self.padded)}: some took "
                "no part in the loss; freeze them with requires_grad_(False)"
            )
        by_name, at = {}, 0
        names = iter(self.parts)
        for of, padded in zip(self._parameters, self.padded, strict=True):
            part = of.sharded_param._local_tensor
            view = flat[at : at + part.numel()].view(part.shape)
            at += padded
            if of.sharded_param.grad is not None:  # of this window's earlier micro-batches, which stayed in the node
                view.add_(of.sharded_param.grad._local_tensor)
                of.sharded_param.grad = None
            if part.numel():
                by_name[next(names)[0]] = view
        self._reducer.begin_step(compressing=True)
        for unit in self._units:
            collected = UnitGradients(unit)
            collected.by_name = {entry.name: by_name[entry.name] for entry in unit.entries}
            for work in self._reducer.reduce(collected):
                work.wait()

    def end_step(self, *, finite: bool) -> None:
        if finite:
            self.residuals.commit()
        else:
            self.residuals.rollback()


class BetweenShards:
    """Gradient sync of all groups of one model. Every rank makes it with the same groups and options."""

    def __init__(
        self, groups: ProcessGroups, options: SyncOptions, sharded: Sequence[Sequence[tuple[str, Any]]]
    ) -> None:
        """Args: sharded: for each group its parameters by name, see ShardGroup.

        Raises: ConfigError for a protect pattern that covers nothing.
        """
        check_protect(options, [name for of_group in sharded for name, _ in of_group])
        self.groups, self.options = groups, options
        # The patterns were checked over all groups; a single group need not contain what they cover.
        patterns = options.protection([name for of_group in sharded for name, _ in of_group])
        self._parts: list[ShardGroup] = []
        for of_group in sharded:
            names = [name for name, _ in of_group]
            covered = [name for name in names if patterns.covers(name)]
            group_options = SyncOptions(mode=options.mode, protect=covered, error_feedback=options.error_feedback)
            self._parts.append(ShardGroup(of_group, group_options, _Peers(groups)))
        self.step = self.skipped_steps = 0
        self.sent_bytes: dict[str, float] = {}
        """Bytes between nodes in the last step, by kind."""
        self.is_accumulating = False
        """Whether the backward pass is not the last of its window; its gradients then stay in the node."""
        self._sent_before = dict(groups.traffic.sent)
        self._align()

    def hooks(self) -> list[Callable[[Tensor], None]]:
        """Return the hooks that torch calls with each group's flat gradient, in the order of the groups."""

        def hook_of(part: ShardGroup) -> Callable[[Tensor], None]:
            return lambda flat: None if self.is_accumulating else part.reduce(flat)

        return [hook_of(part) for part in self._parts]

    def end_step(self, *, finite: bool) -> None:
        """End a step, equally on all ranks: commit its residuals if it was finite, else restore the former ones."""
        for part in self._parts:
            part.end_step(finite=finite)
        self.step += finite
        self.skipped_steps += not finite
        sent = self.groups.traffic.sent
        self.sent_bytes = {kind: total - self._sent_before[kind] for kind, total in sent.items()}
        self._sent_before = dict(sent)

    @torch.no_grad()
    def check_equal(self) -> None:
        """Compare the nodes' shards, bit for bit. Collective: one number travels.

        Raises: RanksDivergedError with the first parameter that differs.
        """
        named = [pair for part in self._parts for pair in part.parts]
        different = first_difference(torch.stack([bits_of(part) for _, part in named]), self.groups.between.group)
        if different is not None:
            raise RanksDivergedError(
                f"the nodes hold different values of {named[different[0]][0]}, the first parameter that differs: "
                "something changed them outside gradient sync; start again from the last checkpoint"
            )

    def _align(self) -> None:
        """Copy the first node's shards to every node."""
        source = dist.get_global_rank(self.groups.between.group, 0)
        for part in self._parts:
            for _, values in part.parts:
                dist.broadcast(values, source, group=self.groups.between.group)

    def state_dict(self) -> dict[str, Any]:
        residuals = {name: value for part in self._parts for name, value in part.residuals.by_name().items()}
        return {"step": self.step, "residuals": residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this rank."""
        self.step = int(state["step"])
        for part in self._parts:
            part.residuals.load_residuals([state["residuals"]], 1.0)
