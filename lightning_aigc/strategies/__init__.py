"""Strategies for Lightning's Trainer. Importing this registers "npu_sparse" and its variants."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_aigc.strategies.npu_sparse import NPUSparseStrategy

__all__ = ["NPUSparseStrategy"]

NPUSparseStrategy.register_strategies(StrategyRegistry)
