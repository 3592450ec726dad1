"""Run the command in this process and take what it says."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from PIL import Image

from fakes.models.pipelines import SIDE, make_pipeline
from lightning_aigc.cli import main


class Said(NamedTuple):
    """End of a run of the command."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Said]]:
    """`command("fit", "-c", path)`. A traceback fails the test, because nothing catches it here."""
    monkeypatch.setattr(sys, "argv", ["lightning"])  # main leaves its arguments there, for the ranks it starts
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        with warnings.catch_warnings(), pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Said(stop.value.code if isinstance(stop.value.code, int) else 99, said.out, said.err)

    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six images of cups and shoes, with captions."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(6):
        Image.new("RGB", (SIDE, SIDE), (40 * number, 90, 200 - 30 * number)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(("a zorp cup", "a zorp shoe")[number % 2])
    return folder


@pytest.fixture(scope="session")
def _quick_config(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> dict[str, Any]:
    """The demo's config with a pipeline of random weights, six images and two steps."""
    path = Path(__file__).parents[2] / "configs" / "sd_lora_demo.yaml"
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["threads"] = 1
    # The guard and its CLIP take seconds, and have tests of their own.
    config["trainer"]["callbacks"] = [c for c in config["trainer"]["callbacks"] if c["class_path"] == "RunReport"]
    config["trainer"]["callbacks"][0]["init_args"] |= {"clip_model": None, "num_images": 1}
    config["model"]["init_args"] |= {
        "pretrained_model_name_or_path": str(make_pipeline(tmp_path_factory.mktemp("pipeline"))),
        "rank": 2,
        "max_train_steps": 2,
        "lr_warmup_steps": 0,
        "num_inference_steps": 2,
        "num_validation_images": 1,
        "validation_prompts": ["a zorp cup"],
    }
    config["data"]["init_args"] |= {
        "train_data_dir": str(photos),
        "class_data_dir": None,
        "resolution": SIDE,
        "train_batch_size": 2,
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
    }
    return config


@pytest.fixture
def quick_config(_quick_config: dict[str, Any]) -> dict[str, Any]:
    """A copy that a test may write to."""
    return copy.deepcopy(_quick_config)
