"""A fine-tuned transformer's single file has the published file's names, which diffusers converts to its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file

from lightning_aigc.diffusion import DiffusionFineTuning
from lightning_aigc.diffusion.families import TRANSFORMERS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders


CONVERTER = {"flux2_dev": "flux2"}
"""Families whose files another one's function converts."""


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
    found = convert(load_file(single))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
