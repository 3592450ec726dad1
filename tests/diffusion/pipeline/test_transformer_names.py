"""A fine-tuned transformer's single file has the published file's names, which diffusers converts to its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file

from lightning_aigc.diffusion import DiffusionFineTuning
from lightning_aigc.diffusion.families import TRANSFORMERS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders


CONVERTER = {"flux2_dev": "flux2"}
"""Families whose files another one's function converts."""
CHROMA_WIDTH = 3072
"""Width at which diffusers' function for Chroma splits layers, whatever the model's is."""


def at_width(convert: FunctionType, width: int) -> Any:
    """The function with this width in place of Chroma's."""
    constants = tuple(width if value == CHROMA_WIDTH else value for value in convert.__code__.co_consts)
    return FunctionType(convert.__code__.replace(co_consts=constants), convert.__globals__)


@pytest.mark.parametrize("family", [name for name, family in TRANSFORMERS.items() if family.original_names])
def test_diffusers_converts_the_single_file_to_the_bit(
    transformers: Callable[[str], str], tmp_path: Path, family: str
) -> None:
    module = DiffusionFineTuning(transformers(family), output_name="tuned")
    module.configure_model()
    folder, single = module.save_model(tmp_path / "tuned.safetensors")
    wanted = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    convert: Any = getattr(
        single_file_utils, f"convert_{CONVERTER.get(family, family)}_transformer_checkpoint_to_diffusers"
    )
    if family == "chroma":
        convert = at_width(convert, module.loaded().denoiser.inner_dim)
    found = convert(load_file(single))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_the_single_file_of_a_2511_has_comfyuis_marker_and_loads_in_diffusers(
    transformers: Callable[[str], str], tmp_path: Path
) -> None:
    module = DiffusionFineTuning(transformers("qwen_image_edit_plus"), output_name="tuned")
    module.configure_model()
    folder, single = module.save_model(tmp_path / "tuned.safetensors")
    assert module.loaded().denoiser.config.zero_cond_t and load_file(single)["__index_timestep_zero__"].shape == (0,)
    found = QwenImageTransformer2DModel.from_single_file(str(single), config=str(folder), subfolder="transformer")
    wanted = module.loaded().denoiser.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.state_dict().items())
