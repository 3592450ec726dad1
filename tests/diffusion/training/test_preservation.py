"""Preservation without class images: the first step's loss, what it costs, what it holds, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fakes.models.pipelines import SIDE, make_batch
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.training.preservation import Preservation, adapter_off, class_caption
from lightning_aigc.errors import ModelError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.memory.budget import MemoryBudget
from pairs.configs import make_images

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]
CAPTIONS = ("a zorp cup", "a red zorp shoe")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "class": {"preserve": "class", "class_word": "blue"},
    "blank": {"preserve": "blank"},
    "own": {"preserve": "own"},
}


def make_module(path: str, kind: str, **options: Any) -> DiffusionLoRA:
    torch.manual_seed(0)
    module = DiffusionLoRA(path, **({"rank": 4, "learning_rate": 1e-2, "max_train_steps": 2} | KINDS[kind] | options))
    module.configure_model()
    return module


def batch_for(kind: str) -> dict[str, Any]:
    batch = make_batch(CAPTIONS)
    mask = torch.zeros(2, 1, SIDE, SIDE)
    mask[:, :, :, : SIDE // 2] = 1
    held = {"class": [class_caption(each, "zorp", "blue") for each in CAPTIONS], "blank": ["", ""]}
    return batch | {"mask": mask} | ({"preserved_captions": held[kind]} if kind in held else {})


def step(module: DiffusionLoRA, kind: str) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """The loss of a training step, the gradients, and what is logged."""
    logged: dict[str, float] = {}
    module.zero_grad()
    torch.manual_seed(3)
    with mock.patch.object(type(module), "log", lambda _, name, value, **__: logged.update({name: float(value)})):
        loss = module.training_step(batch_for(kind), 0)
        loss.backward()
    grads = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads, logged


def trained_a_little(module: DiffusionLoRA) -> DiffusionLoRA:
    torch.manual_seed(5)
    for parameter in module.trainable_parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("kind", ["class", "blank", "own"])
@pytest.mark.parametrize("family", ["sd", "sdxl", "flux", "qwen_image"])
def test_the_first_step_is_the_plain_one(
    family: str, kind: str, sd: str, sdxl: str, transformers: Callable[[str], str]
) -> None:
    path = {"sd": sd, "sdxl": sdxl}.get(family) or transformers(family)
    plain, plain_grads, _ = step(make_module(path, "plain"), kind)
    loss, grads, logged = step(make_module(path, kind), kind)
    assert abs(loss - plain) < 1e-6 and abs(logged["preserved_loss"]) < 1e-6
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, plain_grads[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["class", "own"])
def test_a_trained_adapter_is_pulled_back_by_the_weight_that_is_asked_for(sd: str, kind: str) -> None:
    plain, _, plain_logged = step(trained_a_little(make_module(sd, "plain")), kind)
    loss, _, logged = step(trained_a_little(make_module(sd, kind)), kind)
    twice, _, logged_twice = step(trained_a_little(make_module(sd, kind, preserve_weight=2.0)), kind)
    assert logged["loss"] == pytest.approx(plain_logged["loss"], rel=1e-5) and logged["preserved_loss"] > 1e-5
    assert loss - plain == pytest.approx(logged["preserved_loss"], rel=1e-3)
    assert twice - plain == pytest.approx(2 * logged["preserved_loss"], rel=1e-3)
    assert logged_twice["preserved_loss"] == pytest.approx(2 * logged["preserved_loss"], rel=1e-5)


def test_the_adapter_is_off_for_the_base_alone_and_weights_keep_taking_gradients(sd: str) -> None:
    module, base = trained_a_little(make_module(sd, "plain")), make_module(sd, "plain")
    arguments = torch.randn(1, 4, SIDE // 2, SIDE // 2), torch.tensor([5]), torch.randn(1, 12, 16)
    before = [p.requires_grad for p in module.parameters()]
    with torch.no_grad():
        own = module.loaded().denoiser(*arguments).sample
        with adapter_off(module.loaded().denoiser):
            off = module.loaded().denoiser(*arguments).sample
        assert torch.equal(off, base.loaded().denoiser(*arguments).sample) and not torch.equal(off, own)
        assert torch.equal(module.loaded().denoiser(*arguments).sample, own)
    assert [p.requires_grad for p in module.parameters()] == before


@pytest.mark.parametrize("memory", ["lean", "max", pytest.param(0.5, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", ["sd", pytest.param("flux", marks=pytest.mark.long)])
def test_memory_levels_give_the_native_gradients(
    family: str, memory: Any, sd: str, transformers: Callable[[str], str]
) -> None:
    path = sd if family == "sd" else transformers(family)
    loss, grads, _ = step(trained_a_little(make_module(path, "class")), "class")
    module = trained_a_little(make_module(path, "class"))
    level = memory if isinstance(memory, str) else MemoryBudget(kept=memory)
    FusedBackwardPrecision(precision="32-true", memory=level).convert_module(module)
    for _ in range(2):  # a budget counts the first call and plans the second
        found, found_grads, _ = step(module, "class")
        assert found == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(found_grads[name], grad, rtol=1e-3, atol=1e-5)


def denoiser_operations(path: str, kind: str, **options: Any) -> int:
    """Operations of a step without the autoencoder's and the text encoders', which caches replace."""
    module = make_module(path, kind, **options)
    with FlopCounterMode(display=False) as counted:
        step(module, kind)
    of = {name: sum(table.values()) for name, table in counted.get_flop_counts().items()}
    return int(of["UNet2DConditionModel"])


@pytest.mark.parametrize(("kind", "share", "most"), [("class", 1.0, 2.7), ("class", 0.5, 1.9), ("own", 1.0, 1.6)])
def test_a_held_step_takes_at_most_the_stated_operations(sd: str, kind: str, share: float, most: float) -> None:
    plain, held = denoiser_operations(sd, "plain"), denoiser_operations(sd, kind, preserve_share=share)
    stated = Preservation(kind, share=share).figures()["preserve_step_ratio"]  # type: ignore[arg-type]
    assert 1.2 * plain < held <= stated * plain <= most * plain


def test_the_report_has_the_share_of_a_batch_as_it_was_trained(sd: str) -> None:
    module = make_module(sd, "class", preserve_share=0.1)  # of two examples, one is held at the least
    step(module, "class")
    assert module.report_entries()["figures"] == {
        "preserve_share": 0.5, "preserve_weight": 1.0, "preserve_step_ratio": 1.85,
    }  # fmt: skip


def fit(path: str, images: Path, folder: Path, model: dict[str, Any], **data: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    steps = 2
    given: dict[str, Any] = {"rank": 4, "learning_rate": 1e-2, "max_train_steps": steps, "checkpoints_total_limit": 0}
    module = DiffusionLoRA(path, **(given | model))
    source: dict[str, Any] = {
        "train_data_dir": str(images), "resolution": SIDE, "train_batch_size": 2, "min_bucket_reso": SIDE,
        "bucket_reso_steps": SIDE, "num_workers": 0, "cache_dir": str(folder / "cache"), "trigger_word": "zorp",
    }  # fmt: skip
    trainer = Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, datamodule=ImageCaptionData(**(source | data)))
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("zorp") / "images", "zorp", 4)


@pytest.mark.parametrize(
    "family", ["sd", "qwen_image", *(pytest.param(name, marks=pytest.mark.long) for name in ("flux", "z_image"))]
)
def test_held_captions_come_from_the_cache_as_from_the_text_encoder(
    family: str, sd: str, transformers: Callable[[str], str], images: Path, tmp_path: Path
) -> None:
    path = sd if family == "sd" else transformers(family)
    encoded = fit(path, images, tmp_path / "a", KINDS["class"], caption_dropout_rate=0.5)
    cached = fit(path, images, tmp_path / "b", KINDS["class"], caption_dropout_rate=0.5, cache_text_embeddings=True)
    plain = fit(path, images, tmp_path / "c", {}, caption_dropout_rate=0.5)
    for name, value in encoded.items():
        torch.testing.assert_close(cached[name], value, rtol=1e-3, atol=1e-4)
    assert any(not torch.equal(plain[name], value) for name, value in encoded.items())


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ({"preserve": "class"}, {}, r"there is none; set model\.init_args\.class_word"),
        ({"class_word": "mug"}, {}, r"class_word: 'mug' is read by preserve: class alone"),
        ({"preserve": "blank", "train_text_encoder": True}, {}, r"set model\.init_args\.train_text_encoder: false"),
        ({"preserve": "blank", "preserve_share": 1.5}, {}, "preserve_share must be above 0 and at most 1, got 1.5"),
        (KINDS["class"], {"trigger_word": None}, r"there is none; set data\.init_args\.trigger_word"),
        (KINDS["class"] | {"class_word": "a Zorp"}, {}, r"class_word: 'a Zorp' holds the trigger word 'zorp'"),
        (KINDS["blank"], {"caption_dropout_rate": 0.1}, "set caption_dropout_rate: 0"),
        (KINDS["own"], {}, r"there are none; set data\.init_args\.mask_dir"),
    ],
)
def test_settings_that_would_hold_back_what_is_taught_are_refused_before_the_first_step(
    sd: str, images: Path, tmp_path: Path, model: dict[str, Any], data: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        fit(sd, images, tmp_path, model, **data)


def test_a_caption_without_the_trigger_word_is_refused() -> None:
    with pytest.raises(ModelError, match="'a zorpy cup' has no 'zorp'"):
        class_caption("a zorpy cup", "zorp", "mug")


def test_a_loader_without_held_captions_is_refused(sd: str) -> None:
    module = make_module(sd, "blank")
    with mock.patch.object(type(module), "log"), pytest.raises(ModelError, match="as ImageCaptionData makes them"):
        module.training_step(make_batch(CAPTIONS), 0)
