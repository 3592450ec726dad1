"""Scores of generated images."""

from lightning_aigc.metrics.clip_similarity import CLIPSimilarity, clip_similarity

__all__ = ["CLIPSimilarity", "clip_similarity"]
