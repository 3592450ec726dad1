"""Image strip of a pitfall: the last sample grids of the bad and of the cured run, side by side."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

GAP, HEADER = 16, 22


def draw_strip(bad: Path, cured: Path, target: Path) -> None:
    """Write bad | cured as one small PNG."""
    sheets = [Image.open(_last_grid(root)).convert("RGB") for root in (bad, cured)]
    labelled_strip(sheets, ["bad", "cured"], target)


def labelled_strip(pictures: list[Image.Image], labels: list[str], target: Path) -> None:
    """Write images side by side, each under its label, with a palette to keep the file small."""
    width = sum(p.width for p in pictures) + GAP * (len(pictures) - 1)
    strip = Image.new("RGB", (width, HEADER + max(p.height for p in pictures)), "white")
    draw, x = ImageDraw.Draw(strip), 0
    for picture, label in zip(pictures, labels, strict=True):
        draw.text((x + 2, 3), label, fill="black", font=ImageFont.load_default(14))
        strip.paste(picture, (x, HEADER))
        x += picture.width + GAP
    target.parent.mkdir(parents=True, exist_ok=True)
    strip.quantize(64, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(target, optimize=True)


def _last_grid(root: Path) -> Path:
    return max((root / "samples").glob("step_*.png"))
