"""EdgeFidelity: how well images keep the edges that they were asked for, between a floor and a ceiling.

Legend: N images, H and W pixels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.functional.image import structural_similarity_index_measure

from lightning_aigc.metrics.canny import canny, edge_magnitude

LARGEST_MAGNITUDE = 4.0


class EdgeFidelity(Metric):
    """Edge F1 with a tolerance, its floor and ceiling, and SSIM of the edges' magnitude, over images of all ranks.

    F1 compares canny edges of generated images with those of the images that gave the condition; an edge counts as
    found if one lies within `tolerance` pixels. A strict F1 (tolerance 0) measures the autoencoder instead, which moves
    edges by a pixel. The floor compares with the edges of another image of the batch, the ceiling is that of the
    references' own round trip through the autoencoder.

    Args:
        tolerance: Pixels by which an edge may be moved.
        low: Lower threshold of canny.
        high: Upper threshold of canny.

    Example:
        >>> square = torch.zeros(1, 3, 32, 32); square[..., 8:24, 8:24] = 1
        >>> metric = EdgeFidelity()
        >>> metric.update(square.roll(1, -1), square)
        >>> round(float(metric.compute()["edge_f1"]), 2)
        1.0
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    counts: Tensor
    ssim_sum: Tensor
    pictures: Tensor

    def __init__(self, tolerance: int = 1, low: float = 0.1, high: float = 0.2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if tolerance < 0 or not 0 <= low <= high:
            raise ValueError(
                f"EdgeFidelity wants tolerance >= 0 and 0 <= low <= high, got tolerance {tolerance}, low {low} and high"
                f" {high}"
            )
        self.tolerance, self.low, self.high = tolerance, low, high
        # Rows: result, floor, ceiling; columns: found and all edges of the result, found and all of the reference.
        self.add_state("counts", torch.zeros(3, 4, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("ssim_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("pictures", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, images_N3HW: Tensor, references_N3HW: Tensor, round_trips_N3HW: Tensor | None = None) -> None:
        """Add images in 0..1, the images whose edges they should have, and those as the autoencoder returns them.

        Raises: ValueError if the shapes differ.
        """
        if images_N3HW.shape[-2:] != references_N3HW.shape[-2:] or len(images_N3HW) != len(references_N3HW):
            raise ValueError(
                f"EdgeFidelity compares images one by one, got {list(images_N3HW.shape)} and references"
                f" {list(references_N3HW.shape)}; give as many, of one size"
            )
        edges, wanted = self._edges(images_N3HW), self._edges(references_N3HW)
        self.counts[0] += edge_counts(edges, wanted, self.tolerance)
        self.counts[1] += edge_counts(edges, wanted.roll(1, 0), self.tolerance)
        if round_trips_N3HW is not None:
            self.counts[2] += edge_counts(self._edges(round_trips_N3HW), wanted, self.tolerance)
        ours, theirs = (edge_magnitude(each) / LARGEST_MAGNITUDE for each in (images_N3HW, references_N3HW))
        each_N: Any = structural_similarity_index_measure(ours, theirs, data_range=1.0, reduction="none")
        self.ssim_sum += each_N.double().sum()
        self.pictures += len(images_N3HW)

    def compute(self) -> dict[str, Tensor]:
        """`edge_f1`, `edge_f1_floor`, `edge_f1_ceiling` (1 without round trips), `edge_f1_normalised`, `edge_ssim`."""
        f1, floor, ceiling = (f1_of(row) for row in self.counts)
        if not self.counts[2].any():
            ceiling = torch.ones_like(f1)
        return {
            "edge_f1": f1,
            "edge_f1_floor": floor,
            "edge_f1_ceiling": ceiling,
            "edge_f1_normalised": (f1 - floor) / (ceiling - floor).clamp(min=1e-9),
            "edge_ssim": self.ssim_sum / self.pictures.clamp(min=1),
        }

    def _edges(self, pictures_N3HW: Tensor) -> Tensor:
        return canny(pictures_N3HW, self.low, self.high)


def edge_counts(edges_N1HW: Tensor, wanted_N1HW: Tensor, tolerance: int) -> Tensor:
    """Found and all edges of the result, found and all of the reference, float64 [4]."""

    def near(edges: Tensor) -> Tensor:
        return F.max_pool2d(edges, 2 * tolerance + 1, 1, tolerance)

    found, known = (edges_N1HW * near(wanted_N1HW)).sum(), (wanted_N1HW * near(edges_N1HW)).sum()
    return torch.stack([found, edges_N1HW.sum(), known, wanted_N1HW.sum()]).double()


def f1_of(counts: Tensor) -> Tensor:
    """F1 of precision and recall from `edge_counts`."""
    found, edges, known, wanted = counts.unbind()
    precision, recall = found / edges.clamp(min=1), known / wanted.clamp(min=1)
    return 2 * precision * recall / (precision + recall).clamp(min=1e-9)
