"""ZeROStrategy: optimizer states, gradients and weights divided over the ranks, for any LightningModule."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed.constants import default_pg_timeout

from lightning_aigc._lightning import ParallelStrategy
from lightning_aigc.strategies.zero.settings import NAMES, BetweenNodes, Stage, make_settings


class ZeROStrategy(ParallelStrategy):
    """Divides a training's memory over all ranks, on Ascend NPUs, CUDA GPUs and CPUs.

    Stage 1 keeps each parameter's optimizer states on one rank (DDP with torch's ZeroRedundancyOptimizer around the
    configured optimizer). Stages 2 and 3 shard weights, gradients and states by rows (torch's `fully_shard`, one group
    per block) and gather a block's weights when it is called; stage 2 keeps them until its backward, stage 3 frees them
    after its forward. The module's code stays as it is. Use `Trainer(strategy="zero_3")`, or this class with its
    arguments; it returns a `ZeRO1Strategy` or a `ZeRO23Strategy`.

    A gradient that is not finite on one rank skips the step on all. Checkpoints are ordinary files with full tensors,
    which any strategy and any number of ranks loads.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy=ZeROStrategy(stage=3), accelerator="cpu", devices=2)
    """

    stage: Stage

    def __new__(  # where jsonargparse reads arguments and their help
        cls,
        stage: Stage | None = None,
        offload_optimizer: bool = False,
        between_nodes: BetweenNodes | None = None,
        protect: list[str] | None = None,
        deepspeed_config: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        process_group_backend: str | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> Any:
        """Args:
            stage: 1, 2 or 3; null is deepspeed_config's, else 3.
            offload_optimizer: stages 2 and 3: keep shards, gradients and optimizer states in host memory, pinned if
                there is an accelerator; the optimizer steps there.
            between_nodes: stages 2 and 3, with several nodes: shard inside each node, and send gradients between nodes
                in few bits with error feedback; null shards over all ranks.
            protect: between_nodes: name patterns of parameters whose gradients are sent uncompressed; null protects
                only those that the module itself names, such as a ControlNet's edge path.
            deepspeed_config: a ds_config.json, or accelerate's YAML. Its stage, offload, accumulation, clipping,
                precision and activation checkpointing apply where the config sets none; the log has one line per key.
            timeout: how long a rank waits for the others before it stops with an error, such as 0:05:00, or seconds.
            process_group_backend: hccl, nccl or gloo by the device when null.

        Raises: ConfigError for a value outside what is accepted.
        """
        from lightning_aigc.strategies.zero.stage_1 import ZeRO1Strategy
        from lightning_aigc.strategies.zero.stages_2_3 import ZeRO23Strategy

        settings = make_settings(stage, offload_optimizer, between_nodes, protect, deepspeed_config)
        stage_class = ZeRO1Strategy if settings.stage == 1 else ZeRO23Strategy
        return stage_class(
            settings,
            timeout=timeout,
            process_group_backend=process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, stage in NAMES.items():
            if name not in strategy_registry:
                strategy_registry.register(
                    name, cls, description=f"ZeRO stage {stage}: hccl, nccl or gloo by the device", stage=stage
                )


# `__new__` never makes an object of this class, and a command line refuses an abstract one.
ZeROStrategy.__abstractmethods__ = frozenset()
