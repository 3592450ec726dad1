"""Replay a training step with the same inputs and random states, without side effects."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_aigc._lightning import (
    Closure,
    ClosureResult,
    LightningModule,
    _DataFetcherWrapper,
    _DataLoaderIterDataFetcher,
    is_param_in_hook_signature,
)
from lightning_aigc.precision.context import without_graphs
from lightning_aigc.precision.nan.non_finite import NonFinite, first_non_finite
from lightning_aigc.rng import RandomStates, random_states, restore_random_states


class ReplayedBatch(Iterator[Any]):
    """Yields the last batch of a `dataloader_iter` again, once, for a replayed step.

    Lightning's iterator would give the next batch, which training would then miss.
    """

    def __init__(self, fetcher: _DataLoaderIterDataFetcher) -> None:
        self.done, self.fetched, self.length = fetcher.done, fetcher.fetched, fetcher.length
        self._batch: tuple[Any, int, int] | None = (fetcher._batch, fetcher._batch_idx, fetcher._dataloader_idx)

    def __next__(self) -> tuple[Any, int, int]:
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("training_step draws more than one batch from its dataloader_iter, and one is kept")
        return batch


def step_arguments(closure: object) -> list[Any] | None:
    """The arguments of `training_step`, the batch and its index; None if the closure is not Lightning's.

    Under manual optimization the closure is empty: such a step updates the weights itself and cannot be replayed.
    """
    step = closure._step_fn if isinstance(closure, Closure) else None
    given = step.args if isinstance(step, functools.partial) else ()
    if not given or not isinstance(given[0], dict):
        return None
    return [ReplayedBatch(v.data_fetcher) if isinstance(v, _DataFetcherWrapper) else v for v in given[0].values()]


def arguments_for(model: LightningModule, batch: Any, batch_idx: int) -> list[Any]:
    """The arguments that Lightning passes to `training_step` for this batch.

    Lightning passes the index too if the step takes two arguments of any name, or `*args`.
    """
    takes_index = is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2)
    return [batch, batch_idx] if takes_index else [batch]


def one_line(error: BaseException) -> str:
    """Format an exception as `Type: first line of its message`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def loss_of(model: LightningModule, arguments: list[Any]) -> Tensor | None:
    """The loss that the Trainer would call backward on, before loss scaling."""
    # Not through the strategy: DistributedDataParallel's forward would wait for the other ranks.
    output = model.training_step(*arguments)
    return ClosureResult.from_training_step_output(output, model.trainer.accumulate_grad_batches).closure_loss


def find_non_finite(
    model: LightningModule,
    arguments: list[Any],
    states: RandomStates,
    scale: float,
    forward_context: Callable[[], AbstractContextManager[Any]],
) -> tuple[NonFinite | None, str]:
    """Run a training step again and watch its modules.

    Args:
        arguments: Arguments of `training_step`.
        states: Random states to run it under.
        scale: Loss scale.
        forward_context: Context of the precision plugin, such as autocast.
    Returns: the first module that computed a non-finite value, or None; and the reason why the replay failed, or "".
    """

    def loss() -> Tensor | None:
        with forward_context(), torch.enable_grad():
            return loss_of(model, arguments)

    try:
        with without_side_effects(model, states):
            return first_non_finite(model, loss, scale), ""
    except Exception as error:  # the replay is optional: it must not end the training
        return None, one_line(error)


@contextlib.contextmanager
def without_side_effects(model: LightningModule, states: RandomStates) -> Iterator[None]:
    """Run a step from the given random states without logging, compiling or graphs, and restore what it changed.

    Random states, buffers and torchmetrics are restored; counters in other attributes of the module are not.
    """
    now = random_states(states.device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    metrics = [(m, {name: _copy(getattr(m, name)) for name in _state_names(m)}) for m in model.modules()
               if isinstance(m, Metric)]  # fmt: skip
    restore_random_states(states)
    try:
        # Hooks added to a compiled module are not called.
        with _muted(model), torch.compiler.set_stance("force_eager"), without_graphs():
            yield
    finally:
        restore_random_states(now)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for metric, values in metrics:
            for name, value in values.items():
                setattr(metric, name, value)


@contextlib.contextmanager
def _muted(model: LightningModule) -> Iterator[None]:
    """Disable `self.log`, so that a mean over the epoch does not count this batch twice."""
    own: dict[str, Any] = {name: vars(model)[name] for name in ("log", "log_dict") if name in vars(model)}
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    vars(model).update(log=nothing, log_dict=nothing)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del vars(model)[name]
        vars(model).update(own)


def _state_names(metric: Metric) -> list[str]:
    return [*metric._defaults, "_update_count", "_computed"]


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
