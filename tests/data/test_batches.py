"""Contents of a batch, which depend on nothing but seed, epoch and item."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from lightning_aigc.data.report.findings import DataCheckError
from lightning_aigc.errors import DataError


def fill(tools, folder, count=10):
    for number in range(count):
        size = [(64, 64), (100, 60), (60, 90)][number % 3]
        tools.save(folder / f"{number}.png", tools.picture(*size, seed=number), f"thing {number}, red, blue, new")
    return folder


def batches(data, epoch=0, encoder=None):
    data.prepare(encoder)
    loader = data.loader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def assert_same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]


RANDOM = {"center_crop": False, "random_flip": True, "shuffle_caption": True, "caption_dropout_rate": 0.2}


def test_a_batch_has_the_documented_keys_and_shapes(tools, make, folder):
    fill(tools, folder)
    for batch in batches(make()):
        count = len(batch["names"])
        height, width = batch["target_size"][0].tolist()
        assert batch["pixel_values"].shape == (count, 3, height, width)
        assert batch["pixel_values"].dtype == torch.float32 and batch["pixel_values"].is_contiguous()
        assert -1 <= batch["pixel_values"].min() < batch["pixel_values"].max() <= 1
        assert batch["is_prior"] == [False] * len(batch["captions"])
        assert len(batch["captions"]) == count
        for key in ("original_size", "crop_top_left", "target_size"):
            assert batch[key].shape == (count, 2) and batch[key].dtype == torch.int64


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # the machine may have one core
@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(tools, make, folder, workers):
    fill(tools, folder)
    assert_same(batches(make(**RANDOM), 3), batches(make(**RANDOM, num_workers=workers), 3))


def test_repeats_of_a_picture_and_epochs_draw_anew(tools, make, folder):
    fill(tools, folder, 1)
    data = make(**RANDOM, num_repeats=20, train_batch_size=20)
    (first,) = batches(data, 0)
    (second,) = batches(data, 1)
    assert len(set(first["captions"])) > 3
    assert sorted(first["captions"]) != sorted(second["captions"])


def test_a_sub_folder_with_a_number_repeats_its_pictures(tools, make, folder):
    tools.save(folder / "3_zorp" / "a.png")
    tools.save(folder / "b.png")
    tools.save(folder / "2024_summer" / "c.png")
    names = [name for batch in batches(make(num_repeats=2)) for name in batch["names"]]
    assert {name: names.count(name) for name in names} == {"3_zorp/a.png": 6, "b.png": 2, "2024_summer/c.png": 2}
    assert "1 images x 6" in make(num_repeats=2).report()


def test_crop_and_sizes_say_where_the_pixels_come_from(tools, make, folder):
    image = Image.new("RGB", (128, 64))
    for column in range(128):
        image.paste((2 * column,) * 3, (column, 0, column + 1, 64))
    tools.save(folder / "ramp.png", image)
    data = make(enable_bucket=False, center_crop=False, random_flip=True, num_repeats=8, train_batch_size=8)
    (batch,) = batches(data)
    assert batch["original_size"].tolist() == [[64, 128]] * 8 and batch["target_size"].tolist() == [[64, 64]] * 8
    lefts = batch["crop_top_left"][:, 1].tolist()
    assert len(set(lefts)) > 2 and set(batch["crop_top_left"][:, 0].tolist()) == {0}
    directions = set()
    for left, pixels in zip(lefts, batch["pixel_values"], strict=True):
        row = ((pixels[0, 0] + 1) * 127.5 / 2).round().int()
        flipped = bool(row[0] > row[-1])
        directions.add(flipped)
        start = left if not flipped else 127 - left  # in the mirrored image, column 0 is the last one
        assert abs(int(row[0]) - start) <= 1
    assert directions == {False, True}


def test_center_crop_takes_the_middle(tools, make, folder):
    image = Image.new("RGB", (128, 64), "black")
    image.paste("white", (32, 0, 96, 64))
    tools.save(folder / "a.png", image)
    (batch,) = batches(make(enable_bucket=False))
    assert batch["pixel_values"].min() > 0.99
    assert batch["crop_top_left"].tolist() == [[0, 32]]


def test_class_pictures_follow_the_users_in_the_same_bucket(tools, make, folder, tmp_path):
    fill(tools, folder, 9)
    for number in range(4):
        tools.save(tmp_path / "class" / f"c{number}.png", tools.picture(80, 80), None if number else "own caption")
    data = make(class_data_dir=str(tmp_path / "class"), class_prompt="a shoe", train_batch_size=2, trigger_word="zorp")
    seen = set()
    for batch in batches(data):
        users = batch["is_prior"].count(False)
        assert batch["is_prior"] == [False] * users + [True] * users
        assert all(name.startswith("c") for name in batch["names"][users:])
        assert set(batch["captions"][users:]) <= {"a shoe", "own caption"}
        assert all(caption.startswith("zorp") for caption in batch["captions"][:users])
        seen |= set(batch["names"][users:])
    assert seen == {f"c{number}.png" for number in range(4)}
    assert "4 found, 4 used" in data.report()


def test_class_pictures_without_a_caption_need_a_class_prompt(tools, make, folder, tmp_path):
    fill(tools, folder, 1)
    tools.save(tmp_path / "class" / "c.png", caption=None)
    with pytest.raises(DataError, match=r"class_prompt"):
        make(class_data_dir=str(tmp_path / "class")).setup("fit")


@pytest.mark.parametrize("cached", [False, True])
def test_a_mask_file_is_cropped_and_flipped_with_its_picture(tools, make, folder, tmp_path, cached):
    image = Image.new("RGB", (128, 64), "black")
    image.paste("white", (40, 0, 70, 64))
    for name in "ab":
        tools.save(folder / f"{name}.png", image)
    tools.save(tmp_path / "masks" / "a.png", image.convert("L"), None)
    data = make(
        mask_dir=str(tmp_path / "masks"), enable_bucket=False, random_flip=True, num_repeats=8, train_batch_size=16
    )
    encoder = None
    if cached:
        data = make(
            mask_dir=str(tmp_path / "masks"),
            enable_bucket=False,
            random_flip=True,
            num_repeats=8,
            train_batch_size=16,
            cache_latents=True,
        )
        encoder = tools.FakeEncoder()
    (batch,) = batches(data, 0, encoder)
    assert batch["mask"].shape == (16, 1, 64, 64)
    for row, name in enumerate(batch["names"]):
        if name == "b.png":
            assert (batch["mask"][row] == 1).all()
        elif not cached:
            seen = (batch["pixel_values"][row, :1] + 1) / 2
            assert torch.allclose(batch["mask"][row], seen, atol=1e-6)
    left_white = batch["mask"][:, 0, 0, 8] == 1
    assert left_white.any() and not left_white.all()
    assert "1 of 2" in data.report()


def test_the_alpha_channel_can_be_the_mask(tools, make, folder):
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    image.paste((10, 200, 10, 255), (0, 0, 32, 64))
    tools.save(folder / "a.png", image)
    (batch,) = batches(make(use_alpha_mask=True))
    assert batch["mask"][0, 0, :, :30].min() == 1 and batch["mask"][0, 0, :, 34:].max() == 0


@pytest.mark.parametrize(
    ("name", "image", "message"),
    [
        ("other.png", Image.new("L", (64, 64), 255), "no mask in .* has the name of an image"),
        ("0.png", Image.new("L", (64, 64), 0), "black everywhere"),
        ("0.png", None, "cannot be read"),
        ("0.png", Image.new("L", (200, 50), 255), r"0\.png is 200 x 50 and its image 0\.png 64 x 64: another shape"),
    ],
)
def test_masks_that_cannot_work_are_errors(tools, make, folder, tmp_path, name, image, message):
    fill(tools, folder, 1)
    path = tools.save(tmp_path / "masks" / name, image, None)
    if image is None:
        path.write_bytes(b"no mask")
    with pytest.raises(DataError, match=message):
        make(mask_dir=str(tmp_path / "masks")).setup("fit")


def test_all_masks_that_cannot_be_used_are_in_one_report(tools, make, folder, tmp_path):
    for number in range(8):
        tools.save(folder / f"{number}.png", tools.picture(seed=number))
    images = [Image.new("L", (64, 64), 255) for _ in range(6)]
    images[2], images[4] = Image.new("L", (64, 64), 0), Image.new("RGBA", (64, 64), (255, 255, 255, 0))
    for number, image in enumerate(images):
        tools.save(tmp_path / "masks" / f"{number}.png", image, None)
    tools.save(tmp_path / "masks" / "5.bmp", images[5], None)
    with pytest.raises(DataCheckError) as stopped:
        make(mask_dir=str(tmp_path / "masks")).setup("fit")
    report = str(stopped.value.report)
    for words in ("2.png is black everywhere", "4.png is black everywhere", "5.bmp and ", "2 of 6 masks in "):
        assert words in str(stopped.value) and words in report
    assert "masks     6 of 8;" in report


def test_masks_of_images_that_are_held_out_count_too(tools, make, folder, tmp_path):
    for number in range(8):
        tools.save(folder / f"{number}.png", tools.picture(seed=number))
        tools.save(tmp_path / "masks" / f"{number}.png", Image.new("L", (64, 64), 255), None)
    assert "masks     8 of 8;" in make(mask_dir=str(tmp_path / "masks"), validation_split=0.5).report()


def test_a_mask_of_the_stored_pixels_of_an_image_that_is_turned_is_refused(tools, make, folder, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    folder.mkdir(exist_ok=True)
    tools.picture(128, 64).save(folder / "0.jpg", exif=exif)
    (folder / "0.txt").write_text("a mug", encoding="utf-8")
    mask = Image.new("L", (128, 64), 0)
    mask.paste(255, (0, 0, 64, 64))
    tools.save(tmp_path / "masks" / "0.png", mask, None)
    with pytest.raises(DataError, match=r"128 x 64 and its image 0\.jpg 64 x 128: .*turned as its EXIF data says"):
        make(mask_dir=str(tmp_path / "masks")).setup("fit")
    mask.save(tmp_path / "masks" / "0.png", exif=exif)
    make(mask_dir=str(tmp_path / "masks")).setup("fit")


def test_a_mask_may_be_scaled_with_sides_rounded_to_whole_pixels(tools, make, folder, tmp_path):
    tools.save(folder / "0.png", tools.picture(100, 67))
    tools.save(tmp_path / "masks" / "0.png", Image.new("L", (50, 33), 255), None)
    make(mask_dir=str(tmp_path / "masks")).setup("fit")


def test_a_picture_that_vanishes_during_training_is_named(tools, make, folder):
    fill(tools, folder, 1)
    data = make()
    data.prepare()
    (folder / "0.png").unlink()
    with pytest.raises(DataError, match=r"0\.png was readable when training began"):
        list(data.loader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_batch_size": 0}, "train_batch_size must be at least 1, got 0"),
        ({"num_repeats": 0}, "num_repeats must be at least 1"),
        ({"caption_dropout_rate": 1.5}, r"caption_dropout_rate must be in \[0, 1\], got 1.5"),
        ({"caption_dropout_rate": float("nan")}, "caption_dropout_rate"),
        ({"prior_ratio": 0.0}, "prior_ratio"),
        ({"keep_tokens": -1}, "keep_tokens must be at least 0, got -1"),
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch_factor": 0}, "prefetch_factor"),
        ({"missing_captions": "ignore"}, "error, filename, empty, trigger"),
        ({"missing_captions": "trigger"}, "trigger_word"),
        ({"caption_separator": ""}, "caption_separator"),
        ({"caption_extension": ""}, "caption_extension"),
        ({"class_prompt": "a shoe"}, "class_data_dir"),
        ({"cache_latents": True, "center_crop": False}, "cache_latents and center_crop"),
        ({"cache_text_embeddings": True, "shuffle_caption": True}, "cache_text_embeddings and shuffle_caption"),
        ({"train_data_dir": None}, "exactly one .* got none"),
        ({"shards": "x.tar"}, "exactly one .* got train_data_dir and shards"),
        ({"train_data_dir": "embedded:nothing"}, "embedded are:"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(make, arguments, message):
    with pytest.raises(DataError, match=message):
        make(**arguments).setup("fit")


def test_a_resumed_run_names_data_that_changed(tools, make, folder, tmp_path, recwarn):
    fill(tools, folder, 6)
    masks, others, held = (tmp_path / name for name in ("masks", "class", "held"))
    for number in range(6):
        size = [(64, 64), (100, 60), (60, 90)][number % 3]
        tools.save(masks / f"{number}.png", tools.picture(*size, seed=40 + number), None)
    for number in range(3):
        tools.save(others / f"{number}.png", tools.picture(seed=70 + number), "a plain thing")
        tools.save(held / f"{number}.png", tools.picture(seed=80 + number), "a held thing")

    def loader():
        data = make(
            mask_dir=str(masks), class_data_dir=str(others), validation_data_dir=str(held),
        )  # fmt: skip
        data.prepare()
        return data.loader()

    state = loader().state_dict()
    loader().load_state_dict(state)
    loader().load_state_dict({name: value for name, value in state.items() if name != "contents"})
    assert [str(each.message) for each in recwarn] == []  # the same data, and a state without theirs

    def change(*, caption=None, without=None, again=None):
        if caption:
            caption.write_text("a thing of another colour", encoding="utf-8")
        if without:
            without.unlink()
            without.with_suffix(".txt").unlink()
        if again:
            tools.save(again, tools.picture(64, 64, seed=99), None)

    for what, said in (
        ({"caption": folder / "0.txt"}, r"resume: images \(6 then, 6 now\); a change of a caption counts"),
        ({"without": others / "0.png"}, r"images \(6 then, 6 now\), class images \(3 then, 2 now\); "),
        ({"without": held / "0.png"}, r"class images .*, held-out images \(3 then, 2 now\); "),
        ({"again": masks / "0.png"}, r"held-out images .*, masks \(6 then, 6 now\); "),
    ):
        change(**what)
        with pytest.warns(UserWarning, match=said):
            loader().load_state_dict(state)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_loader_resumes_at_the_next_batch_with_workers(tools, make, folder):
    fill(tools, folder, 12)
    whole = batches(make(**RANDOM), 2)
    data = make(**RANDOM, num_workers=2)
    data.prepare()
    loader = data.loader()
    loader.sampler.set_epoch(2)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(2)]
    state = loader.state_dict()
    del iterator
    resumed = make(**RANDOM)
    resumed.prepare()
    other = resumed.loader()
    other.load_state_dict(state)
    assert len(other) == len(whole)
    assert_same(first + list(other), whole)
