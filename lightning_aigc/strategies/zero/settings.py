"""ZeROSettings: the checked choices of ZeROStrategy, and what a DeepSpeed config among them changes in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_aigc._lightning import ParallelStrategy, Precision, Trainer, rank_zero_info
from lightning_aigc.errors import ConfigError
from lightning_aigc.strategies.deepspeed.config import Imported, import_file

Stage = Literal[1, 2, 3]
BetweenNodes = Literal["int8", "int4", "int3"]
NAMES: dict[str, Stage] = {"zero_1": 1, "zero_2": 2, "zero_3": 3}


@dataclass(frozen=True)
class ZeROSettings:
    """Choices of ZeROStrategy after its checks."""

    stage: Stage
    offload_optimizer: bool
    between_nodes: BetweenNodes | None
    protect: list[str] | None
    imported: Imported | None
    """The blocks of a DeepSpeed config."""

    @property
    def label(self) -> str:
        """The strategy in log lines."""
        return f"zero_{self.stage}"

    def refuse_one_rank(self, world_size: int) -> None:
        if world_size == 1:
            raise ConfigError(
                f"{self.label} shares out what a rank stores, and there is one rank; set trainer.devices to 2 or more, "
                "or leave the strategy out"
            )

    def apply_to_strategy(self, strategy: ParallelStrategy) -> None:
        """Apply a DeepSpeed config's precision and activation checkpointing, before anything is built with them."""
        if self.imported is None:
            return
        for line in (*self.imported.lines, *self.imported.notes):
            rank_zero_info(f"deepspeed_config: {line}")
        if self.imported.precision:
            _apply_precision(strategy, self.imported.precision)

    def apply_to_trainer(self, trainer: Trainer) -> None:
        """Apply a DeepSpeed config's accumulation and clipping, where the Trainer has its defaults."""
        if self.imported is None:
            return
        defaults = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
        for name, wanted in self.imported.trainer.items():
            now = getattr(trainer, name, None)
            if name in defaults and now == defaults[name]:
                setattr(trainer, name, wanted)
            elif name in defaults and now != wanted:
                rank_zero_info(f"deepspeed_config: the YAML's trainer.{name} {now} wins over {wanted}")
        if self.imported.model:
            rank_zero_info("deepspeed_config: optimizer and schedule are the module's; import-deepspeed writes these")


def make_settings(
    stage: Stage | None,
    offload_optimizer: bool,
    between_nodes: BetweenNodes | None,
    protect: list[str] | None,
    deepspeed_config: str | None,
) -> ZeROSettings:
    """Check the arguments of ZeROStrategy. Raises: ConfigError for a value outside what is accepted."""
    imported = None if deepspeed_config is None else import_file(deepspeed_config)
    stage = _stage(stage, imported)
    if imported is not None:
        offload_optimizer = offload_optimizer or bool(imported.strategy.get("offload_optimizer"))
        offload_optimizer = offload_optimizer and stage != 1
    if stage not in NAMES.values():
        raise ConfigError(f"ZeROStrategy.stage must be 1, 2 or 3, got {stage!r}")
    for name, value in (("offload_optimizer", offload_optimizer), ("between_nodes", between_nodes)):
        if stage == 1 and value:
            raise ConfigError(
                f"ZeROStrategy.{name} wants stage 2 or 3, got stage 1, which keeps full weights and gradients on "
                "each rank"
            )
    return ZeROSettings(stage, offload_optimizer, between_nodes, protect, imported)


def _stage(stage: Stage | None, imported: Imported | None) -> Stage:
    if stage is not None:
        return stage
    if imported is None:
        return 3
    in_file: Stage | Literal[0] = imported.strategy["stage"]
    if in_file == 0:
        raise ConfigError(
            "deepspeed_config has ZeRO stage 0, which is strategy ddp: set trainer.strategy: ddp, or give the stage "
            "here, such as stage: 2"
        )
    return in_file


def _apply_precision(strategy: ParallelStrategy, wanted: dict[str, Any]) -> None:
    """Apply a DeepSpeed config's arguments of FusedBackwardPrecision, where the Trainer has its default."""
    from lightning_aigc.precision import FusedBackwardPrecision

    plugin = strategy.precision_plugin
    if type(plugin) is Precision:
        strategy.precision_plugin = FusedBackwardPrecision(**{"precision": "32-true", **wanted})
        return
    for name, value in wanted.items():
        now = getattr(plugin, name, None)
        if now is None:
            rank_zero_info(f"deepspeed_config: {name} {value} wants FusedBackwardPrecision in trainer.plugins")
        elif now != value:
            rank_zero_info(f"deepspeed_config: the YAML's {type(plugin).__name__}.{name} {now} wins over {value}")
