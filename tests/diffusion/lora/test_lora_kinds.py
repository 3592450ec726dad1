"""Files that are given as a LoRA and are none, or hold values that no program draws with, are refused by their kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from lightning_aigc.diffusion.lora.file import convert, read_lora
from lightning_aigc.errors import ModelError

NAME = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
DOTTED = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def pair(dtype: torch.dtype = torch.float32, **further: Tensor) -> dict[str, Tensor]:
    down, up = torch.randn(2, 8).to(dtype), torch.randn(8, 2).to(dtype)
    return {f"{NAME}.lora_down.weight": down, f"{NAME}.lora_up.weight": up} | {
        f"{NAME}.{key}": value for key, value in further.items()
    }


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (f"{NAME}.oft_blocks", "OFT"),
        ("unet.mid_block.attentions.0.proj_in.oft_R.default.weight", "OFT"),
        (f"{NAME}.a1.weight", "GLoRA"),
        (f"{NAME}.on_input", "IA3"),
        (f"{NAME}.lora_mid.weight", "a LoRA in Tucker's form"),
        (f"{DOTTED}.lora_B.bias", "a LoRA with biases"),
        ("lora_unet_norm.w_norm", "a LoRA with trained norms"),
        (f"{NAME}.diff", "whole differences of weights"),
        ("bundle_emb.cat.string_to_param.*", "an embedding of new words"),
        ("unet.conv_in.weight", "a LoRA with layers that were trained whole"),
        ("model.diffusion_model.input_blocks.0.0.weight", "a whole model"),
        ("control_model.input_blocks.0.0.weight", "a whole model"),
    ],
)
@pytest.mark.parametrize("with_lora", [False, True])
def test_a_file_of_another_kind_is_refused_by_its_name(tmp_path: Path, key: str, kind: str, with_lora: bool) -> None:
    state = {key: torch.ones(2)} | (pair() if with_lora else {})
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    with pytest.raises(ModelError, match=rf"in\.safetensors: got {kind} \(.*wanted plain LoRA or DoRA"):
        convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("state", "header", "words"),
    [
        (pair(alpha=torch.ones(2)), {}, r"alpha of shape \[2\]; wanted one value"),
        (pair(alpha=torch.tensor(float("nan"))), {}, "not finite: the training diverged"),
        ({key: value * torch.inf for key, value in pair().items()}, {}, "not finite: the training diverged"),
        (pair(torch.int8), {}, "in int8, a quantized LoRA"),
        (pair(), {"lora_adapter_metadata": "{torn"}, "lora_adapter_metadata cannot be read"),
        (pair(), {"lora_adapter_metadata": '{"unet.lora_alpha": "x"}'}, "an alpha that is no number"),
        (pair(), {"lightning_aigc.layers_per_block": "x"}, "layers_per_block is 'x', no number"),
    ],
)
def test_values_that_cannot_be_used_are_refused(
    tmp_path: Path, state: dict[str, Tensor], header: dict[str, Any], words: str
) -> None:
    safetensors.torch.save_file(state, tmp_path / "in.safetensors", header)
    with pytest.raises(ModelError, match=rf"in\.safetensors: got .*{words}"):
        convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors")


def test_a_float8_lora_keeps_its_product_where_its_scale_is_folded_in(tmp_path: Path) -> None:
    down, up = torch.full((4, 1536), 0.03125), torch.full((1536, 4), 0.017578125)  # 0.0176 / 4 is no float8 value
    names = [f"transformer.transformer_blocks.0.attn.to_q.lora_{side}.weight" for side in "AB"]
    state = {name: value.to(torch.float8_e4m3fn) for name, value in zip(names, (down, up), strict=True)}
    state["transformer.transformer_blocks.0.attn.to_q.alpha"] = torch.tensor(1.0)
    safetensors.torch.save_file(state, tmp_path / "in.safetensors", {"ss_base_model_version": "sd3"})
    out = read_lora(convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "diffusers")).state
    product = out[names[1]].float() @ out[names[0]].float()
    wanted = state[names[1]].float() @ state[names[0]].float() / 4
    torch.testing.assert_close(product, wanted, rtol=1e-3, atol=0.0)
