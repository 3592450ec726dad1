"""diffusers and peft take every key of our LoRA files, in both layouts, and merge them into the weights we trained."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

import diffusers
import pytest
import safetensors.torch

from clients.lora import (
    FILES,
    UNETS,
    add_lora,
    add_random_lokr,
    base_state,
    largest_error,
    lokr_delta,
    trained_state,
    write,
    write_lokr,
)
from clients.shapes import make_denoiser
from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.errors import ModelError

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore:.*DoRA in the kohya layout")]

OF_PUBLISHED_SIZES = ("flux", "flux_kontext", "chroma")
"""Families whose joined layers diffusers splits at the published sizes, whatever the model's are."""
LAYOUTS: list[tuple[str, Literal["kohya", "diffusers"]]] = sorted(
    {*FILES, *((name, "diffusers") for name in FAMILIES)}
    - {*((name, "kohya") for name in OF_PUBLISHED_SIZES), ("krea2", "kohya")}
)
"""Without Krea 2 in kohya's layout, of which diffusers reads no `lora_unet_` names: that file is for ComfyUI."""


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


@pytest.mark.parametrize("rank", [64, 2])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_lokr_file_gives_the_trained_weights(tmp_path: Path, family: str, rank: int) -> None:
    model = make_denoiser(family)
    base = base_state(model)
    trained = add_random_lokr(family, model, rank)
    path = tmp_path / "mug.safetensors"
    if rank == 64 and family in UNETS:  # diffusers reads no whole factor of a convolution, so nothing is written
        with pytest.raises(ModelError, match="a convolution, and diffusers reads decomposed ones alone there"):
            write_lokr(path, family, model, layout="diffusers")
        return
    write_lokr(path, family, model, layout="diffusers")
    fresh: Any = make_denoiser(family)
    state = safetensors.torch.load_file(path)
    fresh.load_lora_adapter(state, prefix=FAMILIES[family].denoiser_name)
    assert len(state) == sum(".lokr_" in name for name, _ in fresh.named_parameters())
    changed = [name for name, module in fresh.named_modules() if hasattr(module, "lokr_w1")]
    found = base | {f"{name}.weight": base[f"{name}.weight"] + lokr_delta(fresh, name) for name in changed}
    assert largest_error(found, base, trained) < 1e-6


@pytest.mark.parametrize("family", UNETS)
def test_a_dora_file_gives_the_trained_weights(tmp_path: Path, family: str) -> None:
    model = add_lora(family, make_denoiser(family), use_dora=True)
    base, trained = base_state(model), trained_state(model)
    path = write(tmp_path / "mug.diffusers.safetensors", family, model, layout="diffusers")
    fresh: Any = make_denoiser(family)
    load(family, fresh, path)
    assert largest_error(trained_state(fresh), base, trained) < 3e-6
