"""The data checks: each speaks of its pitfall, with a figure and a config line, and is quiet on healthy folders."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_aigc.data import ImageCaptionData
from lightning_aigc.data.advice import advice_on
from lightning_aigc.data.advice.captions import check_captions, check_prompts
from lightning_aigc.data.advice.dataset_summary import Material, check_batch, check_crops
from lightning_aigc.data.advice.faces import face_cells, share_kept
from lightning_aigc.data.images.crop import Sample
from lightning_aigc.data.loader.buckets import BucketSettings, bucket_shapes, place, place_in
from tools.embedded import drawing, world

PROMPTS = ["a zorp umbrella", "a zorp mug"]


def write(folder: Path, rows: list[tuple[str, Image.Image]]) -> Path:
    folder.mkdir()
    lines = []
    for i, (caption, picture) in enumerate(rows):
        picture.save(folder / f"{i:03d}.png")
        lines.append(json.dumps({"file_name": f"{i:03d}.png", "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def advice(folder: Path | str, tmp_path: Path, prompts: list[str] = PROMPTS, steps: int = 50, **arguments: Any) -> str:
    data = ImageCaptionData(str(folder), **{"resolution": 64, "cache_dir": str(tmp_path / "cache")} | arguments)
    index = data.index()
    own = sorted({row for bucket in index.buckets for row in bucket})
    samples = [index.samples[row] for row in own]
    material = Material(samples, arguments.get("trigger_word"), prompts, steps * 4, data.buckets)
    return "\n".join(advice_on(material))


def brand(captions: str, count: int = 12, seed: int = 3) -> list[tuple[str, Image.Image]]:
    rng = random.Random(seed)
    things = [drawing.BRAND_THINGS[i % 9] for i in range(count)]
    return [(captions.format(thing=thing), drawing.draw_brand(thing, rng)) for thing in things]


def on_backgrounds(caption: str, count: int = 36) -> list[tuple[str, Image.Image]]:
    rng = random.Random(4)
    rows = []
    for i in range(count):
        thing, background = drawing.BRAND_THINGS[i % 9], world.BACKGROUND_NAMES[i // 9 % 4]
        picture = drawing.draw_product(thing, drawing.BRAND_COLOUR, world.BACKGROUND_VALUES[i // 9 % 4], rng)
        rows.append((caption.format(thing=thing, background=background), picture))
    return rows


def test_the_embedded_brand_and_prior_are_healthy(tmp_path: Path) -> None:
    assert advice("embedded:brand", tmp_path, trigger_word="zorp") == ""
    assert advice("embedded:prior", tmp_path, ["a red mug on white"]) == ""


@pytest.mark.parametrize("seed", range(6))
def test_random_pictures_with_true_captions_are_healthy(tmp_path: Path, seed: int) -> None:
    rng = random.Random(100 + seed)
    rows = []
    for _ in range(20):
        product = world.random_base_product(rng)
        rows.append((world.describe(product, rng, is_brand_known=False)[0], Image.fromarray(product.draw(rng))))
    assert advice(write(tmp_path / "pictures", rows), tmp_path) == ""


@pytest.mark.parametrize(
    ("caption", "trigger_word"),
    [("zorp", None), ("a photo of zorp", "zorp"), ("", "zorp"), ("the zorp image", "zorp")],
)
def test_captions_that_say_nothing_are_reported(tmp_path: Path, caption: str, trigger_word: str | None) -> None:
    folder = write(tmp_path / "pictures", brand(caption))
    said = advice(folder, tmp_path, trigger_word=trigger_word, missing_captions="trigger" if not caption else "error")
    assert "12 of 12 captions say nothing beyond the trigger word" in said


def test_one_caption_for_many_pictures_is_reported_and_dreambooths_few_are_not(tmp_path: Path) -> None:
    many = advice(write(tmp_path / "many", brand("a photo of a zorp thing", 12)), tmp_path, trigger_word="zorp")
    few = advice(write(tmp_path / "few", brand("a photo of a zorp thing", 5)), tmp_path, trigger_word="zorp")
    assert "all 12 captions are the same" in many
    assert few == ""


@pytest.mark.parametrize(
    "names", [["IMG_1234", "IMG_1235"], ["DSC0001", "DSC0002"], ["20240101 1200", "20240102 1300"]]
)
def test_file_names_as_captions_are_reported(names: list[str]) -> None:
    placement = place_in(64, 64, (64, 64))
    samples = [Sample(Path("x"), n, n, "", (64, 64), placement, 0) for n in names]
    assert "are file names of a camera" in check_captions(Material(samples))[0]


def test_backgrounds_that_no_caption_names_are_reported(tmp_path: Path) -> None:
    bad = advice(write(tmp_path / "bad", on_backgrounds("a zorp {thing}")), tmp_path)
    good = advice(write(tmp_path / "good", on_backgrounds("a zorp {thing} on {background}")), tmp_path)
    assert "plain backgrounds, and no word of their captions tells which" in bad
    assert good == ""


def test_one_background_is_reported_only_where_a_prompt_asks_for_another(tmp_path: Path) -> None:
    folder = write(tmp_path / "pictures", brand("a zorp {thing}"))
    assert "100% of the images have the same background (border colour 16, 110, 112)" in advice(
        folder, tmp_path, ["a zorp mug on a beach"]
    )
    assert advice(folder, tmp_path, ["a zorp mug"]) == ""


def test_the_number_of_views_of_a_picture_is_reported(tmp_path: Path) -> None:
    folder = write(tmp_path / "pictures", brand("a zorp {thing}", 4))
    assert "4 images for this many steps: each is seen 450 times" in advice(folder, tmp_path, steps=450)
    assert advice(folder, tmp_path, steps=200) == ""


def test_prompts_without_the_trigger_word_are_reported(tmp_path: Path) -> None:
    assert check_prompts(Material([], None, PROMPTS)) == check_prompts(Material([], "zorp", PROMPTS)) == []
    (said,) = check_prompts(Material([], "zorp", ["a Zorp mug", "a teapot", "a zorps mug"]))
    assert "2 of 3 prompts lack the trigger word zorp (such as 'a teapot')" in said


def test_a_batch_larger_than_the_folder_is_reported_with_a_size_that_fits() -> None:
    assert check_batch(Material([], batch_size=6, items=6)) == check_batch(Material([], batch_size=6)) == []
    (said,) = check_batch(Material([], batch_size=16, items=6))
    assert "takes 16 images and an epoch has 6" in said and said.endswith("set data.init_args.train_batch_size: 3")
    (ranks,) = check_batch(Material([], batch_size=4, devices=2, items=6))
    assert "on each of 2 devices" in ranks and ranks.endswith("train_batch_size: 1")
    (many,) = check_batch(Material([], batch_size=1, devices=8, items=6))
    assert "set trainer.devices: 1" in many


def test_a_crop_of_half_a_picture_is_reported_with_its_sides(tmp_path: Path) -> None:
    rows = []
    for caption, picture in brand("a zorp {thing}"):
        tall = Image.new("RGB", (64, 128), drawing.BRAND_BACKGROUND)
        tall.paste(picture)
        rows.append((caption, tall))
    folder = write(tmp_path / "pictures", rows)
    said = advice(folder, tmp_path, enable_bucket=False)
    assert "12 of 12 images lose more than 20% to the crop" in said
    assert "loses 50%, at its top and bottom" in said
    assert said.endswith("; set data.init_args.enable_bucket: true and data.init_args.bucket_reso_steps: 16")
    assert advice(folder, tmp_path).endswith("; set data.init_args.bucket_reso_steps: 16")
    assert advice(folder, tmp_path, bucket_reso_steps=16) == "", "what it says ends it, buckets are on unless set"


@pytest.mark.parametrize(
    ("sizes", "given", "remedy"),
    [
        ([(640, 960)], {"enable_bucket": False}, "set data.init_args.enable_bucket: true"),
        ([(400, 2400)], {}, "set data.init_args.min_bucket_reso: 128"),
        ([(400, 2400), (9, 9000)], {}, "set data.init_args.min_bucket_reso: 128, and crop the rest yourself"),
        ([(9, 9000)], {}, "crop them yourself"),
    ],
)
def test_the_remedy_of_a_crop_is_the_one_that_ends_it(
    sizes: list[tuple[int, int]], given: dict[str, bool], remedy: str
) -> None:
    buckets = BucketSettings(**given)
    shapes = bucket_shapes(buckets)
    samples = [Sample(Path("x"), "x", "", "", (h, w), place(w, h, buckets, shapes), 0) for w, h in sizes]
    (said,) = check_crops(Material(samples, buckets=buckets))
    assert said.rpartition("; ")[2] == remedy


def test_a_masked_subject_that_is_small_in_latents_is_reported(tmp_path: Path) -> None:
    folder = write(tmp_path / "pictures", brand("a zorp {thing}", 6))
    masks = tmp_path / "masks"
    masks.mkdir()
    for size, wanted in ((24, "3.0 at the least"), (64, "")):
        for i in range(6):
            mask = np.zeros((64, 64), np.uint8)
            mask[:size, :size] = 255
            Image.fromarray(mask).save(masks / f"{i:03d}.png")
        said = advice(folder, tmp_path, mask_dir=str(masks))
        assert (wanted in said) if wanted else said == ""


def test_a_face_at_the_edge_is_cut_by_as_much_as_the_crop_takes() -> None:
    sample = Sample(Path("x"), "x", "", "", (128, 64), place_in(64, 128, (64, 64)), 0)
    assert share_kept((0.2, 0.0, 0.8, 0.25), sample) == 0.0  # the crop keeps the middle half
    assert share_kept((0.2, 0.25, 0.8, 0.75), sample) == 1.0
    assert share_kept((0.2, 0.0, 0.8, 0.5), sample) == pytest.approx(0.5)
    assert face_cells((0.2, 0.0, 0.8, 0.5), sample) == pytest.approx(8.0)


def test_faces_in_photographs_are_found_cut_and_small(tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="pip install 'lightning_aigc[faces]'")
    astronaut = pytest.importorskip("skimage.data", reason="pip install scikit-image").astronaut()
    face_on_top = Image.fromarray(astronaut[40:440, 120:320])  # twice as high as wide, the face in its upper quarter
    rows = [(f"a zorp portrait {i} of a person", face_on_top.crop((i, i, 200, 400))) for i in range(3)]
    folder = write(tmp_path / "pictures", rows)
    said = advice(folder, tmp_path, resolution=512, enable_bucket=False)
    assert "the crop cuts a face or subject in 3 images" in said
    small = advice(folder, tmp_path, resolution=64, bucket_reso_steps=16, min_bucket_reso=32)
    assert "the largest face or masked subject is smaller than 8 latent cells" in small
    whole = advice(folder, tmp_path, resolution=512, bucket_reso_steps=64, min_bucket_reso=256)
    assert "face" not in whole


def test_the_report_shows_the_advice(tmp_path: Path) -> None:
    folder = write(tmp_path / "pictures", brand("zorp"))
    report = ImageCaptionData(str(folder), resolution=64, cache_dir=str(tmp_path / "cache")).report()
    assert "  advice\n    12 of 12 captions say nothing" in report
