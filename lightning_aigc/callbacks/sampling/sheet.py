"""Lay images out as one sheet, each with its caption under it, and write it as a PNG that holds their facts."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
from torch import Tensor

from lightning_aigc._lightning import Trainer
from lightning_aigc.atomic_file import atomic_file

SMALLEST_CELL_PX = 160
"""Smaller images are enlarged by a whole factor, so that captions can be read."""
LARGEST_CELL_PX = 512
"""Larger images are shrunk."""
_MARGIN_PX = 8
_FONT_PX = 13
_CAPTION_LINES = 5
_CAPTION_LETTERS = 600
# Pillow's own font has Latin letters only.
_WIDE_FONTS = ("NotoSansCJK-Regular.ttc", "NotoSans-Regular.ttf", "DejaVuSans.ttf", "Arial Unicode.ttf", "msyh.ttc")

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def draw_sheet(images_N3HW: Tensor, captions: Sequence[str], columns: int) -> Image.Image:
    """One image with `columns` images a row; newlines in captions are kept, long lines wrap.

    images_N3HW: floating point in 0..1; values outside are cut off, those not finite are black. Or uint8.
    """
    cells = [_fit(picture) for picture in to_pictures(images_N3HW)]
    width, height = cells[0].size
    wrapped = [wrap(caption, width) for caption in captions]
    line_px = _FONT_PX + 4
    rows = math.ceil(len(cells) / columns)
    text_px = [
        line_px * max(len(lines) for lines in wrapped[row * columns : (row + 1) * columns]) for row in range(rows)
    ]
    total_width = columns * (width + _MARGIN_PX) + _MARGIN_PX
    sheet = Image.new("RGB", (total_width, sum(height + px + 2 * _MARGIN_PX for px in text_px) + _MARGIN_PX), "white")
    draw = ImageDraw.Draw(sheet)
    top = _MARGIN_PX
    for row in range(rows):
        for column, index in enumerate(range(row * columns, min((row + 1) * columns, len(cells)))):
            left = _MARGIN_PX + column * (width + _MARGIN_PX)
            sheet.paste(cells[index], (left, top))
            for number, line in enumerate(wrapped[index]):
                place = (left, top + height + 4 + number * line_px)
                draw.text(place, line, fill="black" if number else "dimgray", font=_font_for(line))
        top += height + text_px[row] + 2 * _MARGIN_PX
    return sheet


def as_shown(images_N3HW: Tensor) -> Tensor:
    """The images as a sheet of them shows them, before it enlarges them: uint8 [N, 3, H, W] on the CPU."""
    small = [_shrunk(picture) for picture in to_pictures(images_N3HW)]
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in small])).permute(0, 3, 1, 2).contiguous()


def to_pictures(images_N3HW: Tensor) -> list[Image.Image]:
    """8-bit images of images in 0..1, or of such as are 8-bit already."""
    levels_N3HW = images_N3HW.detach()
    if levels_N3HW.dtype is not torch.uint8:
        levels_N3HW = levels_N3HW.float().nan_to_num(0, 1, 0).clamp(0, 1).mul(255).round().byte()
    return [Image.fromarray(picture) for picture in levels_N3HW.permute(0, 2, 3, 1).cpu().numpy()]


def wrap(caption: str, width_px: int) -> list[str]:
    """Break a caption into lines that fit; what is beyond the last line becomes an ellipsis."""
    lines: list[str] = []
    for paragraph in caption[:_CAPTION_LETTERS].splitlines() or [""]:
        line = ""
        for word in paragraph.split():
            candidate = f"{line} {word}".lstrip()
            if line and _length(candidate) > width_px:
                lines.append(line)
                candidate = word
            line = candidate
            while len(line) > 1 and _length(line) > width_px:  # one long word, or a script without spaces
                fitting = _letters_that_fit(line, width_px)
                lines.append(line[:fitting])
                line = line[fitting:]
        lines.append(line)
    if len(lines) > _CAPTION_LINES:
        lines = [*lines[: _CAPTION_LINES - 1], lines[_CAPTION_LINES - 1][:-1] + "…"]
    return lines


def _fit(picture: Image.Image) -> Image.Image:
    picture = _shrunk(picture)
    factor = max(1, round(SMALLEST_CELL_PX / max(picture.size)))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _shrunk(picture: Image.Image) -> Image.Image:
    if max(picture.size) <= LARGEST_CELL_PX:
        return picture
    picture = picture.copy()
    picture.thumbnail((LARGEST_CELL_PX, LARGEST_CELL_PX), Image.Resampling.LANCZOS)
    return picture


def _letters_that_fit(text: str, width_px: int) -> int:
    """Number of leading letters that fit, at least one."""
    fitting, too_many = 1, len(text)
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if _length(text[:middle]) <= width_px else (fitting, middle)
    return fitting


def _length(text: str) -> float:
    return _font_for(text).getlength(text)


def _font_for(text: str) -> Font:
    return _font(wide=any(ord(letter) > 0x24F for letter in text))


@functools.cache
def _font(wide: bool) -> Font:
    for name in _WIDE_FONTS if wide else ():
        try:
            return ImageFont.truetype(name, _FONT_PX)
        except OSError:
            continue
    return ImageFont.load_default(size=_FONT_PX)


def write_png(path: Path, picture: Image.Image, metadata: dict[str, Any]) -> None:
    """Write a PNG atomically, with each entry of `metadata` as JSON in a text chunk of its name. Raises: OSError."""
    text = PngImagePlugin.PngInfo()
    for name, value in metadata.items():
        text.add_itxt(name, json.dumps(value, ensure_ascii=False))
    with atomic_file(path, durable=False) as file:
        picture.save(file, "PNG", pnginfo=text)


def log_picture(trainer: Trainer, name: str, picture: Image.Image, step: int) -> None:
    """Log an image with every logger that takes images: TensorBoard, Weights & Biases, and those like them."""
    loggers: Sequence[Any] = trainer.loggers
    for logger in loggers:
        if callable(getattr(logger, "log_image", None)):  # WandbLogger
            logger.log_image(key=name, images=[picture], step=step)
        elif callable(getattr(getattr(logger, "experiment", None), "add_image", None)):  # TensorBoardLogger
            logger.experiment.add_image(name, np.asarray(picture), step, dataformats="HWC")
