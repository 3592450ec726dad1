"""`lightning caption`: captions by models of transformers next to the images, and never over a caption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from fakes.models.captioners import MAKE, WORDS
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.data.captions.caption_model import CHAT_PROMPT, TASK_PROMPT, CaptionModel

Command = Callable[..., Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a small model of each kind."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKE.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images without captions."""
    folder = tmp_path / "photos"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for number in range(5):
        squares = numbers.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(squares).resize((64, 48), Image.Resampling.NEAREST).save(folder / f"{number}.png")
    return folder


def caption(folder: Path, ending: str = ".txt") -> dict[str, str]:
    files = sorted(folder.glob(f"*{ending}"))
    return {path.name: path.read_text(encoding="utf-8", errors="replace").strip() for path in files}


@pytest.mark.parametrize("kind", MAKE)
def test_each_kind_of_model_writes_a_caption_for_each_image(
    kind: str, models: dict[str, Path], folder: Path, command: Command
) -> None:
    said = command("caption", folder, "--model", models[kind], "--max_new_tokens", 12, "--batch_size", 2)
    assert said.code == 0, said.err
    model = CaptionModel(str(models[kind]), None, torch.device("cpu"), 12)
    alone = [model.captions([Image.open(folder / f"{number}.png").convert("RGB")])[0] for number in range(5)]
    assert list(caption(folder).values()) == alone and len(set(alone)) > 2
    if kind == "blip":
        assert all(set(text.split()) <= set(WORDS) for text in alone)
    else:
        assert all("user" not in text and "Describe" not in text for text in alone)  # the answer without the question
    assert "wrote 5 captions" in said.out and said.err.count("Kwargs") == 0


def test_prompts_are_those_that_each_kind_of_model_knows(models: dict[str, Path]) -> None:
    def prompt(kind: str, given: str | None = None) -> str | None:
        return CaptionModel(str(models[kind]), given, torch.device("cpu"), 8).prompt

    assert [prompt(kind) for kind in ("blip", "qwen", "florence")] == [None, CHAT_PROMPT, TASK_PROMPT]
    assert prompt("qwen", "Name the object.") == "Name the object."
    blip = CaptionModel(str(models["blip"]), "a photo of", torch.device("cpu"), 8)
    (text,) = blip.captions([Image.new("RGB", (64, 64), "red")])
    assert text.startswith("a photo of ")


def test_captions_that_are_there_stay_whatever_their_kind(
    models: dict[str, Path], folder: Path, command: Command
) -> None:
    (folder / "0.txt").write_text("mine\n", encoding="utf-8")
    (folder / "1.txt").write_bytes("eine Tasse für Öl".encode("latin-1"))
    (folder / "metadata.jsonl").write_text('{"file_name": "2.png", "text": "listed"}\n', encoding="utf-8")
    (folder / "3.txt").touch()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    said = command("caption", folder, "--model", models["blip"], "--trigger_word", "zorp", "--max_new_tokens", 8)
    assert said.code == 0, said.err
    assert {path: path.read_bytes() for path in before} == before
    assert caption(folder).keys() == {"0.txt", "1.txt", "3.txt", "4.txt"}
    assert caption(folder)["4.txt"].startswith("zorp, ")
    assert "5 images, 3 with a caption, 1 to caption" in said.out
    assert "1 have an empty caption, such as 3.png; delete the file" in said.out
    again = command("caption", folder, "--model", models["blip"])
    assert again.code == 0 and "0 to caption" in again.out


def test_new_captions_have_the_ending_of_the_others(models: dict[str, Path], folder: Path, command: Command) -> None:
    for number in range(3):
        (folder / f"{number}.caption").write_text("a cup", encoding="utf-8")
    assert command("caption", folder, "--model", models["blip"], "--max_new_tokens", 8).code == 0
    assert len(caption(folder, ".caption")) == 5 and caption(folder) == {}


def test_init_and_training_read_what_was_written(
    models: dict[str, Path], folder: Path, command: Command, tmp_path: Path
) -> None:
    Image.open(folder / "0.png").save(folder / "0.jpg")  # the same name, so each caption has the image's whole name
    arguments = ("--model", models["blip"], "--trigger_word", "zorp", "--max_new_tokens", 8)
    assert command("caption", folder, *arguments).code == 0
    assert {"0.png.txt", "0.jpg.txt", "1.txt"} <= caption(folder).keys()
    said = command("init", folder, "-o", tmp_path / "my.yaml")
    assert said.code == 0 and "6 images, 6 with a caption" in said.out
    given = yaml.safe_load((tmp_path / "my.yaml").read_text(encoding="utf-8"))["data"]["init_args"]
    assert given["trigger_word"] == "zorp" and given["missing_captions"] == "error"
    data = ImageCaptionData(
        str(folder), resolution=64, trigger_word="zorp", train_batch_size=6, cache_dir=str(tmp_path / "cache")
    )
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert sorted(batch["captions"]) == sorted(caption(folder).values())


def test_an_image_that_cannot_be_read_is_named_and_left_out(
    models: dict[str, Path], folder: Path, command: Command
) -> None:
    (folder / "2.png").write_bytes(b"\x89PNG broken")
    said = command("caption", folder, "--model", models["blip"], "--max_new_tokens", 8)
    assert said.code == 0 and "left out: 2.png" in said.out and "wrote 4 captions" in said.out
    assert "2.txt" not in caption(folder)


def test_no_memory_names_a_smaller_batch(
    models: dict[str, Path], folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CaptionModel, "_inputs", fail)
    said = command("caption", folder, "--model", models["blip"])
    assert said.code == 1 and said.errors == ["error: no memory for 4 images at once; give --batch_size 2"]
    assert caption(folder) == {}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "the image folder nothing does not exist"),
        (["empty"], "no images in empty (it is empty)"),
        (["photos", "--batch_size", "0"], "--batch_size must be at least 1, got 0"),
        (["photos", "--model", "photos"], "--model photos cannot be loaded: it is no image-to-text model"),
        (
            ["photos", "--model", "no/such"],
            "--model no/such cannot be loaded: HF_HUB_OFFLINE is set, and it is neither",
        ),
        (["photos", "--device", "vulcan"], "--device vulcan is no device; this machine has "),
        (["photos", "--trigger_word", "Ã"], "--trigger_word is 'Ã', which looks like text that was read in a wrong"),
    ],
)
def test_what_cannot_be_captioned_is_one_sentence(
    arguments: list[str],
    sentence: str,
    folder: Path,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = command("caption", *arguments)
    assert said.code == 1 and len(said.errors) == 1 and sentence in said.err, said.err
    assert caption(folder) == {}


def test_a_model_that_says_nothing_is_an_error(
    models: dict[str, Path], folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CaptionModel, "captions", lambda self, images: [""] * len(images))
    said = command("caption", folder, "--model", models["blip"])
    assert said.code == 1 and "wrote no caption for 5 images; give another model" in said.err
    assert "left out: 0.png: the model said nothing" in said.out


def test_a_caption_that_appears_meanwhile_stays(
    models: dict[str, Path], folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = CaptionModel.captions

    def captions(self: CaptionModel, images: Any) -> list[str]:
        (folder / "0.txt").write_text("mine", encoding="utf-8")
        return own(self, images)

    monkeypatch.setattr(CaptionModel, "captions", captions)
    said = command("caption", folder, "--model", models["blip"], "--max_new_tokens", 8)
    assert said.code == 1 and "0.txt appeared meanwhile and is left as it is" in said.err
    assert caption(folder)["0.txt"] == "mine"
