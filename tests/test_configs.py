"""Every shipped YAML parses through the command line, and the demo differs from the real config in values only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from fakes.models.transformer_pipelines import MAKE
from lightning_aigc.cli import main

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
WANTED = {
    "sd_lora",
    "sd_lora_demo",
    "sd_lora_8gb",
    "sd_lora_ascend",
    "sd_lora_cluster",
    "sdxl_lora",
    "sd3_lora",
    "sd3_lora_demo",
    "z_image_qlora_8gb",
    "flux_qlora_12gb",
    "flux2_klein_lora",
    "qwen_image_qlora",
    "sd_qlora_4gb",
    "sdxl_qlora_6gb",
    "sd_full",
    "sd_full_demo",
    "controlnet_canny",
    "controlnet_demo",
    "sd3_controlnet",
    "edit_demo",
}
REAL = [path for path in FILES if not path.stem.endswith("_demo")]
SCORED_BY_CLIP = [path for path in FILES if "controlnet" not in path.stem and "edit" not in path.stem]
"""Configs whose prompts are captions; a ControlNet is scored by its edges, and an edit's prompts are instructions."""
WATCHING = {"GradientHealthMonitor", "CLIPConvergenceGuard", "AdaptiveLR", "FineTuneCheck", "RunReport"}


def load(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return config


def key_paths(config: Any, path: str = "") -> Iterator[str]:
    """Dotted keys down to the values; lists are values, but for lists of classes."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from key_paths(value, f"{path}.{key}")
    elif isinstance(config, list) and config and isinstance(config[0], dict):
        for number, value in enumerate(config):
            yield from key_paths(value, f"{path}[{number}]")
    else:
        yield path


def test_the_promised_configs_are_there() -> None:
    assert {path.stem for path in FILES} >= WANTED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_parses_and_prints_itself_whole(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning"])  # main writes its arguments there, for the ranks it starts
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(path), "--print_config"])
    said = capsys.readouterr()
    assert stop.value.code == 0, said.err
    printed = yaml.safe_load(said.out)
    given = load(path)
    assert printed["model"]["init_args"].items() >= given["model"]["init_args"].items()
    assert printed["data"]["init_args"].items() >= given["data"]["init_args"].items()
    for key, value in given["trainer"].items():
        if key == "strategy" and isinstance(value, dict):
            assert printed["trainer"][key]["class_path"].endswith(f".{value['class_path']}")
            assert printed["trainer"][key]["init_args"].items() >= value["init_args"].items()
        elif key not in ("callbacks", "plugins"):
            assert printed["trainer"][key] == value
    plugin = printed["trainer"]["plugins"]
    assert plugin["class_path"] == "lightning_aigc.precision.FusedBackwardPrecision"
    assert plugin["init_args"].items() >= given["trainer"]["plugins"]["init_args"].items()


@pytest.mark.parametrize("name", ["sd_lora", "sd3_lora"])
def test_the_demo_differs_from_the_real_config_in_values_only(name: str) -> None:
    real, demo = load(CONFIGS / f"{name}.yaml"), load(CONFIGS / f"{name}_demo.yaml")
    assert sorted(key_paths(real)) == sorted(key_paths(demo))
    assert [c["class_path"] for c in real["trainer"]["callbacks"]] == [
        c["class_path"] for c in demo["trainer"]["callbacks"]
    ]


def callbacks_of(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["class_path"]: entry["init_args"] for entry in config["trainer"]["callbacks"]}


@pytest.mark.parametrize("path", SCORED_BY_CLIP, ids=lambda path: path.stem)
def test_a_config_watches_the_gradients_keeps_the_best_weights_and_looks_for_the_rate(path: Path) -> None:
    config = load(path)
    given = callbacks_of(config)
    assert given.keys() >= WATCHING
    guard, report = given["CLIPConvergenceGuard"], given["RunReport"]
    assert guard["prompts"] is None  # validation_prompts
    judges = {(g["clip_model"], g["clip_pretrained"]) for g in (guard, report, given["FineTuneCheck"])}
    assert len(judges) == 1  # loaded once
    steps = config["model"]["init_args"]["max_train_steps"]
    assert steps / 8 <= guard["every_n_steps"] <= steps / 4
    assert steps / 2 <= guard["patience"] < steps  # it may stop a run, and not in its first half
    order = list(given)
    assert order[-1] == "RunReport"  # it tells of the others


@pytest.mark.parametrize("path", SCORED_BY_CLIP, ids=lambda path: path.stem)
def test_the_rate_is_searched_only_where_a_step_averages_four_pictures_or_more(path: Path) -> None:
    config = load(path)
    pictures = config["data"]["init_args"]["train_batch_size"] * config["trainer"]["accumulate_grad_batches"]
    assert callbacks_of(config)["AdaptiveLR"]["search"] == "auto"
    assert pictures >= 4


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_an_unedited_config_is_one_sentence_before_anything_is_read(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning"])
    for reads in ("diffusion.training.module.load_components", "metrics.clip_model.CLIPModel.__init__"):
        monkeypatch.setattr(f"lightning_aigc.{reads}", never)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(path), "--trainer.accelerator=cpu", "--dry_run"])
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stop.value.code == 1
    for key in ("model.init_args.validation_prompts", "model.init_args.output_name", "data.init_args.trigger_word"):
        assert key in error
    assert "YOUR_TRIGGER_WORD and YOUR_LORA_NAME" in error and "lightning init" in error
    head = path.read_text(encoding="utf-8").partition("seed_everything")[0]
    assert all(key in head for key in ("trigger_word", "validation_prompts", "output_name"))


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("read")


TRIED = [path for path in FILES if path.stem in ("sd_lora", "sd3_full", "controlnet_canny")]
"""tests/test_golden.py trains every config; a dry run is tried on one of each method."""


@pytest.mark.filterwarnings("ignore")  # what Lightning says about precisions and loaders
@pytest.mark.parametrize("path", TRIED, ids=lambda path: path.stem)
def test_an_edited_config_passes_a_dry_run_on_the_embedded_model(
    path: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning"])
    family = max((name for name in MAKE if path.stem.startswith(name)), key=len, default=None)  # flux2 is no flux
    base = "embedded:sd" if family is None else str(MAKE[family](tmp_path_factory.mktemp(family)))
    for number in range(4):
        Image.new("RGB", (64, 64), (60 * number, 90, 200)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("a zorp mug")
    mine = {
        "trainer": {"accelerator": "cpu", "devices": 1, "default_root_dir": str(tmp_path / "run")},
        "model": {"init_args": {"pretrained_model_name_or_path": base}},
        "data": {"init_args": {"train_data_dir": str(tmp_path), "class_data_dir": None, "resolution": 64}},
    }
    mine["data"]["init_args"] |= {"trigger_word": "zorp", "cache_dir": str(tmp_path / "cache"), "num_workers": 0}
    mine["model"]["init_args"] |= {"validation_prompts": ["a zorp mug"], "output_name": "mug"}
    if load(path)["trainer"].get("strategy") in ("ddp", "zero_3"):  # which want two ranks
        mine["trainer"]["strategy"] = "auto"
    if load(path)["trainer"].get("num_nodes", 1) > 1:
        mine["trainer"]["num_nodes"] = 1
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(path), "-c", str(tmp_path / "mine.yaml"), "--dry_run"])
    said = capsys.readouterr()
    assert stop.value.code == 0, said.err
    assert "4 found, " in said.out and "one step:" in said.out


@pytest.mark.parametrize("name", ["controlnet_canny", "controlnet_demo", "sd3_controlnet"])
def test_a_controlnet_config_guards_control_protects_the_edges_and_drops_half_the_captions(name: str) -> None:
    config = load(CONFIGS / f"{name}.yaml")
    order = list(callbacks_of(config))
    assert order == ["GradientHealthMonitor", "ControlGuard", "EdgeReport", "RunReport"]
    assert config["model"]["init_args"]["protect_edges"] is True
    assert config["data"]["init_args"]["caption_dropout_rate"] == 0.5
    assert config["data"]["init_args"]["validation_split"] > 0  # the guard and the report want unseen images


def test_the_cluster_config_is_for_several_machines_with_slow_links_and_kills() -> None:
    config = load(CONFIGS / "sd_lora_cluster.yaml")
    assert config["trainer"]["num_nodes"] > 1
    assert config["trainer"]["strategy"]["class_path"] == "NPUSparseStrategy"
    assert callbacks_of(config)["ExactSnapshot"]["on_signal"] is True


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_never_turns_the_autoencoder_to_half_precision(path: Path) -> None:
    assert load(path)["model"]["init_args"].get("vae_dtype", "float32") in ("float32", "bfloat16")
