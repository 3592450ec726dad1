"""DoRA's kohya file, read by ComfyUI's published formula, is the weight that was trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fakes.models.lora_models import EVERYTHING, adapt, make_unet
from fakes.processes.ranks import run_ranks
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.diffusion.lora.dora_magnitudes import with_comfyui_magnitude
from lightning_aigc.diffusion.lora.file import convert, read_lora, save_lora
from lightning_aigc.diffusion.lora.layers import LoRALayer
from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.errors import ModelError


def comfyui_weight(weight: Tensor, up: Tensor, down: Tensor, alpha: float, dora_scale: Tensor) -> Tensor:
    """weight_decompose of ComfyUI's comfy/weight_adapter/base.py at strength 1, with dora_scale over outputs."""
    delta = torch.mm(up.flatten(1), down.flatten(1)).reshape(weight.shape) * (alpha / down.shape[0])
    norm = weight.reshape(weight.shape[0], -1).norm(dim=1, keepdim=True).reshape(-1, *[1] * (weight.dim() - 1))
    assert dora_scale.shape == norm.shape
    return (weight + delta) * (dora_scale / (norm + torch.finfo(weight.dtype).eps))


def trained_weights(unet: torch.nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """By layer: the base's weight and the merged one, as peft computes it."""
    found = {}
    for name, module in unet.named_modules():
        if hasattr(module, "lora_A"):
            base = module.get_base_layer().weight.detach().clone()
            module.merge()
            found[name] = (base, module.get_base_layer().weight.detach().clone())
            module.unmerge()
    return found


@pytest.mark.parametrize(("rank", "alpha"), [(4, 4), (4, 1), (3, 7)], ids=str)
@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_comfyui_computes_the_trained_weights(tmp_path: Path, rank: int, alpha: int, rslora: bool) -> None:
    unet = adapt(make_unet(), EVERYTHING, r=rank, lora_alpha=alpha, use_dora=True, use_rslora=rslora)
    with pytest.warns(UserWarning, match=r"for ComfyUI alone: .* for A1111 `lightning export .* --merge_into"):
        path = save_lora(tmp_path / "dora.safetensors", unet=unet, dtype=torch.float32)
    state = read_lora(path).state
    weights = trained_weights(unet)
    assert {base.ndim for base, _ in weights.values()} == {2, 4}  # linear layers and convolutions
    for name, (base, trained) in weights.items():
        key = f"lora_unet_{name}".replace(".", "_")
        up, down = state[f"{key}.lora_up.weight"], state[f"{key}.lora_down.weight"]
        found = comfyui_weight(base, up, down, state[f"{key}.alpha"].item(), state[f"{key}.dora_scale"])
        assert (found - trained).norm() < 1e-4 * (trained - base).norm(), name


@pytest.mark.filterwarnings("ignore:.*DoRA in the kohya layout")
def test_a_half_precision_file_keeps_magnitudes_in_float32(tmp_path: Path) -> None:
    """A magnitude rounded to float16 would be off by 2 ** -12 of the weight, as much as a short training changes it."""
    unet = adapt(make_unet(), EVERYTHING, use_dora=True)
    for layout, end in (("kohya", "dora_scale"), ("diffusers", "lora_magnitude_vector")):
        state = read_lora(save_lora(tmp_path / "a.safetensors", unet=unet, layout=layout)).state  # type: ignore[arg-type]
        assert {value.dtype for key, value in state.items() if key.endswith(end)} == {torch.float32}
        assert {value.dtype for key, value in state.items() if key.endswith(("_A.weight", "_up.weight"))} == {
            torch.float16
        }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_files_of_a_run_convert_into_each_other(tmp_path: Path) -> None:
    module = StableDiffusionLoRA("embedded:sd", rank=2, use_dora=True)
    module.configure_model()
    module.save_lora(tmp_path / "zorp.safetensors", date="2026-01-02")
    exact, back = tmp_path / "zorp.diffusers.safetensors", tmp_path / "back.safetensors"
    convert(exact, back, "kohya")
    assert back.read_bytes() == (tmp_path / "zorp.safetensors").read_bytes()
    assert convert(back, tmp_path / "again.safetensors", "diffusers").read_bytes() == exact.read_bytes()
    # diffusers ignores the magnitudes of the kohya layout; a sampler must not
    state = safetensors.torch.load_file(exact)
    for name, value in state.items():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
        elif "magnitude" in name:
            value.mul_(1.5)
    safetensors.torch.save_file(state, exact, read_lora(exact).metadata)
    convert(exact, back, "kohya")
    given = {"pretrained_model_name_or_path": "embedded:sd"}
    drawn = [
        LoRASampler(given, "32-true", "cpu", lora).sample([("a mug", 0)], num_inference_steps=2)
        for lora in (exact, back, None)
    ]
    assert (drawn[0] - drawn[1]).abs().max() < 1e-4 < 0.01 < (drawn[0] - drawn[2]).abs().max()


def test_a_dora_of_another_program_is_not_given_magnitudes_that_comfyui_reads_otherwise(tmp_path: Path) -> None:
    name = "unet.mid_block.attentions.0.proj_in"
    state = {f"{name}.lora_A.weight": torch.ones(2, 8), f"{name}.lora_B.weight": torch.ones(8, 2)}
    safetensors.torch.save_file(state | {f"{name}.lora_magnitude_vector": torch.ones(8)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"base model's weights; merge it: lightning export LORA --merge_into"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "kohya")


def magnitudes_of_a_sharded_layer(rank: int) -> tuple[Tensor, Tensor]:
    """ComfyUI's magnitudes with the base on the CPU, and with the base alone on the fake npu."""
    from fakes.npu import fake_npu

    fake_npu.install()
    base = torch.randn(6, 4)
    layer = LoRALayer("unet", "proj", torch.randn(2, 4), torch.randn(6, 2), 2.0, magnitude=torch.rand(6), base=base)
    there = dataclasses.replace(layer, base=base.to("npu"))
    return tuple(with_comfyui_magnitude(each).comfyui_magnitude for each in (layer, there))  # type: ignore[return-value]


def test_a_base_on_the_device_meets_trained_weights_that_were_gathered_in_host_memory(tmp_path: Path) -> None:
    ((wanted, found),) = run_ranks(magnitudes_of_a_sharded_layer, 1, tmp_path, gloo=False)
    assert torch.equal(found, wanted)
