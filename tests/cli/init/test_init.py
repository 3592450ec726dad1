"""`lightning init`: the config it writes for a folder trains as it is, and each mistake is one sentence."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from lightning_aigc.cli.init.card_sizes import CARDS
from lightning_aigc.cli.init.config import SHIPPED, Choice, read_shipped, render
from lightning_aigc.cli.init.folder import is_rare, made_up_trigger_word, shared_trigger_word
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion.families import FAMILIES
from tools.embedded.drawing import draw_brand

Command = Callable[..., Any]
SHAPES = [(800, 600), (600, 800), (640, 640)]


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # its cache of checked images


def pictures(
    folder: Path, count: int, captions: Callable[[int], str | None] = lambda _: None, scale: float = 1
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        size = tuple(int(side * scale) for side in SHAPES[number % len(SHAPES)])
        draw_brand("mug", random.Random(number), 64).resize(size).save(folder / f"{number}.jpg")  # type: ignore[arg-type]
        if (caption := captions(number)) is not None:
            (folder / f"{number}.txt").write_text(caption)
    return folder


def init(command: Command, folder: Path, output: Path, *more: object) -> tuple[dict[str, Any], str]:
    said = command("init", folder, "-o", output, *more)
    assert said.code == 0, said.err
    text = output.read_text(encoding="utf-8")
    return yaml.safe_load(text), text


@pytest.mark.filterwarnings("ignore")  # what Lightning says about loaders and precisions
@pytest.mark.parametrize("card", ["8gb", "12gb", "24gb"])
@pytest.mark.parametrize("has_captions", [True, False])
def test_what_it_writes_passes_a_dry_run_with_nothing_edited(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_captions: bool, card: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = pictures(tmp_path / "photos", 5, (lambda i: f"a zorp mug number {i}") if has_captions else lambda _: None)
    config, _ = init(command, Path("photos"), tmp_path / "my.yaml", "--base", "embedded:sd", "--card", card)
    data, model = config["data"]["init_args"], config["model"]["init_args"]
    assert data["missing_captions"] == ("error" if has_captions else "trigger")
    assert data["trigger_word"] == ("zorp" if has_captions else "phts")
    assert all(data["trigger_word"] in prompt for prompt in model["validation_prompts"])
    said = command("fit", "-c", tmp_path / "my.yaml", "--dry_run")
    assert said.code == 0, said.err
    assert "5 found, 5 used" in said.out and "one step:" in said.out
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".txt") == [
        f"{number}.txt" for number in range(5 * has_captions)
    ]


def test_every_choice_has_its_reason_beside_it_and_all_else_stays_as_shipped(command: Command, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", 24, lambda i: f"a zorp mug number {i}")
    config, text = init(command, folder, tmp_path / "my.yaml", "--card", "12gb")
    shipped = yaml.safe_load((SHIPPED / "sd_lora.yaml").read_text())
    for block in ("model", "data"):
        for key, value in config[block]["init_args"].items():
            if value != shipped[block]["init_args"][key]:
                (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{key}:")]
                assert len(line.partition(" # ")[2]) > 10, line
        assert list(config[block]["init_args"])[: len(shipped[block]["init_args"])] == list(shipped[block]["init_args"])
    assert "YOUR_" not in text
    for comment in (line.partition("#")[2] for line in (SHIPPED / "sd_lora.yaml").read_text().splitlines()[40:60]):
        assert comment in text or "YOUR_" in comment or "hub id" in comment
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    assert (model["max_train_steps"], data["resolution"], data["enable_bucket"]) == (600, 512, True)
    assert "each image is seen 100 times" in text
    assert config["trainer"]["default_root_dir"] == "runs/my" and model["output_name"] == "my"


def test_it_says_where_pictures_are_few_small_square_or_without_captions(command: Command, tmp_path: Path) -> None:
    few, text = init(command, pictures(tmp_path / "few", 4), tmp_path / "few.yaml")
    assert few["model"]["init_args"]["learning_rate"] == 5e-5
    assert few["model"]["init_args"]["max_train_steps"] == 400 and ", the least;" in text
    small = pictures(tmp_path / "small", 12, lambda i: "a zorp mug" if i % 2 else None, scale=0.5)
    (small / "lost.txt").write_text("a caption without an image")
    (small / "broken.jpg").write_bytes(b"no picture")
    said = command("init", small, "-o", tmp_path / "small.yaml")
    assert said.code == 0 and "left out: broken.jpg" in said.out
    data = yaml.safe_load((tmp_path / "small.yaml").read_text())["data"]["init_args"]
    assert data["resolution"] == 320 and data["missing_captions"] == "trigger"
    text = (tmp_path / "small.yaml").read_text()
    assert "6 of 12 images have no caption" in text and "lost.txt" in text and "below the base's 512" in text
    for number in range(3):
        (tmp_path / "square").mkdir(exist_ok=True)
        Image.new("RGB", (600, 600), (number, 0, 0)).save(tmp_path / "square" / f"{number}.png")
    square, _ = init(command, tmp_path / "square", tmp_path / "square.yaml")
    assert square["data"]["init_args"]["enable_bucket"] is False


@pytest.mark.parametrize(
    ("base", "card", "template", "memory", "pictures_a_step"),
    [
        ("sd15", "4gb", "sd_qlora_4gb.yaml", "max", 8),
        ("sd15", "8gb", "sd_lora_8gb.yaml", "max", 8),
        ("sdxl", "4gb", "sdxl_qlora_6gb.yaml", "max", 4),
        ("sdxl", "8gb", "sdxl_qlora_6gb.yaml", "max", 4),
        ("sd15", "24gb", "sd_lora.yaml", "off", 4),
        ("sd15", "910b", "sd_lora_ascend.yaml", "lean", 4),
        ("sdxl", "12gb", "sdxl_lora.yaml", "max", 4),
        ("someone/their-xl-model", "24gb", "sdxl_lora.yaml", "lean", 4),
    ],
)
def test_base_and_card_choose_the_shipped_config_and_the_memory_level(
    command: Command, tmp_path: Path, base: str, card: str, template: str, memory: str, pictures_a_step: int
) -> None:
    folder = pictures(tmp_path / "photos", 3, scale=2)
    config, text = init(command, folder, tmp_path / "my.yaml", "--base", base, "--card", card)
    assert f"from {template}" in text.splitlines()[0]
    assert config["trainer"]["plugins"]["init_args"]["memory"] == memory  # `off` is not false
    batch = config["data"]["init_args"]["train_batch_size"] * config["trainer"]["accumulate_grad_batches"]
    assert batch == pictures_a_step
    assert config["data"]["init_args"]["resolution"] == (1024 if "xl" in base else 512)
    kind = {("sd15", "4gb"): "int8", ("sdxl", "4gb"): "nf4", ("sdxl", "8gb"): "int8"}.get((base, card))
    assert config["model"]["init_args"].get("base_quantization") == kind


def test_every_shipped_config_is_there_for_each_base_and_card() -> None:
    for family in FAMILIES.values():
        configs = [family.shipped_config, *(row.config for row in family.cards.values())]
        assert all((SHIPPED / name).is_file() for name in configs)
        assert list(family.cards) == list(CARDS) if family.step_memory is None else not family.cards
    assert (SHIPPED / "sd_lora.yaml").samefile(Path(__file__).parents[3] / "configs" / "sd_lora.yaml")


@pytest.mark.parametrize("value", ["off", "no", "1e4", "0x1f", "a: b", "é", "null"])
def test_a_text_that_yaml_takes_for_another_type_is_read_back_as_it_is(value: str) -> None:
    choices = [
        Choice("data.init_args.trigger_word", value, "it"),
        Choice("model.init_args.validation_prompts", [value], "it"),
    ]
    config = yaml.safe_load(render(read_shipped("sd_lora.yaml"), choices, "head"))
    assert config["data"]["init_args"]["trigger_word"] == value
    assert config["model"]["init_args"]["validation_prompts"] == [value]


@pytest.mark.parametrize(
    ("captions", "word"),
    [
        (["zorp mug on white", "zorp chair", "Zorp lamp"], "zorp"),
        (["a photo of sks dog", "a drawing of sks dog"], "sks"),
        (["a photo of a dog", "a photo of a dog outside"], None),  # shared, and words that everybody uses
        (["zorp mug", "a blue mug"], None),
        (["zorp mug"], None),
        ([], None),
    ],
)
def test_the_trigger_word_is_a_rare_word_that_all_captions_share(captions: list[str], word: str | None) -> None:
    assert shared_trigger_word(captions) == word


@pytest.mark.parametrize("folder", ["photos", "My Red Mugs!", "dog", "写真", "a", "zorp"])
def test_a_made_up_trigger_word_is_rare_stays_the_same_and_is_in_no_caption(folder: str) -> None:
    captions = ["a zrp mug", "a phts"]
    word = made_up_trigger_word(folder, captions)
    assert word.isascii() and word.isalpha() and 3 <= len(word) <= 12
    assert is_rare(word) and not is_rare("mug")
    assert word not in {"zrp", "phts"}
    assert word == made_up_trigger_word(folder, captions)


def test_each_mistake_is_one_sentence_and_writes_nothing(command: Command, tmp_path: Path) -> None:
    photos = pictures(tmp_path / "photos", 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.md").write_text("text")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.jpg").write_bytes(b"no picture")
    (tmp_path / "mine.yaml").write_text("mine")
    new = tmp_path / "new.yaml"
    for arguments, says in (
        ((tmp_path / "nowhere", "-o", new), "does not exist"),
        ((tmp_path / "mine.yaml", "-o", new), "is a file"),
        ((tmp_path / "empty", "-o", new), "it is empty"),
        ((tmp_path / "texts", "-o", new), "1 other files are there"),
        ((tmp_path / "broken", "-o", new), "none of the 1 images"),
        ((photos, "-o", tmp_path / "mine.yaml"), "--force"),
        ((photos, "-o", tmp_path / "no" / "new.yaml"), "does not exist"),
        ((photos, "-o", photos), "is a folder"),
        (
            (photos, "-o", new, "--base", "nonsense"),
            "use chroma, flux, flux2, flux2_dev, flux_kontext, krea2, qwen_image, qwen_image_edit, ",
        ),
        ((photos, "-o", new, "--base", tmp_path / "empty"), "model_index.json"),
        ((photos, "-o", new, "--base", tmp_path / "mine.yaml"), "checkpoint"),
        ((photos, "-o", new, "--trigger_word", "two words"), "one word"),
    ):
        said = command("init", *arguments)
        assert said.code == 1, (arguments, said)
        assert len(said.errors) == 1 and says in said.errors[0], said.errors
        assert not new.exists() and (tmp_path / "mine.yaml").read_text() == "mine"
    assert command("init", photos, "-o", tmp_path / "mine.yaml", "--force").code == 0
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["model"]


def test_a_run_without_its_folder_stops_before_a_model_is_read(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("read")

    config = tmp_path / "my.yaml"
    init(command, pictures(tmp_path / "photos", 2), config)
    (tmp_path / "photos").rename(tmp_path / "moved")
    for reads in ("diffusion.training.module.load_components", "metrics.clip_model.CLIPModel.__init__"):
        monkeypatch.setattr(f"lightning_aigc.{reads}", never)
    said = command(
        "fit", "-c", config, "--trainer.accelerator", "cpu", f"--trainer.default_root_dir={tmp_path / 'run'}"
    )
    assert said.code == 1
    assert len(said.errors) == 1 and "photos does not exist" in said.errors[0]


def test_it_reads_the_captions_of_other_programs_and_its_config_does_too(command: Command, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos" / "10_zorp cup", 3)
    for number, text in enumerate(("雪中的茶壶", "一个红色的杯子", "桌子上的吉他")):
        (folder / f"{number}.caption").write_bytes(text.encode("gbk"))
    said = command("init", tmp_path / "photos", "-o", tmp_path / "my.yaml", "--card", "12gb")
    assert said.code == 0, said.err
    for line in ("3 with a caption", "read as GBK", "caption_extension .caption", "the word of the folder 10_zorp cup"):
        assert line in said.out
    config = yaml.safe_load((tmp_path / "my.yaml").read_text(encoding="utf-8"))
    own = config["data"]["init_args"]
    assert (own["trigger_word"], own["missing_captions"]) == ("zorp", "error")
    assert any("茶壶" in prompt for prompt in config["model"]["init_args"]["validation_prompts"])
    found = ImageCaptionData(**own | {"cache_latents": False, "cache_text_embeddings": False}).index()
    assert [sample.caption for sample in found.samples] == [
        "zorp 雪中的茶壶",
        "zorp 一个红色的杯子",
        "zorp 桌子上的吉他",
    ]
    assert found.report.items_per_epoch == 30


def test_a_damaged_line_is_named_and_nothing_is_written(command: Command, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", 2)
    (folder / "metadata.jsonl").write_text('{"file_name": "0.jpg", "text": "a mug"}\n{"file_name": "1.jpg" "text": ""}')
    said = command("init", folder, "-o", tmp_path / "my.yaml")
    assert said.code == 1 and not (tmp_path / "my.yaml").exists()
    assert len(said.errors) == 1 and "metadata.jsonl line 2 is not valid JSON" in said.errors[0]


def test_letters_of_a_wrong_encoding_are_no_trigger_word(command: Command, tmp_path: Path) -> None:
    assert shared_trigger_word(["Ã a mug", "Ã a cup"]) is None
    said = command("init", pictures(tmp_path / "photos", 2), "-o", tmp_path / "my.yaml", "--trigger_word", "Ã")
    assert said.code == 1 and "wrong encoding" in said.errors[0]
