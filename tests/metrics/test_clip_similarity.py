"""CLIPSimilarity against open_clip's own encoders, across ranks, and with models that cannot be had."""

from __future__ import annotations

import copy
import doctest
import json
import math
import pickle
from pathlib import Path

import open_clip
import pytest
import skimage.data
import torch
import torch.multiprocessing as mp
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cosine_similarity, normalize
from torchvision.transforms.functional import to_pil_image

from lightning_aigc.errors import DataError, ImageWarning, ModelError
from lightning_aigc.metrics import CLIPSimilarity, clip_similarity
from lightning_aigc.metrics import clip_similarity as clip_similarity_function
from lightning_aigc.metrics.clip_model import preprocess
from lightning_aigc.metrics.clip_similarity import recognition
from lightning_aigc.metrics.image_problems import find_image_problems, find_ruined

PROMPTS = ["a red cup", "two blue cats", "zorp", "a very long prompt " * 40]
CONFIG = {
    "model_cfg": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    },
    "preprocess_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny open_clip model of random weights, as open_clip's own `push_to_hf_hub` lays it out."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    model = open_clip.model.CLIP(**CONFIG["model_cfg"])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    (folder / "open_clip_config.json").write_text(json.dumps(CONFIG))
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(4, 3, 40, 24, generator=torch.Generator().manual_seed(1))


def test_scores_are_those_of_open_clips_own_encoders(folder: Path, images: torch.Tensor) -> None:
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(PROMPTS)
    metric = CLIPSimilarity(str(folder), reference_images=images[:3], batch_size=3)
    small = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(2)).mul(255).round() / 255
    with torch.no_grad():
        pixels = torch.stack([transform(to_pil_image(image)) for image in small])
        image_embeddings, text_embeddings = model.eval().encode_image(pixels), model.encode_text(tokens)
        wanted = cosine_similarity(image_embeddings, text_embeddings)
        references = model.encode_image(preprocess(images[:3], metric._clip().preprocessing))
        mean = normalize(references, dim=-1).mean(dim=0, keepdim=True)
        wanted_i = cosine_similarity(image_embeddings, mean)
    scores = metric.scores(small, PROMPTS)
    torch.testing.assert_close(scores["clip_t"], wanted)
    torch.testing.assert_close(scores["clip_i"], wanted_i)
    metric.update(small[:1], PROMPTS[:1])
    metric.update(small[1:], PROMPTS[1:])
    torch.testing.assert_close(metric.compute(), {"clip_t": wanted.mean(), "clip_i": wanted_i.mean()})
    metric.reset()
    metric.update(small[2:], PROMPTS[2:])
    torch.testing.assert_close(metric.compute()["clip_t"], wanted[2:].mean())


@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
@pytest.mark.parametrize("size", [(40, 24), (24, 40), (16, 16), (9, 33), (1, 1)], ids=str)
def test_preprocessing_is_open_clips_but_for_rounding(mode: str, size: tuple[int, int]) -> None:
    config = {"size": 16, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic"}
    transform = open_clip.transform.image_transform_v2(
        open_clip.transform.PreprocessCfg(**config, resize_mode=mode), is_train=False
    )
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    image = nn.functional.interpolate(coarse, size, mode="bilinear").mul(255).round() / 255
    picture = to_pil_image(image[0])
    assert isinstance(picture, Image.Image)
    difference = (preprocess(image, config | {"resize_mode": mode})[0] - transform(picture)).abs()
    assert difference.max() <= 3 / 255 / 0.2  # up to three 8-bit levels where PIL rounds twice


def test_references_may_differ_in_size_and_count_equally(folder: Path, images: torch.Tensor) -> None:
    references = [images[0], images[1, :, :20], images[2, :, :, :8]]
    metric = CLIPSimilarity(str(folder), reference_images=references)
    alone = [CLIPSimilarity(str(folder))._clip().embed_images(image[None], 1) for image in references]
    clip = metric._clip()
    wanted = cosine_similarity(clip.embed_images(images, 4), torch.cat(alone).mean(dim=0, keepdim=True))
    torch.testing.assert_close(metric.scores(images, PROMPTS)["clip_i"], wanted)


def test_clip_i_is_nan_until_references_are_set(folder: Path, images: torch.Tensor) -> None:
    metric = CLIPSimilarity(str(folder))
    metric.update(images, PROMPTS)
    assert metric.compute()["clip_i"].isnan() and metric.compute()["clip_t"].isfinite()
    metric.reset()
    metric.set_reference_images(images[:1])
    metric.update(images[:1], PROMPTS[:1])
    assert metric.compute()["clip_i"].item() == pytest.approx(1, abs=1e-5)
    with pytest.raises(DataError, match="got no reference_images"):
        metric.set_reference_images([])


def test_the_model_stays_out_of_state_dicts_and_parameters(folder: Path, images: torch.Tensor) -> None:
    module = nn.Module()
    module.metric = CLIPSimilarity(str(folder), reference_images=images)
    module.metric.check()
    module.train()
    assert not list(module.parameters()) and not module.state_dict()
    clip = module.metric._clip()
    assert not clip.model.training and not any(parameter.requires_grad for parameter in clip.model.parameters())
    wanted = module.metric.scores(images, PROMPTS)
    module.half()
    with torch.autocast("cpu", torch.bfloat16):
        again = module.metric.scores(images, PROMPTS)
    assert {parameter.dtype for parameter in clip.model.parameters()} == {torch.float32}
    torch.testing.assert_close(again, wanted, rtol=0, atol=0)


def test_to_moves_model_and_states_together(folder: Path, images: torch.Tensor) -> None:
    metric = CLIPSimilarity(str(folder))
    metric.check()
    metric.to("meta")
    assert {parameter.device.type for parameter in metric._loaded[0].model.parameters()} == {"meta"}
    assert metric.count.device.type == "meta"


def test_copies_load_anew_and_score_alike(folder: Path, images: torch.Tensor) -> None:
    metric = CLIPSimilarity(str(folder), reference_images=images)
    metric.update(images, PROMPTS)
    for clone in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert clone._loaded == []
        torch.testing.assert_close(clone.compute(), metric.compute())
        torch.testing.assert_close(clone.scores(images, PROMPTS), metric.scores(images, PROMPTS))


def test_broken_pictures_count_and_are_named(folder: Path, images: torch.Tensor) -> None:
    images[0] = float("nan")
    images[1] = 0
    images[2] = 0.5
    metric = CLIPSimilarity(str(folder))
    with pytest.warns(ImageWarning) as caught:
        metric.update(images, PROMPTS)
    messages = [str(warning.message) for warning in caught]
    assert ["not finite" in messages[0], "black" in messages[1], "constant" in messages[2]] == [True] * 3
    assert "'two blue cats'" in messages[1] and len(messages) == 3
    assert metric.count == 4 and metric.compute()["clip_t"].isfinite()


def test_image_problems_are_found_by_kind() -> None:
    images = torch.rand(6, 3, 8, 8)
    images[1, 0, 0, 0] = float("inf")
    images[2] = 1 / 255
    images[3] = torch.tensor([0.1, 0.9, 0.5]).view(3, 1, 1)
    images[4, 1:] = 0  # one channel is enough to be an image
    problems = find_image_problems(images.half())
    assert [(p.index, p.problem) for p in problems] == [(1, "not finite"), (2, "black"), (3, "constant")]
    assert find_image_problems(images[:0]) == []


@pytest.mark.parametrize(
    ("bad", "prompts", "message"),
    [
        (torch.rand(2, 3, 8, 8), ["a"], "got 1 prompts for 2 images"),
        (torch.rand(1, 3, 8, 8), "a", "got one string"),
        (torch.rand(3, 8, 8), ["a"], r"wanted \[N, 3, H, W\]"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), ["a"], "divide by 255"),
        (torch.rand(0, 3, 8, 8), [], "got no images"),
    ],
)
def test_wrong_inputs_say_what_is_wanted(folder: Path, bad: torch.Tensor, prompts: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        CLIPSimilarity(str(folder)).update(bad, prompts)


def test_models_that_cannot_be_had_name_argument_and_remedy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "open_clip_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "open_clip_config.json").write_text("{")
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(1)}, other)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes((folder / "open_clip_model.safetensors").read_bytes()[:1000])

    def offline(*_: object, **__: object) -> None:
        raise OSError("the hub cannot be reached")

    monkeypatch.setattr("open_clip.factory.download_pretrained", offline)
    for model, pretrained, message in (
        ("ViT-B-33", None, r"model='ViT-B-33'.*did you mean ViT-B-32\?"),
        ("ViT-B-32", "opnai", r"pretrained='opnai'.*openai"),
        ("ViT-B-32", "openai", r"cannot be reached.*embedded:clip"),
        ("ViT-B-32", None, r"laion2b_s34b_b79k.*cannot be reached"),
        ("ViT-B-32", "here/weights.pt", "is not a file"),
        (str(tmp_path / "empty"), None, r"without open_clip_config\.json"),
        (str(tmp_path / "no_weights"), None, "could not be loaded"),
        (str(tmp_path / "broken"), None, "cannot load CLIP"),
        (str(folder), str(other), "of another architecture"),
        (str(folder), str(torn), "cannot load CLIP"),
        ("embedded:nothing", None, "not embedded"),
    ):
        metric = CLIPSimilarity(model, pretrained)  # nothing is loaded yet
        with pytest.raises(ModelError, match=rf"(?s){message}"):
            metric.check()


def test_a_weights_file_overrides_the_folders_own(folder: Path, tmp_path: Path, images: torch.Tensor) -> None:
    model = open_clip.create_model(f"local-dir:{folder}")
    with torch.no_grad():
        model.visual.proj.neg_()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    negated = CLIPSimilarity(str(folder), str(tmp_path / "weights.pt")).scores(images, PROMPTS)["clip_t"]
    torch.testing.assert_close(negated, -CLIPSimilarity(str(folder)).scores(images, PROMPTS)["clip_t"])


def score_share(rank: int, folder: str, where: str, images: torch.Tensor, results: mp.SimpleQueue) -> None:
    torch.distributed.init_process_group("gloo", where, rank=rank, world_size=2)
    metric = CLIPSimilarity(folder, reference_images=images[:2])
    share = slice(0, 3) if rank == 0 else slice(3, 4)  # uneven: a mean of means would differ
    metric.update(images[share], PROMPTS[share])
    results.put({key: value.item() for key, value in metric.compute().items()})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_together_score_what_one_scores(folder: Path, images: torch.Tensor, tmp_path: Path) -> None:
    results = mp.get_context("fork").SimpleQueue()
    where = f"file://{tmp_path}/store"
    mp.start_processes(score_share, (str(folder), where, images, results), nprocs=2, start_method="fork")
    single = CLIPSimilarity(str(folder), reference_images=images[:2])
    single.update(images, PROMPTS)
    wanted = {key: value.item() for key, value in single.compute().items()}
    for _ in range(2):
        assert results.get() == pytest.approx(wanted, rel=1e-6)


def test_the_documented_example_holds() -> None:
    module = __import__("lightning_aigc.metrics.clip_similarity", fromlist=["clip_similarity"])
    assert clip_similarity is clip_similarity_function
    assert doctest.testmod(module).failed == 0


def test_recognition_is_what_own_prompts_score_above_shuffled_ones() -> None:
    own = torch.tensor([0, 0, 1, 1, 2, 2])
    knows = torch.nn.functional.one_hot(own, 3) * 0.5 + 0.1
    assert recognition(knows, own) == pytest.approx((0.5, 0.0))
    blind = torch.tensor([0.1, 0.3, -0.2]).repeat(6, 1)  # a prompt scores alike whatever the image shows
    assert recognition(blind, own) == pytest.approx((0.0, 0.0))
    assert all(math.isnan(value) for value in recognition(knows[:2], own[:2]))  # one prompt has nothing to shuffle


def test_ruined_images_are_named_and_photographs_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    photographs = [skimage.data.coffee(), skimage.data.chelsea(), skimage.data.gravel()[..., None].repeat(3, -1)]
    sides = [torch.tensor(image).permute(2, 0, 1)[None].float() / 255 for image in photographs]
    whole = [torch.nn.functional.interpolate(image, (64, 64), mode="area") for image in sides]
    noise = torch.rand(1, 3, 64, 64, generator=generator)
    flat = torch.rand(1, 3, 64, 64, generator=generator) * 0.01 + 0.5
    pure = torch.zeros(1, 3, 64, 64)
    pure[:, 0, :40] = 1
    white = torch.ones(1, 3, 64, 64)  # a product on white is white for the most part
    white[:, :, 24:40, 24:40] = torch.rand(1, 3, 1, 1, generator=generator)
    found = find_ruined(torch.cat([*whole, white, noise, flat, pure, torch.zeros(1, 3, 64, 64)]))
    assert found == {4: "noise", 5: "flat", 6: "saturated", 7: "black"}
