"""ZeRO1Strategy: DDP in which each rank keeps the optimizer states of a part of the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_aigc._lightning import LightningModule, Trainer
from lightning_aigc.strategies.device_ddp import DeviceDDPStrategy
from lightning_aigc.strategies.finite_step import StepCount, are_gradients_finite, skip_unless_finite
from lightning_aigc.strategies.refused import refuse_optimizers
from lightning_aigc.strategies.zero.settings import ZeROSettings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.13 scripts functions of this package on import
    from torch.distributed.optim import ZeroRedundancyOptimizer

BROADCAST_BYTES = 25 * 2**20


class ZeRO1Strategy(DeviceDDPStrategy):
    """DDP with torch's ZeroRedundancyOptimizer around each configured optimizer."""

    def __init__(self, settings: ZeROSettings, **lightning_arguments: Any) -> None:
        super().__init__(**lightning_arguments, gradient_as_bucket_view=True)
        self.settings, self.stage = settings, settings.stage
        self._steps = StepCount()

    @property
    def label(self) -> str:
        return self.settings.label

    def setup_environment(self) -> None:
        self.settings.apply_to_strategy(self)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        self.settings.refuse_one_rank(self.world_size)
        self.settings.apply_to_trainer(trainer)
        super().setup(trainer)

    def teardown(self) -> None:
        self._steps.report(self.label)
        self._steps = StepCount()
        super().teardown()

    _is_for_snapshot = False
    _saved_states: Sequence[dict[int, Any]] = ()
    """States of a snapshot by parameter index, for each optimizer, until they are loaded."""

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
        """Take the step on all ranks, or on none if the mean gradient is not finite."""
        with skip_unless_finite(optimizer, lambda: are_gradients_finite(optimizer), self._steps):
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
        """Read optimizers within the block without gathering their states."""
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
    """Return the states that this rank keeps, by parameter index."""
    return {optimizer._param_to_index[parameter]: state for parameter, state in optimizer.optim.state.items()}


class SharedOptimizer(ZeroRedundancyOptimizer):
    """ZeroRedundancyOptimizer with one broadcast per 25 MiB of parameters, instead of one per parameter.

    torch's option `parameters_as_bucket_view` would make them views of one tensor, which is saved with each of them.
    """

    def _verify_same_dense_param_type(self) -> None:
        """Accept parameters of several dtypes, because they are broadcast by dtype."""

    @torch.no_grad()
    def _sync_params(self) -> None:
        for rank, groups in enumerate(self._partition_parameters()):  # type: ignore[attr-defined]
            parameters = [parameter for group in groups for parameter in group["params"]]
            if parameters:
                dist._broadcast_coalesced(self.process_group, parameters, BROADCAST_BYTES, rank)  # type: ignore[attr-defined]


def share_out(configured: Optimizer) -> ZeroRedundancyOptimizer:
    """Return a ZeroRedundancyOptimizer whose local optimizer is the configured one, with this rank's parameters.

    Its class has the configured optimizer's name, for messages and progress bars.
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
    """Count the optimizer's steps for a learning rate schedule that was made for the configured optimizer."""
    step = type(optimizer).step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True
        return step(self, *args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(counted, optimizer)
