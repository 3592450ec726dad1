"""Write an image as a PNG with metadata, and hand it to the loggers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from PIL import Image, PngImagePlugin

from lightning_aigc.atomic_file import atomic_file


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
