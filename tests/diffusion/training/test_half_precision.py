"""bf16-true: what is trained stays float32 in every job and family, and moves as it does under bf16-mixed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.models.pipelines import make_batch
from fakes.runs.seeded_fits import fit
from lightning_aigc.diffusion import (
    ControlNetTraining,
    DiffusionControlNet,
    DiffusionFineTuning,
    DiffusionLoRA,
    StableDiffusionFineTuning,
    StableDiffusionLoRA,
)
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]
QUICK: dict[str, Any] = {"learning_rate": 1e-4, "max_train_steps": 3, "num_inference_steps": 2}
JOBS: dict[str, Callable[[str], Any]] = {
    "lora": lambda path: StableDiffusionLoRA(path, rank=2, **QUICK),
    "lora with text encoders": lambda path: StableDiffusionLoRA(path, rank=2, train_text_encoder=True, **QUICK),
    "full": lambda path: StableDiffusionFineTuning(path, **QUICK),
    "attention": lambda path: StableDiffusionFineTuning(path, trained_parts=["unet.*attn2*", "text_encoder"], **QUICK),
    "controlnet": lambda path: ControlNetTraining(path, conditions="canny", **QUICK),
    "controlnet lora": lambda path: ControlNetTraining(path, conditions="canny", rank=2, **QUICK),
}
TRANSFORMER_JOBS: dict[str, Callable[[str], Any]] = {
    "lora": lambda path: DiffusionLoRA(path, rank=2, **QUICK),
    "full": lambda path: DiffusionFineTuning(path, **QUICK),
    "controlnet": lambda path: DiffusionControlNet(path, conditions="canny", **QUICK),
}
PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "stock": lambda: {"precision": "bf16-true"},
    "off": lambda: {"plugins": [FusedBackwardPrecision("bf16-true", "off")]},
    "lean": lambda: {"plugins": [FusedBackwardPrecision("bf16-true", "lean")]},
    "max": lambda: {"plugins": [FusedBackwardPrecision("bf16-true", "max")]},
}


def train(module: Any, folder: Path, **precision: Any) -> tuple[list[float], float]:
    """The losses, and the share of the trained values that moved."""
    module.configure_model()
    before = {name: p.detach().clone() for name, p in trained(module).items()}
    losses = fit(module, folder, batch=make_batch(("a red cup", "a zorp shoe")), **precision)
    assert all(p.dtype == torch.float32 for p in trained(module).values())
    has_moved = torch.cat([(p != before[name]).flatten() for name, p in trained(module).items()])
    return losses, float(has_moved.float().mean())


def trained(module: Any) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module", params=JOBS)
def mixed_run(
    request: pytest.FixtureRequest, sd: str, tmp_path_factory: pytest.TempPathFactory, without_report_page: None
) -> tuple[str, list[float], float]:
    """A job, and its losses and the share of the values that moved under bf16-mixed."""
    torch.manual_seed(0)
    return str(request.param), *train(JOBS[request.param](sd), tmp_path_factory.mktemp("mixed"), precision="bf16-mixed")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_trained_weights_stay_float32_and_move(
    sd: str, tmp_path: Path, mixed_run: tuple[str, list[float], float], precision: str
) -> None:
    job, mixed, moved_mixed = mixed_run
    torch.manual_seed(0)
    losses, moved = train(JOBS[job](sd), tmp_path, **PRECISIONS[precision]())
    assert losses == pytest.approx(mixed, rel=2e-2)  # the batch's pixels are bfloat16 under bf16-true
    assert moved >= 0.98 * moved_mixed


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("job", TRANSFORMER_JOBS)
def test_stable_diffusion_3_trains_in_every_job(
    transformers: Callable[[str], str], tmp_path: Path, job: str, precision: str
) -> None:
    _, moved = train(TRANSFORMER_JOBS[job](transformers("sd3")), tmp_path, **PRECISIONS[precision]())
    assert moved > 0.4  # a ControlNet's first steps move its last projections alone


@pytest.mark.parametrize("family", ["flux", "flux2", "qwen_image", "z_image", "chroma", "krea2"])
def test_every_family_trains_a_lora(transformers: Callable[[str], str], tmp_path: Path, family: str) -> None:
    module = DiffusionLoRA(transformers(family), rank=2, **QUICK)
    _, moved = train(module, tmp_path, **PRECISIONS["lean"]())
    assert moved > 0.9


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_a_precision_that_does_not_train_is_refused_before_the_first_step(
    sd: str, tmp_path: Path, precision: str
) -> None:
    with pytest.raises(ConfigError, match=f"got precision {precision}, which does not train this model: .*; use "):
        fit(StableDiffusionLoRA(sd, rank=2, **QUICK), tmp_path, precision=precision)
