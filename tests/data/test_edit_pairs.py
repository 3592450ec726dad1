"""Pairs of an edit: sources by name, list or shard, cut as their images are, cached, and what is wrong with them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fakes.models.encoder import FakeEncoder
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.errors import DataError

SIDES = [(80, 64), (96, 128), (64, 64), (128, 72)]


def ramp(size: tuple[int, int], blue: int = 90) -> Image.Image:
    """A picture whose red channel rises to the right."""
    width, height = size
    red = np.linspace(20, 250, width)[None].repeat(height, 0) * np.linspace(0.4, 1, height)[:, None]
    return Image.fromarray(np.stack([red, np.full_like(red, 40), np.full_like(red, blue)], 2).astype(np.uint8))


def make_pairs(folder: Path) -> tuple[Path, Path]:
    """Images of several shapes, and sources that have another blue."""
    targets, sources = folder / "targets", folder / "sources"
    for path in (targets, sources):
        path.mkdir(parents=True)
    for number, size in enumerate(SIDES):
        ramp(size).save(targets / f"{number}.png")
        ramp(size, blue=200).save(sources / f"{number}.png")
        (targets / f"{number}.txt").write_text(f"make it {number}")
    return targets, sources


def make_data(targets: Path, **options: Any) -> ImageCaptionData:
    settings: dict[str, Any] = {
        "resolution": 64, "train_batch_size": 1, "min_bucket_reso": 32, "bucket_reso_steps": 16, "num_workers": 0,
        "cache_dir": str(targets.parent / "cache"),
    }  # fmt: skip
    return ImageCaptionData(str(targets), **(settings | options))


def apart(batch: dict[str, Any], number: int = 0) -> float:
    """Largest difference of the image's and the source's red channels, of 255."""
    difference = (batch["pixel_values"][:, 0] - batch["sources"][number][:, 0]).abs()
    return float(difference.max()) * 127.5


@pytest.mark.parametrize("options", [{}, {"random_flip": True}, {"center_crop": False}, {"enable_bucket": False}])
def test_a_source_shares_crop_flip_and_bucket_with_its_picture(tmp_path: Path, options: dict[str, Any]) -> None:
    targets, sources = make_pairs(tmp_path)
    data = make_data(targets, source_data_dir=str(sources), num_repeats=4, **options)
    data.prepare()
    batches = list(data.loader())
    assert len(batches) == 4 * len(SIDES)
    assert max(apart(batch) for batch in batches) == 0
    assert all(float(batch["sources"][0][:, 2].mean()) > 0.4 for batch in batches)  # the sources' blue
    if "random_flip" in options:
        rising = {bool(batch["sources"][0][0, 0, 0, 0] < batch["sources"][0][0, 0, 0, -1]) for batch in batches}
        assert rising == {False, True}


def test_several_sources_come_from_several_folders_or_from_numbered_names(tmp_path: Path) -> None:
    targets, first = make_pairs(tmp_path)
    second, numbered = tmp_path / "second", tmp_path / "numbered"
    second.mkdir()
    numbered.mkdir()
    for number, size in enumerate(SIDES):
        ramp(size, blue=0).save(second / f"{number}.jpg", quality=100, subsampling=0)
        ramp(size, blue=200).save(numbered / f"{number}_1.png")
        ramp(size, blue=0).save(numbered / f"{number}_2.png")
    for given in ([str(first), str(second)], str(numbered)):
        data = make_data(targets, source_data_dir=given)
        data.prepare()
        assert data.sources_per_image == 2
        for batch in data.loader():
            blues = [float(each[:, 2].mean()) for each in batch["sources"]]
            assert blues[0] > 0.4 and blues[1] < -0.9


@pytest.mark.parametrize("key", ["source", "control_path_1", "edit_image", "kontext_images"])
def test_sources_may_be_listed_under_the_names_of_other_programs(tmp_path: Path, key: str) -> None:
    targets, sources = make_pairs(tmp_path)
    sources.rename(targets / "before")
    rows = [{"file_name": f"{n}.png", "text": f"make it {n}", key: f"before/{n}.png"} for n in range(len(SIDES))]
    rows[0][key] = [rows[0][key]]  # type: ignore[assignment]
    (targets / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = make_data(targets)
    data.prepare()
    assert data.data_report.images_used == len(SIDES)  # the sources below the folder are no images
    assert max(apart(batch) for batch in data.loader()) == 0


@pytest.mark.parametrize("key", ["target_caption", "conditioning_image"])
def test_a_listed_value_of_another_kind_is_named(tmp_path: Path, key: str) -> None:
    targets, _ = make_pairs(tmp_path)
    row = {"file_name": "0.png", "text": "make it 0", "source": "../sources/0.png", key: 3}
    (targets / "metadata.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=rf"metadata.jsonl line 1: '{key}' must be text, got 3"):
        make_data(targets).prepare()


def test_a_csv_lists_sources_and_an_image_may_be_the_source_of_another(tmp_path: Path) -> None:
    targets, sources = make_pairs(tmp_path)
    for name in ("0", "1"):
        ramp((64, 64), blue=int(name)).save(targets / f"{name}.png")
    for path in {*targets.glob("[23].*"), *targets.glob("*.txt")}:
        path.unlink()
    ramp((64, 64), blue=200).save(sources / "0.png")
    (targets / "captions.csv").write_text("file_name,text,source\n0.png,one,../sources/0.png\n1.png,two,0.png\n")
    data = make_data(targets, train_batch_size=2)
    data.prepare()
    (batch,) = data.loader()
    blues = [round(float(each) * 127.5 + 127.5) for each in batch["sources"][0][:, 2].mean((1, 2))]
    assert sorted(blues) == [0, 200]


def test_shards_hold_sources_and_a_description_under_the_name_of_their_image(tmp_path: Path) -> None:
    described = {0: ("target.txt", b"a red cup"), 1: ("json", b'{"edited_prompt": "a blue cup"}'), 2: ("json", b"{")}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(3):
            texts = {"txt": b"turn", described[number][0]: described[number][1]}
            images = {}
            for name, blue in (("png", 90), ("source_1.png", 200), ("source_2.png", 0)):
                file = io.BytesIO()
                ramp((64, 64), blue).save(file, "PNG")
                images[name] = file.getvalue()
            for name, content in (images | texts).items():
                entry = tarfile.TarInfo(f"{number}.{name}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    options: dict[str, Any] = {"resolution": 64, "num_workers": 0, "cache_dir": str(tmp_path / "cache")}
    data = ImageCaptionData(shards=str(tmp_path / "a.tar"), train_batch_size=3, **options)
    data.prepare()
    (batch,) = data.loader()
    assert [round(float(each[:, 2].mean()) * 127.5 + 127.5) for each in batch["sources"]] == [200, 0]
    assert batch["captions"] == ["turn"] * 3 and data.data_report.images_used == 3
    assert [sample.description for sample in data.index().samples] == ["a red cup", "a blue cup", None]


def test_references_keep_their_own_shape_and_batches_are_of_equal_shapes(tmp_path: Path) -> None:
    targets, sources = make_pairs(tmp_path)
    for number, size in enumerate([(64, 64), (64, 128), (128, 64), (64, 64)]):
        ramp((64, 64)).save(targets / f"{number}.png")
        ramp(size).save(sources / f"{number}.png")
    data = make_data(targets, source_data_dir=str(sources), source_fit="own", source_resolution=128, train_batch_size=4)
    data.prepare()
    batches = list(data.loader())
    assert sorted(len(batch["names"]) for batch in batches) == [1, 1, 2]
    assert all(batch["pixel_values"].shape[-2:] == (64, 64) for batch in batches)
    assert {tuple(batch["sources"][0].shape[-2:]) for batch in batches} >= {(128, 128)}
    assert len(set(data.image_sizes())) == 4


def test_cached_latents_of_sources_are_those_of_the_pixels_and_shared_by_equal_sources(tmp_path: Path) -> None:
    targets, sources = make_pairs(tmp_path)
    for number in (2, 3):
        ramp((64, 64), blue=number).save(targets / f"{number}.png")
        ramp((64, 64), blue=77).save(sources / f"{number}.png")
    encoder = FakeEncoder()
    plain = make_data(targets, source_data_dir=str(sources), random_flip=True, num_repeats=3)
    cached = make_data(targets, source_data_dir=str(sources), random_flip=True, num_repeats=3, cache_latents=True)
    plain.prepare()
    cached.prepare(encoder)
    for one, other in zip(plain.loader(), cached.loader(), strict=True):
        assert one["names"] == other["names"]
        mean = encoder.encode_pixels(one["sources"][0]).chunk(2, dim=1)[0]
        torch.testing.assert_close(other["source_latents"][0], mean)
    assert len(list((tmp_path / "cache" / "sources").rglob("*.safetensors"))) == 2 * 3  # of 4 pairs, 2 share a source


def wrong_count(targets: Path, sources: Path) -> dict[str, Any]:
    (sources / "0.png").rename(sources / "0_1.png")
    ramp(SIDES[0]).save(sources / "0_2.png")
    return {}


def broken(targets: Path, sources: Path) -> dict[str, Any]:
    (sources / "0.png").write_bytes((sources / "0.png").read_bytes()[:50])
    return {}


def replaced(name: str, size: tuple[int, int]) -> Any:
    def change(targets: Path, sources: Path) -> dict[str, Any]:
        ramp(size).save(sources / name)
        return {}

    return change


def equal(targets: Path, sources: Path) -> dict[str, Any]:
    for path in targets.glob("*.png"):
        (sources / path.name).write_bytes(path.read_bytes())
    return {}


BAD: dict[str, tuple[Any, str]] = {
    "missing": (lambda t, s: (s / "0.png").unlink(), "1 of 4 images in .* have no source, such as 0.png. Give every"),
    "left over": (replaced("other.png", (64, 64)), "1 sources match no image, .*other.png. Remove these sources"),
    "counts": (wrong_count, "0.png has 2 sources and most images in .* have 1"),
    "broken": (broken, "the source .*0.png of 0.png cannot be read"),
    "shape": (replaced("0.png", (64, 80)), "64 x 80 and its image 0.png 80 x 64: another shape.*source_fit: own"),
    "small": (replaced("2.png", (60, 60)), "2.png is 60 x 60 pixels, a side must have at least 64"),
    "long": (replaced("2.png", (1024, 64)), "2.png is 1024 x 64 pixels, with one side more than 8 times the other"),
    "equal": (equal, "4 of 4 images in .* are equal to their source"),
    "no folder": (lambda t, s: {"source_data_dir": str(s) + "x"}, "source_data_dir .*sourcesx does not exist"),
    "class": (lambda t, s: {"class_data_dir": str(t), "class_prompt": "x"}, "class images have no source images"),
    "resolution": (lambda t, s: {"source_resolution": 64}, "source_fit: own"),
    "fit": (lambda t, s: {"source_fit": "both"}, "source_fit must be crop or own, got 'both'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(BAD))
def test_a_bad_pair_is_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    targets, sources = make_pairs(tmp_path)
    change, said = BAD[kind]
    options = {"source_data_dir": str(sources)} | (change(targets, sources) or {})
    with pytest.raises(DataError, match=said):
        make_data(targets, **options).prepare()


def test_one_instruction_for_all_pairs_is_noted(tmp_path: Path) -> None:
    targets, sources = tmp_path / "targets", tmp_path / "sources"
    targets.mkdir()
    sources.mkdir()
    for number in range(20):
        ramp((64, 64), blue=number).save(targets / f"{number}.png")
        ramp((64, 64), blue=200 + number).save(sources / f"{number}.png")
        (targets / f"{number}.txt").write_text("make it blue")
    data = make_data(targets, source_data_dir=str(sources))
    assert "all 20 pairs" in data.report() and "'make it blue'" in data.report()


def test_five_instructions_for_one_source_are_held_out_together(tmp_path: Path) -> None:
    targets, sources = tmp_path / "targets", tmp_path / "sources"
    targets.mkdir()
    sources.mkdir()
    for number in range(20):
        ramp((64, 64), blue=number).save(targets / f"{number}.png")
        ramp((64, 64), blue=200 + number // 5).save(sources / f"{number}.png")
        (targets / f"{number}.txt").write_text(f"make it {number}")
    data = make_data(targets, source_data_dir=str(sources), validation_split=0.3)
    index = data.index()
    of_training = {sample.sources[0].content_sha256 for sample in index.samples}
    of_held_out = {sample.sources[0].content_sha256 for sample in index.validation}
    assert of_held_out and of_training and not of_held_out & of_training
