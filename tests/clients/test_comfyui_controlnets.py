"""ComfyUI's own code takes every tensor of our ControlNets, and computes what diffusers does with them."""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import (
    ControlNetModel,
    FluxControlNetModel,
    QwenImageControlNetModel,
    SD3ControlNetModel,
    UNet2DConditionModel,
    ZImageControlNetModel,
)
from torch import Tensor, nn

from clients.comfyui import load_denoiser, no_warnings, small_sizes
from clients.shapes import make_denoiser
from clients.test_comfyui import layout_of
from lightning_aigc.diffusion.controlnet import transformer, unet
from lightning_aigc.diffusion.controlnet.lora import add_lora, merged_controlnet, save_control_lora

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated")]

SIDE = 32


def small_unet(sdxl: bool = False) -> UNet2DConditionModel:
    """Four levels as SD 1.5 with its 8 heads, or three as SDXL with heads of 64 channels: ComfyUI assumes those."""
    torch.manual_seed(0)
    if not sdxl:
        return UNet2DConditionModel(
            sample_size=SIDE, block_out_channels=(32, 64, 64, 64), cross_attention_dim=16, attention_head_dim=8
        )
    return UNet2DConditionModel(
        sample_size=SIDE, block_out_channels=(32, 64, 128), cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 2), attention_head_dim=(1, 1, 2), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=64,
    )  # fmt: skip


def stirred(network: Any) -> Any:
    """The network with random weights where a new one has zeros."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


@torch.no_grad()
def residuals(controlnet: ControlNetModel) -> list[Tensor]:
    """The residuals that diffusers adds to the U-Net, from its first to its middle block."""
    x, hint, steps, context, added = inputs(controlnet.config)
    kwargs = (
        {"text_embeds": added[:, :16], "time_ids": torch.zeros(2, 6)} if "time_ids" in str(controlnet.config) else None
    )
    down, middle = controlnet(x, steps, context, hint, added_cond_kwargs=kwargs, return_dict=False)
    return [*down, middle]


@torch.no_grad()
def comfyui_residuals(control_model: nn.Module, config: Any) -> list[Tensor]:
    x, hint, steps, context, added = inputs(config)
    found = control_model(x=x, hint=hint, timesteps=steps, context=context, y=added)
    return [*found["output"], *found["middle"]]


def inputs(config: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    x, hint = (
        torch.randn(2, 4, SIDE, SIDE, generator=generator),
        torch.rand(2, 3, 8 * SIDE, 8 * SIDE, generator=generator),
    )
    context = torch.randn(2, 5, config.cross_attention_dim, generator=generator)
    added = torch.randn(2, 64, generator=generator) if config.addition_embed_type else None
    return x, hint, torch.tensor([10, 500]), context, added


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_a_unets_controlnet_computes_what_diffusers_does(comfy: Any, tmp_path: Path) -> None:
    controlnet = stirred(ControlNetModel.from_unet(small_unet()))
    unet.save_controlnet(tmp_path / "edges", tmp_path / "edges.safetensors", controlnet, torch.float32)
    with small_sizes(comfy), no_warnings():
        loaded = comfy.controlnet.load_controlnet(str(tmp_path / "edges.safetensors"))
    assert_close(comfyui_residuals(loaded.control_model, controlnet.config), residuals(controlnet))


def test_an_sdxl_controlnet_has_its_weights(comfy: Any, tmp_path: Path) -> None:
    controlnet = stirred(ControlNetModel.from_unet(small_unet(sdxl=True)))
    unet.save_controlnet(tmp_path / "edges", tmp_path / "edges.safetensors", controlnet, torch.float32)
    with small_sizes(comfy), no_warnings():
        loaded = comfy.controlnet.load_controlnet(str(tmp_path / "edges.safetensors"))
    found = loaded.control_model.state_dict()
    for name, tensor in controlnet.state_dict().items():
        assert torch.equal(found[unet.single_file_name(name, 2, 6)], tensor), name
    assert len(found) == len(controlnet.state_dict())


def test_a_control_lora_computes_what_the_merged_controlnet_does(comfy: Any, tmp_path: Path) -> None:
    base = small_unet()
    controlnet = ControlNetModel.from_unet(base)
    add_lora(controlnet, 2)
    with torch.no_grad():
        for name, parameter in controlnet.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    save_control_lora(tmp_path / "edges_lora.safetensors", controlnet, torch.float32)
    patcher = load_denoiser(comfy, layout_of(comfy, "sd", dict(base.state_dict())))
    with no_warnings():
        loaded = comfy.controlnet.load_controlnet(str(tmp_path / "edges_lora.safetensors"))
        loaded.pre_run(patcher.model, lambda percent: percent)
    merged = merged_controlnet(controlnet)
    assert_close(comfyui_residuals(loaded.control_model, merged.config), residuals(merged))


def control_of(family: str) -> Any:
    """A ControlNet of the family's denoiser, with the sizes that both share."""
    config = make_denoiser(family).config
    kind: Any = {"sd3": SD3ControlNetModel, "flux": FluxControlNetModel, "qwen_image": QwenImageControlNetModel}[family]
    own = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in config.items() if name in own})


@pytest.mark.parametrize("family", ["sd3", "flux", "qwen_image"])
def test_a_transformers_controlnet_has_its_weights(comfy: Any, tmp_path: Path, family: str) -> None:
    controlnet = stirred(control_of(family))
    transformer.save_controlnet(tmp_path / "edges", tmp_path / "edges.safetensors", controlnet, torch.float32)
    unused: list[str] = []
    with (
        small_sizes(comfy), no_warnings(),
        mock.patch("logging.debug", lambda text, *_: unused.append(text) if "unexpected" in text else None),
    ):  # fmt: skip
        loaded = comfy.controlnet.load_controlnet(str(tmp_path / "edges.safetensors"))
    state = dict(controlnet.state_dict())
    names = {} if family == "qwen_image" else comfy.model_detection.convert_diffusers_mmdit(dict(state), "")
    found = loaded.control_model.state_dict()
    for name, tensor in (state | names if family == "qwen_image" else names).items():
        assert torch.equal(found[name].reshape(tensor.shape), tensor), name
    assert torch.equal(found["controlnet_blocks.0.weight"], state["controlnet_blocks.0.weight"])


def test_a_z_image_controlnet_is_read_as_a_model_patch(comfy: Any, tmp_path: Path) -> None:
    sizes = {"dim": 1152, "n_heads": 4, "n_kv_heads": 4, "control_in_dim": 4}
    controlnet = stirred(
        ZImageControlNetModel(
            control_layers_places=list(range(6)),
            control_refiner_layers_places=[],
            control_in_dim=4,
            dim=1152,
            n_refiner_layers=2,
            n_heads=4,
            n_kv_heads=4,
        )
    )
    transformer.save_controlnet(tmp_path / "edges", tmp_path / "edges.safetensors", controlnet, torch.float32)
    nodes = importlib.import_module("comfy_extras.nodes_model_patch")
    module = nodes.comfy.ldm.lumina.controlnet
    small = functools.partial(module.ZImage_Control, **sizes)
    with (
        mock.patch.object(module, "ZImage_Control", small),
        mock.patch.object(nodes.folder_paths, "get_full_path_or_raise", lambda _, name: str(tmp_path / name)),
    ):
        (patch,) = nodes.ModelPatchLoader().load_model_patch("edges.safetensors")
    found = patch.model.state_dict()
    wanted = nodes.z_image_convert(dict(controlnet.state_dict()))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
