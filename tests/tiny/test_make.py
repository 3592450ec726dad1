"""The script that makes the embedded models still makes working, smaller ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel

from lightning_aigc.metrics import CLIPSimilarity
from lightning_aigc.tiny import world
from lightning_aigc.tiny.make import make
from lightning_aigc.tiny.train_base import build_vae


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder, scale=0.015)
    return folder


def test_the_pipeline_loads_and_draws_pictures_that_differ_by_seed(made: Path) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(made / "sd")
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    pictures = torch.as_tensor(
        pipeline(["a red mug"] * 2, generator=generators, num_inference_steps=4, output_type="pt").images
    )
    assert pictures.shape == (2, 3, 64, 64)
    assert pictures.isfinite().all()
    assert not torch.equal(pictures[0], pictures[1])


def test_the_autoencoder_learned_to_see(made: Path) -> None:
    vae = AutoencoderKL.from_pretrained(made / "sd" / "vae")
    rng = random.Random(0)
    pixels = world.to_pixels([world.random_judge_product(rng).draw(rng) for _ in range(16)]).mul(2).sub(1)
    torch.manual_seed(0)

    def error(model: AutoencoderKL) -> float:
        with torch.no_grad():
            return float((model.decode(model.encode(pixels).latent_dist.mean).sample - pixels).square().mean())

    assert error(vae) < 0.7 * error(build_vae())


def test_the_unet_learned_to_see_noise(made: Path) -> None:
    unet = UNet2DConditionModel.from_pretrained(made / "sd" / "unet")
    torch.manual_seed(0)
    noise, text = torch.randn(8, 4, 16, 16), torch.randn(8, 24, 96)
    with torch.no_grad():  # at the last step a noisy latent is nearly all noise
        guessed = unet(noise, torch.full((8,), 999), text).sample
    assert (guessed - noise).square().mean() < 0.8


def test_the_judge_loads_and_scores(made: Path) -> None:
    judge = CLIPSimilarity(str(made / "clip"))
    scores = judge.scores(torch.rand(2, 3, 64, 64), ["a red mug", "a zorp sock"])["clip_t"]
    assert scores.isfinite().all()
    graded = json.loads((made / "made.json").read_text())["judge"]
    assert graded["background_accuracy"] > 0.5  # a quarter by chance; 22 steps are enough for backgrounds
