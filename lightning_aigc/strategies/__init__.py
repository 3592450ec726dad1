"""Strategies for Lightning's Trainer. Importing this registers "npu_sparse", its variants, and "zero_1" to "zero_3"."""

from lightning_aigc._lightning import StrategyRegistry
from lightning_aigc.strategies.npu_sparse import NPUSparseStrategy
from lightning_aigc.strategies.zero.strategy import ZeROStrategy

__all__ = ["NPUSparseStrategy", "ZeROStrategy"]

NPUSparseStrategy.register_strategies(StrategyRegistry)
ZeROStrategy.register_strategies(StrategyRegistry)
