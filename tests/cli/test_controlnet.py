"""`lightning sample` with conditions, and a ControlNet's run through the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import SD3ControlNetModel
from PIL import Image
from torch import nn

from fakes.models.pipelines import SIDE, make_sd3_pipeline
from lightning_aigc.diffusion import ControlNetTraining
from lightning_aigc.embedded import resolve

Command = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loggers and folders


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a ControlNet whose zero convolutions are open."""
    root = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    module = ControlNetTraining("embedded:sd", output_name="edges")
    module.configure_model()
    assert module.controlnet is not None
    hint = module.controlnet.controlnet_cond_embedding.conv_out
    for convolution in (*module.controlnet.controlnet_down_blocks, hint):
        nn.init.normal_(convolution.weight, std=0.05)
    module.save_model(root / "edges.safetensors")
    config = {
        "model": {
            "class_path": "lightning_aigc.diffusion.ControlNetTraining",
            "init_args": {
                "pretrained_model_name_or_path": "embedded:sd", "conditions": "canny", "output_name": "edges",
                "num_inference_steps": 2, "guidance_scale": 3.0, "validation_prompts": ["a red mug"],
            },
        },
        "data": {"class_path": "ImageCaptionData", "init_args": {"resolution": 64}},
        "trainer": {"default_root_dir": str(root), "accelerator": "cpu"},
    }  # fmt: skip
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture(scope="module")
def shown() -> list[str]:
    return [str(path) for path in sorted(resolve("embedded:prior").glob("*.png"))[:2]]


def test_sample_draws_each_condition_at_each_weight(
    command: Command, run: Path, shown: list[str], tmp_path: Path
) -> None:
    grid = tmp_path / "grid.png"
    arguments = ("sample", "-c", run, "--condition", *shown, "--weight", "0", "1", "--seeds", "3", "-o", grid)
    said = command(*arguments)
    assert said.code == 0, said.err
    assert "edges" in said.out and "grid.png" in said.out
    facts = Image.open(grid).text  # type: ignore[attr-defined]
    assert json.loads(facts["weights"]) == [0.0, 1.0] and json.loads(facts["prompts"]) == ["a red mug"]
    pixels = np.asarray(Image.open(grid).convert("RGB")).astype(int)
    columns = np.array_split(pixels, 3, axis=1)
    condition = columns[0]
    assert (condition == 255).any() and (condition == 0).any()
    assert np.abs(columns[1][:, 8:120] - columns[2][:, 8:120]).max() > 20  # the ControlNet does something
    command(*arguments)
    assert np.array_equal(pixels, np.asarray(Image.open(grid).convert("RGB")))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "a ControlNet draws what it is shown; give images"),
        (["--condition", "nowhere.png"], "there is no file nowhere.png"),
        (["--condition", "PICTURE", "--controlnet", "nowhere"], "nowhere is no ControlNet folder"),
        (["--condition", "PICTURE", "--num_inference_steps", "1001"], "--num_inference_steps must be at most 1000"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    command: Command, run: Path, shown: list[str], options: list[str], said: str
) -> None:
    done = command("sample", "-c", run, *(shown[0] if option == "PICTURE" else option for option in options))
    assert done.code == 1 and len(done.errors) == 1 and said in done.errors[0]


def test_conditions_belong_to_controlnets(command: Command, run: Path, shown: list[str], tmp_path: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["class_path"] = "StableDiffusionLoRA"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    done = command("sample", "-c", tmp_path, "--condition", shown[0])
    assert done.code == 1 and "belong to runs of DiffusionControlNet" in done.errors[0]


# Beside a transformer -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sd3_run(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """A YAML of DiffusionControlNet on a tiny Stable Diffusion 3, cached captions and all."""
    root = tmp_path_factory.mktemp("sd3_run")
    config = {
        "model": {
            "class_path": "DiffusionControlNet",
            "init_args": {
                "pretrained_model_name_or_path": str(make_sd3_pipeline(root / "sd3")), "output_name": "edges",
                "conditions": "canny", "learning_rate": 0.01, "max_train_steps": 2, "validation_steps": 2,
                "validation_prompts": ["a red cup"], "num_validation_images": 1, "num_inference_steps": 2,
            },
        },
        "data": {
            "class_path": "ImageCaptionData",
            "init_args": {
                "train_data_dir": str(photos), "resolution": SIDE, "enable_bucket": False, "train_batch_size": 2,
                "num_workers": 0, "validation_split": 0.4, "cache_dir": str(root / "cache"), "cache_latents": True,
                "cache_text_embeddings": True,
            },
        },
        "trainer": {
            "default_root_dir": str(root / "run"), "accelerator": "cpu", "devices": 1, "logger": False,
            "enable_progress_bar": False,
            "plugins": {"class_path": "FusedBackwardPrecision", "init_args": {"precision": "32-true", "memory": "max"}},
            "callbacks": [
                {"class_path": "ControlGuard", "init_args": {"every_n_steps": 1, "num_images": 2}},
                {"class_path": "EdgeReport", "init_args": {"num_images": 2}},
            ],
        },
    }  # fmt: skip
    (root / "mine.yaml").write_text(yaml.safe_dump(config))
    return root


def test_a_transformers_controlnet_trains_from_yaml_and_lightning_sample_draws_with_it(
    command: Command, sd3_run: Path, photos: Path, tmp_path: Path
) -> None:
    said = command("fit", "-c", sd3_run / "mine.yaml")
    assert said.code == 0, said.err
    saved = SD3ControlNetModel.from_pretrained(sd3_run / "run" / "edges")
    assert any(bool(block.weight.any()) for block in saved.controlnet_blocks)
    assert (sd3_run / "run" / "edges.safetensors").is_file()
    summary = json.loads((sd3_run / "run" / "summary.json").read_text())
    assert "control_gap" in json.dumps(summary) and "edge_f1" in json.dumps(summary)
    drawn = command(
        "sample", "-c", sd3_run / "run" / "config.yaml", "--condition", photos / "1.png", "-o", tmp_path / "grid.png"
    )
    assert drawn.code == 0, drawn.err
    assert (tmp_path / "grid.png").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model.rank", "4"], "rank: 4 is for ControlNets of U-Nets, and this is Stable Diffusion 3"),
        (["--model.conditions", "folder"], "conditions: folder needs data.init_args.conditioning_data_dir"),
        (["--model.num_layers", "2"], "do not read 2 of a ControlNet's"),
    ],
)
def test_a_transformers_controlnet_that_cannot_be_trained_is_one_sentence(
    command: Command, sd3_run: Path, options: list[str], said: str
) -> None:
    done = command("fit", "-c", sd3_run / "mine.yaml", "--overwrite", *options)
    assert done.code == 1 and len(done.errors) == 1 and said in done.errors[0], done.err
