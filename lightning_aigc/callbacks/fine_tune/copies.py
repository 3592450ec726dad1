"""Memorised training images: samples that are nearer to a training image than training images are to another.

Legend: N samples, M training images, P values of a reduced image.
Source: the nearest neighbour compared with the usual distance, as in Carlini et al., Extracting Training Data from
Diffusion Models, arXiv:2301.13188, section 4.2. Distances here are of reduced images, so that a shift by a pixel
counts little.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate

SIDE = 16
"""Pixels per side to which images are reduced."""
COPY_RATIO = 0.5
"""A sample is a copy below this share of the usual distance between a training image and its nearest neighbour."""
LEAST_DISTANCE = 1e-3
"""Root mean square distance, of 1, below which two training images are duplicates and tell no usual distance."""


def copy_ratios(samples_N3HW: Tensor, training_M3HW: Tensor) -> Tensor | None:
    """Each sample's distance to its nearest training image over the usual one [N]; None for fewer than two images.

    Mirrored training images count as well. Images of any size, in 0..1.
    """
    if len(training_M3HW) < 2:
        return None
    samples_NP, training_MP = _reduced(samples_N3HW), _reduced(training_M3HW)
    mirrored_MP = _reduced(training_M3HW.flip(-1))
    scale = samples_NP.shape[1] ** 0.5
    among_MM = torch.cdist(training_MP, training_MP) / scale
    among_MM.fill_diagonal_(torch.inf)
    nearest_M = among_MM.min(dim=1).values
    usual = nearest_M[nearest_M > LEAST_DISTANCE].median() if (nearest_M > LEAST_DISTANCE).any() else None
    if usual is None:
        return None
    distance_N = torch.minimum(
        torch.cdist(samples_NP, training_MP).min(dim=1).values, torch.cdist(samples_NP, mirrored_MP).min(dim=1).values
    )
    ratios_N: Tensor = distance_N / scale / usual
    return ratios_N


def _reduced(images_N3HW: Tensor) -> Tensor:
    return interpolate(images_N3HW.float(), (SIDE, SIDE), mode="area").flatten(1)
