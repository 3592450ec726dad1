"""Sources, encodings and processing of captions."""

from __future__ import annotations

import json
import random
import unicodedata

import pytest

from lightning_aigc.data.captions.captions import add_trigger_word, shuffle_tags, trigger_tags
from lightning_aigc.errors import DataError


def captions(data) -> dict[str, str]:
    data.prepare()
    return {
        name: caption
        for batch in data.loader()
        for name, caption in zip(batch["names"], batch["captions"], strict=True)
    }


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")


def test_metadata_jsonl_wins_over_csv_and_csv_over_sidecars(tools, make, folder):
    for name in "abc":
        tools.save(folder / f"{name}.png", caption="from sidecar")
    (folder / "captions.csv").write_text("file_name,text\na.png,from csv\nb.png,from csv\n")
    write_jsonl(folder / "metadata.jsonl", [{"file_name": "a.png", "text": "from jsonl"}])
    assert captions(make()) == {"a.png": "from jsonl", "b.png": "from csv", "c.png": "from sidecar"}


def test_a_csv_without_header_and_quoted_commas_works(tools, make, folder):
    tools.save(folder / "a.png", caption=None)
    (folder / "captions.csv").write_text('a.png,"red, round"\n\n')
    assert captions(make()) == {"a.png": "red, round"}


def test_metadata_in_a_sub_folder_names_files_beside_it(tools, make, folder):
    tools.save(folder / "sub" / "a.png", caption=None)
    write_jsonl(folder / "sub" / "metadata.jsonl", [{"file_name": "a.png", "text": "x"}])
    assert captions(make()) == {"sub/a.png": "x"}


def test_unicode_forms_of_a_name_are_the_same_name(tools, make, folder):
    tools.save(folder / unicodedata.normalize("NFD", "café.png"), caption=None)
    write_jsonl(folder / "metadata.jsonl", [{"file_name": unicodedata.normalize("NFC", "café.png"), "text": "x"}])
    assert list(captions(make()).values()) == ["x"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("café".encode(), "café"),
        ("café".encode("utf-8-sig"), "café"),
        ("café".encode("utf-16"), "café"),
        (b"\xfe\xff" + "café".encode("utf-16-be"), "café"),
        ("café".encode("utf-32"), "café"),
        ("café".encode("latin-1"), "café"),
        (b"  two\r\n lines \n", "two lines"),
    ],
)
def test_a_sidecar_may_have_any_usual_encoding(tools, make, folder, content, expected):
    tools.save(folder / "a.png")
    (folder / "a.txt").write_bytes(content)
    data = make()
    assert captions(data) == {"a.png": expected}
    assert ("Latin-1" in data.report()) == (content == "café".encode("latin-1"))


def test_a_caption_of_ten_thousand_words_is_kept_and_noted(tools, make, folder):
    tools.save(folder / "a.png", caption="word " * 10_000)
    data = make()
    assert len(captions(data)["a.png"].split()) == 10_000
    assert "1 captions have more than 60 words" in data.report()


@pytest.mark.parametrize("content", ["", "  \n", "\ufeff"])
def test_an_empty_caption_counts_as_missing(tools, make, folder, content):
    tools.save(folder / "a.png", caption=content)
    with pytest.raises(DataError, match=r"1 of 1 images.*a\.png.*missing_captions"):
        make().setup("fit")


@pytest.mark.parametrize(("switch", "expected"), [("filename", "zorp red shoe"), ("empty", ""), ("trigger", "zorp")])
def test_the_one_switch_fills_missing_captions(tools, make, folder, switch, expected):
    tools.save(folder / "red_shoe.png", caption=None)
    data = make(missing_captions=switch, trigger_word="zorp")
    assert captions(data) == {"red_shoe.png": expected}
    assert "1 filled in" in data.report()


def test_a_caption_that_matches_no_picture_is_an_error_unless_switched_off(tools, make, folder):
    tools.save(folder / "a.png")
    (folder / "b.txt").write_text("about nothing")
    with pytest.raises(DataError, match=r"match no image: b\.txt"):
        make().setup("fit")
    report = make(missing_captions="filename").report()
    assert "note      1 captions" in report and "match no image" in report and "    b.txt" in report


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_listed_file_that_is_not_there_is_an_error_naming_the_place(tools, make, folder, kind):
    tools.save(folder / "a.png")
    if kind == "jsonl":
        write_jsonl(folder / "metadata.jsonl", [{"file_name": "b.png", "text": "x"}])
    else:
        (folder / "captions.csv").write_text("b.png,x\n")
    with pytest.raises(DataError, match=r"b\.png \((metadata\.jsonl line 1|captions\.csv row 1)\)"):
        make().setup("fit")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metadata.jsonl", '{"file_name": "a.png", "text": "x"', "line 1.*not valid JSON"),
        ("metadata.jsonl", '["a.png", "x"]', "file_name"),
        ("metadata.jsonl", '{"text": "x"}', "file_name"),
        ("metadata.jsonl", '{"file_name": "a.png", "label": "x"}', "caption_column"),
        ("metadata.jsonl", '{"file_name": "a.png", "text": 3}', "must be text, got int"),
        ("metadata.jsonl", '{"file_name": "a.png", "text": "x"}\n{"file_name": "a.png", "text": "y"}', "two different"),
        ("metadata.jsonl", "[" * 100_000, "JSON"),
        ("captions.csv", "file_name,label\na.png,x\n", "caption_column"),
        ("captions.csv", "a.png,one, two\n", "quotes"),
        ("captions.csv", "file_name,text\na.png\n", "row 2"),
    ],
)
def test_damaged_metadata_is_an_error_that_names_the_line(tools, make, folder, name, content, message):
    tools.save(folder / "a.png", caption=None)
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=message):
        make().setup("fit")


def test_two_pictures_with_one_sidecar_are_an_error_naming_both(tools, make, folder):
    tools.save(folder / "a.png")
    tools.save(folder / "a.jpg")
    with pytest.raises(DataError, match=r"a\.jpg and a\.png.*share the caption file a\.txt.*rename"):
        make().setup("fit")


def test_two_pictures_of_one_stem_listed_in_metadata_are_fine(tools, make, folder):
    tools.save(folder / "a.png", caption=None)
    tools.save(folder / "a.jpg", caption=None)
    write_jsonl(folder / "metadata.jsonl", [{"file_name": f"a.{s}", "text": s} for s in ("png", "jpg")])
    assert captions(make()) == {"a.png": "png", "a.jpg": "jpg"}


def test_another_caption_extension_works_with_and_without_its_dot(tools, make, folder):
    tools.save(folder / "a.png", caption=None)
    (folder / "a.caption").write_text("x")
    assert captions(make(caption_extension="caption")) == captions(make(caption_extension=".caption")) == {"a.png": "x"}


def test_the_trigger_word_is_added_once():
    assert add_trigger_word("a Zorp shoe", "zorp", ",") == "a Zorp shoe"
    assert add_trigger_word("a zorpian shoe", "zorp", ",") == "zorp a zorpian shoe"
    assert add_trigger_word("shoe, red", "zorp", ",") == "zorp, shoe, red"
    assert add_trigger_word("C++ shoe", "c++", ",") == "C++ shoe"
    assert add_trigger_word("shoe", None, ",") == "shoe"


def test_shuffled_tags_keep_the_first_ones_and_lose_none():
    shuffled = {shuffle_tags("a, b, c, d, e", ",", 2, random.Random(seed)) for seed in range(50)}
    assert all(caption.startswith("a, b, ") and sorted(caption.split(", ")) == list("abcde") for caption in shuffled)
    assert len(shuffled) == 6


def test_the_trigger_word_stays_in_front_of_shuffled_tags(tools, make, folder):
    for number in range(8):
        tools.save(folder / f"{number}.png", caption="a, b, c, d")
    found = captions(make(trigger_word="zorp", shuffle_caption=True)).values()
    assert all(caption.startswith("zorp, ") for caption in found)
    assert len(set(found)) > 1


@pytest.mark.parametrize("front", ["Zorp", "ZORP", "a zorp shoe", "Zorp mug"])
def test_a_trigger_word_in_another_case_or_within_the_first_tag_stays_in_front(tools, make, folder, front):
    for number in range(8):
        tools.save(folder / f"{number}.png", caption=f"{front}, b, c, d, e")
    found = captions(make(trigger_word="zorp", shuffle_caption=True)).values()
    assert all(caption.startswith(f"{front}, ") for caption in found)
    assert len(set(found)) > 1


@pytest.mark.parametrize(
    ("caption", "separator", "tags"),
    [
        ("Zorp, b", ",", 1),
        ("zorpian, b", ",", 0),
        ("b, zorp", ",", 0),
        ("the red, Shoe, b", ",", 2),
        ("ZORP|b", "|", 1),
    ],
)
def test_tags_that_the_trigger_word_keeps_in_front(caption, separator, tags):
    assert trigger_tags(caption, "red, shoe" if "red" in caption else "zorp", separator) == tags
    assert trigger_tags(caption, None, separator) == 0


def test_caption_dropout_empties_its_share(tools, make, folder):
    tools.save(folder / "a.png")
    data = make(caption_dropout_rate=0.25, num_repeats=400, train_batch_size=8)
    data.prepare()
    found = [caption for batch in data.loader() for caption in batch["captions"]]
    assert 60 < found.count("") < 140
    assert set(found) == {"", "a thing"}
