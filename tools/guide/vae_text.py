"""Text through an autoencoder: which letters survive a round trip, by their height in pixels.

Letters are drawn in black on white, encoded and decoded; each of the result is compared with all 26 as they were drawn.
 A letter counts as kept if it correlates best with itself.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from lightning_aigc.diffusion.pipeline.vae_checks import round_trip

HEIGHTS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32)
"""Heights of a capital letter, in pixels."""
LEGIBLE = 0.9
"""Share of letters that must be kept."""
ROWS_OF_LETTERS = 4


@dataclass(frozen=True)
class Legibility:
    """Recovered letters of one height."""

    height: int
    kept: float
    """Share of the letters that correlate best with themselves."""
    correlation: float
    """Mean correlation of a letter with itself."""


def legibility(vae: Any, heights: Sequence[int] = HEIGHTS, side: int = 64, seed: int = 0) -> list[Legibility]:
    """Round-trip random capitals of each height, on images of `side` pixels."""
    return [_at_height(vae, height, side, seed) for height in heights]


def least_legible_height(measured: Sequence[Legibility]) -> int | None:
    """The least height from which all larger ones keep 90 % of their letters; None where none does."""
    least = None
    for row in sorted(measured, key=lambda row: -row.height):
        if row.kept < LEGIBLE:
            break
        least = row.height
    return least


def _at_height(vae: Any, height: int, side: int, seed: int) -> Legibility:
    font = _font(height)
    templates = {letter: _letter(letter, font, height) for letter in string.ascii_uppercase}
    width = max(template.shape[1] for template in templates.values())
    templates = {k: np.pad(t, ((0, 0), (0, width - t.shape[1])), constant_values=1.0) for k, t in templates.items()}
    rng = np.random.default_rng(seed)
    per_row, per_column = max(1, side // (width + 2)), max(1, side // (height + 4))
    count = max(26, per_row * per_column * ROWS_OF_LETTERS)
    letters = [string.ascii_uppercase[i] for i in rng.integers(0, 26, count)]
    pages, places = _pages(letters, templates, side, per_row, per_column)
    decoded = round_trip(vae, torch.from_numpy(pages)[:, None].repeat(1, 3, 1, 1).float()).decoded.mean(dim=1)
    stacked = np.stack([_normalized(template) for template in templates.values()])
    kept, own = 0, []
    for letter, (page, y, x) in zip(letters, places, strict=True):
        scores = stacked @ _normalized(decoded[page, y : y + height, x : x + width].numpy())
        index = string.ascii_uppercase.index(letter)
        kept += int(scores.argmax()) == index
        own.append(scores[index])
    return Legibility(height, kept / count, float(np.mean(own)))


def _font(height: int) -> Any:
    """Pillow's own font at the size whose capitals have this height."""
    size = height
    while True:
        font = ImageFont.load_default(size=float(size))
        top, bottom = font.getbbox("H")[1], font.getbbox("H")[3]
        if bottom - top >= height:
            return font
        size += 1


def _letter(letter: str, font: Any, height: int) -> np.ndarray:
    left, _, right, _ = font.getbbox(letter)
    top = font.getbbox("H")[1]
    image = Image.new("L", (int(right - left) + 1, height), 255)
    ImageDraw.Draw(image).text((-left, -top), letter, fill=0, font=font)
    return np.asarray(image, dtype=np.float32) / 255


def _pages(
    letters: Sequence[str], templates: dict[str, np.ndarray], side: int, per_row: int, per_column: int
) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """White pages with the letters on a grid, and each letter's (page, y, x)."""
    height, width = next(iter(templates.values())).shape
    a_page = per_row * per_column
    pages = np.ones((-(-len(letters) // a_page), side, side), dtype=np.float32)
    places = []
    for i, letter in enumerate(letters):
        page, at = divmod(i, a_page)
        y, x = (at // per_row) * (height + 4) + 2, (at % per_row) * (width + 2) + 1
        y, x = min(y, side - height), min(x, side - width)
        pages[page, y : y + height, x : x + width] = templates[letter]
        places.append((page, y, x))
    return pages, places


def _normalized(patch_HW: np.ndarray) -> np.ndarray:
    flat = patch_HW.ravel() - patch_HW.mean()
    normalized: np.ndarray = flat / max(float(np.linalg.norm(flat)), 1e-6)
    return normalized
