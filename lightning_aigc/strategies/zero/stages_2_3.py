"""ZeRO23Strategy: weights, gradients and optimizer states sharded by rows over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_aigc._lightning import (
    LightningModule,
    ModelParallelStrategy,
    Trainer,
    TrainerFn,
    _materialize_distributed_module,
    _optimizers_to_device,
    rank_zero_info,
)
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.between_shards import BetweenShards
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups
from lightning_aigc.protocols import ProtectsGradients
from lightning_aigc.setting_checks import as_timedelta
from lightning_aigc.sharding.full_state import gathered, sharded_states, sharded_weights
from lightning_aigc.sharding.layout import is_sharded, shard_model, sharded_parts
from lightning_aigc.sharding.local_parts import original_class
from lightning_aigc.sharding.shards import from_shards
from lightning_aigc.strategies.device_process_group import DeviceProcessGroup
from lightning_aigc.strategies.finite_step import StepCount, are_gradients_finite, skip_unless_finite
from lightning_aigc.strategies.late_parameters import named
from lightning_aigc.strategies.refused import refuse_callbacks, refuse_optimizers
from lightning_aigc.strategies.zero.local_shard_optimizer import steps_on_local_parts
from lightning_aigc.strategies.zero.settings import ZeROSettings

CALLED = ("training_step", "validation_step", "test_step", "predict_step", "forward")
COMPUTE_DTYPES = {"bf16-mixed": torch.bfloat16}
CHECKSUM_EVERY_N_STEPS = 100


class ZeRO23Strategy(DeviceProcessGroup, ModelParallelStrategy):
    """ModelParallelStrategy that shards the module itself, after `configure_model`."""

    _groups: ProcessGroups | None = None
    _node_mesh: DeviceMesh | None = None
    _sync: BetweenShards | None = None

    @property
    def sync(self) -> BetweenShards | None:
        """The gradient sync between nodes, with the last step's `sent_bytes`; None where all ranks shard together."""
        return self._sync

    def __init__(
        self,
        settings: ZeROSettings,
        *,
        timeout: timedelta | float | None,
        process_group_backend: str | None,
        **lightning_attributes: Any,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=False,
            timeout=as_timedelta(timeout, "timeout"),
            process_group_backend=process_group_backend,
        )
        for name, value in lightning_attributes.items():  # ModelParallelStrategy has no arguments for them
            if value is not None:
                setattr(self, name, value)
        self.settings, self.stage = settings, settings.stage
        self.offload_optimizer, self.between_nodes = settings.offload_optimizer, settings.between_nodes
        self._steps = StepCount()

    @property
    def label(self) -> str:
        return self.settings.label

    def setup_environment(self) -> None:
        self.settings.apply_to_strategy(self)
        super().setup_environment()

    # Setup

    def _setup_distributed(self) -> None:
        """Make the process group like npu_sparse, instead of like Lightning."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()
        self.settings.refuse_one_rank(self.world_size)
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1

        if self.between_nodes is not None:
            self._groups = ProcessGroups("auto", self._timeout or default_pg_timeout)
            if self._groups.inside is None:
                raise ConfigError(
                    f"{self.label}: between_nodes: {self.between_nodes} wants several nodes with equally many ranks,"
                    f" two or more; got {self._groups.layout}; leave between_nodes out"
                )

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh over which weights are sharded: all ranks, or a node's."""
        if self._groups is None or self._groups.inside is None:
            return self.device_mesh["data_parallel"]
        if self._node_mesh is None:
            self._node_mesh = DeviceMesh.from_group(self._groups.inside.group, self.root_device.type)
        return self._node_mesh

    def setup(self, trainer: Trainer) -> None:
        assert self.model is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        self._refuse_loss_scale()
        refuse_callbacks(self.label, trainer)
        self.settings.apply_to_trainer(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if not is_sharded(self.model):  # a second fit of the same module
            self._shard()
        if self.between_nodes is not None and trainer.state.fn == TrainerFn.FITTING:
            self._sync_between_nodes()
        _materialize_distributed_module(self.model, self.root_device)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.label, self.optimizers, shares=True, cuts=True)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and not self.offload_optimizer:
            _optimizers_to_device(self.optimizers, self.root_device)
        self._unused_were_refused = False

    def teardown(self) -> None:
        self._steps.report(self.label)
        self._steps = StepCount()
        super().teardown()

    def _shard(self) -> None:
        module = self.lightning_module
        assert module is not None
        groups = shard_model(
            module,
            self.shard_mesh,
            stage=self.stage,
            compute_dtype=COMPUTE_DTYPES.get(str(self.precision_plugin.precision)),
            offload=self.offload_optimizer,
            called=CALLED,
        )
        frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
        cut = sum(group.numel for group in groups)
        rank_zero_info(
            f"{self.label}: {cut / 1e6:.1f} M trained values of {original_class(module).__name__} in "
            f"{len(groups)} groups over {self.shard_mesh.size()} ranks; {frozen / 1e6:.1f} M "
            "frozen values stay unsharded on each"
        )

    def _sync_between_nodes(self) -> None:
        """Reduce each group's gradient between nodes, after its reduction inside them."""
        assert self._groups is not None and self.lightning_module is not None
        protect = self.settings.protect or []
        options = SyncOptions(mode=self.between_nodes, protect=protect, hierarchical=False)  # type: ignore[arg-type]
        parts = sharded_parts(self.lightning_module)
        if isinstance(self.lightning_module, ProtectsGradients):
            names = [name for _, named in parts for name, _ in named]
            options = options.protecting(self.lightning_module.protected_gradients, names)
        if options.exchanges_rows:
            self._groups.chunk_on_slow_links()
        self._sync = BetweenShards(self._groups, options, [named for _, named in parts])
        for (module, _), hook in zip(parts, self._sync.hooks(), strict=True):
            module.set_all_reduce_hook(hook)
        rank_zero_info(
            f"{self.label}: {len(self._groups.nodes)} nodes of {self.shard_mesh.size()} ranks; gradients travel "
            f"between them in {self.between_nodes}"
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep the gradients of the block's backward pass in the node, because it is not the last of its window."""
        if self._sync is None:
            yield
            return
        self._sync.is_accumulating = True
        try:
            yield
        finally:
            self._sync.is_accumulating = False

    def _refuse_loss_scale(self) -> None:
        precision = str(self.precision_plugin.precision)
        if precision in ("16-mixed", "bf16-forward-fp16-backward"):
            raise ConfigError(
                f"{self.label} has no loss scale over shards, got precision {precision}; use bf16-mixed, or strategy "
                "zero_1, which takes it"
            )

    # A step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().training_step(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise ConfigError(
                f"{self.label}: a module's weights were read without calling the module, so they were not gathered; "
                "call it by its forward, or use strategy zero_1"
            ) from error

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take the step on all ranks, or on none if a gradient is not finite on one of them."""

        def is_step_finite() -> bool:
            self._refuse_late()
            if not self._unused_were_refused and len(self.optimizers) == 1:
                self._refuse_unused()
            finite = are_gradients_finite(optimizer)
            if self._sync is not None:
                self._sync.end_step(finite=finite)
            return finite

        with steps_on_local_parts(optimizer), skip_unless_finite(optimizer, is_step_finite, self._steps):
            try:
                result = super().optimizer_step(optimizer, closure, model, **kwargs)
            except RuntimeError as error:
                if "Sharding propagation failed" not in str(error):
                    raise
                raise ConfigError(
                    f"{self.label} cannot train with {type(optimizer).__name__}: torch has no sharded form of an "
                    f"operation of its step ({str(error).splitlines()[0]}); use AdamW, or strategy zero_1"
                ) from error
        if self._sync is not None and self._sync.step % CHECKSUM_EVERY_N_STEPS == 0:
            self._sync.check_equal()
        return result

    def _refuse_late(self) -> None:
        assert self.lightning_module is not None
        named_parameters = self.lightning_module.named_parameters()
        late = [name for name, p in named_parameters if p.requires_grad and not isinstance(p, DTensor)]
        if late:
            raise ConfigError(
                f"{self.label}: {named(late)} began to be trained after the weights were cut over the ranks; unfreeze "
                "what is trained before the fit, or use strategy zero_1 or npu_sparse, which let layers join on the way"
            )

    def _refuse_unused(self) -> None:
        assert self.lightning_module is not None
        trained = [(name, p) for name, p in self.lightning_module.named_parameters() if p.requires_grad]
        unused = [name for name, p in trained if p.grad is None]
        if unused and len(unused) < len(trained):
            raise ConfigError(
                f"{self.label}: the loss does not depend on {named(unused)}, which would be "
                "gathered for nothing and hang where ranks differ; freeze them with requires_grad_(False)"
            )
        self._unused_were_refused = bool(trained)

    # protocols.HasSnapshotState, HasShardedTensors: each rank's rows go into its file of an exact snapshot

    ranks_differ = True

    @property
    def snapshot_kind(self) -> str:
        return f"zero_2 or zero_3 over {self.shard_mesh.size()} ranks"

    def snapshot_state(self) -> dict[str, Any]:
        return {} if self._sync is None else {"sync": self._sync.state_dict()}

    def load_snapshot_state(self, read: Callable[[int], dict[str, Any]], world_size: int) -> None:
        saved = read(self.global_rank) if world_size == self.world_size else {}
        if self._sync is not None and "sync" in saved and saved["kind"] == self.snapshot_kind:
            self._sync.load_state_dict(saved["sync"])
        elif self._sync is not None:
            rank_zero_info(f"{self.label}: the residuals between nodes start anew: other ranks wrote the snapshot")

    @contextmanager
    def without_averaging(self) -> Iterator[None]:
        yield

    def from_shards(self, tree: Any) -> Any:
        return from_shards(tree, self.shard_mesh, torch.device("cpu") if self.offload_optimizer else self.root_device)

    # Weights and states: full in files, sharded by rows in memory

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return getattr(optimizer, "_optimizer", optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        full = gathered(checkpoint, keep=self.is_global_zero)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(full, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        weights = sharded_weights(checkpoint["state_dict"], self.lightning_module)
        self.lightning_module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(sharded_states(saved, optimizer))
