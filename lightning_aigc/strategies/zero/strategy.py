"""ZeROStrategy: optimizer states, gradients and weights shared out over the ranks, for any LightningModule."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.constants import default_pg_timeout

from lightning_aigc.errors import ConfigError
from lightning_aigc.strategies.deepspeed.config import import_file
from lightning_aigc.strategies.deepspeed.imported import Imported

Stage = Literal[1, 2, 3]
BetweenNodes = Literal["int8", "int4", "int3"]
NAMES: dict[str, Stage] = {"zero_1": 1, "zero_2": 2, "zero_3": 3}


class _OfStage:
    """Makes an object of the class that the stage needs.

    In a base class, because a parser reads a class's arguments from a `__new__` of its own in place of `__init__`.
    """

    def __new__(cls, stage: Stage | None = None, *args: Any, deepspeed_config: str | None = None, **kwargs: Any) -> Any:
        if cls is not ZeROStrategy:
            return object.__new__(cls)
        # Imported here: both are subclasses of that one.
        from lightning_aigc.strategies.zero.stage_1 import StatesZeROStrategy
        from lightning_aigc.strategies.zero.stages_2_3 import ShardedZeROStrategy

        is_first = _stage(stage, _imported(deepspeed_config)) == 1
        of_stage: type[ZeROStrategy] = StatesZeROStrategy if is_first else ShardedZeROStrategy
        return object.__new__(of_stage)


class ZeROStrategy(_OfStage, ParallelStrategy):
    """Trains with what a rank stores shared out over all ranks, on Ascend NPUs, CUDA GPUs and CPUs.

    Stage 1 keeps each parameter's optimizer states on one rank (DDP with torch's ZeroRedundancyOptimizer around the
    configured optimizer). Stages 2 and 3 cut weights, gradients and states by rows (torch's `fully_shard`, one group a
    block) and gather a block's weights when it is called; stage 2 keeps them until its backward, stage 3 frees them
    after its forward. No code of the module changes. `Trainer(strategy="zero_3")`, or this class with its arguments; it
    makes an object of the class that the stage needs.

    A gradient that is not finite on one rank skips the step on all. Checkpoints are ordinary files with whole tensors,
    which any strategy and any number of ranks loads.

    Args:
        stage: 1, 2 or 3; null is deepspeed_config's, else 3.
        offload_optimizer: stages 2 and 3: keep shards, gradients and optimizer states in host memory, pinned beside an
            accelerator; the optimizer steps there.
        between_nodes: stages 2 and 3, with several nodes: shard inside each node, and send gradients between nodes in
            so few bits with error feedback; null shards over all ranks.
        protect: between_nodes: name patterns of parameters whose gradients travel whole; null is none but those that
            the module itself protects, as a ControlNet's edge path.
        deepspeed_config: a ds_config.json, or accelerate's YAML, whose stage, offload, accumulation, clipping,
            precision and activation checkpointing are taken where the config says nothing; one line for each key says
            what it became.
        timeout: how long a rank waits for the others before it stops with an error.
        process_group_backend: hccl, nccl or gloo by the device when null.

    Raises: ConfigError for a value outside what is accepted.
    """

    def __init__(
        self,
        stage: Stage | None = None,
        offload_optimizer: bool = False,
        between_nodes: BetweenNodes | None = None,
        protect: list[str] | None = None,
        deepspeed_config: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        process_group_backend: str | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self.imported = _imported(deepspeed_config)
        stage = _stage(stage, self.imported)
        if self.imported is not None:
            offload_optimizer = offload_optimizer or bool(self.imported.strategy.get("offload_optimizer"))
            offload_optimizer = offload_optimizer and stage != 1
        if stage not in NAMES.values():
            raise ConfigError(f"ZeROStrategy.stage must be 1, 2 or 3, got {stage!r}")
        for name, value in (("offload_optimizer", offload_optimizer), ("between_nodes", between_nodes)):
            if stage == 1 and value:
                raise ConfigError(
                    f"ZeROStrategy.{name} wants stage 2 or 3, got stage 1, which keeps whole weights and gradients on "
                    "each rank"
                )
        self._take_lightnings_arguments(
            timeout=timeout,
            process_group_backend=process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.stage, self.offload_optimizer = stage, offload_optimizer
        self.between_nodes, self.protect = between_nodes, protect

    def _take_lightnings_arguments(self, **arguments: Any) -> None:
        """Call the constructor of the Lightning strategy that the stage is built on."""
        raise NotImplementedError

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, stage in NAMES.items():
            if name not in strategy_registry:
                strategy_registry.register(
                    name, cls, description=f"ZeRO stage {stage}: hccl, nccl or gloo by the device", stage=stage
                )

    @property
    def label(self) -> str:
        return f"zero_{self.stage}"

    def setup_environment(self) -> None:
        """Take a DeepSpeed config's precision and activation checkpointing, before anything is built with them."""
        if self.imported is not None:
            for line in (*self.imported.lines, *self.imported.notes):
                rank_zero_info(f"deepspeed_config: {line}")
            if self.imported.precision:
                self._take_precision(self.imported.precision)
        super().setup_environment()

    def _take_precision(self, wanted: dict[str, Any]) -> None:
        """Take a DeepSpeed config's arguments of FusedBackwardPrecision, where the Trainer has its default."""
        from lightning_aigc.precision import FusedBackwardPrecision

        plugin = self.precision_plugin
        if type(plugin) is Precision:
            self.precision_plugin = FusedBackwardPrecision(**{"precision": "32-true", **wanted})
            return
        for name, value in wanted.items():
            now = getattr(plugin, name, None)
            if now is None:
                rank_zero_info(f"deepspeed_config: {name} {value} wants FusedBackwardPrecision in trainer.plugins")
            elif now != value:
                rank_zero_info(f"deepspeed_config: the YAML's {type(plugin).__name__}.{name} {now} wins over {value}")

    def _take_imported(self, trainer: Trainer) -> None:
        """Take a DeepSpeed config's accumulation and clipping, where the Trainer has its defaults."""
        defaults = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
        for name, wanted in (self.imported.trainer if self.imported is not None else {}).items():
            now = getattr(trainer, name, None)
            if name in defaults and now == defaults[name]:
                setattr(trainer, name, wanted)
            elif name in defaults and now != wanted:
                rank_zero_info(f"deepspeed_config: the YAML's trainer.{name} {now} wins over {wanted}")
        if self.imported is not None and self.imported.model:
            rank_zero_info("deepspeed_config: optimizer and schedule are the module's; import-deepspeed writes these")

    def _refuse_one_rank(self) -> None:
        if self.world_size == 1:
            raise ConfigError(
                f"{self.label} shares out what a rank stores, and there is one rank; set trainer.devices to 2 or more, "
                "or leave the strategy out"
            )


def _imported(path: str | None) -> Imported | None:
    return None if path is None else import_file(path)


def _stage(stage: Stage | None, imported: Imported | None) -> Stage:
    if stage is not None:
        return stage
    if imported is None:
        return 3
    found: Stage | Literal[0] = imported.strategy["stage"]
    if found == 0:
        raise ConfigError(
            "deepspeed_config has ZeRO stage 0, which is strategy ddp: set trainer.strategy: ddp, or give the stage "
            "here, such as stage: 2"
        )
    return found


# No object is of this class itself, and a command line refuses an abstract one.
ZeROStrategy.__abstractmethods__ = frozenset()
