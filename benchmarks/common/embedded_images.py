"""Embedded image sets as one tensor."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightning_aigc.embedded import resolve


def embedded_images(name: str) -> Tensor:
    """All embedded images of a set, float32 [N, 3, H, W] in 0..1."""
    files = sorted(resolve(name).glob("*.png"))
    return torch.stack([torch.from_numpy(np.array(Image.open(f).convert("RGB"))).permute(2, 0, 1) for f in files]) / 255
