"""Hugging Face datasets, webdataset shards and embedded folders give the same as a folder of images."""

from __future__ import annotations

import io
import json
import tarfile
import time
from pathlib import Path

import pytest

from lightning_aigc.errors import DataError


def encoded(tools, seed, suffix="png"):
    buffer = io.BytesIO()
    tools.picture(seed=seed).save(buffer, {"png": "PNG", "jpg": "JPEG"}[suffix])
    return buffer.getvalue()


def write_shard(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def captions(data):
    data.prepare()
    return sorted(caption for batch in data.loader() for caption in batch["captions"])


@pytest.fixture
def shards(tools, tmp_path):
    for shard in range(3):
        members = []
        for number in range(2):
            key = f"sub/{shard}{number}"
            suffix = "png" if number else "jpg"
            members.append((f"{key}.{suffix}", encoded(tools, 2 * shard + number, suffix)))
            if number:
                members.append((f"{key}.txt", f"thing {shard}{number}".encode()))
            else:
                members.append((f"{key}.json", json.dumps({"text": f"thing {shard}{number}"}).encode()))
        write_shard(tmp_path / "shards" / f"data-{shard:03}.tar", members)
    return tmp_path / "shards"


@pytest.mark.parametrize("pattern", ["data-{000..002}.tar", "data-*.tar", "data-00{0,1,2}.tar"])
def test_shards_give_their_pictures_and_captions(make, shards, pattern):
    data = make(train_data_dir=None, shards=str(shards / pattern))
    assert captions(data) == sorted(f"thing {shard}{number}" for shard in range(3) for number in range(2))


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (["photo.v2.jpg", "photo.v2.txt"], ["photo.v2"]),
        (["photo.jpg", "photo.txt", "photo.v2.jpg", "photo.v2.txt"], ["photo", "photo.v2"]),
        (["photo.v1.jpg", "photo.v1.json", "photo.v2.final.PNG", "photo.v2.final.txt"], ["photo.v1", "photo.v2.final"]),
        (["a.b.jpg", "a.txt"], ["a"]),  # webdataset: key `a`, extension `b.jpg`
        (["a.txt", "a.jpg", "a.depth.png", "a.depth.json"], ["a", "a.depth"]),
        (["a.txt", "a.jpg", "a.depth.png"], ["a"]),  # a part of the sample, no image to learn
        (["a.img.jpg", "a.depth.png", "a.txt"], ["a"]),
        (["./a.1.jpg", "./a.1.txt", "./b.1.jpg", "./b.1.txt"], ["a.1", "b.1"]),
    ],
)
def test_dots_in_the_names_of_a_shards_members(tools, make, tmp_path, members, expected):
    def content(name):
        stem, _, suffix = name.removeprefix("./").rpartition(".")
        if suffix in ("txt", "json"):
            return (json.dumps({"text": stem}) if suffix == "json" else stem).encode()
        return encoded(tools, len(name), "jpg" if suffix == "jpg" else "png")

    write_shard(tmp_path / "a.tar", [(name, content(name)) for name in members])
    assert captions(make(train_data_dir=None, shards=str(tmp_path / "a.tar"))) == expected


def test_a_caption_extension_with_a_dot_of_its_own_is_read_from_shards(tools, make, tmp_path):
    members = [("a.jpg", encoded(tools, 1, "jpg")), ("a.tags.txt", b"tags"), ("a.txt", b"a sentence")]
    write_shard(tmp_path / "a.tar", members)
    data = make(train_data_dir=None, shards=str(tmp_path / "a.tar"), caption_extension=".tags.txt")
    assert captions(data) == ["tags"]


def test_a_folders_names_with_dots_find_their_captions(tools, make, folder):
    for name in ("photo.jpg", "photo.v2.jpg", "photo.v2.final.jpg"):
        tools.save(folder / name, caption=name)
    tools.save(folder / "other.v3.png", caption=None).rename(folder / "other.v3")
    tools.save(folder / "other.png", caption="other.png")
    (folder / "other.v3.txt").write_text("other.v3")
    assert captions(make()) == ["other.png", "other.v3", "photo.jpg", "photo.v2.final.jpg", "photo.v2.jpg"]


def test_shards_are_extracted_once_and_again_when_they_change(tools, make, shards, tmp_path):
    pattern = str(shards / "data-*.tar")
    before = tools.fingerprint(shards)
    for _ in range(2):
        make(train_data_dir=None, shards=pattern).setup("fit")
    assert tools.fingerprint(shards) == before
    assert len(list((tmp_path / "cache" / "shards").iterdir())) == 1
    write_shard(shards / "data-000.tar", [("a.png", encoded(tools, 7)), ("a.txt", b"changed")])
    assert "changed" in captions(make(train_data_dir=None, shards=pattern))


def test_the_files_written_for_shards_are_counted(make, shards, tmp_path):
    for expected in (7, 0):  # six images and metadata.jsonl, then nothing
        data = make(train_data_dir=None, shards=str(shards / "data-*.tar"))
        data.setup("fit")
        folder = next((tmp_path / "cache" / "shards").iterdir())
        assert data.index().report.written_files - expected in (0, 1), "and the file of the checks"
        assert expected in (0, len(list(folder.iterdir())))
        time.sleep(0.3)


def test_members_that_try_to_leave_the_cache_folder_stay_in_it(tools, make, tmp_path):
    write_shard(tmp_path / "evil.tar", [("../../escaped.png", encoded(tools, 1)), ("../../escaped.txt", b"x")])
    assert captions(make(train_data_dir=None, shards=str(tmp_path / "evil.tar"))) == ["x"]
    assert not list(tmp_path.parent.glob("escaped*")) and not list(tmp_path.glob("escaped*"))


def test_a_sample_without_caption_is_a_missing_caption(tools, make, tmp_path):
    write_shard(tmp_path / "a.tar", [("a.png", encoded(tools, 1))])
    with pytest.raises(DataError, match="have no caption"):
        make(train_data_dir=None, shards=str(tmp_path / "a.tar")).setup("fit")
    assert captions(make(train_data_dir=None, shards=str(tmp_path / "a.tar"), missing_captions="empty")) == [""]


@pytest.mark.parametrize("kind", ["absent", "no match", "no tar", "cut", "bad json", "no images"])
def test_shards_that_cannot_be_read_are_named_and_leave_no_litter(make, shards, tmp_path, kind):
    target = shards / "data-001.tar"
    pattern = str(target)
    if kind == "absent":
        target.unlink()
    elif kind == "no match":
        pattern = str(shards / "none-*.tar")
    elif kind == "no tar":
        target.write_bytes(b"no archive")
    elif kind == "cut":
        target.write_bytes(target.read_bytes()[:700])
    elif kind == "bad json":
        write_shard(target, [("a.png", b"x"), ("a.json", b"{")])
    else:
        write_shard(target, [("a.txt", b"x")])
    with pytest.raises(DataError, match=r"data-001|none-|a\.json|no images"):
        make(train_data_dir=None, shards=pattern).setup("fit")
    assert not list((tmp_path / "cache").rglob("*.part"))


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="the extra `hub` is not installed")


@pytest.fixture
def saved(tools, tmp_path, datasets):
    rows = {"image": [tools.picture(seed=seed) for seed in range(4)], "text": [f"thing {seed}" for seed in range(4)]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_dataset_gives_its_pictures_and_captions(make, saved):
    data = make(train_data_dir=None, dataset_name=str(saved))
    assert captions(data) == [f"thing {seed}" for seed in range(4)]
    assert "4 found, 4 used" in data.report()


def test_a_dataset_dict_is_read_by_its_split(make, saved, datasets, tmp_path):
    datasets.DatasetDict({"small": datasets.load_from_disk(str(saved))}).save_to_disk(str(tmp_path / "dict"))
    data = make(train_data_dir=None, dataset_name=str(tmp_path / "dict"), dataset_split="small")
    assert len(captions(data)) == 4
    with pytest.raises(DataError, match="split 'train'"):
        make(train_data_dir=None, dataset_name=str(tmp_path / "dict")).setup("fit")


@pytest.mark.parametrize(("key", "name"), [("image_column", "picture"), ("caption_column", "caption")])
def test_a_column_that_is_not_there_is_named_with_those_that_are(make, saved, key, name):
    with pytest.raises(DataError, match=rf"no column '{name}', only \['image', 'text'\]; set data\.init_args\.{key}"):
        make(train_data_dir=None, dataset_name=str(saved), **{key: name}).setup("fit")


def test_a_dataset_of_edits_gives_each_image_its_sources(make, tools, tmp_path, datasets):
    """Columns as in timbrooks/instructpix2pix-clip-filtered."""
    rows = {"edit_prompt": ["make it red"] * 3, "edited_image": [], "original_image": []}
    rows["edited_prompt"] = ["a red cup", "", "a red shoe"]
    for name, seed in (("edited_image", 0), ("original_image", 10)):
        for number in range(3):
            rows[name].append(str(tmp_path / f"{name}{number}.png"))
            tools.picture(seed=seed + number).save(rows[name][-1])
    kinds = dict.fromkeys(("edited_image", "original_image"), datasets.Image())
    features = datasets.Features(kinds | dict.fromkeys(("edit_prompt", "edited_prompt"), datasets.Value("string")))
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    given = {"train_data_dir": None, "dataset_name": str(tmp_path / "saved"), "image_column": "edited_image"}
    data = make(**given, caption_column="edit_prompt", source_column="original_image")
    data.setup("fit")
    assert data.sources_per_image == 1
    found = {sample.path.name: sample.sources[0].path for sample in data.index().samples}
    assert len(found) == 3
    assert [sample.description for sample in data.index().samples] == ["a red cup", None, "a red shoe"]
    for name, path in found.items():
        number = int(Path(name).stem)
        assert path.read_bytes() == Path(rows["original_image"][number]).read_bytes()
    with pytest.raises(DataError, match=r"has no column 'before'.*set data.init_args.source_column"):
        make(**given, caption_column="edit_prompt", source_column="before").setup("fit")
    with pytest.raises(DataError, match="source_column names a column of a dataset, and dataset_name is not set"):
        make(source_column="before")


def test_a_dataset_that_cannot_be_loaded_is_an_error_naming_it(make, datasets, monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"'someone/photos'.*cannot be loaded.*offline.*local copy"):
        make(train_data_dir=None, dataset_name="someone/photos").setup("fit")
