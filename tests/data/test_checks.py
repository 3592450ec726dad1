"""One report lists everything that is wrong with a folder, at once."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from lightning_aigc.data.loader.validation import held_out
from lightning_aigc.data.report.findings import DataCheckError
from lightning_aigc.errors import DataError


@pytest.fixture
def everything(tools, folder):
    """A folder with all problems: broken, missing, empty, unmatched, damaged, twice, nearly twice."""
    tools.save(folder / "good.png", tools.picture(seed=1))
    (folder / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
    tools.save(folder / "missing.png", tools.picture(seed=2), caption=None)
    tools.save(folder / "empty.png", tools.picture(seed=3), caption="  ")
    (folder / "orphan.txt").write_text("nobody")
    tools.save(folder / "twice.png", tools.picture(seed=4))
    (folder / "again.png").write_bytes((folder / "twice.png").read_bytes())
    (folder / "again.txt").write_text("a thing")
    large = tools.picture(128, 128, seed=5)
    tools.save(folder / "large.png", large)
    tools.save(folder / "small.jpg", large.resize((64, 64)), quality=90)
    tools.save(folder / "same.png", tools.picture(seed=6))
    tools.save(folder / "same.webp", tools.picture(seed=7))
    (folder / "metadata.jsonl").write_text('{"file_name": "good.png", "text": "a"}\nnot json\n')
    return folder


def test_a_folder_with_all_problems_gives_one_report_and_one_error_of_all(make, everything):
    with pytest.raises(DataCheckError) as stopped:
        make().setup("fit")
    report, message = str(stopped.value.report), str(stopped.value)
    for line in (
        "broken.jpg: not an image",
        "    missing.png",
        "    empty.png (empty.txt)",
        "    orphan.txt",
        "    again.png = twice.png",
        "    large.png ~ small.jpg",
        "same.png and same.webp share the caption file same.txt",
        "metadata.jsonl line 2 is not valid JSON",
    ):
        assert line in report, report
    for name in ("missing.png", "empty.png", "orphan.txt", "same.webp", "metadata.jsonl line 2"):
        assert name in message, message
    assert "broken.jpg" not in message and "twice.png" not in message, "these do not stop a training"
    assert report.index("error ") < report.index("note  ")


def test_what_does_not_stop_the_training_is_a_note_of_its_report(tools, make, folder):
    tools.save(folder / "good.png", tools.picture(seed=1))
    tools.save(folder / "more.png", tools.picture(seed=2))
    (folder / "broken.jpg").write_bytes(b"")
    data = make()
    data.setup("fit")
    assert data.data_report.images_used == 2
    assert "note      1 of 3 images" in data.report() and "broken.jpg: empty file" in data.report()
    assert "error " not in data.report() and "~" not in data.report(), "different images do not look the same"


def test_problems_of_the_class_pictures_and_masks_are_listed_beside_the_users(tools, make, folder, tmp_path):
    tools.save(folder / "a.png", caption=None)
    tools.save(tmp_path / "class" / "b.png", caption=None)
    (tmp_path / "masks").mkdir()
    with pytest.raises(DataCheckError) as stopped:
        make(class_data_dir=str(tmp_path / "class"), mask_dir=str(tmp_path / "masks")).setup("fit")
    for words in ("a.png", "class_prompt", "no mask in"):
        assert words in str(stopped.value)


def test_embedded_pictures_that_differ_are_not_called_the_same(make):
    report = make(train_data_dir="embedded:prior", missing_captions="empty").report()
    assert "look the same" not in report


# Held-out images --------------------------------------------------------------------------------------------------


def fill(tools, folder, numbers):
    for number in numbers:
        noise = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        tools.save(folder / f"{number}.png", Image.fromarray(noise), f"thing {number}")


def names(data):
    data.prepare()
    trained = {name for batch in data.loader() for name in batch["names"]}
    return trained, {name for batch in data.val_dataloader() for name in batch["names"]}


def test_the_split_is_by_content_and_stays_when_pictures_are_added_or_renamed(tools, make, folder):
    fill(tools, folder, range(30))
    trained, held = names(make(validation_split=0.2))
    assert not trained & held and trained | held == {f"{number}.png" for number in range(30)}
    assert 2 <= len(held) <= 12
    fill(tools, folder, range(30, 50))
    trained_now, held_now = names(make(validation_split=0.2))
    assert held <= held_now and trained <= trained_now
    moved = sorted(held)[0]
    (folder / moved).rename(folder / "moved.png")
    (folder / moved).with_suffix(".txt").rename(folder / "moved.txt")
    assert "moved.png" in names(make(validation_split=0.2))[1]
    assert names(make(validation_split=0.2, seed=7))[1] == names(make(validation_split=0.2))[1]


def test_at_least_one_picture_is_held_out_and_one_is_trained_on(tools, make, folder):
    fill(tools, folder, range(3))
    assert len(names(make(validation_split=0.001))[1]) == 1
    assert held_out(["a"] * 5, 0.0) == set()
    with pytest.raises(DataError, match=r"holds out all 1 images"):
        held_out(["a"], 0.5)


def test_class_pictures_and_copies_are_never_split(tools, make, folder, tmp_path):
    fill(tools, folder, range(12))
    fill(tools, tmp_path / "class", range(100, 112))
    for number in range(12):
        (folder / f"copy{number}.png").write_bytes((folder / f"{number}.png").read_bytes())
        (folder / f"copy{number}.txt").write_text("a copy")
    trained, held = names(make(validation_split=0.4, class_data_dir=str(tmp_path / "class")))
    of_class = {f"{number}.png" for number in range(100, 112)}
    assert of_class & trained and not of_class & held
    assert {f"copy{name}" for name in held if not name.startswith("copy")} == {n for n in held if n.startswith("copy")}


def test_a_folder_of_held_out_pictures_is_not_trained_on_and_a_copy_is_noted(tools, make, folder):
    fill(tools, folder, range(4))
    fill(tools, folder / "val", [10, 11])
    (folder / "val" / "leak.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "val" / "leak.txt").write_text("x")
    data = make(validation_data_dir=str(folder / "val"))
    trained, held = names(data)
    assert trained == {f"{number}.png" for number in range(4)} and held == {"10.png", "11.png", "leak.png"}
    assert "val_loss is of images that are trained on" in data.report() and "3 held out" in data.report()


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0])
def test_a_share_out_of_range_is_refused(make, share):
    with pytest.raises(DataError, match="validation_split must be in"):
        make(validation_split=share)


UNREAD = {
    "keep_tokens": 2, "prior_ratio": 0.5, "image_column": "photo", "dataset_split": "test", "prefetch_factor": 3,
    "enable_bucket": False, "min_bucket_reso": 64, "bucket_no_upscale": True, "source_fit": "own",
    "caption_separator": ";", "caption_column": "caption",
}  # fmt: skip


def test_arguments_that_change_nothing_are_notes_of_the_report(tools, make, folder):
    tools.save(folder / "good.png")
    said = make(**UNREAD).report()
    for line in (
        "data.init_args.keep_tokens: 2 changes nothing while shuffle_caption is false; set"
        " data.init_args.shuffle_caption: true, or remove keep_tokens",
        "data.init_args.prior_ratio: 0.5 changes nothing while class_data_dir is unset; set"
        " data.init_args.class_data_dir: FOLDER, or remove prior_ratio",
        "data.init_args.source_fit changes nothing without sources of an edit; remove it",
        "data.init_args.caption_separator changes nothing without shuffle_caption and trigger_word; set"
        " data.init_args.shuffle_caption: true, or remove caption_separator",
        "data.init_args.caption_column: caption changes nothing, because none of metadata.jsonl, captions.csv,"
        " metadata.csv is in ",
        *(f"data.init_args.{name}:" for name in list(UNREAD)[:7] if name != "enable_bucket"),
    ):
        assert line in said, line
    reads = {"shuffle_caption": True, "keep_tokens": 2, "min_bucket_reso": 64, "caption_separator": ";"}
    assert "changes nothing" not in make(**reads).report()


def test_alpha_masks_without_an_alpha_channel_are_a_note(tools, make, folder):
    tools.save(folder / "plain.png")
    assert "masks: no image has an alpha channel: all is learned" in make(use_alpha_mask=True).report()
    tools.save(folder / "cut out.png", tools.picture(mode="RGBA", seed=3))
    assert "masks: the alpha channel of each image that has one" in make(use_alpha_mask=True).report()
