"""NPUSparseStrategy: DDP with compressed gradients, on HCCL, NCCL and Gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_aigc._lightning import LightningModule, Trainer, rank_zero_info, rank_zero_warn
from lightning_aigc.checkpoint.session import session_of
from lightning_aigc.cluster.modes import DEFAULT_MODE, Mode
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.base import Sync
from lightning_aigc.gradient_sync.elastic import MeetingPlace
from lightning_aigc.gradient_sync.factory import make_sync
from lightning_aigc.gradient_sync.options import (
    check_protect,
    refuse_sparse_gradients,
    shows_options,
    take_options,
    trained_parameters,
    unused_options,
)
from lightning_aigc.gradient_sync.transport.process_groups import explain, is_of_a_collective
from lightning_aigc.gradient_sync.watch.replica_check import check_equal
from lightning_aigc.gradient_sync.watch.stall_watchdog import print_line
from lightning_aigc.gradient_sync.watch.step_report import describe
from lightning_aigc.protocols import ProtectsGradients
from lightning_aigc.report.record import SyncResult
from lightning_aigc.strategies.device_ddp import DeviceDDPStrategy
from lightning_aigc.strategies.finite_step import StepCount, skip_unless_finite
from lightning_aigc.strategies.refused import refuse_optimizers
from lightning_aigc.strategies.sync_checkpoint import SyncCheckpoint

NAMES = {
    "npu_sparse": ("popen", False),
    "npu_sparse_find_unused_parameters_true": ("popen", True),
    "npu_sparse_spawn": ("spawn", False),
    "npu_sparse_notebook": ("fork", False),
}
"""Start method of ranks, and find_unused_parameters, by registered name."""
LOCAL = "npu_sparse in mode local"
"""Kind of a snapshot in which each rank has its own model."""


@shows_options
class NPUSparseStrategy(DeviceDDPStrategy):
    """DDP that sends a ninth of the gradients' bytes, on Ascend NPUs, CUDA GPUs and CPUs.

    With the protected layers of a U-Net, which stay dense, it is a seventh.

    The default, `int3`, sends three-bit integers with a scale for every 32 of them, and adds the quantization error to
    the next gradient. Every rank decodes the same bytes, so parameters stay bit-identical. A gradient that is not
    finite on one rank skips the step on all.

    Args:
        find_unused_parameters: As in DDP.
        gradient_as_bucket_view: As in DDP; saves a copy of the gradients.
        static_graph: As in DDP.
        timeout: How long a rank waits for the others before it stops with an error, such as 0:05:00, or seconds.
        stall_after_s: Seconds without a finished step before each rank writes where it waits to the folder `stalled`
            of the run; null is a third of timeout, 0 never.
        process_group_backend: hccl, nccl or gloo by the device when null.
        start_method: How Lightning starts the ranks.
        rendezvous: mode local: HOST:PORT at which runs of one rank each meet for their averages, where
            `python -m lightning_aigc.gradient_sync.elastic` runs. A run may start, end or die at any time; the others
            continue.
        min_ranks: With rendezvous, runs that an average waits for.
        arguments: The fields of `SyncOptions`, and further arguments of torch's DistributedDataParallel.

    Raises: ConfigError for a value outside what is accepted.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy=NPUSparseStrategy(mode="int3"), accelerator="cpu", devices=2)
    """

    def __init__(
        self,
        mode: Mode = DEFAULT_MODE,
        *,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        timeout: timedelta | float | None = default_pg_timeout,
        stall_after_s: float | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        rendezvous: str | None = None,
        min_ranks: int = 1,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **arguments: Any,
    ) -> None:
        self.options = take_options(mode, arguments)
        self.mode: Mode = mode
        if rendezvous is None and min_ranks != 1:
            raise ConfigError(
                f"min_ranks={min_ranks} counts the runs at a rendezvous, which is not set; set rendezvous: HOST:PORT,"
                " or remove min_ranks"
            )
        self._meets = None if rendezvous is None else MeetingPlace.of(rendezvous, min_ranks, self.options)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            stall_after_s=stall_after_s,
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            bucket_cap_mb=self.options.bucket_mb,
            **arguments,
        )
        self._sync: Sync | None = None
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._optimizer_steps = 0
        self._steps = StepCount()
        self._checkpoint = SyncCheckpoint()
        self._is_without_averaging = False

    @property
    def sync(self) -> Sync | None:
        """The gradient sync, with the last step's `report`; None with one rank, or where auto chose dense."""
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

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.world_size > 1 and self.options.mode != "dense":
            refuse_optimizers(f"npu_sparse in mode {self.options.mode}", self.optimizers, shares=False, cuts=False)

    # The sync

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self._parameters = trained_parameters(self.model)
        names = [name for name, _ in self._parameters]
        check_protect(self.options, names)  # with one rank, and in dense modes, too
        if isinstance(self.lightning_module, ProtectsGradients):
            self.options = self.options.protecting(self.lightning_module.protected_gradients, names)
        refuse_sparse_gradients(self.model)
        for sentence in unused_options(self.options):
            rank_zero_warn(f"npu_sparse: {sentence}")
        if self._meets is not None:
            self._join(self._meets)
            return
        if self.world_size == 1:
            rank_zero_info("npu_sparse: one rank, nothing to send; gradients are left alone")
            return
        timeout = self._timeout or default_pg_timeout
        self._watch()
        self._note_progress(doing=f"setting up mode {self.mode}")
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
        self._note_progress()

    def _join(self, place: MeetingPlace) -> None:
        """Meet the other runs, and copy the weights of one if they are ahead."""
        place.refuse_ranks(self.world_size)
        self._watch()
        self._note_progress(doing=f"waiting for other runs at {place.address}")
        timeout = self._timeout or default_pg_timeout
        self._sync = sync = place.make_sync(self._parameters, self.options, timeout, self._is_told_to_end)
        for note in self._checkpoint.apply(sync, self.reduce_boolean_decision):
            rank_zero_info(f"npu_sparse: {note}")
        try:
            sync.join()
        except KeyboardInterrupt:
            print_line(
                "stopped while it waited for other runs: nothing was trained; start it again by the same command"
            )
            raise
        ranks = sync.groups.everyone.size
        rank_zero_info(f"npu_sparse: mode local, {ranks} run(s) at {place.address} now, and more may come")
        self._note_progress()

    def _is_told_to_end(self) -> bool:
        """Whether a stop signal has arrived, as far as Lightning or the snapshots have seen it."""
        if self.lightning_module is None:
            return False
        trainer = self.lightning_module.trainer
        session = session_of(trainer)
        return trainer.received_sigterm or (session is not None and session.is_told_to_end)

    def on_train_start(self) -> None:
        """Count on from the run's steps where its checkpoint has none of this strategy: one device's, or another's."""
        super().on_train_start()
        if self.lightning_module is None or self._meets is not None:
            return
        taken = self.lightning_module.trainer.global_step
        self._optimizer_steps = self._optimizer_steps or taken
        if self._sync is not None and not self._checkpoint.is_loaded:
            self._sync.step = taken

    def describe_wait(self) -> Sequence[str]:
        return [f"mode {self.mode}"] if self._sync is None else self._sync.describe_wait()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run DDP's step. Its forward broadcasts buffers, where a lost rank may be noticed first."""
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
        """Take the step on all ranks, or on none if a rank's gradients are not finite."""
        if self._sync is None or isinstance(optimizer, LBFGS):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        else:
            with skip_unless_finite(optimizer, self._is_step_finite, self._steps):
                result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._after_step()
        return result

    def _is_step_finite(self) -> bool:
        report = None if self._sync is None else self._sync.end_step()
        return (report is None or report.finite) and self._is_late_finite

    def _after_step(self) -> None:
        self._optimizer_steps += 1
        if self._sync is not None:
            self._sync.end_step()
            self._sync.after_optimizer_step()
            for note in self._sync.take_notes():
                rank_zero_info(f"npu_sparse: {note}")
            log_step(self.lightning_module, self._sync, self._optimizer_steps)
        every = self.options.checksum_every_n_steps
        if every and self._optimizer_steps % every == 0 and not self.ranks_differ:
            assert isinstance(self.model, DistributedDataParallel)
            check_equal(trained_parameters(self.model))
        self._note_progress(self._optimizer_steps)

    def sync_metrics(self) -> dict[str, float]:
        """Return the last step's bytes and times for loggers; empty with one rank, or where auto chose dense."""
        return {} if self._sync is None else sync_metrics(self._sync)

    def report_entries(self) -> dict[str, Any]:
        """Return mode, ranks and skipped steps for RunReport's page."""
        if self.world_size == 1:
            return {}
        return {
            "sync": SyncResult(str(self.mode), self.world_size, 0 if self._sync is None else self._sync.skipped_steps)
        }

    def on_train_end(self) -> None:
        if self._sync is not None:
            self._sync.end_training()
        super().on_train_end()

    # protocols.HasSnapshotState: each rank's state goes into its file of an exact snapshot

    @property
    def ranks_differ(self) -> bool:
        """Whether the ranks' parameters and optimizers differ now."""
        return self._sync is not None and self._sync.has_rank_local_parameters

    @property
    def snapshot_kind(self) -> str:
        return LOCAL if self.options.mode == "local" and self.world_size > 1 else "npu_sparse"

    def snapshot_state(self) -> dict[str, Any]:
        """Return this rank's sync state, with its residuals, and the number of its steps."""
        sync = None if self._sync is None else self._sync.state_dict()
        return {"sync": sync, "optimizer_steps": self._optimizer_steps}

    def load_snapshot_state(self, read: Callable[[int], dict[str, Any]], world_size: int) -> None:
        """Keep the state of a snapshot until there is a sync; `read(rank)` returns one rank's state."""
        if read(0)["kind"] not in ("npu_sparse", LOCAL):
            return
        self._optimizer_steps = int(read(0)["optimizer_steps"])

        def sync_state(rank: int) -> dict[str, Any] | None:
            state: dict[str, Any] | None = read(rank)["sync"]
            if state is None or world_size == self.world_size:
                return state
            # Another number of ranks continues from the mean of their models, so no average travels any more.
            return {key: value for key, value in state.items() if key != "flight"}

        self._checkpoint.expect(sync_state, self.global_rank, self.world_size, world_size)

    @contextmanager
    def without_averaging(self) -> Iterator[None]:
        """Read parameters without triggering the local-SGD average."""
        self._is_without_averaging = True
        try:
            yield
        finally:
            self._is_without_averaging = False

    # Checkpoints: each rank's state is in a file next to the checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        # With rendezvous each run saves when it likes: its own parameters, and the last average in the file next to it.
        if self._sync is not None and not self._is_without_averaging and self._meets is None:
            self._sync.average_parameters()  # all ranks call this, and rank zero writes
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
            self._steps.warn_if_none_taken("npu_sparse")
            self._steps = StepCount()
            self._sync.close()
            self._sync = None
        super().teardown()


def sync_metrics(sync: Sync) -> dict[str, float]:
    """Return the last step's bytes in MB by kind, its times, and the number of skipped steps; empty at first."""
    report = sync.report
    if report is None:
        return {}
    numbers = {f"sync/{kind}_mb": sent / 1e6 for kind, sent in report.sent_bytes.items()}
    return numbers | {
        "sync/between_nodes_mb": report.between_nodes_bytes / 1e6,
        "sync/ratio_to_dense": report.ratio,
        "sync/exposed_ms": report.exposed_ms,
        "sync/share_hidden": report.share_hidden,
        "sync/skipped_steps": float(sync.skipped_steps),
    }


def log_step(module: Any, sync: Sync, optimizer_steps: int) -> None:
    """Log the last step's metrics in the module's Trainer every `log_every_n_steps`; 0 never logs."""
    trainer = module.trainer if module is not None else None
    if trainer is None or sync.report is None:
        return
    every = trainer.log_every_n_steps
    if not every or optimizer_steps % every:
        return
    for logger in trainer.loggers:
        logger.log_metrics(sync_metrics(sync), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
