"""`lightning validate`, `test`, `predict` and `sample` of a run: what they print and write."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lightning_aigc.cli.fit.evaluate import trained_images
from lightning_aigc.diffusion import DiffusionControlNet, StableDiffusionLoRA
from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.errors import ModelError

Command = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loggers and folders


@pytest.fixture
def quick(quick_config: dict[str, Any], tmp_path: Path) -> Path:
    """A config of two steps with held-out images; its run goes to `tmp_path / "run"`."""
    quick_config["trainer"]["default_root_dir"] = str(tmp_path / "run")
    quick_config["trainer"]["callbacks"] = []
    quick_config["data"]["init_args"]["validation_split"] = 0.3
    quick_config["model"]["init_args"] |= {"learning_rate": 1e-2, "validation_steps": 1, "lr_warmup_steps": 0}
    path = tmp_path / "quick.yaml"
    path.write_text(yaml.safe_dump(quick_config))
    return path


def number(text: str, name: str) -> float:
    found = re.search(rf"{name}\D+([\d.]+)", text)
    assert found is not None, text
    return float(found[1])


def test_validate_test_and_predict_use_the_runs_snapshot(command: Command, quick: Path, tmp_path: Path) -> None:
    untrained = command("validate", "-c", quick)
    assert untrained.code == 0, untrained.err
    assert "untrained" in untrained.out and not (tmp_path / "run").exists()
    assert command("fit", "-c", quick).code == 0
    config = tmp_path / "run" / "config.yaml"
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    trained = command("validate", "-c", quick)
    assert trained.code == 0 and "snapshot of step 2" in trained.out, trained.err
    assert number(trained.out, "val_loss") != number(untrained.out, "val_loss")
    again = command("validate", "-c", quick, "--ckpt_path", "none")
    assert number(again.out, "val_loss") == number(untrained.out, "val_loss")
    tested = command("test", "-c", quick, "--ckpt_path", "latest")
    assert number(tested.out, "test_loss") == number(trained.out, "val_loss")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert config in before

    assert command("predict", "-c", quick).code == 0
    predicted = np.asarray(Image.open(tmp_path / "run" / "predict.png"))
    last = np.asarray(Image.open(tmp_path / "run" / "samples" / "step_000002.png"))
    assert np.array_equal(predicted, last), "the same weights, prompts and seeds"


def test_held_out_images_that_the_run_trained_on_are_named(command: Command, quick: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(quick.read_text(encoding="utf-8"))
    config["data"]["init_args"]["validation_split"] = 0.0
    quick.write_text(yaml.safe_dump(config), encoding="utf-8")
    untrained = command("validate", "-c", quick)
    assert untrained.code != 0 and "set data.init_args.validation_split, such as 0.1, or" in untrained.err
    assert command("fit", "-c", quick).code == 0
    alone = command("validate", "-c", quick)
    assert alone.code != 0 and "set data.init_args.validation_data_dir to a folder of images" in alone.err
    assert "such as 0.1" not in alone.err
    split = ("--data.init_args.validation_split", "0.3")
    with pytest.warns(UserWarning, match=r"had data.init_args.validation_split: 0.0, not 0.3: .* held out now were"):
        leaky = command("test", "-c", quick, *split)
    assert leaky.code == 0 and "test_loss" in leaky.out
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the run of this snapshot")
        assert command("test", "-c", quick, *split, "--ckpt_path", "none").code == 0


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ({"validation_split": 0.1}, {"validation_split": 0.1}, ""),
        ({"validation_split": 0.1}, {"validation_split": 0.3}, "set data.init_args.validation_split: 0.1, or set"),
        ({"validation_split": 0.1, "train_data_dir": "a"}, {"validation_split": 0.1, "train_data_dir": "b"}, ""),
        ({"validation_split": 0.1}, {"validation_split": 0.3, "train_data_dir": "b"}, "may have been trained on"),
        ({"validation_split": 0.1}, {"validation_split": 0.1, "source_data_dir": "b"}, "were trained on"),
        ({"validation_split": 0.0, "train_data_dir": "a"}, {"validation_data_dir": "b"}, ""),
        (
            {"validation_split": 0.0, "train_data_dir": "a"},
            {"validation_data_dir": "./a/in"},
            "the run of this snapshot",
        ),
        ({"shards_dir": "shards"}, {"validation_shards_dir": "shards/"}, "validation_shards_dir to a folder of other"),
        ({"shards_dir": "shards"}, {"validation_shards_dir": "held"}, ""),
    ],
)
def test_data_of_a_snapshots_run_are_no_held_out_data(was: dict[str, Any], now: dict[str, Any], said: str) -> None:
    lines = trained_images(*({f"data.init_args.{k}": v for k, v in given.items()} for given in (was, now)))
    assert (len(lines) == 1 and said in lines[0]) if said else not lines


def test_predict_of_a_controlnet_takes_the_conditions_of_the_data(
    command: Command, quick: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load(quick.read_text(encoding="utf-8"))
    kept = {k: v for k, v in config["model"]["init_args"].items() if k in signature(DiffusionControlNet).parameters}
    config["model"] = {"class_path": "DiffusionControlNet", "init_args": kept}
    quick.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert command("fit", "-c", quick).code == 0
    said = command("predict", "-c", quick)
    assert said.code == 0, said.err
    predicted = np.asarray(Image.open(tmp_path / "run" / "predict.png"))
    last = np.asarray(Image.open(tmp_path / "run" / "samples" / "step_000002.png"))
    assert np.array_equal(predicted, last), "the same weights, prompts, seeds and conditions"


def test_validate_without_held_out_pictures_says_what_to_set(command: Command, quick: Path) -> None:
    said = command("validate", "-c", quick, "--data.init_args.validation_split", "0")
    assert said.code == 1
    assert len(said.errors) == 1 and "validation_split" in said.errors[0]


def test_latest_without_a_snapshot_is_one_sentence(command: Command, quick: Path) -> None:
    said = command("validate", "-c", quick, "--ckpt_path", "latest")
    assert said.code == 1 and len(said.errors) == 1 and "no snapshot" in said.errors[0]


def test_both_kinds_of_held_out_pictures_are_one_sentence(command: Command, quick: Path, photos: Path) -> None:
    said = command("fit", "-c", quick, "--data.init_args.validation_data_dir", photos)
    assert said.code != 0 and len(said.errors) == 1 and "set only one" in said.errors[0]


# sample -------------------------------------------------------------------------------------------------------------


def test_sample_draws_what_the_run_drew(command: Command, quick: Path, tmp_path: Path) -> None:
    assert command("fit", "-c", quick).code == 0
    config, grid = tmp_path / "run" / "config.yaml", tmp_path / "grid.png"
    said = command("sample", "-c", config, "--seeds", 0, "-o", grid)
    assert said.code == 0, said.err
    assert "zorp.safetensors" in said.out and "grid.png" in said.out
    facts = Image.open(grid).text  # type: ignore[attr-defined]
    assert json.loads(facts["prompts"]) == ["a zorp cup"] and json.loads(facts["seeds"]) == [0]

    given = yaml.safe_load(config.read_text())["model"]["init_args"]
    own = np.asarray(Image.open(tmp_path / "run" / "samples" / "step_000002.png"))
    drawn = np.asarray(Image.open(grid))
    top = slice(8, 8 + 160)  # the image, without what is written under it
    assert np.abs(own[top, top].astype(int) - drawn[top, top].astype(int)).max() <= 3
    assert command("sample", "-c", config, "--seeds", 0, "-o", grid, "--resolution", 64).code == 0
    assert Image.open(grid).width < drawn.shape[1]
    odd = command("sample", "-c", config, "-o", grid, "--resolution", 100)
    assert odd.code == 1 and odd.errors == [
        "error: --resolution must be a multiple of 8 pixels for SD 1.5, got 100; use 96"
    ]
    base = LoRASampler(given, "32-true", "cpu", None).sample([("a zorp cup", 0)])
    with_lora = LoRASampler(given, "32-true", "cpu", tmp_path / "run" / "zorp.safetensors")
    full, half, none = (with_lora.sample([("a zorp cup", 0)], weight) for weight in (1.0, 0.5, 0.0))
    torch.testing.assert_close(none, base, atol=1e-5, rtol=0)
    assert 1e-3 < (half - base).abs().max() < (full - base).abs().max()


def test_weights_are_columns_and_the_best_file_goes_first(command: Command, quick: Path, tmp_path: Path) -> None:
    assert command("fit", "-c", quick).code == 0
    run = tmp_path / "run"
    (run / "zorp_best.safetensors").write_bytes((run / "zorp.safetensors").read_bytes())
    grid = tmp_path / "grid.png"
    prompts = ["--prompts", "a zorp cup", "a zorp shoe", "--negative_prompt", "blue"]
    said = command("sample", "-c", run, *prompts, "--weight", 0.4, 0.8, "--seeds", 1, "-o", grid)
    assert said.code == 0 and "zorp_best.safetensors" in said.out and "trigger word" not in said.out
    assert "weight 0.4: 100%" in said.err and "weight 0.8: 100%" in said.err and "2/2" in said.err
    assert all(re.match(r"\s*$|weight 0\.[48]: ", line) for line in re.split("[\r\n]", said.err)), said.err
    width, height = Image.open(grid).size
    assert width == 2 * (160 + 8) + 8 and height > 2 * 160
    said = command("sample", "-c", run, "--prompts", "a cup", "a zorp cup" + " on a table" * 40, "-o", grid)
    assert "1 of 2 prompts have more than 10 tokens, and the text encoder cuts off the rest" in said.out
    assert "1 of 2 prompts lack the trigger word zorp (such as 'a cup')" in said.out
    said = command("sample", "-c", run, "--prompts", "a cup", "--lora", "none", "-o", grid)
    assert said.code == 0 and "base model" in said.out and "trigger word" not in said.out


def test_a_full_fine_tuning_draws_with_its_own_model(command: Command, quick: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(quick.read_text(encoding="utf-8"))
    config["model"]["class_path"] = "DiffusionFineTuning"
    for name in ("rank", "lora_alpha", "lora_targets", "preserve", "class_word", "preserve_weight"):  # of a LoRA alone
        del config["model"]["init_args"][name]
    quick.write_text(yaml.safe_dump(config), encoding="utf-8")
    said = command("sample", "-c", quick)
    assert said.code == 1 and "no fine-tuned model zorp/ yet; train it first" in said.errors[0]
    said = command("fit", "-c", quick)
    assert said.code == 0, said.err
    run, grid = tmp_path / "run", tmp_path / "grid.png"
    said = command("sample", "-c", run, "--seeds", 0, "-o", grid)
    assert said.code == 0 and f"drawing with {run / 'zorp'}" in said.out, said.err
    drawn, own = (np.asarray(Image.open(path)) for path in (grid, run / "samples" / "step_000002.png"))
    top = slice(8, 8 + 160)  # the image, without what is written under it
    assert np.abs(own[top, top].astype(int) - drawn[top, top].astype(int)).max() <= 3
    assert command("sample", "-c", run, "--seeds", 0, "--lora", "none", "-o", grid).code == 0
    assert np.abs(own[top, top].astype(int) - np.asarray(Image.open(grid))[top, top].astype(int)).max() > 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c", "nowhere.yaml", "--prompts", "a"], "nowhere.yaml cannot be read"),
        (["-c", "{config}", "--prompts", "a"], "no LoRA file zorp.safetensors"),
        (["-c", "{config}", "--prompts", "a", "--lora", "gone.safetensors"], "no file gone.safetensors"),
        (["-c", "{bare}", "--lora", "none"], "no prompts"),
        (["-c", "{config}", "--prompts", "a cup", " "], "--prompts: prompt 2 of 2 is empty"),
        (["-c", "{empty}", "--prompts", "a"], "pretrained_model_name_or_path"),
        (["-c", "{config}", "--prompts", "a", "--lora", "{config}"], "safetensors"),
        (["-c", "{config}", "--num_inference_steps", "0"], "--num_inference_steps must be at least 1, got 0"),
        (["-c", "{config}", "--seeds", str(2**64)], "--seeds must be numbers of 64 bits, got 18446744073709551616"),
        (["-c", "{config}", "--weight", "nan"], "--weight must be a finite number, got nan"),
        (["-c", "{config}", "--guidance_scale", "inf"], "--guidance_scale must be a finite number, got inf"),
        (["-c", "{config}", "--guidance_scale", "-1"], "--guidance_scale must not be negative, got -1"),
        (
            ["-c", "{config}", "--lora", "none", "--negative_prompt", "b", "--guidance_scale", "1"],
            "--negative_prompt is read at a guidance scale above 1 alone, got 1",
        ),
        (
            ["-c", "{config}", "--lora", "none", "--num_inference_steps", "1001"],
            "--num_inference_steps must be at most 1000, the timesteps of",
        ),
        (["-c", "{config}", "-o", "{folder}"], "it is a folder; give another --output"),
        (["-c", "{config}", "-o", "{config}/grid.png"], "File exists; give another --output"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    command: Command, quick: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    bare = yaml.safe_load(quick.read_text(encoding="utf-8"))
    bare["model"]["init_args"]["validation_prompts"] = []
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(bare))
    (tmp_path / "empty.yaml").write_text("")
    places = {"config": str(quick), "bare": str(tmp_path / "bare.yaml"), "empty": str(tmp_path / "empty.yaml")}
    places["folder"] = str(tmp_path)
    said = command("sample", *(argument.format(**places) for argument in arguments))
    assert said.code == 1 and len(said.errors) == 1 and words in said.errors[0]


def test_a_lora_of_another_base_is_one_sentence(tmp_path: Path, quick: Path) -> None:
    module = StableDiffusionLoRA("embedded:sd", rank=2)
    module.configure_model()
    module.save_lora(tmp_path / "other.safetensors")
    given = yaml.safe_load(quick.read_text(encoding="utf-8"))["model"]["init_args"]
    with pytest.raises(ModelError, match=r"is a LoRA of another base model.*use the base"):
        LoRASampler(given, "32-true", "cpu", tmp_path / "other.safetensors")


# dry run ------------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_it_wrote(command: Command, quick: Path, tmp_path: Path) -> None:
    cache = tmp_path / "own"
    said = command("fit", "-c", quick, "--dry_run", "--data.init_args.cache_dir", cache)
    assert said.code == 0, said.err
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert f"wrote {len(files)} files (" in said.out and str(cache) in said.out
    assert "val_loss" in said.out
    assert "nothing was written" in command("fit", "-c", quick, "--dry_run", "--data.init_args.cache_dir", cache).out


def test_a_dry_run_that_stops_prints_the_whole_report_and_what_it_wrote(
    command: Command, quick: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (32, 32), (200, 90, 20)).save(folder / f"{name}.png")
    (folder / "broken.png").write_bytes(b"")
    (folder / "a.txt").write_text("a cup")
    (folder / "lost.txt").write_text("a shoe")
    said = command("fit", "-c", quick, "--dry_run", "--data.init_args.train_data_dir", folder)
    assert said.code == 1 and len(said.errors) == 1
    for words in ("broken.png: empty file", "have no caption", "lost.txt", "a.png = b.png", "dry run: stopped"):
        assert words in said.out, said.out
    assert "b.png" in said.errors[0] and "lost.txt" in said.errors[0]
