"""The networks of sd-scripts take every key of our LoRA files, and merge them into the weights that we trained.

A file that they write of FLUX.1 is read here.

sd-scripts has no network for FLUX.2, Z-Image and Qwen-Image, and for Stable Diffusion 3 one with names that no other
program reads: those files are not meant for it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import safetensors.torch
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn

from clients.lora import add_lora, base_state, largest_error, trained_state, write
from clients.shapes import make_denoiser
from fakes.models.lora_models import ATTENTION, CONVOLUTIONS, FEED_FORWARD, TEXT, adapt
from fakes.models.pipelines import make_text_encoder
from lightning_aigc.diffusion.lora.file import convert, read_lora
from lightning_aigc.diffusion.pipeline.single_file_names import unet_names

pytestmark = [pytest.mark.clients, pytest.mark.usefixtures("sd_scripts")]

PROJECTIONS = ["proj_in", "proj_out"]
FLUX: dict[str, Any] = {
    "in_channels": 64, "vec_in_dim": 16, "context_in_dim": 32, "hidden_size": 64, "mlp_ratio": 4.0, "num_heads": 4,
    "depth": 1, "depth_single_blocks": 2, "axes_dim": [4, 6, 6], "theta": 10_000, "qkv_bias": True,
    "guidance_embed": True,
}  # fmt: skip
"""Sizes of the small FLUX.1 under sd-scripts' names."""
WIDTHS = (32, 64, 64, 64)


def small_unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(sample_size=8, block_out_channels=WIDTHS, cross_attention_dim=16, attention_head_dim=8)


def small_sdxl() -> UNet2DConditionModel:
    """SDXL's blocks and layers, a tenth as wide."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10), attention_head_dim=(1, 1, 2), cross_attention_dim=2048,
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=48,
        use_linear_projection=True,
    )  # fmt: skip


def their_unet(state: dict[str, Tensor]) -> nn.Module:
    theirs = importlib.import_module("library.original_unet")
    sizes = {"BLOCK_OUT_CHANNELS": WIDTHS, "TIMESTEP_INPUT_DIM": 32, "TIME_EMBED_DIM": 128}
    with mock.patch.multiple(theirs, **sizes):
        unet: nn.Module = theirs.UNet2DConditionModel(8, 8, 16, False)
    unet.load_state_dict(state)
    return unet


def their_sdxl(state: dict[str, Tensor]) -> nn.Module:
    theirs = importlib.import_module("library.sdxl_original_unet")
    sizes = {"MODEL_CHANNELS": 32, "TIME_EMBED_DIM": 128, "ADM_IN_CHANNELS": 48}
    with mock.patch.multiple(theirs, **sizes):
        unet: nn.Module = theirs.SdxlUNet2DConditionModel()
    unet.load_state_dict(sdxl_names(state))
    return unet


def sdxl_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = unet_names(state, 2)
    return {names[name]: tensor for name, tensor in state.items()}


def merged(module: str, path: Path, text_encoders: Any, denoiser: nn.Module) -> None:
    """Merge a file by sd-scripts' own code, after each of its keys found its place."""
    networks = importlib.import_module(f"networks.{module}")
    network, tensors = networks.create_network_from_weights(1.0, str(path), None, text_encoders, denoiser)
    network.apply_to(text_encoders, denoiser, any(key.startswith("lora_te") for key in tensors), True)
    taken = network.load_state_dict(tensors, strict=False)
    assert not taken.missing_keys
    assert not taken.unexpected_keys
    fresh, tensors = networks.create_network_from_weights(
        1.0, str(path), None, text_encoders, denoiser, for_inference=True
    )
    fresh.merge_to(text_encoders, denoiser, tensors, torch.float32, "cpu")


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_a_lora_file_gives_the_trained_weights(tmp_path: Path, family: str) -> None:
    model = adapt(
        small_sdxl() if family == "sdxl" else small_unet(), [*ATTENTION, *FEED_FORWARD, *PROJECTIONS, *CONVOLUTIONS]
    )
    encoders = [adapt(make_text_encoder(), TEXT)]
    if family == "sdxl":
        encoders.append(adapt(make_text_encoder(with_projection=True), TEXT))
    path = write(tmp_path / "mug.safetensors", family, model, text_encoders=encoders)
    theirs = their_sdxl(base_state(model)) if family == "sdxl" else their_unet(base_state(model))
    plain = [with_earlier_names(make_text_encoder(with_projection=bool(i))) for i in range(len(encoders))]
    merged("lora", path, plain if family == "sdxl" else plain[0], theirs)
    states = base_state(model), trained_state(model)
    base, trained = map(sdxl_names, states) if family == "sdxl" else states
    assert largest_error(theirs.state_dict(), base, trained) < 1e-6
    for encoder, found in zip(encoders, plain, strict=True):
        weights = found.state_dict() if hasattr(encoder, "text_model") else found.text_model.state_dict()
        assert largest_error(weights, base_state(encoder), trained_state(encoder)) < 1e-6


def with_earlier_names(encoder: nn.Module) -> Any:
    """A text encoder whose layers have the names of transformers 4, which sd-scripts is written for."""
    return encoder if hasattr(encoder, "text_model") else nn.ModuleDict({"text_model": encoder})


def test_a_flux_lora_file_gives_the_trained_weights(tmp_path: Path) -> None:
    model: FluxTransformer2DModel = add_lora("flux", make_denoiser("flux"))  # type: ignore[assignment]
    path = write(tmp_path / "mug.safetensors", "flux", model, layout="kohya")
    models, utils = (importlib.import_module(f"library.flux_{name}") for name in ("models", "utils"))
    flux = models.Flux(models.FluxParams(**FLUX))
    base, trained = (
        utils.convert_diffusers_sd_to_bfl(state, 1, 2) for state in (base_state(model), trained_state(model))
    )
    flux.load_state_dict(base)
    merged("lora_flux", path, [make_text_encoder()], flux)
    assert largest_error(flux.state_dict(), base, trained) < 1e-6


@pytest.mark.filterwarnings("ignore:Positional args are being deprecated")
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_a_file_that_it_writes_of_flux_is_converted(tmp_path: Path, layout: Literal["kohya", "diffusers"]) -> None:
    """Its default network, which adapts the modulations of each block and joins query, key and value."""
    models, utils = (importlib.import_module(f"library.flux_{name}") for name in ("models", "utils"))
    networks = importlib.import_module("networks.lora_flux")
    model = make_denoiser("flux")
    base = utils.convert_diffusers_sd_to_bfl(base_state(model), 1, 2)
    flux = models.Flux(models.FluxParams(**FLUX))
    flux.load_state_dict(base)
    encoder = make_text_encoder()
    network = networks.create_network(1.0, 2, 3.0, None, [encoder, None], flux)
    network.apply_to([encoder, None], flux, False, True)
    generator = torch.Generator().manual_seed(7)
    for parameter in network.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    # As its `save_weights`, without the hashes in the header, whose module imports what training needs.
    state = {name: tensor.detach().contiguous() for name, tensor in network.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    assert any("img_mod_lin" in key for key in state)
    trained = dict(base)
    for key in (key for key in state if key.endswith(".lora_down.weight")):
        name = key.removesuffix(".lora_down.weight")
        (own,) = (each for each in base if f"lora_unet_{each.replace('.', '_')}" == f"{name}_weight")
        down, up, alpha = (state[f"{name}.{end}"] for end in ("lora_down.weight", "lora_up.weight", "alpha"))
        trained[own] = base[own] + up @ down * (alpha / 2)
    ours = convert(tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors", layout, "flux")
    changed = base_state(model)
    for layer in read_lora(ours).layers("flux"):
        changed[f"{layer.module}.weight"] = (
            changed[f"{layer.module}.weight"] + layer.up @ layer.down * layer.alpha / layer.rank
        )
    assert largest_error(utils.convert_diffusers_sd_to_bfl(changed, 1, 2), base, trained) < 1e-6
