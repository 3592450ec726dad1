"""The checks of the untrained model: its prediction type, and its autoencoder in float16 and on text."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
import torch
from lightning.pytorch import Trainer
from PIL import Image

from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.diffusion.objectives.ddpm import LEARNED_SHARE, loss_by_type
from lightning_aigc.diffusion.pipeline.vae_checks import FLOAT16_MAX, LEAST_PSNR_DB, MOST_LOST, describe_vae, round_trip
from tools.guide.vae_text import Legibility, least_legible_height, legibility

pytestmark = [  # of Lightning: frozen parts are in eval mode, and so small a run has no workers
    pytest.mark.filterwarnings("ignore:.*module\\(s\\) in eval mode"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


def fit(tmp_path: Path, prediction_type: str | None) -> StableDiffusionLoRA:
    torch.manual_seed(0)
    module = StableDiffusionLoRA("embedded:sd", rank=4, prediction_type=prediction_type)  # type: ignore[arg-type]
    data = ImageCaptionData("embedded:brand", resolution=64, cache_dir=str(tmp_path / "cache"))
    trainer = Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    return module


@pytest.mark.parametrize("wrong", ["v_prediction", "sample"])
def test_a_wrong_prediction_type_is_named_before_the_first_step(tmp_path: Path, wrong: str) -> None:
    with pytest.warns(UserWarning, match=rf"prediction_type {wrong} does not fit .*prediction_type: epsilon"):
        fit(tmp_path, wrong)


def test_the_right_one_is_quiet_and_the_check_leaves_the_random_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = fit(tmp_path, None)  # warnings are errors here
    monkeypatch.setattr("lightning_aigc.diffusion.training.module.warn_of_prediction_type", lambda *_: None)
    other = fit(tmp_path, None)
    assert all(torch.equal(a, b) for a, b in zip(one.trainable_parameters(), other.trainable_parameters(), strict=True))


def test_a_random_model_fits_no_prediction_type_much_better_than_another() -> None:
    torch.manual_seed(0)
    module = StableDiffusionLoRA("embedded:sd", rank=4)
    parts = module.loaded()
    for layer in parts.denoiser.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            reset()
    batch: dict[str, Any] = {"pixel_values": torch.rand(4, 3, 64, 64) * 2 - 1, "captions": ["a mug"] * 4}
    condition = module.encoders.condition(batch, with_gradients=False)
    losses = loss_by_type(
        module.loaded_objective().schedule, module.encoders.latents(batch),
        lambda noisy, timesteps: module.predict(noisy, timesteps, condition, batch),
    )  # fmt: skip
    shares = [share for _, share in losses.values()]
    assert all(LEARNED_SHARE < share < 1.5 for share in shares)


@pytest.fixture(scope="module")
def vae() -> Any:
    return StableDiffusionLoRA("embedded:sd").loaded().vae


@pytest.fixture(scope="module")
def pictures() -> torch.Tensor:
    return ImageCaptionData("embedded:brand", resolution=64).reference_images(2)


def test_a_healthy_autoencoder_gets_one_line_of_figures(vae: Any, pictures: torch.Tensor) -> None:
    lines = describe_vae(vae, pictures)
    assert len(lines) == 1 and "dB PSNR" in lines[0]
    assert 25 < round_trip(vae, pictures).psnr_db < 40


@pytest.mark.parametrize("name", ["astronaut", "coffee", "chelsea", "rocket"])
def test_photographs_that_the_autoencoder_loses_are_reported(vae: Any, name: str) -> None:
    photograph = Image.fromarray(getattr(skimage.data, name)()).resize((64, 64))
    photo_1CHW = torch.from_numpy(np.array(photograph)).permute(2, 0, 1)[None].float() / 255
    _, said = describe_vae(vae, photo_1CHW)
    assert 0.2 < round_trip(vae, photo_1CHW).lost_share < 0.4
    assert "of what your images show" in said and "data.init_args.resolution" in said


def test_a_pale_subject_on_a_pale_ground_is_lost_at_a_high_psnr(vae: Any, pictures: torch.Tensor) -> None:
    pale = 0.9 + 0.1 * torch.randn(1, 1, 8, 8, generator=torch.manual_seed(0)).repeat_interleave(8, 2)
    pale = (pale.repeat_interleave(8, 3).expand(1, 3, -1, -1) * 0.2 + 0.75).clamp(0, 1)
    trip = round_trip(vae, pale)
    assert trip.psnr_db > LEAST_PSNR_DB and trip.lost_share > MOST_LOST
    assert len(describe_vae(vae, pale)) == 2


def test_an_activation_beyond_float16_is_found_with_its_layer(vae: Any, pictures: torch.Tensor) -> None:
    large = copy.deepcopy(vae)
    with torch.no_grad():
        large.decoder.mid_block.resnets[0].conv2.weight.mul_(1e6)
    trip = round_trip(large, pictures)
    assert trip.peak > FLOAT16_MAX and trip.peak_layer.startswith("decoder.")
    said = "\n".join(describe_vae(large, pictures))
    assert f"float16 overflows at {trip.peak_layer}" in said and "vae_dtype: float32" in said
    with torch.no_grad(), warnings.catch_warnings():
        half = large.half().decode(torch.randn(1, 4, 16, 16).half()).sample
    assert not half.isfinite().all()  # the check is right: float16 does not hold it


def test_hooks_are_gone_after_the_check(vae: Any, pictures: torch.Tensor) -> None:
    describe_vae(vae, pictures)
    assert not any(module._forward_hooks for module in vae.modules())


def test_large_letters_survive_the_autoencoder_and_small_ones_do_not(vae: Any) -> None:
    small, large = legibility(vae, heights=(6, 24))
    assert small.kept < 0.5 < 0.95 < large.kept
    assert small.correlation < large.correlation


def test_the_least_height_is_that_above_which_all_are_legible() -> None:
    rows = [Legibility(h, kept, 0.5) for h, kept in ((6, 0.95), (8, 0.5), (10, 0.92), (12, 0.99))]
    assert least_legible_height(rows) == 10
    assert least_legible_height(rows[:2]) is None
