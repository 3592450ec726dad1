"""Small images for a page: uint8 tensors while a run is measured, data URIs in its record."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

LARGEST_SIDE = 256
LARGEST_PNG = 128


def thumbnail(picture_3HW: Tensor, largest_side: int = LARGEST_SIDE) -> Tensor:
    """An image in 0..1 as the page shows it: uint8 on the CPU, no side longer than `largest_side`."""
    array = picture_3HW.detach().clamp(0, 1).nan_to_num(0).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(array)
    picture.thumbnail((largest_side, largest_side))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def data_uri(thumbnail_3HW: Tensor) -> str:
    """A thumbnail as the data URI of a PNG, above 128 px of a JPEG."""
    picture = Image.fromarray(thumbnail_3HW.permute(1, 2, 0).numpy())
    kind = "PNG" if max(picture.size) <= LARGEST_PNG else "JPEG"
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=88) if kind == "JPEG" else picture.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
