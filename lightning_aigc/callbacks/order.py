"""The order of a Trainer's callbacks, from what their classes declare."""

from __future__ import annotations

from typing import Any

from lightning_aigc._lightning import Checkpoint

FIRST, USUAL, LATE, LAST = range(4)
"""Values of a callback class's `callback_order`; a class without one is USUAL, Lightning's checkpoints are LAST."""


def order_callbacks(trainer: Any) -> None:
    """Sort `trainer.callbacks` by `callback_order`; callbacks of equal order keep their places."""
    trainer.callbacks = sorted(trainer.callbacks, key=_order)


def _order(callback: object) -> int:
    return LAST if isinstance(callback, Checkpoint) else int(getattr(callback, "callback_order", USUAL))
