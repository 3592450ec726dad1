"""The places in Lightning's fit loop where a state can be taken and put back: between two micro-batches.

Lightning has no hook there: a callback's `on_train_batch_end` comes before validation, plateau schedules and counters.
Four methods of one Trainer's loops, and the connector's way to its checkpoint, are wrapped for the time of one fit.
This goes when Lightning calls something after a micro-batch is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer


class Boundary:
    """Wraps the methods on construction; `remove` puts them back.

    Args:
        on_checkpoint: gets (ckpt_path, Lightning's own way to load it), in place of that.
        on_loaders: after the training loaders are made and before anything iterates over them; gets their list and
            returns the one to use.
        on_epoch: before an epoch's loop asks for its first batch, or, in a resumed run, the one after its place.
        on_batch_over: after a micro-batch, with all that belongs to it.
        on_run: gets the fit loop's own `run`, in place of that.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        on_checkpoint: Callable[[Any, Callable[[Any], None]], None],
        on_loaders: Callable[[list[Any]], list[Any]],
        on_epoch: Callable[[], None],
        on_batch_over: Callable[[], None],
        on_run: Callable[[Callable[[], None]], None],
    ) -> None:
        self._wrapped: list[tuple[Any, str]] = []
        fit_loop: Any = trainer.fit_loop

        def wrap(owner: Any, name: str, make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
            setattr(owner, name, make(getattr(owner, name)))
            self._wrapped.append((owner, name))

        def with_loaders(stock: Callable[..., None]) -> Callable[..., None]:
            def load() -> None:
                combined = fit_loop._combined_loader
                combined.flattened = on_loaders(list(combined.flattened))
                stock()

            return load

        def then(after: Callable[[], None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
            def make(stock: Callable[..., None]) -> Callable[..., None]:
                def both(data_fetcher: Any) -> None:
                    stock(data_fetcher)
                    after()

                return both

            return make

        def with_checkpoint(stock: Callable[..., None]) -> Callable[..., None]:
            def start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
                on_checkpoint(checkpoint_path, lambda path: stock(path, weights_only=weights_only))

            return start

        wrap(trainer._checkpoint_connector, "resume_start", with_checkpoint)
        wrap(fit_loop, "_load_combined_loader_states", with_loaders)
        wrap(fit_loop, "run", lambda stock: lambda: on_run(stock))
        wrap(fit_loop.epoch_loop, "on_run_start", then(on_epoch))
        wrap(fit_loop.epoch_loop, "on_advance_end", then(on_batch_over))

    def remove(self) -> None:
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        self._wrapped = []


def run_ending(trainer: Trainer) -> None:
    """What follows the last batch of a fit: the end of its epoch and of its training, with all their hooks.

    For a run that was killed there: Lightning's own `run` returns at once where a limit is reached. This is that
    method without its first look at the limits, and with one turn of its loop, in which no batch is left.
    """
    fit_loop: Any = trainer.fit_loop
    if fit_loop.max_batches == 0 or trainer.limit_train_batches == 0:
        return
    fit_loop.reset()
    fit_loop.on_run_start()
    fit_loop.on_advance_start()
    fit_loop.advance()
    fit_loop.on_advance_end()
    fit_loop.on_iteration_done()
    fit_loop._restarting = False
    fit_loop.on_run_end()
