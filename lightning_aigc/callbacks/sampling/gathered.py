"""Weights that one rank alone may run or write, under strategies that shard them too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, runtime_checkable

from lightning_aigc._lightning import LightningModule
from lightning_aigc.sharding.full_parameters import full_parameters, full_parameters_on_host
from lightning_aigc.sharding.layout import is_sharded


@runtime_checkable
class HasAveragedWeights(Protocol):
    """Has an average of its weights, to be sampled and saved in their place."""

    def averaged_weights(self) -> AbstractContextManager[object]:
        """Swap in the average until the block ends."""
        ...


@contextmanager
def gathered_weights(pl_module: LightningModule) -> Iterator[None]:
    """Within the block each rank may sample by itself, with the average where there is one; every rank enters.

    Nothing happens to a model that is not sharded: it swaps in its average itself.
    """
    if not is_sharded(pl_module):
        yield
        return
    with _average(pl_module), full_parameters(pl_module):
        yield


@contextmanager
def written_weights(pl_module: LightningModule) -> Iterator[bool]:
    """Within the block rank 0 may write the weights by itself, with the average where there is one; every rank enters.

    Yields whether this rank is the one that writes.
    """
    writes = pl_module.trainer.is_global_zero
    if not is_sharded(pl_module):
        yield writes
        return
    with _average(pl_module), full_parameters_on_host(pl_module, keep=writes):
        yield writes


def _average(pl_module: LightningModule) -> AbstractContextManager[object]:
    return pl_module.averaged_weights() if isinstance(pl_module, HasAveragedWeights) else nullcontext()
