"""The two trees of a snapshot: what a rank has of its own and what all have alike, taken and put back."""

from __future__ import annotations

import contextlib

from lightning.pytorch import Trainer

from lightning_aigc.checkpoint import trainer_state as states


def take(trainer: Trainer, moment: states.Moment, own_buffers: states.OwnBuffers) -> tuple[states.State, states.State]:
    """Of this moment, with the Trainer's own tensors in it: what this rank has of its own, and what all have alike."""
    strategy, module = trainer.strategy, trainer.lightning_module
    with strategy.without_averaging() if hasattr(strategy, "without_averaging") else contextlib.nullcontext():
        checkpoint = states.checkpoint_of(trainer)
    own = {
        "moment": moment.to_plain(),
        "gradients": states.gradients(module) if moment.is_window_open else {},
        "buffers": own_buffers.changed(module, checkpoint["state_dict"] if trainer.is_global_zero else {}),
        "in_eval": states.training_modes(trainer),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "strategy": strategy.snapshot_state() if hasattr(strategy, "snapshot_state") else None,
        "checkpoint": checkpoint if _ranks_differ(trainer) else states.of_this_rank(trainer, checkpoint),
    }
    return own, {} if _ranks_differ(trainer) else checkpoint


def restore(trainer: Trainer, own: states.State, own_buffers: states.OwnBuffers) -> None:
    """What Lightning did not load by itself, to be called where the epoch's loop is about to ask for a batch."""
    module = trainer.lightning_module
    if _ranks_differ(trainer):  # DDP has given all ranks rank 0's
        module.load_state_dict(own["checkpoint"]["state_dict"], strict=False)
    states.restore_gradients(module, own["gradients"])
    states.restore_training_modes(trainer, own["in_eval"])
    own_buffers.restore(module, own["buffers"])
    trainer.accumulate_grad_batches = own["accumulate_grad_batches"]
    states.Moment.from_plain(own["moment"], trainer.strategy.root_device).restore(trainer)


def _ranks_differ(trainer: Trainer) -> bool:
    return bool(getattr(trainer.strategy, "ranks_differ", False))
