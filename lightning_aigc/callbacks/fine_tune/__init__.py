"""FineTuneCheck and what it is made of: copies, colours, scores, text embeddings and LoRA ranks, before and after."""

from lightning_aigc.callbacks.fine_tune.check import FineTuneCheck

__all__ = ["FineTuneCheck"]
