"""Canny edges in torch: the same edges on every device, and a gradient magnitude that can be differentiated.

Gaussian blur, Sobel gradient, suppression of what is no maximum along the gradient, two thresholds with hysteresis.
Source: Canny, A Computational Approach to Edge Detection, PAMI 1986; scale and thresholds as in kornia.filters.canny.

Legend: N images, H and W pixels, C is 1 or 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

LUMA = (0.299, 0.587, 0.114)
STEPS = ((0, 1), (1, 1), (1, 0), (1, -1))
"""(down, right) to the neighbour along a gradient of 0, 45, 90 and 135 degrees; y grows downwards."""


def edge_magnitude(pictures_NCHW: Tensor, sigma: float = 1.0) -> Tensor:
    """The gradient's magnitude, float32 [N, 1, H, W], of images in 0..1; an edge from black to white has about 4."""
    gx, gy = _gradient(pictures_NCHW, sigma)
    return (gx * gx + gy * gy + 1e-6).sqrt()  # without the 1e-6 the root's own gradient is infinite on flat ground


def canny(pictures_NCHW: Tensor, low: float = 0.1, high: float = 0.2, sigma: float = 1.0) -> Tensor:
    """Edges as float32 [N, 1, H, W] of 0 and 1, of images in 0..1; not differentiable.

    Pixels above `high` are edges, and those above `low` that touch an edge.
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
            is_largest |= (direction == number) & (magnitude > ahead) & (magnitude > behind)
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
