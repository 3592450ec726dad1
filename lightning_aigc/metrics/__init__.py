"""Scores of generated images."""

from lightning_aigc.metrics.clip_similarity import CLIPSimilarity, clip_similarity
from lightning_aigc.metrics.edge_fidelity import EdgeFidelity, canny, edge_magnitude
from lightning_aigc.metrics.edit_similarity import EditSimilarity, edit_direction

__all__ = [
    "CLIPSimilarity", "EdgeFidelity", "EditSimilarity", "canny", "clip_similarity", "edge_magnitude", "edit_direction",
]  # fmt: skip
