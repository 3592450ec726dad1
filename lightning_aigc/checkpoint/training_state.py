"""State of a Trainer beyond its loops: captured into a snapshot's two trees, and restored.

Lightning's checkpoint has weights, optimizers, schedules, loss scale and callbacks. It leaves out random states, the
position in the data, the gradients of an open accumulation window, what is logged, and buffers in no state_dict.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from lightning_aigc._lightning import LightningModule, Trainer
from lightning_aigc.checkpoint.lightning_loops import LoopState, State, dump_checkpoint
from lightning_aigc.errors import ConfigError
from lightning_aigc.protocols import HasShardedTensors, HasSnapshotState
from lightning_aigc.sharding.full_state import shard_like
from lightning_aigc.sharding.local_parts import local_parts
from lightning_aigc.sharding.shards import to_shards

SHARDED = ("FSDP", "DeepSpeed", "ModelParallel")
PER_RANK_KEYS = ("callbacks",)
"""Keys of Lightning's checkpoint, but for plugins and data modules, whose values may differ between ranks."""
NOT_PLAIN = object()


def check_strategy(trainer: Trainer) -> None:
    """Raises: ConfigError if the strategy shards the state, which a snapshot cannot hold."""
    if type(trainer.strategy).__name__.startswith(SHARDED):
        raise ConfigError(
            f"ExactSnapshot cannot take the sharded state of {type(trainer.strategy).__name__}; use"
            " trainer.strategy: ddp or npu_sparse, or leave ExactSnapshot out"
        )


def capture(trainer: Trainer, loop_state: LoopState, local_state: LocalState) -> tuple[State, State]:
    """This rank's own state and the state that all ranks share, holding the Trainer's tensors themselves."""
    strategy, module = trainer.strategy, trainer.lightning_module
    with strategy.without_averaging() if isinstance(strategy, HasSnapshotState) else contextlib.nullcontext():
        checkpoint = checkpoint_of(trainer)
    checkpoint = to_shards(checkpoint)
    own = {
        "loop_state": loop_state.to_plain(),
        "gradients": to_shards(gradients(module)) if loop_state.is_window_open else {},
        "buffers": local_state.changed(module, checkpoint["state_dict"] if trainer.is_global_zero else {}),
        "in_eval": training_modes(trainer),
        "refrozen": local_state.refrozen(module),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "strategy": strategy.snapshot_state() | {"kind": strategy.snapshot_kind}
        if isinstance(strategy, HasSnapshotState)
        else None,
        "checkpoint": checkpoint if _ranks_differ(trainer) else per_rank_part(trainer, checkpoint),
    }
    return own, {} if _ranks_differ(trainer) else checkpoint


def restore(trainer: Trainer, own: State, local_state: LocalState) -> None:
    """Restore what Lightning did not load. Call it in `LoopHooks.on_epoch`."""
    module = trainer.lightning_module
    if _ranks_differ(trainer) and not isinstance(trainer.strategy, HasShardedTensors):  # DDP has broadcast rank 0's
        module.load_state_dict(own["checkpoint"]["state_dict"], strict=False)
    refrozen = own.get("refrozen", {})  # older snapshots have none
    for name, parameter in module.named_parameters():
        if name in refrozen:
            parameter.requires_grad_(refrozen[name])
    restore_gradients(module, own["gradients"])
    restore_training_modes(trainer, own["in_eval"])
    local_state.restore(module, own["buffers"])
    trainer.accumulate_grad_batches = own["accumulate_grad_batches"]
    LoopState.from_plain(own["loop_state"], trainer.strategy.root_device).restore(trainer)


def weights_are_finite(module: nn.Module) -> bool:
    """Whether all trained weights are, as far as this rank holds them."""
    parts = local_parts([p.detach() for p in module.parameters() if p.requires_grad])
    return not parts or bool(torch.stack([part.isfinite().all() for part in parts]).all())


def configured_options(trainer: Trainer) -> list[list[dict[str, Any]]]:
    """Plain options of each optimizer's parameter groups; call it before a checkpoint's are loaded.

    Its `lr` is the configured rate, whatever a schedule makes of it.
    """
    return [
        [
            {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in group.items()
                if _is_plain(value)
            }
            | {"lr": float(group.get("initial_lr", group.get("lr", 0)) or 0)}
            for group in optimizer.param_groups
        ]
        for optimizer in trainer.optimizers
    ]


def _is_plain(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return all(each is None or isinstance(each, (bool, int, float, str)) for each in values)


def apply_options(trainer: Trainer, was: list[list[dict[str, Any]]] | None, now: list[list[dict[str, Any]]]) -> None:
    """Give the optimizers, whose state is that of a snapshot, the options that the configuration has changed since.

    torch's optimizers and schedules load their options with their state, so that a new learning rate would do nothing.

    Args: was, now: `configured_options` of the snapshot's run and of this one.
    """
    for number, (optimizer, groups_was, groups_now) in enumerate(zip(trainer.optimizers, was or (), now, strict=False)):
        for at, (group, old, new) in enumerate(zip(optimizer.param_groups, groups_was, groups_now, strict=False)):
            changed = {name: value for name, value in new.items() if name in old and value != old[name]}
            rate = changed.pop("lr", None)
            changed.pop("initial_lr", None)
            group |= {name: tuple(value) if isinstance(value, list) else value for name, value in changed.items()}
            if rate is not None and old["lr"]:
                _scale_rate(trainer, number, at, rate, rate / old["lr"])


def _scale_rate(trainer: Trainer, number: int, at: int, rate: float, factor: float) -> None:
    """Set the configured rate of a parameter group, and scale what its schedule has made of it."""
    optimizer = trainer.optimizers[number]
    group = optimizer.param_groups[at]
    group["lr"] *= factor
    if "initial_lr" in group:
        group["initial_lr"] = rate
    schedulers: list[Any] = [c.scheduler for c in trainer.lr_scheduler_configs if c.scheduler.optimizer is optimizer]
    while schedulers:
        scheduler = schedulers.pop()
        schedulers += getattr(scheduler, "_schedulers", [])
        for name, value in (("base_lrs", rate), ("_last_lr", group["lr"])):
            rates: list[float] = getattr(scheduler, name, [])
            if len(rates) > at:
                rates[at] = value


def strategy_kind(trainer: Trainer) -> str | None:
    """Kind of split over the ranks by the strategy of a run; None if each rank has all of it."""
    return trainer.strategy.snapshot_kind if isinstance(trainer.strategy, HasSnapshotState) else None


def _ranks_differ(trainer: Trainer) -> bool:
    return isinstance(trainer.strategy, HasSnapshotState) and trainer.strategy.ranks_differ


def gradients(module: LightningModule) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def restore_gradients(module: LightningModule, saved: dict[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if name in saved:
            gradient = shard_like(saved[name], parameter)
            parameter.grad = gradient.to(parameter.device, parameter.dtype).clone(memory_format=torch.preserve_format)


class ChangeTracker:
    """Whether the state has changed since the last complete micro-batch, as far as an exception may find it.

    In-place writes of buffers are seen by their version counters; every other change is reported by `touch`.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._buffers = [] if module is None else list(module.buffers())
        self._versions: list[int] = []
        self._is_touched = True

    def mark(self) -> None:
        """A micro-batch is complete."""
        self._versions, self._is_touched = [buffer._version for buffer in self._buffers], False

    def touch(self) -> None:
        """Something is about to change the state."""
        self._is_touched = True

    def none_since_mark(self) -> bool:
        return not self._is_touched and self._versions == [buffer._version for buffer in self._buffers]


class LocalState:
    """State of the module that Lightning's checkpoint does not restore: non-persistent buffers, on ranks above 0 all
    buffers, because running statistics are per rank, and the weights that were frozen or unfrozen during the run."""

    def __init__(self, module: LightningModule) -> None:
        self._trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._start = {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}
        self._known: set[str] = set()

    def changed(self, module: LightningModule, saved: dict[str, Any]) -> dict[str, Tensor]:
        """Buffers not in `saved` that changed since this fit began, or had changed in the snapshot it resumed from."""
        return {
            name: buffer
            for name, buffer in module.named_buffers()
            if name not in saved and (name in self._known or self._start.get(name) != (id(buffer), buffer._version))
        }

    def refrozen(self, module: LightningModule) -> dict[str, bool]:
        """The weights that take gradients now and did not when this fit began, or the other way round."""
        now = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        return {name: trains for name, trains in now.items() if trains != (name in self._trained)}

    def restore(self, module: LightningModule, values: dict[str, Tensor]) -> None:
        self._known |= values.keys()
        buffers = dict(module.named_buffers())
        for name, value in values.items():
            if name in buffers and buffers[name].shape == value.shape:
                with torch.no_grad():
                    buffers[name].copy_(value)


def checkpoint_of(trainer: Trainer) -> State:
    """Lightning's checkpoint on every rank, without its loops and with only the plain part of its hyperparameters."""
    checkpoint = dump_checkpoint(trainer)
    for key in [
        key
        for key in checkpoint
        if key.startswith(("hyper_parameters", "hparams_", "datamodule_hparams", "datamodule_hyper"))
    ]:
        checkpoint[key] = plain_part(checkpoint[key])
    return checkpoint


def plain_part(value: Any) -> Any:
    """Copy a nested value without what is neither plain nor a tensor."""
    if isinstance(value, dict):
        kept = {k: plain_part(v) for k, v in value.items() if isinstance(k, (str, int))}
        return {k: v for k, v in kept.items() if v is not NOT_PLAIN}
    if isinstance(value, (list, tuple)):
        return [v for v in map(plain_part, value) if v is not NOT_PLAIN]
    return value if value is None or isinstance(value, (bool, int, float, str, Tensor)) else NOT_PLAIN


def per_rank_part(trainer: Trainer, checkpoint: State) -> State:
    """The part of the checkpoint that may differ between ranks."""
    names = {
        type(part).__qualname__
        for part in (trainer.precision_plugin, getattr(trainer, "datamodule", None))
        if part is not None
    }
    return {key: value for key, value in checkpoint.items() if key in PER_RANK_KEYS or key in names}


def training_modes(trainer: Trainer) -> list[str]:
    """Names of submodules in eval mode, with the strategy's wrapper, which Lightning leaves in it after validation."""
    return [name for name, part in _wrapped(trainer).named_modules() if not part.training]


def restore_training_modes(trainer: Trainer, in_eval: list[str]) -> None:
    names = set(in_eval)
    for name, part in _wrapped(trainer).named_modules():
        part.training = name not in names


def _wrapped(trainer: Trainer) -> nn.Module:
    return trainer.strategy.model or trainer.lightning_module
