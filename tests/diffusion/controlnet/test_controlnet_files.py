"""Files of a ControlNet: lllyasviel's names, which diffusers and ComfyUI load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionPipeline,
)
from safetensors.torch import load_file

from fakes.models.pipelines import make_pipeline
from fakes.runs.seeded_fits import cloned, same
from lightning_aigc.diffusion import ControlNetTraining
from lightning_aigc.diffusion.controlnet.unet import PREFIX, single_file_name

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders

QUICK: dict[str, Any] = {"num_inference_steps": 2, "learning_rate": 1e-3, "max_train_steps": 3, "output_name": "edges"}


def test_the_single_file_has_lllyasviels_names_and_loads_in_diffusers(tmp_path: Path) -> None:
    """The hint embedding of a factor 8, whose last convolution diffusers looks for under one fixed number."""
    folder = make_pipeline(tmp_path / "sd")
    module = ControlNetTraining(str(folder), **QUICK)
    module.configure_model()
    assert module.unet is not None
    module.controlnet = ControlNetModel.from_unet(module.unet)
    torch.manual_seed(0)
    for parameter in module.controlnet.parameters():
        torch.nn.init.normal_(parameter)
    module.save_model(tmp_path / "edges.safetensors")
    found = load_file(tmp_path / "edges.safetensors")
    assert {"control_model.input_hint_block.14.weight", "control_model.zero_convs.0.0.bias"} <= found.keys()
    loaded = ControlNetModel.from_single_file(
        str(tmp_path / "edges.safetensors"), config=str(tmp_path / "edges"), local_files_only=True
    )
    assert same(cloned(module.controlnet), cloned(loaded))


@pytest.mark.parametrize("hint_blocks", [2, 4, 6])
def test_no_two_parameters_share_a_name_in_the_single_file(sd: str, hint_blocks: int) -> None:
    unet = StableDiffusionPipeline.from_pretrained(sd, safety_checker=None).unet
    channels = (4,) * (hint_blocks // 2 + 1)
    state = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=channels).state_dict()
    names = {PREFIX + single_file_name(name, 1, hint_blocks) for name in state}
    assert len(names) == len(state)
