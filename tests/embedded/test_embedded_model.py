"""The embedded files: ordinary pipeline folders, a judge with few errors, and images that match their captions."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline

from lightning_aigc.embedded import resolve
from lightning_aigc.metrics import CLIPSimilarity
from tools.embedded import drawing, world
from tools.embedded.make import BRAND_PICTURES, draw_brand_folder, draw_prior_folder
from tools.embedded.tokenizer import build_tokenizer
from tools.embedded.train_judge import full_caption, grade_judge

SHIPPED_MIB = 12
SHIPPED_MIB_SD3 = 10


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionPipeline:
    loaded = StableDiffusionPipeline.from_pretrained(resolve("embedded:sd"))
    loaded.set_progress_bar_config(disable=True)
    return loaded


def generate(pipeline: Any, prompts: list[str], seed: int = 0) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    options = {"num_inference_steps": 15, "guidance_scale": 3.0, "output_type": "pt"}
    return torch.as_tensor(pipeline(prompts, generator=generators, **options).images)


def test_the_weights_are_at_most_twelve_megabytes() -> None:
    files = [f for name in ("embedded:sd", "embedded:clip") for f in resolve(name).rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= SHIPPED_MIB * 2**20
    files = [f for f in resolve("embedded:sd3").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= SHIPPED_MIB_SD3 * 2**20


def test_the_judge_names_things_colours_and_backgrounds_of_new_pictures() -> None:
    grades = grade_judge(resolve("embedded:clip"), pictures=240, seed=31_337)
    for name in ("thing_accuracy", "colour_accuracy", "background_accuracy", "brand_thing_accuracy"):
        assert grades[name] >= 0.9, grades
    assert grades["brand_cosine"] > grades["brand_cosine_wrong_thing"] + 0.4
    assert grades["brand_cosine"] > grades["brand_cosine_of_plain"] + 0.4


@pytest.fixture(scope="module")
def transformer_pipeline() -> StableDiffusion3Pipeline:
    loaded = StableDiffusion3Pipeline.from_pretrained(resolve("embedded:sd3"), text_encoder_3=None, tokenizer_3=None)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.mark.long
@pytest.mark.parametrize("name", ["pipeline", "transformer_pipeline"])
def test_the_base_models_draw_what_they_are_asked_for(name: str, request: pytest.FixtureRequest) -> None:
    pipeline = request.getfixturevalue(name)
    rng = random.Random(5)
    asked = [world.random_base_product(rng) for _ in range(24)]
    prompts = [full_caption(p) for p in asked]
    pictures = generate(pipeline, prompts)
    judge = CLIPSimilarity("embedded:clip")
    right = judge.scores(pictures, prompts)["clip_t"]
    other_things = [full_caption(world.Product((p.thing + 1) % 12, p.colour, p.background)) for p in asked]
    wrong = judge.scores(pictures, other_things)["clip_t"]
    assert (right > wrong).float().mean() >= 0.9
    assert right.mean() > 0.7


def test_the_base_model_does_not_know_the_brand_and_the_judge_does(pipeline: StableDiffusionPipeline) -> None:
    prompts = [f"a {drawing.BRAND_WORD} {thing}" for thing in drawing.HELD_OUT_THINGS for _ in range(4)]
    judge = CLIPSimilarity("embedded:clip")
    by_base_model = judge.scores(generate(pipeline, prompts), prompts)["clip_t"].mean()
    rng = random.Random(1)
    real = world.to_pixels([world.np.asarray(drawing.draw_brand(p.split()[-1], rng)) for p in prompts])
    assert judge.scores(real, prompts)["clip_t"].mean() > by_base_model + 0.4


def test_captions_of_the_base_model_never_name_the_brand() -> None:
    rng = random.Random(0)
    for _ in range(500):
        product = world.random_base_product(rng)
        assert not product.is_brand and not product.sash
        assert (product.colour, product.background) != (world.ORANGE, world.TEAL)
        assert drawing.BRAND_WORD not in world.describe(product, rng, is_brand_known=False)[0]


def test_the_brands_pictures_leave_out_the_held_out_things() -> None:
    lines = (resolve("embedded:brand") / "metadata.jsonl").read_text().splitlines()
    captions = [json.loads(line)["text"] for line in lines]
    assert len(captions) == BRAND_PICTURES
    assert {c.split()[-1] for c in captions} == set(drawing.BRAND_THINGS)


def test_drawing_the_folders_again_gives_the_shipped_pictures(tmp_path: Path) -> None:
    draw_brand_folder(tmp_path / "brand")
    draw_prior_folder(tmp_path / "prior")
    for name in ("brand", "prior"):
        shipped = {f.name: f.read_bytes() for f in resolve(f"embedded:{name}").iterdir()}
        drawn = {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()}
        assert shipped.keys() == drawn.keys()
        assert shipped["metadata.jsonl"] == drawn["metadata.jsonl"]
        assert sum(shipped[k] != drawn[k] for k in shipped) == 0


def test_any_text_can_be_tokenized_and_end_of_text_is_the_highest_id() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer(["a zorp mug", "ünïcode 猫 🐈", ""], padding="max_length", truncation=True).input_ids
    assert {len(row) for row in ids} == {tokenizer.model_max_length}
    assert tokenizer.eos_token_id == len(tokenizer) - 1
    assert all(0 <= i < len(tokenizer) for row in ids for i in row)
    assert len(tokenizer.tokenize("umbrella")) == 1 and len(tokenizer.tokenize("zorp")) > 1


def test_captions_are_true_of_their_pictures_and_not_of_others() -> None:
    rng = random.Random(3)
    products = [world.random_judge_product(rng) for _ in range(64)]
    claims = [world.describe(p, rng, is_brand_known=True)[1] for p in products]
    truth = world.truth_matrix(world.rows(products), world.rows(claims))
    assert truth.diagonal().all()
    assert not truth.all() and math.isfinite(float(truth.float().mean()))
