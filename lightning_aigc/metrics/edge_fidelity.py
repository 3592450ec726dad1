"""EdgeFidelity: how well images keep the edges that they were asked for, between a floor and a ceiling; Canny edges.

Legend: N images, H and W pixels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

LARGEST_MAGNITUDE = 4.0
EQUAL = 1e-4
"""Relative difference below which two magnitudes are one: a step between two pixels gives both the same, but for the
rounding of a device's convolution."""


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
        from torchmetrics.functional.image import structural_similarity_index_measure  # brings every metric: 1.4 s

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


LUMA = (0.299, 0.587, 0.114)
STEPS = ((0, 1), (1, 1), (1, 0), (1, -1))
"""(down, right) to the neighbour along a gradient of 0, 45, 90 and 135 degrees; y grows downwards."""


def edge_magnitude(pictures_NCHW: Tensor, sigma: float = 1.0) -> Tensor:
    """The gradient's magnitude, float32 [N, 1, H, W], of images in 0..1; an edge from black to white has about 4."""
    gx, gy = _gradient(pictures_NCHW, sigma)
    return (gx * gx + gy * gy + 1e-6).sqrt()  # without the 1e-6 the root's own gradient is infinite on flat ground


def canny(pictures_NCHW: Tensor, low: float = 0.1, high: float = 0.2, sigma: float = 1.0) -> Tensor:
    """Edges as float32 [N, 1, H, W] of 0 and 1, of images in 0..1; not differentiable.

    Pixels above `high` are edges, and those above `low` that touch an edge. Of neighbours with one magnitude the last
    along the gradient's axis is kept, so that every device finds the same edges.
    """
    with torch.no_grad():
        gx, gy = _gradient(pictures_NCHW, sigma)
        magnitude = (gx * gx + gy * gy + 1e-6).sqrt()
        direction = torch.round(torch.atan2(gy, gx) * (4 / math.pi)).long() % 4
        height, width = magnitude.shape[-2:]
        around = F.pad(magnitude, (1, 1, 1, 1))
        is_largest = torch.zeros_like(magnitude, dtype=torch.bool)
        for number, (down, right) in enumerate(STEPS):
            ahead = around[..., 1 + down : 1 + down + height, 1 + right : 1 + right + width]
            behind = around[..., 1 - down : 1 - down + height, 1 - right : 1 - right + width]
            is_largest |= (direction == number) & (
                (magnitude > ahead * (1 + EQUAL)) & (magnitude > behind * (1 - EQUAL))
            )
        thin = magnitude * is_largest
        candidates, edges = thin > low, thin > high
        while True:
            grown = candidates & (F.max_pool2d(edges.float(), 3, 1, 1) > 0)
            if torch.equal(grown, edges):
                return edges.float()
            edges = grown


def _gradient(pictures_NCHW: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """Sobel's horizontal and vertical derivative of the blurred grey images, float32 [N, 1, H, W] each."""
    pictures = pictures_NCHW.float()
    if pictures.shape[1] == 3:
        pictures = (pictures * pictures.new_tensor(LUMA)[:, None, None]).sum(1, keepdim=True)
    offsets = torch.arange(-2, 3, dtype=torch.float32, device=pictures.device)
    blur = torch.exp(-offsets.square() / (2 * sigma * sigma))
    blur = blur / blur.sum()
    grey = F.conv2d(F.pad(pictures, (2, 2, 2, 2), mode="reflect"), blur.outer(blur)[None, None])
    slope, smooth = grey.new_tensor([-1.0, 0.0, 1.0]), grey.new_tensor([1.0, 2.0, 1.0])
    kernels = torch.stack([smooth.outer(slope), slope.outer(smooth)])[:, None]
    gradient_N2HW = F.conv2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), kernels)
    return gradient_N2HW[:, :1], gradient_N2HW[:, 1:]
