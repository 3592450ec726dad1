"""Checks of an autoencoder with the user's images: round-trip error, and whether float16 could hold it.

Legend: N images, H and W their size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_aigc.diffusion.families import FAMILIES, Family

LEAST_PSNR_DB = 25.0
"""Round trip below which edges and skin are visibly damaged; Stable Diffusion 1.5's autoencoder is published with 23.4
on COCO at 256 px and reaches 27 to 32 on sharp photographs of 512 px."""
MOST_LOST = 0.1
"""Share of the images' variance that a round trip may lose. Measured one by one with the tiny autoencoder at 64 px: 26
brand images lose 0.01 to 0.03, 19 of its prior 0.01 to 0.08, and four photographs of scikit-image 0.21 to 0.38, where
the face is gone. PSNR alone misses a pale subject on a pale ground."""
FLOAT16_MAX = 65504.0
FLOAT16_MARGIN = 4.0
"""Another image may have larger activations than those that were measured."""


@dataclass(frozen=True)
class RoundTrip:
    """Images encoded and decoded in float32."""

    decoded: Tensor
    """float32 [N, 3, H, W] in 0..1, on the CPU."""
    psnr_db: float
    lost_share: float
    """Error of the images over their variance; 0 for images of one colour."""
    peak: float
    """The largest activation of any layer."""
    peak_layer: str


@torch.no_grad()
def round_trip(vae: Any, pictures_N3HW: Tensor, family: Family = FAMILIES["sd"]) -> RoundTrip:
    """Encode and decode images in 0..1, and find the layer with the largest activation."""
    peaks: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                peaks[name] = max(peaks.get(name, 0.0), float(output.abs().max()))

        return hook

    parameter = next(vae.parameters())
    handles = [module.register_forward_hook(watch(name)) for name, module in vae.named_modules() if name]
    try:
        pixels_N3HW = pictures_N3HW.to(parameter.device, parameter.dtype) * 2 - 1
        mean = family.encode(vae, pixels_N3HW).chunk(2, dim=1)[0]
        decoded_N3HW = family.decode(vae, mean).float().div(2).add(0.5).clamp(0, 1).cpu()
    finally:
        for handle in handles:
            handle.remove()
    error = float((decoded_N3HW - pictures_N3HW.cpu().float()).square().mean())
    variance = float(pictures_N3HW.float().var(dim=(2, 3), correction=0).mean())
    lost = error / variance if variance > 0 else 0.0
    layer = max(peaks, key=lambda name: peaks[name] if math.isfinite(peaks[name]) else math.inf)
    return RoundTrip(decoded_N3HW, -10 * math.log10(max(error, 1e-10)), lost, peaks[layer], layer)


def describe_vae(vae: Any, pictures_N3HW: Tensor, family: Family = FAMILIES["sd"]) -> list[str]:
    """One line with the figures, and one for each finding."""
    trip = round_trip(vae, pictures_N3HW, family)
    lines = [
        f"autoencoder: your images come back with {trip.psnr_db:.1f} dB PSNR; its largest activation is "
        f"{trip.peak:.3g} of float16's {FLOAT16_MAX:.0f}, at {trip.peak_layer}"
    ]
    if not trip.peak * FLOAT16_MARGIN < FLOAT16_MAX:
        lines.append(
            f"autoencoder: float16 overflows at {trip.peak_layer} and draws black images; keep "
            "model.init_args.vae_dtype: float32, and run this autoencoder in float32 or bfloat16 wherever you sample "
            "(ComfyUI: --fp32-vae, A1111: --no-half-vae)"
        )
    if trip.psnr_db < LEAST_PSNR_DB or trip.lost_share > MOST_LOST:
        lines.append(
            f"autoencoder: it loses {trip.lost_share:.0%} of what your images show, at {trip.psnr_db:.1f} dB (usual:"
            f" below {MOST_LOST:.0%}, above {LEAST_PSNR_DB:g} dB), and no training brings that back; raise"
            " data.init_args.resolution, crop closer (docs/guide.md, text and faces), or use another base"
        )
    return lines
