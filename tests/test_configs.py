"""Every shipped YAML parses through the command line, and the demo differs from the real config in values only."""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_aigc.cli import main

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
WANTED = {"sd_lora", "sd_lora_demo", "sd_lora_8gb", "sd_lora_ascend", "sdxl_lora"}


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


def test_the_demo_differs_from_the_real_config_in_values_only() -> None:
    real, demo = load(CONFIGS / "sd_lora.yaml"), load(CONFIGS / "sd_lora_demo.yaml")
    assert sorted(key_paths(real)) == sorted(key_paths(demo))
    assert [c["class_path"] for c in real["trainer"]["callbacks"]] == [
        c["class_path"] for c in demo["trainer"]["callbacks"]
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_never_turns_the_autoencoder_to_half_precision(path: Path) -> None:
    assert load(path)["model"]["init_args"].get("vae_dtype", "float32") in ("float32", "bfloat16")
