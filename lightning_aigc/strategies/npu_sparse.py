"""NPUSparseStrategy: DDP whose gradients travel compressed, on HCCL, NCCL and Gloo."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _destroy_dist_connection, _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_aigc.cluster import env_settings
from lightning_aigc.gradient_sync.compressor import describe, refuse_sparse_gradients, trained_parameters
from lightning_aigc.gradient_sync.executors import explain
from lightning_aigc.gradient_sync.factory import AnySync, make_sync
from lightning_aigc.gradient_sync.flat_units import check_protect
from lightning_aigc.gradient_sync.options import DEFAULT_MODE, Mode, SyncOptions, without_effect
from lightning_aigc.gradient_sync.plain import LocalSGD
from lightning_aigc.gradient_sync.replica_check import check_equal
from lightning_aigc.strategies.device_order import agree_on_order, open_store
from lightning_aigc.strategies.sync_checkpoint import SyncCheckpoint

NAMES = {
    "npu_sparse": ("popen", False),
    "npu_sparse_find_unused_parameters_true": ("popen", True),
    "npu_sparse_spawn": ("spawn", False),
    "npu_sparse_notebook": ("fork", False),
}
"""What the registry knows: how ranks are started, and whether parameters may go without a gradient."""
BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


class NPUSparseStrategy(DDPStrategy):
    """DDP that sends a ninth of the bytes, equally at home on Ascend NPUs, CUDA GPUs and CPUs.

    The default, `int3`, sends three-bit integers with a scale for every 32 of them, and carries what they cannot say to
    the next step. Every rank decodes the same bytes, so parameters stay equal to the bit. A gradient that is not finite
    on one rank skips the step on all.
    """

    def __init__(
        self,
        mode: Mode = DEFAULT_MODE,
        sparsity: float = 0.75,
        layer_wise_adaptive: bool = True,
        protect: Sequence[str] | None = None,
        warmup_steps: int = 0,
        error_feedback: bool = True,
        hierarchical: bool | Literal["auto"] = "auto",
        bucket_mb: float = 25.0,
        overlap: bool = True,
        delay_one_step: bool = False,
        rank: int = 16,
        local_steps: int = 8,
        outer_learning_rate: float = 1.0,
        outer_momentum: float = 0.0,
        checksum_every_n_steps: int = 100,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        timeout: timedelta | None = default_pg_timeout,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **ddp_kwargs: Any,
    ) -> None:
        """Args:
            mode: what is sent of a gradient; docs/gradient_sync.md has bytes, loss and time of each. auto measures the
                link first and may answer dense.
            sparsity: sparse modes: share of the gradient that waits for a later step, in [0, 1).
            layer_wise_adaptive: sparse modes: layers share what is sent by the size of their gradients.
            protect: name patterns of parameters that are sent whole in float32, as in FusedBackwardPrecision; null
                protects vae.decoder and mid_block.attentions where the model has them, [] nothing.
            warmup_steps: dense steps before compression begins.
            error_feedback: whether what was not sent is added to the next gradient.
            hierarchical: whether ranks of a node first add up among themselves; auto where nodes are alike.
            bucket_mb: MB of float32 gradient that travel together.
            overlap: whether gradients travel while backward runs on.
            delay_one_step: apply each gradient one step late. Hides slow links and costs quality: a small
                denoiser's loss rose by 23 %.
            rank: low_rank: columns of the factors.
            local_steps: local: optimizer steps between two averages of the parameters.
            outer_learning_rate: local: how far the parameters go to the average; 1 is all the way.
            outer_momentum: local: Nesterov momentum over averages.
            checksum_every_n_steps: steps between two comparisons of the ranks' parameters; 0 never compares.
            find_unused_parameters: as in DDP.
            gradient_as_bucket_view: as in DDP; saves a copy of the gradients.
            static_graph: as in DDP.
            timeout: how long a rank waits for the others before it stops with an error.
            process_group_backend: hccl, nccl or gloo by the device when null.
            start_method: how Lightning starts the ranks.
            ddp_kwargs: further arguments of torch's DistributedDataParallel.

        Raises: ConfigError for a value outside what is accepted.
        """
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            bucket_cap_mb=bucket_mb,
            **ddp_kwargs,
        )
        self.options = SyncOptions(
            mode=mode,
            sparsity=sparsity,
            layer_wise_adaptive=layer_wise_adaptive,
            protect=protect,
            warmup_steps=warmup_steps,
            error_feedback=error_feedback,
            hierarchical=hierarchical,
            bucket_mb=bucket_mb,
            overlap=overlap,
            delay_one_step=delay_one_step,
            rank=rank,
            local_steps=local_steps,
            outer_learning_rate=outer_learning_rate,
            outer_momentum=outer_momentum,
            checksum_every_n_steps=checksum_every_n_steps,
        )
        self.mode: Mode = mode
        self._sync: AnySync | None = None
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._optimizer_steps = 0
        self._checkpoint = SyncCheckpoint()
        self._is_left_apart = False
        self._store: Store | None = None

    @property
    def sync(self) -> AnySync | None:
        """What adds up the gradients, with the last step's `report`; None with one rank, or where auto chose dense."""
        return self._sync

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, (start_method, find_unused) in NAMES.items():
            if name not in strategy_registry:
                strategy_registry.register(
                    name,
                    cls,
                    description="DDP with compressed gradients: hccl, nccl or gloo by the device",
                    start_method=start_method,
                    find_unused_parameters=find_unused,
                )

    # Ranks and devices

    def setup_environment(self) -> None:
        assert self.parallel_devices is not None
        if self.root_device.type in ("cuda", "npu") and len(self.parallel_devices) > 2:  # two have one link
            self._order_devices()
        backend = self._get_process_group_backend()
        if backend in BACKENDS.values():
            deterministic = torch.are_deterministic_algorithms_enabled()
            for line in env_settings.apply(backend, self.num_nodes, deterministic, os.environ):
                rank_zero_info(f"npu_sparse sets {line}")
        super().setup_environment()

    def _order_devices(self) -> None:
        """Neighbouring ranks on devices with the best link between them; as they are where all links are equal."""
        assert self.parallel_devices is not None
        indices = [device.index for device in self.parallel_devices]
        order, news = agree_on_order(indices, self._open_store, self.node_rank, decides=self.local_rank == 0)
        self.parallel_devices = [torch.device(self.root_device.type, index) for index in order]
        if news:
            rank_zero_info(f"npu_sparse {news}")

    def _open_store(self) -> Store:
        assert self.cluster_environment is not None
        self.set_world_ranks()
        # As Lightning does on its way to the process group, which takes this store: two cannot share a port.
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        self._store = open_store(self.global_rank, self.world_size, self._timeout)
        return PrefixStore("npu_sparse", self._store)

    def setup_distributed(self) -> None:
        # Lightning does so for nccl alone. Gloo's threads abort a process that ends before its groups do
        # (pytorch#179291), and a group destroyed sooner, at teardown, lets a second fit hang.
        atexit.register(_destroy_dist_connection)
        # As DDPStrategy does, but on NPUs without device_id: connecting at once is more than every torch_npu can.
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        assert self.cluster_environment is not None
        arguments: dict[str, Any] = {"timeout": self._timeout}
        if self.root_device.type == "cuda":
            arguments["device_id"] = self.root_device
        if self._store is not None:
            arguments["store"], self._store = PrefixStore("default_pg", self._store), None
        _init_dist_connection(self.cluster_environment, self._process_group_backend, **arguments)

    def _get_process_group_backend(self) -> str:
        return (
            self._process_group_backend or BACKENDS.get(self.root_device.type) or super()._get_process_group_backend()
        )

    def determine_ddp_device_ids(self) -> list[int] | None:
        return [self.root_device.index] if self.root_device.type == "cuda" else None

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self.root_device.type != "npu":
            return super()._setup_model(model)
        return DistributedDataParallel(model, **self._ddp_kwargs)  # its parent would open a CUDA stream

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As in DDP; on NPUs a mean is a sum divided here, because HCCL has none."""
        if self.root_device.type != "npu" or not isinstance(tensor, Tensor) or reduce_op not in ("mean", "avg"):
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.div_(self.world_size) if total.is_floating_point() else total.copy_(total / self.world_size)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # as its parent
        votes = torch.tensor(int(decision), device=self.root_device, dtype=torch.int32)  # HCCL has not always had int64
        total = int(self.reduce(votes, reduce_op="sum"))
        return total == self.world_size if all else total > 0

    # The sync

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self._parameters = trained_parameters(self.model)
        check_protect(self.options, [name for name, _ in self._parameters])  # with one rank, and in dense modes, too
        refuse_sparse_gradients(self.model)
        for sentence in without_effect(self.options):
            rank_zero_info(f"npu_sparse: {sentence}")
        if self.world_size == 1:
            rank_zero_info("npu_sparse: one rank, nothing to send; gradients are left alone")
            return
        timeout = self._timeout or default_pg_timeout
        self._sync, self.mode, why = make_sync(
            self._parameters,
            self.options,
            timeout=timeout,
            find_unused=bool(self._ddp_kwargs["find_unused_parameters"] or self._ddp_kwargs["static_graph"]),
            loss_scale=self._loss_scale,
        )
        if self._sync is not None:
            self._sync.attach(self.model)
            groups = self._sync.groups
            nodes = f"{groups.world_size} ranks on {len(groups.nodes)} node(s)"
            why += f", {nodes}, {'hierarchical' if groups.inside is not None else 'flat'}"
        rank_zero_info(f"npu_sparse: {why}")
        for note in self._checkpoint.apply(self._sync, self.reduce_boolean_decision):
            rank_zero_info(f"npu_sparse: {note}")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As in DDP, whose forward broadcasts buffers: a rank that is gone may show there first."""
        try:
            return super().training_step(*args, **kwargs)
        except RuntimeError as error:
            if self._sync is None or not is_of_a_collective(error):
                raise
            raise explain(error, self._sync.groups, self._sync.step) from error

    def _loss_scale(self) -> float:
        scaler = getattr(self.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take the step, unless a rank's gradients were not finite: then none of them does."""
        if self._sync is None or isinstance(optimizer, LBFGS):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        else:
            sync, step = self._sync, optimizer.step

            def step_if_finite(closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
                if closure is None:  # a loss scaler has looked at the gradients already
                    return step(**arguments)
                result = closure()
                report = sync.settle()
                return step(lambda: result, **arguments) if report is None or report.finite else result

            own = vars(optimizer).get("step")
            optimizer.step = step_if_finite  # type: ignore[method-assign]
            try:
                result = super().optimizer_step(optimizer, closure, model, **kwargs)
            finally:
                if own is None:
                    del optimizer.step
                else:
                    optimizer.step = own  # type: ignore[method-assign]  # a learning rate schedule's wrapper
        self._after_step()
        return result

    def _after_step(self) -> None:
        self._optimizer_steps += 1
        if self._sync is not None:
            self._sync.settle()
            if isinstance(self._sync, LocalSGD):
                self._sync.after_optimizer_step()
            self._log_step(self._sync)
        every = self.options.checksum_every_n_steps
        if every and self._optimizer_steps % every == 0 and self.mode != "local":
            check_equal(self._parameters)

    def _log_step(self, sync: AnySync) -> None:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or sync.report is None or self._optimizer_steps % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        report = sync.report
        numbers = {f"sync/{kind}_mb": sent / 1e6 for kind, sent in report.sent_bytes.items()}
        numbers |= {
            "sync/between_nodes_mb": report.between_nodes_bytes / 1e6,
            "sync/ratio_to_dense": report.ratio,
            "sync/exposed_ms": report.exposed_ms,
            "sync/share_hidden": report.share_hidden,
            "sync/skipped_steps": float(sync.skipped_steps),
        }
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_end(self) -> None:
        if isinstance(self._sync, LocalSGD):
            self._sync.average()
        super().on_train_end()

    # Exact snapshots: every rank's own state goes into its own file

    @property
    def ranks_differ(self) -> bool:
        """Whether ranks have parameters and optimizers of their own now."""
        return isinstance(self._sync, LocalSGD)

    def snapshot_state(self) -> dict[str, Any]:
        """What this rank owes, and how many steps it took."""
        sync = None if self._sync is None else self._sync.state_dict()
        return {"sync": sync, "optimizer_steps": self._optimizer_steps}

    def load_snapshot_state(self, read: Callable[[int], dict[str, Any]], saved_ranks: int) -> None:
        """Take up, once there is a sync, what `snapshot_state` returned; `read` gets it for one of those ranks."""
        self._optimizer_steps = int(read(0)["optimizer_steps"])
        self._checkpoint.expect(lambda rank: read(rank)["sync"], self.global_rank, self.world_size, saved_ranks)

    @contextmanager
    def left_apart(self) -> Iterator[None]:
        """Within: to look at the parameters does not average them."""
        self._is_left_apart = True
        try:
            yield
        finally:
            self._is_left_apart = False

    # Checkpoints: every rank's own state lies beside the file

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if isinstance(self._sync, LocalSGD) and not self._is_left_apart:
            self._sync.average()  # all ranks come here, and one of them writes
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._sync is not None:
            checkpoint = self._checkpoint.save(self.checkpoint_io, self._sync, checkpoint, filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        return self._checkpoint.load(
            self.checkpoint_io,
            checkpoint,
            checkpoint_path,
            self.global_rank,
            self.world_size,
            own_optimizers=self.options.mode == "local",
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._checkpoint.remove(self.checkpoint_io, filepath)

    def teardown(self) -> None:
        if self._sync is not None:
            rank_zero_info(f"npu_sparse: {describe(self._sync.report, self._sync.step, self._sync.skipped_steps)}")
            self._sync.close()
            self._sync = None
        super().teardown()


def is_of_a_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it: Gloo's errors have no type of their own, and name its source files."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
