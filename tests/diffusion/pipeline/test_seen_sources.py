"""A text encoder that sees the sources of an edit: cached embeddings belong to both, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fakes.models.edit_pipelines import make_image, make_qwen_image_edit_pipeline, show_small
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.errors import DataError

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]
SIDE = 64


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Four pairs: two sources with one instruction, and one source with two."""
    for number, (source, text) in enumerate(((0, "make it red"), (1, "make it red"), (2, "a sash"), (2, "blue"))):
        for side, seed in (("before", source), ("after", 10 + number)):
            (tmp_path / side).mkdir(exist_ok=True)
            make_image(seed, SIDE, SIDE).save(tmp_path / side / f"{number}.png")
        (tmp_path / "after" / f"{number}.txt").write_text(text)
    return tmp_path


def data_of(pairs: Path, **options: Any) -> ImageCaptionData:
    given: dict[str, Any] = {
        "source_data_dir": str(pairs / "before"), "resolution": SIDE, "min_bucket_reso": SIDE, "train_batch_size": 2,
        "num_workers": 0, "cache_dir": str(pairs / "cache"), "cache_latents": True, "cache_text_embeddings": True,
    }  # fmt: skip
    return ImageCaptionData(str(pairs / "after"), **(given | options))


def fit(path: str, data: ImageCaptionData, folder: Path, **options: Any) -> DiffusionLoRA:
    torch.manual_seed(0)
    module = DiffusionLoRA(path, rank=4, learning_rate=1e-2, max_train_steps=4, **options)
    torch.manual_seed(1)
    Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, logger=False, max_steps=4, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, data)  # fmt: skip
    return module


def trained(module: DiffusionLoRA) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("family", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_cached_texts_train_as_texts_that_are_encoded_at_each_step(
    family: str, transformers: Callable[[str], str], pairs: Path, tmp_path: Path
) -> None:
    """With mirrored images and dropped instructions, which are texts of their own."""
    random = {"random_flip": True, "caption_dropout_rate": 0.4}
    cached = data_of(pairs, **random)
    found = trained(fit(transformers(family), cached, tmp_path / "cached"))
    plain = data_of(pairs, cache_latents=False, cache_text_embeddings=False, **random)
    wanted = trained(fit(transformers(family), plain, tmp_path / "plain"))
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)
    written = list((pairs / "cache" / "instructions").rglob("*.safetensors"))
    # Four instructions with their sources and three sources without one, each mirrored too.
    assert len(written) == 2 * (4 + 3)


def test_samples_of_a_run_show_the_datas_sources_to_the_text_encoder(
    transformers: Callable[[str], str], pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text encoder stays beside cached texts, quantized with the base, and samples of unseen prompts need it."""
    show_small(monkeypatch, (SIDE, SIDE))
    options = {"num_inference_steps": 2, "guidance_scale": 3.0, "base_quantization": "int8"}
    module = fit(transformers("qwen_image_edit_plus"), data_of(pairs), tmp_path, **options)
    assert module.packed_base is not None and module.packed_base.packed > 20
    drawn = module.sample(["make it red", "another edit"], [0, 1])
    assert drawn.shape == (2, 3, SIDE, SIDE) and drawn.isfinite().all()
    sources = module.sources_of_samples(["make it red", "another edit"], [0, 1])
    torch.testing.assert_close(module.sample(["make it red", "another edit"], [0, 1], sources=sources), drawn)
    others = [[make_image(50, SIDE, SIDE)]] * 2
    assert not torch.equal(module.sample(["make it red", "another edit"], [0, 1], sources=others), drawn)


def test_an_entry_is_of_its_sources_and_of_the_pipeline_that_shows_them(
    transformers: Callable[[str], str], pairs: Path, tmp_path: Path
) -> None:
    def rows_of(family: str) -> tuple[list[str], list[Tensor]]:
        data = data_of(pairs)
        module = DiffusionLoRA(transformers(family), rank=4)
        data.prepare(module)
        cache = data.caches.embeddings
        assert cache is not None
        order = [sample.name for sample in data.index().samples]
        rows = cache.rows([s.caption for s in data.index().samples], range(len(order)), [False] * len(order))
        by_name = dict(zip(order, rows, strict=True))
        chosen = [by_name[name] for name in sorted(order)]
        return [cache.keys[row] for row in chosen], [cache.batch([row])["prompt_embeds"][0] for row in chosen]

    keys, texts = rows_of("qwen_image_edit_plus")
    assert len(set(keys)) == 4 and not torch.equal(texts[0], texts[1])  # one instruction, two sources
    assert not set(keys) & set(rows_of("qwen_image_edit")[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_text_embeddings": False}, "keeps their latents alone; set data.init_args.cache_text_embeddings: true"),
        (
            {"cache_latents": False, "center_crop": False},
            "each random crop is a new text; set data.init_args.center_crop: true",
        ),
    ],
)
def test_caches_that_hide_the_sources_are_refused_before_weights_are_read(
    options: dict[str, Any],
    said: str,
    transformers: Callable[[str], str],
    pairs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_aigc.diffusion.training.module.load_components", None)
    with pytest.raises(DataError, match=f"Qwen-Image-Edit's text encoder sees the source images, .*{said}"):
        fit(transformers("qwen_image_edit"), data_of(pairs, **options), tmp_path)


def test_2509_has_one_timestep_and_2511_a_second_for_its_sources(tmp_path: Path) -> None:
    """`zero_cond_t` comes from the transformer's config: with it, a change of the timestep leaves the sources' own."""
    paths = [make_qwen_image_edit_pipeline(tmp_path / str(own), plus=True, zero_cond_t=own) for own in (False, True)]
    of_2509, of_2511 = (load_components(str(path)) for path in paths)
    assert not of_2509.denoiser.zero_cond_t and of_2511.denoiser.zero_cond_t
    of_2511.denoiser.load_state_dict(of_2509.denoiser.state_dict())
    torch.manual_seed(0)
    noisy, source = torch.randn(2, 1, 4, 8, 8).unbind()
    condition = {"prompt_embeds": torch.randn(1, 9, 32), "prompt_lengths": torch.tensor([9]), "source_1": source}
    with torch.no_grad():
        for timestep, are_equal in ((0.0, True), (700.0, False)):
            found, other = (
                each.family.predict(each, noisy, torch.tensor([timestep]), condition, {}) for each in (of_2509, of_2511)
            )
            assert torch.allclose(found, other, atol=1e-6) == are_equal
