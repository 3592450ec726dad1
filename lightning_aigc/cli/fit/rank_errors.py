"""An error of one rank's set-up ends all ranks, each with its sentence.

Else the others wait at the next collective until that rank's process is gone, or under NCCL and HCCL, which do not
notice that, until their timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_aigc.gradient_sync.transport.process_groups import raise_on_all_ranks


def share_errors(module: Any, data: Any) -> None:
    """Make an error in `prepare_data`, `setup` or `configure_model` on one rank an error of all ranks.

    Args: module, data: the LightningModule, and the LightningDataModule or None.
    """
    state = _Kept()
    if data is not None:
        data.prepare_data = _SharedHook(data.prepare_data, state, data, agrees=False)  # runs on one rank of a node
        data.setup = _SharedHook(data.setup, state, data)
    module.setup = _SharedHook(module.setup, state, module)
    module.configure_model = _SharedHook(module.configure_model, state, module)


class _Kept:
    """The error that this rank has met and the others do not know of yet."""

    error: Exception | None = None


class _SharedHook:
    """A hook of Lightning's that all ranks leave with an error if one does. A class, so that spawn can pickle it."""

    def __init__(self, hook: Callable[..., Any], kept: _Kept, owner: Any, *, agrees: bool = True) -> None:
        self.__wrapped__ = hook  # what Lightning compares to see whether a hook is overridden
        self._kept, self._owner, self._agrees = kept, owner, agrees

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__wrapped__.__name__
        is_called_alone = name == "configure_model" and self._owner._current_fx_name != name
        if not dist.is_initialized() or dist.get_world_size() == 1 or is_called_alone:
            return self.__wrapped__(*args, **kwargs)
        result = None
        if self._kept.error is None:
            try:
                result = self.__wrapped__(*args, **kwargs)
            except Exception as error:  # raised below, or by the next hook that all ranks run
                self._kept.error = error
        if self._agrees:
            raise_on_all_ranks(self._kept.error)
        return result


def end_started_ranks(trainer: Any) -> None:
    """End the ranks that Lightning started from this process, where they still wait for a process group.

    Once there is a group its collectives tell them, and they may write a last snapshot.
    """
    if not dist.is_initialized():
        for process in getattr(trainer.strategy.launcher, "procs", None) or ():
            process.kill()
