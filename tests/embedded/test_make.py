"""`tools.embedded.make` at a small scale: smaller models that load and have learned."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline, StableDiffusionPipeline, UNet2DConditionModel

from lightning_aigc.metrics import CLIPSimilarity
from tools.embedded import world
from tools.embedded.make import make
from tools.embedded.pack import NAMES, pack
from tools.embedded.train_base import build_vae
from tools.embedded.train_judge import train_judge

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # making takes seven minutes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder, scale=0.015)
    return folder


def test_archives_can_be_packed_of_the_folders(made: Path, tmp_path: Path) -> None:
    assert [path.name for path in pack(made, tmp_path)] == [f"{name}.zip" for name in NAMES]


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


def test_the_transformer_loads_as_stable_diffusion_3_and_learned_to_see_noise(made: Path) -> None:
    pipeline = StableDiffusion3Pipeline.from_pretrained(made / "sd3", text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline("a red mug", num_inference_steps=2, output_type="pt").images
    assert pictures.shape == (1, 3, 64, 64)
    torch.manual_seed(0)
    noise = torch.randn(8, 4, 16, 16)
    text, _, pooled, _ = pipeline.encode_prompt(["a red mug"] * 8, None, None, do_classifier_free_guidance=False)
    with torch.no_grad():  # at the last step the velocity is the noise less an unknown image
        velocity = pipeline.transformer(noise, text, pooled, torch.full((8,), 1000.0)).sample
    assert (velocity - noise).square().mean() < 1.3  # 1 for the best guess of an image of unit variance, 2 for zeros


def test_the_judge_loads_and_scores(made: Path) -> None:
    scores = CLIPSimilarity(str(made / "clip")).scores(torch.rand(2, 3, 64, 64), ["a red mug", "a zorp sock"])
    assert scores["clip_t"].isfinite().all()
    assert "thing_accuracy" in json.loads((made / "made.json").read_text())["judge"]


def test_a_judge_trained_a_little_longer_sees_colours(tmp_path: Path) -> None:
    grades = train_judge(tmp_path, steps=120, batch_size=32)
    assert grades["colour_accuracy"] > 0.6  # 0.88 when written; an eighth by chance
    assert grades["background_accuracy"] > 0.7  # 0.95 when written; a quarter by chance
