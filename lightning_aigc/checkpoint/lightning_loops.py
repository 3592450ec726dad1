"""The one module that touches Lightning's private loops: hooks between micro-batches, and the loops' own state.

Read against Lightning 2.6.6 (`fit_loop.py`, `training_epoch_loop.py`, `checkpoint_connector.py`, `result.py`);
pyproject.toml admits lightning>=2.6.6,<2.7. Lightning has no hook between two micro-batches: `on_train_batch_end` comes
before validation, plateau schedules and counters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_aigc._lightning import (
    ModelCheckpoint,
    OnExceptionCheckpoint,
    Trainer,
    _CheckpointConnector,
    _Loop,
    _Metadata,
    _pl_migrate_checkpoint,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning_aigc.checkpoint.dataloader import stateful
from lightning_aigc.rng import RandomStates, from_plain, random_states, restore_random_states, to_plain

State = dict[str, Any]
METRIC_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


class LoopHooks:
    """Wraps methods of one Trainer's loops on construction; `remove` restores them.

    Args:
        on_checkpoint: called instead of Lightning's loading of a checkpoint, with (ckpt_path, that loading).
        on_optimizers: called instead of Lightning's loading of optimizers and schedules, with that loading.
        on_loaders: called when the training loaders exist and nothing has iterated over them; gets their list and
            returns the list to use.
        on_epoch: called before the epoch loop asks for its next batch, at an epoch's start or after a resume.
        on_batch_over: called after a micro-batch, with its validation, schedules and counters done.
        on_run: called instead of the fit loop's `run`, with that method.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        on_checkpoint: Callable[[Any, Callable[[Any], None]], None],
        on_optimizers: Callable[[Callable[[], None]], None],
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
        wrap(
            trainer._checkpoint_connector,
            "restore_optimizers_and_schedulers",
            lambda stock: lambda: on_optimizers(stock),
        )
        wrap(fit_loop, "_load_combined_loader_states", with_loaders)
        wrap(fit_loop, "run", lambda stock: lambda: on_run(stock))
        wrap(fit_loop.epoch_loop, "on_run_start", then(on_epoch))
        wrap(fit_loop.epoch_loop, "on_advance_end", then(on_batch_over))

    def remove(self) -> None:
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        self._wrapped = []


def run_end_hooks(trainer: Trainer) -> None:
    """Run what follows the last batch of a fit: the end of its epoch and of its training, with their hooks.

    A run that was killed there needs it, because Lightning's `run` returns at once when a limit is reached. This is
    that method without its first check of the limits, and with one turn of its loop, in which no batch is left.
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


@dataclass
class LoopState:
    """The loops' state that changes with every micro-batch; cheap enough to capture after each."""

    step: int
    loops: State
    random: RandomStates
    loaders: list[State | None]
    """one per training loader; `places` on disk"""
    cycle: State
    metrics: State
    is_window_open: bool
    should_stop: bool = False
    """Whether a callback has asked to stop."""

    @classmethod
    def capture(cls, trainer: Trainer) -> LoopState:
        fit_loop: Any = trainer.fit_loop
        fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
        ahead = len(getattr(fetcher, "batches", ()))
        iterator = combined._iterator
        connector: Any = trainer._logger_connector
        return cls(
            trainer.global_step,
            fit_loop.state_dict(),
            random_states(trainer.strategy.root_device),
            [
                loader.snapshot_state(ahead) if isinstance(loader, stateful.ResumableLoader) else None
                for loader in combined.flattened
            ],
            {"index": iterator._idx - ahead, "consumed": list(getattr(iterator, "_consumed", ()))},
            {
                "callback": dict(connector._callback_metrics),
                "logged": dict(connector._logged_metrics),
                "progress_bar": dict(connector._progress_bar_metrics),
                "is_first": connector._first_loop_iter,
                "hook": connector._current_fx,
                "epoch": epoch_metrics(fit_loop.epoch_loop._results),
            },
            is_window_open(trainer),
            trainer.should_stop,
        )

    def to_plain(self) -> State:
        return {
            "step": self.step,
            "loops": self.loops,
            "random": to_plain(self.random),
            "loaders": [None if state is None else stateful.to_plain(state) for state in self.loaders],
            "cycle": self.cycle,
            "metrics": self.metrics,
            "is_window_open": self.is_window_open,
            "should_stop": self.should_stop,
        }

    @classmethod
    def from_plain(cls, plain: State, device: torch.device) -> LoopState:
        loaders = [None if state is None else stateful.from_plain(state) for state in plain["loaders"]]
        values = {name: value for name, value in plain.items() if name != "loaders"}
        return cls(**values | {"random": from_plain(plain["random"], device), "loaders": loaders})

    def restore(self, trainer: Trainer) -> None:
        """Restore all of it, the random states last. Call it in `on_epoch`, when the loaders have their states."""
        fit_loop: Any = trainer.fit_loop
        fit_loop.load_state_dict(self.loops)
        fit_loop._combined_loader_states_to_load = []
        _forget_restart(fit_loop)
        combined = fit_loop._combined_loader
        for loader in combined.flattened:
            if isinstance(loader, stateful.ResumableLoader):
                loader.start_pending()
        fetcher = fit_loop._data_fetcher
        combined._iterator._idx = self.cycle["index"] + len(getattr(fetcher, "batches", ()))
        if self.cycle["consumed"]:
            combined._iterator._consumed = list(self.cycle["consumed"])
        connector: Any = trainer._logger_connector
        for name in ("callback", "logged", "progress_bar"):
            getattr(connector, f"_{name}_metrics").update(self.metrics[name])
        connector._first_loop_iter, connector._current_fx = self.metrics["is_first"], self.metrics["hook"]
        restore_epoch_metrics(fit_loop.epoch_loop._results, self.metrics["epoch"], trainer)
        restore_random_states(self.random)


def _forget_restart(loop: Any) -> None:
    """Clear the restart flags: Lightning's restart would step plateau schedules and counters a second time."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    if hasattr(loop, "_restart_stage"):
        loop._restart_stage = "none"
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            _forget_restart(inner)


def is_window_open(trainer: Trainer) -> bool:
    """Whether gradients await further micro-batches, or may: in manual optimization only the module knows."""
    return not trainer.lightning_module.automatic_optimization or trainer.fit_loop._should_accumulate()


def epoch_metrics(results: _ResultCollection) -> list[dict[str, Any]]:
    """The running sums of `self.log(..., on_epoch=True)`, which a schedule or an early stop may read.

    A logged torchmetrics.Metric is left out: the module holds its state.
    """
    return [
        {
            "key": key,
            "meta": {name: getattr(metric.meta, name) for name in METRIC_FIELDS}
            | {"reduce": metric.meta.reduce_fx.__name__},
            "sync": [metric.meta.sync.should, metric.meta.sync.rank_zero_only],
            "value": metric.value,
            "batch_size": getattr(metric, "cumulated_batch_size", None),
            "last": metric._forward_cache,
            "updates": metric._update_count,
            "has_reset": metric.has_reset,
        }
        for key, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch
    ]


def restore_epoch_metrics(results: _ResultCollection, saved: list[dict[str, Any]], trainer: Trainer) -> None:
    """Make the metrics anew as `self.log` would, with their sums."""
    device = trainer.strategy.root_device
    for entry in saved:
        fields = dict(entry["meta"])
        meta = _Metadata(**fields | {"reduce_fx": getattr(torch, fields.pop("reduce"))})
        should, rank_zero_only = entry["sync"]
        meta.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
        metric = _ResultMetric(meta, is_tensor=True)
        metric.value = entry["value"].to(device)
        if entry["batch_size"] is not None:
            metric.cumulated_batch_size = entry["batch_size"].to(device)
        metric._forward_cache = None if entry["last"] is None else entry["last"].to(device)
        metric._update_count, metric.has_reset = entry["updates"], entry["has_reset"]
        results[entry["key"]] = metric


def load_checkpoint(trainer: Trainer, checkpoint: State, loops: State, path: str) -> None:
    """Hand Lightning a checkpoint that is in memory already, instead of the file it would read."""
    connector = trainer._checkpoint_connector
    checkpoint["loops"] = connector._get_loops_state_dict() | {"fit_loop": loops}
    connector._loaded_checkpoint = _pl_migrate_checkpoint(checkpoint, path)
    connector._ckpt_path = path


def keep_asked_path(connector_class: type[_CheckpointConnector]) -> None:
    """Make Lightning keep the ckpt_path that it was asked for: under SLURM it replaces None by an hpc_ckpt file."""
    stock = connector_class._select_ckpt_path
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def select(connector: Any, state_fn: Any, ckpt_path: Any, **arguments: Any) -> Any:
        connector.asked_ckpt_path = ckpt_path
        return stock(connector, state_fn, ckpt_path, **arguments)

    connector_class._select_ckpt_path = select  # type: ignore[method-assign,assignment]


keep_asked_path(_CheckpointConnector)


def is_chosen_by_lightning(trainer: Trainer, path: Any) -> bool:
    """Whether a fit's checkpoint is an hpc_ckpt file of the run's folder that nobody asked for."""
    connector: Any = trainer._checkpoint_connector
    is_asked = connector.asked_ckpt_path is not None or connector._user_managed
    return path is not None and not is_asked and str(path) == connector._hpc_resume_path


def keep_handlers(trainer: Trainer, handlers: Mapping[int, Any]) -> None:
    """Make Lightning restore these signal handlers at the end of the fit, if it restores any."""
    found: dict[Any, Any] = trainer._signal_connector._original_handlers
    found.update({number: handler for number, handler in handlers.items() if number in found})


def dump_checkpoint(trainer: Trainer) -> State:
    """Lightning's checkpoint of now, on every rank, without its loops."""
    checkpoint: State = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    del checkpoint["loops"]
    return checkpoint


def mute_sigterm_broadcast(trainer: Trainer) -> None:
    """Stop Lightning from asking every rank about SIGTERM before each batch; the caller asks about all signals."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def run_validation(trainer: Trainer) -> None:
    """Run the whole validation loop now, between two batches of a fit, as the epoch loop does.

    The gradients of an open window stay; random states do not change, if the loader has a generator of its own.
    """
    connector: Any = trainer._logger_connector
    first_loop_iter = connector._first_loop_iter
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True
    connector._first_loop_iter = first_loop_iter


def finds_last(trainer: Trainer) -> bool:
    """Whether Lightning finds a checkpoint of its own for ckpt_path: last; it starts anew where it finds none."""
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    of_errors = [Path(callback.ckpt_path) for callback in found if isinstance(callback, OnExceptionCheckpoint)]
    return any(path.exists() for path in of_errors) or any(
        callback._find_last_checkpoints(trainer) for callback in found if isinstance(callback, ModelCheckpoint)
    )


def load_for_evaluation(trainer: Trainer, checkpoint: State) -> None:
    """Make `trainer.validate`, `test` and `predict` load this checkpoint instead of the file of their ckpt_path."""
    connector: Any = trainer._checkpoint_connector

    def start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        connector._ckpt_path = checkpoint_path
        connector._loaded_checkpoint = _pl_migrate_checkpoint(checkpoint, checkpoint_path)

    connector.resume_start = start
