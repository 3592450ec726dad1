"""Scores of generated images."""

from lightning_aigc.metrics.clip_similarity import CLIPSimilarity, clip_similarity
from lightning_aigc.metrics.edge_fidelity import EdgeFidelity, canny, edge_magnitude

__all__ = ["CLIPSimilarity", "EdgeFidelity", "canny", "clip_similarity", "edge_magnitude"]
