"""diffusers and peft take every key of our LoRA files, in both layouts, and merge them into the weights we trained."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

import diffusers
import pytest

from clients.lora import FILES, UNETS, add_lora, base_state, largest_error, trained_state, write
from clients.shapes import make_denoiser
from lightning_aigc.diffusion.families import FAMILIES

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore:.*DoRA in the kohya layout")]

LAYOUTS: list[tuple[str, Literal["kohya", "diffusers"]]] = sorted(
    {*FILES, *((name, "diffusers") for name in FAMILIES)} - {("flux", "kohya"), ("krea2", "kohya")}
)
"""Without FLUX.1 in kohya's layout, whose layers diffusers splits at the published sizes, whatever the model's are, and
without Krea 2 in it, of which diffusers reads no `lora_unet_` names: that file is for ComfyUI."""


def load(family: str, model: Any, path: Path) -> None:
    """Load a file into a denoiser by the pipeline class of its family."""
    pipeline: Any = getattr(diffusers, FAMILIES[family].pipeline)
    wants = {"return_lora_metadata": True}
    if family in UNETS:
        wants |= {"unet_config": model.config}
    state, *others = pipeline.lora_state_dict(str(path), **wants)
    into = pipeline.load_lora_into_unet if family in UNETS else pipeline.load_lora_into_transformer
    taken = inspect.signature(into).parameters
    given = {"network_alphas": others[0] if len(others) == 2 else None, "metadata": others[-1]}
    into(
        state,
        **{
            name: model if name in ("unet", "transformer") else given.get(name)
            for name in taken
            if name in ("unet", "transformer", "network_alphas", "metadata")
        },
    )


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_a_lora_file_gives_the_trained_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, layout: Literal["kohya", "diffusers"]
) -> None:
    model = add_lora(family, make_denoiser(family))
    base, trained = base_state(model), trained_state(model)
    path = write(tmp_path / "mug.safetensors", family, model, layout=layout)
    fresh: Any = make_denoiser(family)
    load(family, fresh, path)
    assert "unexpected" not in caplog.text
    assert largest_error(trained_state(fresh), base, trained) < 1e-6


@pytest.mark.parametrize("family", UNETS)
def test_a_dora_file_gives_the_trained_weights(tmp_path: Path, family: str) -> None:
    model = add_lora(family, make_denoiser(family), use_dora=True)
    base, trained = base_state(model), trained_state(model)
    path = write(tmp_path / "mug.diffusers.safetensors", family, model, layout="diffusers")
    fresh: Any = make_denoiser(family)
    load(family, fresh, path)
    assert largest_error(trained_state(fresh), base, trained) < 3e-6
