"""Conditions of images: files by name or list, cut as their images are, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lightning_aigc.data import ImageCaptionData
from lightning_aigc.errors import DataError

SIDES = [(80, 64), (96, 128), (64, 64), (128, 72)]


def make_folder(folder: Path) -> tuple[Path, Path]:
    """Images of several shapes whose red channel is a ramp, and their conditions, the same ramps in grey."""
    photos, conditions = folder / "photos", folder / "conditions"
    photos.mkdir(parents=True)
    conditions.mkdir()
    for number, (width, height) in enumerate(SIDES):
        ramp = np.linspace(20, 250, width)[None].repeat(height, 0) * np.linspace(0.4, 1, height)[:, None]
        red = np.stack([ramp, np.full_like(ramp, 40), np.full_like(ramp, 90)], 2).astype(np.uint8)
        Image.fromarray(red).save(photos / f"{number}.png")
        Image.fromarray(red[..., 0]).save(conditions / f"{number}.png")
        (photos / f"{number}.txt").write_text(f"a ramp {number}")
    return photos, conditions


def make_data(photos: Path, **options: Any) -> ImageCaptionData:
    settings: dict[str, Any] = {
        "resolution": 64, "train_batch_size": 1, "min_bucket_reso": 32, "bucket_reso_steps": 16, "num_workers": 0,
        "cache_dir": str(photos.parent / "cache"),
    }  # fmt: skip
    return ImageCaptionData(str(photos), **(settings | options))


def apart(batch: dict[str, Any]) -> float:
    """Largest difference of condition and the image's red channel over the inner pixels, of 255."""
    red: Tensor = (batch["pixel_values"][:, 0] + 1) * 127.5
    difference = (red - batch["conditioning"][:, 0].float()).abs()
    return float(difference[..., 2:-2, 2:-2].max())


@pytest.mark.parametrize("options", [{}, {"random_flip": True}, {"center_crop": False}, {"enable_bucket": False}])
def test_a_condition_shares_crop_flip_and_bucket_with_its_picture(tmp_path: Path, options: dict[str, Any]) -> None:
    photos, conditions = make_folder(tmp_path)
    data = make_data(photos, conditioning_data_dir=str(conditions), num_repeats=4, **options)
    data.prepare()
    batches = list(data.loader())
    assert len(batches) == 4 * len(SIDES)
    assert max(apart(batch) for batch in batches) < 8  # one is scaled by Lanczos, the other by area
    assert all(batch["conditioning"].dtype == torch.uint8 for batch in batches)
    if "random_flip" in options:
        rising = {bool(batch["conditioning"][0, 0, 0, 0] < batch["conditioning"][0, 0, 0, -1]) for batch in batches}
        assert rising == {False, True}


def test_conditions_may_be_listed_in_metadata_beside_the_pictures(tmp_path: Path) -> None:
    photos, conditions = make_folder(tmp_path)
    conditions.rename(photos / "edges")
    rows = [
        {"file_name": f"{n}.png", "text": f"ramp {n}", "conditioning_image": f"edges/{n}.png"}
        for n in range(len(SIDES))
    ]
    (photos / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = make_data(photos)
    data.prepare()
    assert data.data_report.images_used == len(SIDES)  # the conditions below the folder are no images
    assert max(apart(batch) for batch in data.loader()) < 8
    assert data.has_condition_files


def grey(path: Path, size: tuple[int, int], value: int = 200) -> None:
    Image.new("L", size, value).save(path)


@pytest.mark.parametrize(
    ("break_one", "said"),
    [
        (lambda folder: (folder / "1.png").unlink(), r"1 of 4 images .* have no condition, such as 1\.png"),
        (
            lambda folder: grey(folder / "cup.png", (64, 64)),
            r"1 conditions match no image, such as .*cup\.png\. Remove these conditions, or",
        ),
        (lambda folder: grey(folder / "2.png", (64, 200)), r"2\.png is 64 x 200 and its image 2\.png 64 x 64"),
        (lambda folder: grey(folder / "3.png", (128, 72), 0), r"3\.png is black everywhere"),
        (lambda folder: grey(folder / "3.png", (128, 72), 255), r"3\.png is white everywhere"),
        (lambda folder: grey(folder / "3.png", (128, 72), 9), r"3\.png is of one colour \(9, 9, 9\) everywhere"),
        (lambda folder: Image.new("RGBA", (128, 72)).save(folder / "3.png"), r"3\.png is black everywhere"),
        (lambda folder: (folder / "0.png").write_bytes(b"no"), r"0\.png cannot be read"),
    ],
)
def test_a_condition_that_cannot_be_is_one_sentence(tmp_path: Path, break_one: Any, said: str) -> None:
    photos, conditions = make_folder(tmp_path)
    break_one(conditions)
    with pytest.raises(DataError, match=said) as raised:
        make_data(photos, conditioning_data_dir=str(conditions)).prepare()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize(
    ("line", "hidden", "shown"),
    [
        (255, 0, (0, 255)),  # white lines, as diffusers' convert("RGB") shows them
        (255, 255, (0, 255)),  # the same from an editor that leaves white below transparency
        (0, 255, (0, 255)),  # black lines on transparency are to be seen on white alone
        (0, 0, (0, 255)),
        (90, 0, (0, 90)),  # a grey one stays on black
    ],
)
def test_lines_on_transparency_are_seen(
    tmp_path: Path, mode: str, line: int, hidden: int, shown: tuple[int, int]
) -> None:
    photos, conditions = make_folder(tmp_path)
    for number, (width, height) in enumerate(SIDES):
        drawn = np.full((height, width, 4), (hidden, hidden, hidden, 0), np.uint8)
        drawn[height // 2 - 8 : height // 2 + 8] = (line, line, line, 255)
        image = Image.fromarray(drawn, "RGBA")
        if mode == "P":
            image = image.quantize(4)
        (image.convert(mode) if mode == "LA" else image).save(conditions / f"{number}.png")
    data = make_data(photos, conditioning_data_dir=str(conditions))
    data.prepare()
    for batch in data.loader():
        middle = batch["conditioning"].shape[2] // 2
        assert (int(batch["conditioning"].min()), int(batch["conditioning"].max())) == shown
        assert int(batch["conditioning"][0, 0, middle, 0]) == line


def test_training_images_stay_on_white_masks_on_black_and_a_white_drawing_is_noted(tmp_path: Path) -> None:
    photos, _ = make_folder(tmp_path)
    white = np.zeros((64, 64, 4), np.uint8)
    white[:, :32] = 255
    Image.fromarray(white, "RGBA").save(photos / "logo.png")
    (photos / "logo.txt").write_text("a logo")
    (tmp_path / "masks").mkdir()
    Image.fromarray(white, "RGBA").save(tmp_path / "masks" / "logo.png")
    data = make_data(photos, mask_dir=str(tmp_path / "masks"))
    assert "1 images in " in data.report() and "are one colour everywhere" in data.report()
    batch = next(batch for batch in data.loader() if batch["names"] == ["logo.png"])
    assert float(batch["pixel_values"].min()) == 1
    assert batch["mask"][0, 0, 0].tolist() == [1.0] * 32 + [0.0] * 32


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    photos, _ = make_folder(tmp_path)
    with pytest.raises(DataError, match=r"conditioning_data_dir .*nowhere does not exist"):
        make_data(photos, conditioning_data_dir=str(tmp_path / "nowhere")).prepare()


def test_without_conditions_batches_have_none(tmp_path: Path) -> None:
    photos, _ = make_folder(tmp_path)
    data = make_data(photos)
    data.prepare()
    assert "conditioning" not in next(iter(data.loader())) and not data.has_condition_files


def test_held_out_batches_are_the_pictures_that_are_not_trained_on(tmp_path: Path) -> None:
    photos, conditions = make_folder(tmp_path)
    data = make_data(photos, conditioning_data_dir=str(conditions), validation_split=0.3)
    data.prepare()
    trained = {name for batch in data.loader() for name in batch["names"]}
    held_out = {name for batch in data.held_out_loader(2) for name in batch["names"]}
    assert held_out and not held_out & trained and len(held_out | trained) == len(SIDES)
    assert max(apart(batch) for batch in data.held_out_loader(1)) < 8
