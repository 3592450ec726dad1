"""Weights that one rank alone may read and run, under strategies that shard them too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from lightning.pytorch import LightningModule

from lightning_aigc.protocols import HasAveragedWeights
from lightning_aigc.sharding.layout import is_sharded
from lightning_aigc.sharding.whole_weights import whole_weights


@contextmanager
def gathered_weights(pl_module: LightningModule) -> Iterator[None]:
    """Within the block each rank may sample and save by itself, with the average where there is one; every rank enters.

    Nothing happens to a model that is not sharded: it swaps in its average itself.
    """
    if not is_sharded(pl_module):
        yield
        return
    average = pl_module.averaged_weights() if isinstance(pl_module, HasAveragedWeights) else nullcontext()
    with average, whole_weights(pl_module):
        yield
