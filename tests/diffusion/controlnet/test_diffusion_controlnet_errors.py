"""DiffusionControlNet: what cannot be is one sentence, and which numbers of blocks can."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import FluxControlNetModel

from fakes.models.pipelines import SIDE, make_batch
from fakes.models.transformer_controlnets import CAPTIONS, make_module
from fakes.runs.seeded_fits import fit
from fakes.runs.training_losses import example_losses
from lightning_aigc.diffusion import DiffusionControlNet
from lightning_aigc.diffusion.families import CONTROLLED
from lightning_aigc.errors import ModelError

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),  # diffusers' ControlNet imports it
]

Folder = Callable[[str], str]


@pytest.mark.parametrize("other", ["flux2", "flux2_dev", "chroma", "krea2"])
def test_a_family_without_a_controlnet_is_one_sentence_that_names_those_with(other: str, transformers: Folder) -> None:
    with pytest.raises(ModelError, match=r"this model trains FluxPipeline and .*, and diffusers has no ControlNet for"):
        DiffusionControlNet(transformers(other))


def test_an_option_of_the_other_kind_of_model_is_one_sentence(sd: str, transformers: Folder) -> None:
    with pytest.raises(ModelError, match=r"num_layers: 2 is for ControlNets of transformers, and this is SD 1.5"):
        DiffusionControlNet(sd, num_layers=2)
    with pytest.raises(ModelError, match=r"rank: 4 is for ControlNets of U-Nets, and this is Stable Diffusion 3"):
        DiffusionControlNet(transformers("sd3"), rank=4)


def test_a_condition_without_files_or_pictures_is_one_sentence(transformers: Folder) -> None:
    module = make_module(transformers("sd3"), conditions="folder")
    with pytest.raises(ModelError, match=r"the batch has no conditions; set data\.init_args\.conditioning_data_dir"):
        example_losses(module, make_batch(CAPTIONS))
    with pytest.raises(ModelError, match="needs condition images; pass `conditions`"):
        make_module(transformers("sd3")).sample(["a red cup"], [0])


def test_a_size_that_does_not_divide_is_one_sentence(family: str, folder: str) -> None:
    module, batch = make_module(folder), make_batch(CAPTIONS)
    batch["pixel_values"] = torch.rand(2, 3, SIDE, 34) * 2 - 1
    with pytest.raises(ModelError, match=r"34 x 32 pixels do not divide .* multiple of 4"):
        example_losses(module, batch)
    for width in (34, 33):
        with pytest.raises(ModelError, match=rf"{width} x 32 pixels do not divide .* multiple of 4"):
            module.sample(["a red cup"], [0], conditions=torch.rand(1, 3, SIDE, width))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sd3", {"num_layers": 2}, "num_layers: the transformer's 2 blocks do not read 2 of a .* use one of 1"),
        ("flux", {"num_layers": 0}, "num_layers: the transformer's 1 blocks do not read 0"),
        ("flux", {"num_single_layers": 3}, "num_single_layers: .* use one of 0, 1, 2"),
        ("sd3", {"num_single_layers": 1}, "num_single_layers: StableDiffusion3Pipeline has no such blocks"),
    ],
)
def test_a_number_of_blocks_that_cannot_be_is_one_sentence(
    name: str, options: dict[str, int], said: str, transformers: Folder
) -> None:
    with pytest.raises(ModelError, match=said):
        make_module(transformers(name), **options)


def test_of_a_controlnets_blocks_the_transformer_reads_each() -> None:
    """By the rules of diffusers' transformers: SD 3's last block takes nothing."""
    for blocks in (1, 2, 3, 19, 24, 38):
        for count in CONTROLLED["sd3"].control.control_counts(blocks):
            assert {int(i / (blocks / count)) for i in range(blocks - 1)} == set(range(count))
        for count in CONTROLLED["flux"].control.control_counts(blocks):
            assert {i // -(-blocks // count) for i in range(blocks)} == set(range(count))
    assert 12 in CONTROLLED["sd3"].control.control_counts(24) and 4 in CONTROLLED["flux"].control.control_counts(19)


def test_a_flux_controlnet_without_single_blocks_trains(transformers: Folder, tmp_path: Path) -> None:
    module = make_module(transformers("flux"), num_single_layers=0)
    fit(module, tmp_path, batch=make_batch(CAPTIONS))
    assert all(p.grad is not None for p in module.trainable_parameters())


def test_a_controlnet_of_another_kind_is_one_sentence(transformers: Folder, tmp_path: Path) -> None:
    of_sd3, of_flux = make_module(transformers("sd3")).controlnet, make_module(transformers("flux")).controlnet
    of_sd3.save_pretrained(tmp_path / "sd3")
    given = {"controlnet_model_name_or_path": str(tmp_path / "sd3")}
    with pytest.raises(ModelError, match="is a SD3ControlNetModel, and this base takes a FluxControlNetModel"):
        make_module(transformers("flux"), **given)
    with pytest.raises(ModelError, match=r"num_layers is of a new ControlNet, and .*controlnet_model_name_or_path"):
        make_module(transformers("sd3"), num_layers=1, **given)
    config = {**of_flux.config, "_use_default_values": []}  # which would win
    FluxControlNetModel.from_config(config | {"num_mode": 3}).save_pretrained(tmp_path / "union")
    FluxControlNetModel.from_config(config | {"pooled_projection_dim": 8}).save_pretrained(tmp_path / "other")
    for name, said in (("union", "reads more than one image's latents"), ("other", "its pooled_projection_dim is 8")):
        with pytest.raises(ModelError, match=said):
            make_module(transformers("flux"), controlnet_model_name_or_path=str(tmp_path / name))
    shutil.rmtree(tmp_path / "sd3")
    with pytest.raises(ModelError, match="does not load as a ControlNet"):
        make_module(transformers("sd3"), **given)
