"""Text encoders encode captions and prompts and leave; only then the transformer is loaded. Nothing else changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image

from fakes.models.pipelines import SIDE
from fakes.models.transformer_pipelines import MAKE
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.training import module
from lightning_aigc.diffusion.training.module import DiffusionTraining

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders
PROMPTS = ["a red cup", "a blue shoe on a long wooden table"]


class WithEncoders(DiffusionLoRA):
    """Keeps the text encoders beside the transformer."""

    def _load(self) -> Any:
        return self.load_half(None)


class Alive:
    """Records which parts are in memory whenever some are loaded."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, weakref.ref[Any]]] = []
        self.seen: list[tuple[str, list[str]]] = []
        """Loaded halves, with the networks that were in memory before."""

    def __call__(self, *args: Any, only: Any = None, **options: Any) -> Any:
        gc.collect()
        self.seen.append((only or "all", [kind for kind, part in self.parts if part() is not None]))
        loaded = load_components(*args, only=only, **options)
        self.parts += [("text encoder", weakref.ref(encoder)) for encoder in loaded.text_encoders]
        if loaded.denoiser is not None:
            self.parts.append(("transformer", weakref.ref(loaded.denoiser)))
        return loaded


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, caption in enumerate(("a red cup", "zorp", "a blue shoe and a red cup")):
        pixels = np.random.default_rng(number).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(caption)
    return folder


def fit(model: DiffusionLoRA, photos: Path, folder: Path, steps: int = 2, **options: Any) -> DiffusionLoRA:
    given: dict[str, Any] = {
        "resolution": SIDE, "min_bucket_reso": SIDE, "bucket_reso_steps": SIDE, "train_batch_size": 2,
        "cache_latents": True, "cache_text_embeddings": True, "caption_dropout_rate": 0.3, "num_workers": 0,
        "validation_split": 0.3, "cache_dir": str(folder / "cache"),
    }  # fmt: skip
    data = ImageCaptionData(str(photos), **(given | options))
    torch.manual_seed(1)
    Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, logger=False, max_steps=steps,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, data)  # fmt: skip
    return model


def make(kind: type[DiffusionLoRA], path: str, **options: Any) -> DiffusionLoRA:
    torch.manual_seed(0)
    return kind(
        path, rank=4, learning_rate=1e-2, num_inference_steps=2, sample_resolution=SIDE,
        validation_prompts=PROMPTS, num_validation_images=1, validation_steps=2, **options,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def without_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report's CLIP model, which a download would bring."""
    monkeypatch.setattr(DiffusionTraining, "configure_callbacks", lambda self: [])


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *((family, None) for family in MAKE),
        *(pytest.param(f, "int8", marks=[] if f == "sd3" else pytest.mark.long) for f in MAKE),
    ],
)
def test_the_text_encoders_are_gone_before_the_transformer_is_loaded(
    family: str,
    quantization: Any,
    transformers: Callable[[str], str],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive = Alive()
    monkeypatch.setattr(module, "load_components", alive)
    path = transformers(family)
    ours = fit(make(DiffusionLoRA, path, base_quantization=quantization), photos, tmp_path)
    drawn = ours.sample(PROMPTS, [0, 1], guidance_scale=3.0)
    assert alive.seen == [("text_encoders", []), ("without_text_encoders", [])]
    assert ours.loaded().text_encoders == ()

    usual = fit(make(WithEncoders, path, base_quantization=quantization), photos, tmp_path / "usual")
    for name, parameter in usual.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, ours.get_parameter(name)), name
    torch.testing.assert_close(drawn, usual.sample(PROMPTS, [0, 1], guidance_scale=3.0), atol=1e-5, rtol=1e-5)


def test_an_unforeseen_prompt_brings_the_encoders_back_for_a_moment_and_says_so(
    transformers: Callable[[str], str], photos: Path, tmp_path: Path
) -> None:
    path = transformers("z_image")
    ours = fit(make(DiffusionLoRA, path), photos, tmp_path)
    with pytest.warns(
        UserWarning, match=r"1 prompts, such as 'a zorp on the moon', were not known .*validation_prompts"
    ):
        found = ours.sample(["a zorp on the moon"], [0], guidance_scale=3.0)
    usual = fit(make(WithEncoders, path), photos, tmp_path / "usual")
    torch.testing.assert_close(found, usual.sample(["a zorp on the moon"], [0], guidance_scale=3.0))
    assert ours.loaded().text_encoders == ()


def test_without_a_text_cache_the_encoders_stay(
    transformers: Callable[[str], str], photos: Path, tmp_path: Path
) -> None:
    ours = fit(make(DiffusionLoRA, transformers("z_image")), photos, tmp_path, cache_text_embeddings=False)
    assert len(ours.loaded().text_encoders) == 1
