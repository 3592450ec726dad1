"""Captions as other programs and editors write them: each is read, or named in a sentence with what to set."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_aigc.data import ImageCaptionData
from lightning_aigc.data.captions.encodings import decode_text, guess_encoding
from lightning_aigc.errors import DataError

Make = Callable[..., ImageCaptionData]
CHINESE = ("zorp 一个红色的杯子", "zorp 雪中的茶壶", "zorp 桌子上的吉他，高清")
JAPANESE = ("zorp 赤いカップ", "zorp 雪の中のギター", "zorp 白い背景のティーポット")


def captions(data: ImageCaptionData) -> list[str]:
    return [sample.caption for sample in data.index().samples]


@pytest.mark.parametrize(
    ("texts", "encoding", "title"),
    [
        (CHINESE, "gbk", "GBK"),
        (JAPANESE, "shift_jis", "Shift-JIS"),
        (("zorp красная чашка", "zorp кошка на столе"), "cp1251", "cp1251"),
        (("zorp à café", "zorp größer", "zorp – “señor”"), "cp1252", "Latin-1"),
        (("zorp mug", "zorp cup on a table"), "utf-16-le", "UTF-16"),
        (("zorp mug", "zorp cup on a table"), "utf-16-be", "UTF-16"),
    ],
)
@pytest.mark.parametrize("table", [True, False])
def test_captions_of_another_encoding_are_read_and_named_once(
    tools, make: Make, folder: Path, texts: tuple[str, ...], encoding: str, title: str, table: bool
) -> None:
    for number, text in enumerate(texts):
        tools.save(folder / f"{number}.png", tools.picture(seed=number), caption=None)
        if not table:
            (folder / f"{number}.txt").write_bytes(text.encode(encoding))
    if table:
        rows = "\n".join(f'{number}.png,"{text}"' for number, text in enumerate(texts))
        (folder / "captions.csv").write_bytes(rows.encode(encoding))
    data = make()
    assert captions(data) == list(texts)
    (line,) = [line for line in data.report().splitlines() if "not UTF-8" in line]
    assert title in line and texts[0][:12] in line and "caption_encoding" in line


def test_the_encoding_that_is_set_is_used_where_a_guess_is_wrong(tools, make: Make, folder: Path) -> None:
    tools.save(folder / "a.png", caption=None)
    (folder / "a.txt").write_bytes("红色".encode("gbk"))  # two characters: the same bytes are words in Big5
    assert captions(make(caption_encoding="gb18030")) == ["红色"]
    with pytest.raises(DataError, match=r"caption_encoding.*'gb99'.*gb18030"):
        make(caption_encoding="gb99")


def test_one_short_caption_is_read_by_the_encoding_of_all() -> None:
    contents = [text.encode("gbk") for text in (*CHINESE, "红色")]
    assert guess_encoding(contents) == "gb18030"
    assert decode_text(contents[-1], "gb18030") == ("红色", "GBK")
    assert guess_encoding([b"a mug", "caf\u00e9".encode()]) is None


def test_caption_files_of_another_ending_are_an_error_whose_remedy_works(tools, make: Make, folder: Path) -> None:
    for number in range(3):
        tools.save(folder / f"{number}.png", caption=None)
        (folder / f"{number}.caption").write_text(f"mug {number}")
    with pytest.raises(DataError, match=r"3 of 3 images .* have a caption in a \.caption file: ") as error:
        make().index()
    assert "no caption" not in str(error.value)
    remedy = re.search(r"[Ss]et data\.init_args\.(\w+) to (\S+),", str(error.value))
    assert remedy is not None
    assert captions(make(**{remedy[1]: remedy[2]})) == ["mug 0", "mug 1", "mug 2"]
    assert "a caption in a .caption file" in make(missing_captions="filename").report()


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("captions.csv", 'file_name;text\na.png;a mug, red\nb.png;"a; cup"\n', "separated by semicolons"),
        ("captions.csv", "a.png;a mug, red\nb.png;a; cup\n".replace("a; cup", '"a; cup"'), "separated by semicolons"),
        ("captions.csv", 'image,caption\na.png,"a mug, red"\nb.png,a; cup\n', "'image' and 'caption'"),
        ("captions.csv", "id\tpath\tprompt\n1\ta.png\ta mug, red\n2\tb.png\ta; cup\n", "separated by tabs"),
        ("metadata.csv", 'file_name,text\na.png,"a mug, red"\nb.png,a; cup\n', None),
        (
            "metadata.jsonl",
            '{"image": "a.png", "prompt": "a mug, red"}\n{"image": "b.png", "prompt": "a; cup"}',
            "'image' and 'prompt'",
        ),
        (
            "metadata.jsonl",
            json.dumps(
                [{"file_name": "a.png", "text": "a mug, red"}, {"file_name": "b.png", "text": "a; cup"}], indent=1
            ),
            "one JSON list",
        ),
    ],
)
def test_tables_of_other_programs_are_read(
    tools, make: Make, folder: Path, name: str, text: str, note: str | None
) -> None:
    for image in ("a.png", "b.png"):
        tools.save(folder / image, caption=None)
    (folder / name).write_text(text)
    data = make()
    assert captions(data) == ["a mug, red", "a; cup"]
    assert note is None or note in data.report()


def test_a_table_of_another_name_is_named_where_captions_are_missing(tools, make: Make, folder: Path) -> None:
    tools.save(folder / "a.png", caption=None)
    (folder / "labels.csv").write_text("a.png,a mug")
    with pytest.raises(DataError, match=r"Not read because of their names: labels\.csv"):
        make().index()


@pytest.mark.parametrize("above", [True, False])
def test_kohyas_folder_gives_the_repeats_and_its_word_is_offered(tools, make: Make, folder: Path, above: bool) -> None:
    tools.save(folder / "10_zorp cup" / "a.png", caption="a cup")
    given = folder if above else folder / "10_zorp cup"
    data = make(train_data_dir=str(given))
    assert data.data_report.items_per_epoch == 10
    assert "10_zorp cup: each is taken 10 times" in data.report()
    assert "set data.init_args.trigger_word to zorp" in data.report()
    assert "10_zorp" not in make(train_data_dir=str(folder), trigger_word="zorp").report()


@pytest.mark.parametrize("word", ["Ã", "ã", "\ufffd\ufffd", "zo\x85rp"])
def test_a_trigger_word_of_a_wrong_encoding_is_refused(make: Make, word: str) -> None:
    with pytest.raises(DataError, match=r"trigger_word.*wrong encoding; set data.init_args.trigger_word: zorp"):
        make(trigger_word=word)


def test_a_chinese_character_is_a_trigger_word(make: Make) -> None:
    make(trigger_word="猫")
