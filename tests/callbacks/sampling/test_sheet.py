"""Sheets of images with captions."""

from __future__ import annotations

import pytest
import torch

from lightning_aigc.callbacks.sampling.sheet import draw_sheet, wrap


@pytest.mark.parametrize("size", [(1, 1), (64, 48), (700, 900)], ids=str)
def test_sheets_fit_any_picture_and_caption(size: tuple[int, int]) -> None:
    images = torch.rand(5, 3, *size)
    images[0, 0, 0, 0] = float("nan")
    sheet = draw_sheet(images, ["", "seed 1\n猫 עברית 🐈", "a  b\n\nc", "x" * 1000, "word " * 200], columns=3)
    assert sheet.mode == "RGB" and max(sheet.size) < 3 * 560
    assert all(len(wrap(caption, 160)) <= 5 for caption in ("word " * 200, "x" * 1000, "猫" * 500))
    assert wrap("word " * 200, 160)[-1].endswith("…") and wrap("", 160) == [""] and wrap("a b", 160) == ["a b"]
