"""Conditions of a ControlNet: made of images, cached, read from files, and what they may not be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.models.pipelines import SIDE, make_batch
from fakes.runs.seeded_fits import fit
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import ControlNetTraining
from lightning_aigc.diffusion.controlnet import conditions
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders

QUICK: dict[str, Any] = {"num_inference_steps": 2, "learning_rate": 1e-3, "max_train_steps": 3, "output_name": "edges"}


def test_a_function_is_refused_with_what_to_give() -> None:
    with pytest.raises(ModelError, match=r"conditions must be a name or a class path, got <function .*my_function"):
        conditions.find_maker(lambda images: images, (0.1, 0.2))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "channels"), [("canny", 1), ("lineart", 1), ("tile", 3), ("inpaint", 4)])
def test_each_condition_trains(sd: str, tmp_path: Path, name: str, channels: int) -> None:
    module = ControlNetTraining(sd, conditions=name, **QUICK | {"max_train_steps": 1})
    module.configure_model()
    batch = make_batch()
    made = module.make_conditions(batch["pixel_values"])
    assert made is not None and made.dtype == torch.uint8 and made.shape == (2, channels, SIDE, SIDE)
    assert float(made.float().std()) > 0
    shown = module.conditioning(batch)
    assert shown.shape == (2, 3, SIDE, SIDE)
    assert torch.equal(module.conditioning({"conditioning": made}), shown)  # cached as bytes: the same values
    if name == "inpaint":
        hidden = shown[:, 0] == -1
        assert 0.05 < float(hidden.float().mean()) < 0.6
        assert torch.equal(shown, module.conditioning(batch))
    else:
        assert float(shown.min()) >= 0 and float(shown.max()) <= 1
    assert all(math.isfinite(loss) for loss in fit(module, tmp_path))


class Halved:
    """A condition by class path."""

    def __call__(self, pictures_B3HW: Tensor) -> Tensor:
        return pictures_B3HW / 2


class TooBright(Halved):
    def __call__(self, pictures_B3HW: Tensor) -> Tensor:
        return pictures_B3HW * 3


def test_a_class_path_makes_conditions(sd: str) -> None:
    module = ControlNetTraining(sd, conditions=f"{__name__}.Halved", **QUICK)
    module.configure_model()
    batch = make_batch()
    wanted = ((batch["pixel_values"] / 2 + 0.5) / 2 * 255).round() / 255
    torch.testing.assert_close(module.conditioning(batch), wanted)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cany", r"must be canny, lineart, tile, inpaint, folder or a class path such as my\.Depth, got 'cany'"),
        ("nowhere.Depth", "cannot be imported"),
        (f"{__name__}.TooBright", r"values outside 0\.\.1"),
    ],
)
def test_conditions_that_cannot_be_are_one_sentence(sd: str, name: str, said: str) -> None:
    def show() -> Tensor:
        module = ControlNetTraining(sd, conditions=name, **QUICK)
        module.configure_model()
        return module.conditioning(make_batch())

    with pytest.raises(ModelError, match=said) as raised:
        show()
    assert "\n" not in str(raised.value)


def test_thresholds_out_of_order_are_refused(sd: str) -> None:
    with pytest.raises(ModelError, match="two numbers 0 <= low <= high"):
        ControlNetTraining(sd, canny_thresholds=(0.3, 0.1))


def test_colour_where_one_channel_is_wanted_names_the_picture() -> None:
    grey = torch.randint(0, 255, (2, 1, 8, 8), dtype=torch.uint8).expand(-1, 3, -1, -1).clone()
    assert conditions.from_bytes(grey, 1).shape == (2, 1, 8, 8)
    grey[1, 0, 3, 3] ^= 255
    with pytest.raises(ModelError, match=r"the condition of b\.png is in colour"):
        conditions.from_bytes(grey, 1, ["a.png", "b.png"])


def test_cached_conditions_are_those_of_the_cached_latents_pictures(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "resolution": 64, "train_batch_size": 8, "num_workers": 0, "random_flip": True, "validation_split": 0.9,
        "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    module = ControlNetTraining("embedded:sd", **QUICK)
    module.configure_model()
    plain = ImageCaptionData("embedded:prior", **settings)
    cached = ImageCaptionData("embedded:prior", cache_latents=True, **settings)
    plain.prepare()
    cached.prepare(module)
    for first, second in zip(plain.loader(), cached.loader(), strict=True):
        assert first["names"] == second["names"] and "pixel_values" not in second
        assert second["conditioning"].dtype == torch.uint8 and second["conditioning"].shape[1] == 1
        assert torch.equal(module.conditioning(first), module.conditioning(second))
    other = ControlNetTraining("embedded:sd", canny_thresholds=(0.2, 0.4), **QUICK)
    other.configure_model()
    assert other.encoder_identity() != module.encoder_identity()


def test_conditions_that_are_files_need_the_word_folder_and_the_word_needs_files(tmp_path: Path, sd: str) -> None:
    data = ImageCaptionData("embedded:prior", resolution=64, num_workers=0, cache_dir=str(tmp_path))
    with pytest.raises(ModelError, match=r"conditions: folder needs data\.init_args\.conditioning_data_dir"):
        fit(ControlNetTraining(sd, conditions="folder", **QUICK), tmp_path, data=data)
    data = ImageCaptionData(
        "embedded:prior", resolution=64, num_workers=0, cache_dir=str(tmp_path),
        conditioning_data_dir=str(resolve("embedded:prior")),
    )  # fmt: skip
    with pytest.raises(ModelError, match="conditions is canny; set conditions: folder"):
        fit(ControlNetTraining(sd, **QUICK), tmp_path, data=data)
    losses = fit(
        ControlNetTraining("embedded:sd", conditions="folder", **QUICK | {"max_train_steps": 1}), tmp_path, data=data
    )
    assert all(math.isfinite(loss) for loss in losses)
