"""ZeRO stage 1: DDP whose ranks keep the optimizer states of a share of the parameters each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from lightning_aigc.sharding.local_parts import gradient_norm, is_finite
from lightning_aigc.strategies.device_ddp import DeviceDDPStrategy
from lightning_aigc.strategies.finite_step import skip_unless_finite
from lightning_aigc.strategies.refused import refuse_optimizers
from lightning_aigc.strategies.zero.strategy import ZeROStrategy

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.13 scripts functions of this package on import
    from torch.distributed.optim import ZeroRedundancyOptimizer

BROADCAST_BYTES = 25 * 2**20


class StatesZeROStrategy(ZeROStrategy, DeviceDDPStrategy):
    """DDP with torch's ZeroRedundancyOptimizer around each configured optimizer."""

    def _take_lightnings_arguments(self, **arguments: Any) -> None:
        DeviceDDPStrategy.__init__(self, **arguments, gradient_as_bucket_view=True)

    def setup(self, trainer: Trainer) -> None:
        self._refuse_one_rank()
        self._take_imported(trainer)
        super().setup(trainer)

    _is_for_snapshot = False
    _saved_states: Sequence[dict[int, Any]] = ()
    """A snapshot's states by the parameters' places, for each optimizer, until they are loaded."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        refuse_optimizers(self.label, self.optimizers, shares=True, cuts=False)
        around = [share_out(optimizer) for optimizer in self.optimizers]
        for config in self.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            for configured, shared in zip(self.optimizers, around, strict=True):
                if scheduler.optimizer is configured:
                    scheduler.optimizer = shared
        self.optimizers = list(around)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take the step on all ranks, or on none where the mean gradient is not finite."""

        def is_step_finite() -> bool:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = [p.grad for p in parameters if p.grad is not None]
            return not gradients or is_finite(gradient_norm(gradients))

        with skip_unless_finite(optimizer, is_step_finite):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # protocols.HasSnapshotState: each rank's states go into its file of an exact snapshot

    snapshot_kind = "zero_1"
    ranks_differ = False

    def snapshot_state(self) -> dict[str, Any]:
        return {"states": [own_states(optimizer) for optimizer in self.optimizers]}

    def load_snapshot_state(self, read: Callable[[int], dict[str, Any]], world_size: int) -> None:
        own = read(self.global_rank) if world_size == self.world_size else {}
        self._saved_states = own["states"] if own.get("kind") == self.snapshot_kind else ()

    @contextmanager
    def without_averaging(self) -> Iterator[None]:
        """Read optimizers in the block without gathering their states."""
        self._is_for_snapshot = True
        try:
            yield
        finally:
            self._is_for_snapshot = False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._is_for_snapshot:
            return {"state": {}, "param_groups": Optimizer.state_dict(optimizer)["param_groups"]}
        return super().optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        saved, self._saved_states = self._saved_states, ()
        if saved:
            together = zip(checkpoint["optimizer_states"], saved, strict=True)
            checkpoint = {"optimizer_states": [{**state, "state": by_place} for state, by_place in together]}
        super().load_optimizer_state_dict(checkpoint)


def own_states(optimizer: Any) -> dict[int, Any]:
    """Return the states that this rank keeps, by their parameters' places among all."""
    return {optimizer._param_to_index[parameter]: state for parameter, state in optimizer.optim.state.items()}


class SharedOptimizer(ZeroRedundancyOptimizer):
    """torch's, which broadcasts parameters one by one, with a broadcast for each 25 MiB of them instead.

    Its own `parameters_as_bucket_view` would make them views of one tensor, contiguous and saved whole with each.
    """

    def _verify_same_dense_param_type(self) -> None:
        """Accept parameters of several dtypes: they are broadcast by dtype."""

    @torch.no_grad()
    def _sync_params(self) -> None:
        for rank, groups in enumerate(self._partition_parameters()):  # type: ignore[attr-defined]
            parameters = [parameter for group in groups for parameter in group["params"]]
            if parameters:
                dist._broadcast_coalesced(self.process_group, parameters, BROADCAST_BYTES, rank)  # type: ignore[attr-defined]


def share_out(configured: Optimizer) -> ZeroRedundancyOptimizer:
    """Return a ZeroRedundancyOptimizer whose local optimizer is the configured one, with this rank's parameters.

    Its class has the configured one's name, which messages and progress bars of others say.
    """
    groups = [dict(group) for group in configured.param_groups]

    def with_own_share(own_groups: list[dict[str, Any]], **_: Any) -> Optimizer:
        configured.param_groups = [{**group} for group in own_groups]
        configured.state.clear()
        return configured

    of_name = type(type(configured).__name__, (SharedOptimizer,), {})
    shared: ZeroRedundancyOptimizer = of_name(groups, optimizer_class=with_own_share)
    if hasattr(configured.step, "_wrapped_by_lr_sched"):
        _count_steps_for_schedule(shared)
    return shared


def _count_steps_for_schedule(optimizer: Any) -> None:
    """Mark the optimizer as a learning rate schedule does, which was made for the configured one."""
    step = type(optimizer).step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True
        return step(self, *args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(counted, optimizer)
