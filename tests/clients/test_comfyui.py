"""ComfyUI's own code takes every key of every file that we write, and makes of it the weights that we trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from clients.comfyui import load_denoiser, no_warnings, small_sizes, weights
from clients.lora import (
    FOR_COMFYUI,
    UNETS,
    UNKNOWN_TO_COMFYUI,
    add_lora,
    add_random_lokr,
    base_state,
    largest_error,
    trained_state,
    write,
    write_lokr,
)
from clients.shapes import make_denoiser, original
from fakes.models.lora_models import TEXT, adapt
from fakes.models.pipelines import assemble, make_text_encoder
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.pipeline.saving import save_single_file, save_transformer
from lightning_aigc.diffusion.pipeline.single_file_names import unet_names

pytestmark = pytest.mark.clients


def layout_of(comfy: Any, family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A denoiser's tensors as ComfyUI keeps them, converted by its own tables where it has one."""
    if family in UNETS:
        layers = sum(f"down_blocks.0.resnets.{i}.conv1.weight" in tensors for i in range(4))
        names = unet_names(tensors, layers)
        converted = {names[name]: tensor for name, tensor in tensors.items()}
        with small_sizes(comfy):
            config = comfy.model_detection.detect_unet_config(converted, "")
        for theirs, name in comfy.utils.unet_to_diffusers(config).items():
            assert theirs not in tensors or torch.equal(converted[name], tensors[theirs])
        return converted
    if family in ("flux2", "flux2_dev", "z_image"):
        return original(family, tensors)
    if family.startswith("qwen_image"):
        return tensors
    left = dict(tensors)
    from_diffusers: dict[str, Tensor] = comfy.model_detection.convert_diffusers_mmdit(left, "")
    if family == "chroma":  # the tables are FLUX.1's, without the network that makes the modulations
        from_diffusers |= {guidance_name(name): tensor for name, tensor in left.items()}
    return from_diffusers


def guidance_name(name: str) -> str:
    """The name of a tensor of Chroma's guidance layer in the published file, from diffusers' name."""
    for ours, theirs in {"linear_1.": "in_layer.", "linear_2.": "out_layer."}.items():
        name = name.replace(ours, theirs)
    return name.removesuffix(".weight") + ".scale" if ".norms." in name else name


@pytest.mark.parametrize(("family", "layout"), FOR_COMFYUI)
def test_a_lora_file_gives_the_trained_weights(
    comfy: Any, tmp_path: Path, family: str, layout: Literal["kohya", "diffusers"]
) -> None:
    model = add_lora(family, make_denoiser(family))
    base, trained = base_state(model), trained_state(model)
    path = write(tmp_path / "mug.safetensors", family, model, layout=layout)
    patcher = load_denoiser(comfy, layout_of(comfy, family, base))
    found = with_lora(comfy, patcher, path)
    assert largest_error(found, layout_of(comfy, family, base), layout_of(comfy, family, trained)) < 1e-6


@pytest.mark.parametrize("rank", [64, 2])
@pytest.mark.parametrize("family", sorted({family for family, _ in FOR_COMFYUI}))
def test_a_lokr_file_gives_the_trained_weights(comfy: Any, tmp_path: Path, family: str, rank: int) -> None:
    model = make_denoiser(family)
    base = base_state(model)
    trained = add_random_lokr(family, model, rank)
    path = write_lokr(tmp_path / "mug.safetensors", family, model)
    found = with_lora(comfy, load_denoiser(comfy, layout_of(comfy, family, base)), path)
    error = largest_error(found, layout_of(comfy, family, base), layout_of(comfy, family, trained))
    assert error < 1e-6


def with_lora(comfy: Any, patcher: Any, path: Path) -> dict[str, Tensor]:
    """The denoiser's weights with the file's LoRA, whose keys must all be taken."""
    lora = comfy.utils.load_torch_file(str(path), safe_load=True)
    with no_warnings():
        patched, _ = comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 1.0)
    return {name.removeprefix("diffusion_model."): tensor for name, tensor in weights(comfy, patched).items()}


@pytest.mark.filterwarnings("ignore:.*DoRA in the kohya layout")
@pytest.mark.parametrize("family", UNETS)
def test_a_dora_file_gives_the_trained_weights(comfy: Any, tmp_path: Path, family: str) -> None:
    model = add_lora(family, make_denoiser(family), use_dora=True)
    base, trained = base_state(model), trained_state(model)
    patcher = load_denoiser(comfy, layout_of(comfy, family, base))
    found = with_lora(comfy, patcher, write(tmp_path / "mug.safetensors", family, model))
    assert largest_error(found, layout_of(comfy, family, base), layout_of(comfy, family, trained)) < 3e-6


@pytest.mark.parametrize("family", UNETS)
def test_text_encoders_get_their_trained_weights_too(comfy: Any, tmp_path: Path, family: str) -> None:
    model = add_lora(family, make_denoiser(family))
    encoders = [adapt(make_text_encoder(), TEXT)]
    if family == "sdxl":
        encoders.append(adapt(make_text_encoder(with_projection=True), TEXT))
    path = write(tmp_path / "mug.safetensors", family, model, text_encoders=encoders)
    patcher = load_denoiser(comfy, layout_of(comfy, family, base_state(model)))
    clip = small_clip(comfy, family, [base_state(encoder) for encoder in encoders])
    with no_warnings():
        lora = comfy.utils.load_torch_file(str(path), safe_load=True)
        _, patched = comfy.sd.load_lora_for_models(patcher, clip, lora, 1.0, 1.0)
    found = weights(comfy, patched.patcher)
    for name, encoder in zip(("clip_l", "clip_g"), encoders, strict=False):
        base, trained = (clip_names(name, state) for state in (base_state(encoder), trained_state(encoder)))
        assert largest_error(found, base, trained) < 1e-6


def clip_names(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """An encoder's layers under ComfyUI's names."""
    return {
        f"{name}.transformer.text_model.{key.removeprefix('text_model.')}": tensor
        for key, tensor in state.items()
        if ".layers." in key
    }


def small_clip(comfy: Any, family: str, states: list[dict[str, Tensor]]) -> Any:
    """ComfyUI's text encoders of SD or SDXL in the sizes of the small ones, with these weights in their layers."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    kind = comfy.sd1_clip.SD1ClipModel if family == "sd" else comfy.sdxl_clip.SDXLClipModel
    target = SimpleNamespace(params={}, clip=kind, tokenizer=lambda **_: None)
    options = {"clip_l_model_config": sizes, "clip_g_model_config": sizes, "dtype": torch.float32}
    clip = comfy.sd.CLIP(target, model_options=options)
    tensors = {
        k: v
        for name, state in zip(("clip_l", "clip_g"), states, strict=False)
        for k, v in clip_names(name, state).items()
    }
    assert not clip.cond_stage_model.load_state_dict(tensors, strict=False).unexpected_keys
    return clip


@pytest.mark.parametrize("family", UNETS)
def test_a_single_file_checkpoint_is_the_pipeline(comfy: Any, tmp_path: Path, family: str) -> None:
    pipeline = assemble(tmp_path / "base", make_denoiser(family), sdxl=family == "sdxl")
    pipeline.vae = AutoencoderKL(
        block_out_channels=(8,) * 4, layers_per_block=2, norm_num_groups=4, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    pipeline.save_pretrained(tmp_path / "base")
    components = load_components(str(tmp_path / "base"))
    save_single_file(tmp_path / "mug.safetensors", components, {"unet": components.denoiser}, torch.float32)
    tensors = comfy.utils.load_torch_file(str(tmp_path / "mug.safetensors"), safe_load=True)
    found = weights(comfy, load_denoiser(comfy, tensors))
    wanted = layout_of(comfy, family, dict(components.denoiser.state_dict()))
    assert all(torch.equal(found[f"diffusion_model.{name}"], tensor) for name, tensor in wanted.items())
    # The autoencoder, as ComfyUI's checkpoint loader takes it.
    vae = comfy.utils.state_dict_prefix_replace(tensors, {"first_stage_model.": ""}, filter_keys=True)
    again = comfy.utils.load_torch_file(str(tmp_path / "mug.safetensors"), safe_load=True)
    named = comfy.diffusers_convert.convert_vae_state_dict(dict(components.vae.state_dict()))
    assert vae.keys() == named.keys()
    assert all(torch.equal(vae[name], named[name]) for name in vae)
    # The text encoders, under the names that its model class of the family expects.
    published = comfy.supported_models.SDXL if family == "sdxl" else comfy.supported_models.SD15
    clip = published({}).process_clip_state_dict(again)
    for name, encoder in zip(("clip_l", "clip_g"), components.text_encoders, strict=False):
        for key, tensor in clip_names(name, dict(encoder.state_dict())).items():
            assert torch.equal(clip[key.replace("text_model.text_model", "text_model")], tensor), key


@pytest.mark.parametrize("family", [name for name in TRANSFORMERS if name not in UNKNOWN_TO_COMFYUI])
def test_a_fine_tuned_transformer_is_read(comfy: Any, tmp_path: Path, family: str) -> None:
    model = make_denoiser(family)
    components: Any = SimpleNamespace(denoiser=model, family=TRANSFORMERS[family])
    save_transformer(tmp_path / "mug.safetensors", components, torch.float32, {})
    tensors = comfy.utils.load_torch_file(str(tmp_path / "mug.safetensors"), safe_load=True)
    patcher = load_denoiser(comfy, tensors)
    if family in ("qwen_image_edit", "qwen_image_edit_plus"):  # only 2511's sources have a timestep of their own
        method = "index_timestep_zero" if family == "qwen_image_edit_plus" else "index"
        assert patcher.model.diffusion_model.default_ref_method == method
    found = weights(comfy, patcher)
    for name, tensor in layout_of(comfy, family, dict(model.state_dict())).items():
        assert torch.equal(found[f"diffusion_model.{name}"], tensor)
