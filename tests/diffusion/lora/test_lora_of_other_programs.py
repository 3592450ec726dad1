"""LoRA files of other programs: under whose names they come out, and which are refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fakes.models.lora_models import ATTENTION, adapt, make_unet
from fakes.models.pipelines import make_sd3_pipeline
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.lora.file import LoRAFile, convert, read_lora, save_lora
from lightning_aigc.errors import ModelError

PEFT = ("lora_A.weight", "lora_B.weight")
KOHYA = ("lora_down.weight", "lora_up.weight")
BLOCK, SINGLE = "transformer_blocks.7", "single_transformer_blocks.5"
UNET = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def pair(name: str, sides: tuple[str, str] = PEFT, inputs: int = 8, outputs: int | None = None) -> dict[str, Tensor]:
    outputs = inputs if outputs is None else outputs
    return {f"{name}.{sides[0]}": torch.randn(2, inputs), f"{name}.{sides[1]}": torch.randn(outputs, 2)}


def converted(
    folder: Path, state: dict[str, Tensor], to: str, header: dict[str, str] | None = None, **options: str
) -> LoRAFile:
    safetensors.torch.save_file(state, folder / "in.safetensors", header)
    return read_lora(convert(folder / "in.safetensors", folder / "out.safetensors", to, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "sides", "component", "module"),
    [
        (f"transformer.base_model.model.{BLOCK}.attn.to_q", PEFT, "transformer", f"{BLOCK}.attn.to_q"),
        (f"transformer._orig_mod.{BLOCK}.ff.net.2", PEFT, "transformer", f"{BLOCK}.ff.net.2"),
        (f"transformer.{SINGLE}.norm.linear", PEFT, "transformer", f"{SINGLE}.norm.linear"),
        (f"unet._orig_mod.{UNET}", PEFT, "unet", UNET),
        (f"unet.base_model.model.{UNET}", ("lora_A.default.weight", "lora_B.default.weight"), "unet", UNET),
        (f"lora_unet__orig_mod_{UNET}".replace(".", "_"), KOHYA, "unet", UNET),
        ("diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q", KOHYA, "unet", UNET),
        (f"lycoris_{UNET}".replace(".", "_"), KOHYA, "unet", UNET),
        ("lora_unet_layers_0_attention_to_q", KOHYA, "transformer", "layers.0.attention.to_q"),
        ("diffusion_model.layers.4.feed_forward.w1", PEFT, "transformer", "layers.4.feed_forward.w1"),
        (f"diffusion_model.{BLOCK}.img_mlp.net.0.proj", PEFT, "transformer", f"{BLOCK}.img_mlp.net.0.proj"),
        ("lora_transformer_single_transformer_blocks_5_proj_out", KOHYA, "transformer", f"{SINGLE}.proj_out"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1", KOHYA, "text_encoder", "text_model.encoder.layers.0.mlp.fc1"),
        ("clip_g.text_model.encoder.layers.0.mlp.fc1", KOHYA, "text_encoder_2", "text_model.encoder.layers.0.mlp.fc1"),
        (
            "text_encoders.clip_l.transformer.text_model.encoder.layers.1.self_attn.k_proj", KOHYA, "text_encoder",
            "text_model.encoder.layers.1.self_attn.k_proj",
        ),
    ],
)  # fmt: skip
def test_a_layer_is_read_under_every_programs_name(
    tmp_path: Path, name: str, sides: tuple[str, str], component: str, module: str
) -> None:
    state = pair(name, sides) | {f"{name}.alpha": torch.tensor(2.0)}
    (layer,) = converted(tmp_path, state, "diffusers").layers()
    assert (layer.component, layer.module, layer.alpha) == (component, module, 2.0)
    assert torch.equal(layer.down, state[f"{name}.{sides[0]}"]) and torch.equal(layer.up, state[f"{name}.{sides[1]}"])


@pytest.mark.parametrize(
    ("name", "sides", "times", "base", "module"),
    [
        ("lora_unet_double_blocks_7_img_mod_lin", KOHYA, 6, "flux", f"{BLOCK}.norm1.linear"),
        ("lora_unet_double_blocks_7_txt_mod_lin", KOHYA, 6, "flux_kontext", f"{BLOCK}.norm1_context.linear"),
        ("lora_unet_single_blocks_5_modulation_lin", KOHYA, 3, "flux", f"{SINGLE}.norm.linear"),
        ("lycoris_single_transformer_blocks_5_norm_linear", KOHYA, 3, "flux", f"{SINGLE}.norm.linear"),
        (f"diffusion_model.{BLOCK}.img_mod.1", PEFT, 6, "qwen_image", f"{BLOCK}.img_mod.1"),
        (f"diffusion_model.{BLOCK}.txt_mod.1", PEFT, 6, "qwen_image_edit_plus", f"{BLOCK}.txt_mod.1"),
        ("diffusion_model.layers.4.adaLN_modulation.0", PEFT, 4, "z_image", "layers.4.adaLN_modulation.0"),
    ],
)
def test_modulations_which_sd_scripts_and_ai_toolkit_adapt_unasked_are_read_and_written(
    tmp_path: Path, name: str, sides: tuple[str, str], times: int, base: str, module: str
) -> None:
    state = pair(name, sides, 8, 8 * times)
    for layout in ("diffusers", "kohya"):
        (layer,) = converted(tmp_path, state, layout, base_model=base).layers(base)
        assert layer.module == module and torch.equal(layer.up, state[f"{name}.{sides[1]}"])


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_a_lora_on_every_layer_of_a_transformer_is_read(
    family: str, transformers: Callable[[str], str], tmp_path: Path
) -> None:
    state: dict[str, Tensor] = {}
    for file in Path(transformers(family), "transformer").glob("*.safetensors"):
        for name, weight in safetensors.torch.load_file(file).items():
            if weight.dim() == 2 and name.endswith(".weight"):
                layer = f"transformer.{name.removesuffix('.weight')}"
                state |= pair(layer, inputs=weight.shape[1], outputs=len(weight))
    file = converted(tmp_path, state, "diffusers", base_model=family)
    assert {f"{layer.component}.{layer.module}" for layer in file.layers(family)} == {
        name.removesuffix(".lora_A.weight") for name in state if name.endswith("lora_A.weight")
    }


def test_layers_that_comfyui_joins_are_taken_apart_with_their_product(tmp_path: Path) -> None:
    """ai-toolkit and sd-scripts train one down for query, key and value, which is no block diagonal."""
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    state = pair(name, PEFT, 8, 24) | pair("diffusion_model.single_blocks.1.linear1", PEFT, 8, 56)
    layers = {each.module: each for each in converted(tmp_path, state, "diffusers").layers()}
    assert len(layers) == 7 and layers["single_transformer_blocks.1.proj_mlp"].up.shape == (
        32,
        2,
    )  # FLUX.1's 3 + 4 parts
    whole = state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
    parts = [layers[f"transformer_blocks.0.attn.to_{letter}"] for letter in "qkv"]
    torch.testing.assert_close(torch.cat([each.up @ each.down for each in parts]), whole)


def test_flux_1_and_flux_2_are_told_apart_by_the_width_of_their_layers(tmp_path: Path) -> None:
    for outputs, module in ((32, "ff.net.0.proj"), (48, "ff.linear_in")):
        (layer,) = converted(
            tmp_path, pair("lora_unet_double_blocks_0_img_mlp_0", KOHYA, 8, outputs), "diffusers"
        ).layers()
        assert layer.module == f"transformer_blocks.0.{module}"


@pytest.mark.parametrize(
    ("header", "first"),
    [
        ({"ss_base_model_version": "flux1"}, "lora_unet_double_blocks_0_img_attn_qkv"),
        ({"modelspec.architecture": "Flux.1-dev/lora"}, "lora_unet_double_blocks_0_img_attn_qkv"),
        ({"modelspec.architecture": "Qwen-Image"}, "lora_unet_transformer_blocks_0_attn_to_q"),
        ({"ss_base_model_version": "sd3m"}, None),
        ({"modelspec.architecture": "stable-diffusion-3.5-large/lora"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_header_says_whose_names_shared_layers_get(
    tmp_path: Path, header: dict[str, str], first: str | None
) -> None:
    state = pair("transformer.transformer_blocks.0.attn.to_q")
    if first is None:
        with pytest.raises(ModelError, match="has diffusers' layout only" if header else "add --base_model chroma, or"):
            converted(tmp_path, state, "kohya", header)
    else:
        assert {key.partition(".")[0] for key in converted(tmp_path, state, "kohya", header).state} == {first}


def test_a_base_model_that_is_given_decides_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    state = pair("transformer.transformer_blocks.0.attn.to_q")
    file = converted(tmp_path, state, "kohya", base_model="qwen_image")
    assert "lora_unet_transformer_blocks_0_attn_to_q.alpha" in file.state
    assert convert(tmp_path / "out.safetensors", tmp_path / "again.safetensors", "diffusers")  # its header says it now
    with pytest.raises(ModelError, match="wanted one of chroma, flux, flux2, flux2_dev, flux_kontext, krea2, qwen_im"):
        converted(tmp_path, state, "kohya", base_model="fluxx")
    with pytest.raises(ModelError, match=r"its header names z_image; wanted layers of"):
        converted(tmp_path, state, "diffusers", {"modelspec.architecture": "z-image"})


@pytest.mark.parametrize(
    ("width", "deepest", "first"),
    [(3072, 59, "lora_unet_transformer_blocks_"), (3072, 18, "lora_unet_double_blocks_"), (2432, 37, None)],
    ids=["qwen_image", "flux", "sd3"],
)  # fmt: skip
def test_published_sizes_tell_shared_layers_apart(tmp_path: Path, width: int, deepest: int, first: str | None) -> None:
    state = pair("transformer.transformer_blocks.0.attn.to_q", inputs=width)
    state |= pair(f"transformer.transformer_blocks.{deepest}.attn.to_k", inputs=width)
    if first is None:
        with pytest.raises(ModelError, match="the LoRA of sd3 has diffusers' layout only"):
            converted(tmp_path, state, "kohya")
    else:
        assert all(key.startswith(first) for key in converted(tmp_path, state, "kohya").state)


@pytest.mark.parametrize(
    ("state", "header", "words"),
    [
        (pair("diffusion_model.blocks.0.self_attn.q"), {}, "its header names no base model; wanted layers of"),
        (pair("lora_unet_joint_blocks_0_x_block_attn_proj", KOHYA), {}, "got a LoRA on denoiser.joint_blocks_0"),
        (pair("lora_unet_double_blocks_0_img_attn_proj", KOHYA), {"ss_base_model_version": "hunyuan_video"},
         "names hunyuan_video, which is not known here; .* add --base_model chroma"),
        (pair("lora_te3_encoder_block_0_layer_0_SelfAttention_q", KOHYA), {}, "wanted layers of CLIP"),
        (pair("lora_te2_encoder_block_0_layer_0_SelfAttention_q", KOHYA), {}, "wanted layers of CLIP"),
        (pair(f"unet.{UNET}") | pair("transformer.layers.0.attention.to_q"), {}, "wanted layers of"),
        (pair(f"unet.{UNET}") | pair(f"unet.base_model.model.{UNET}"), {}, "holds more than one LoRA"),
        (pair("base_model.model.transformer_blocks.0.attn.to_q"), {}, "peft's layout, which does not hold its alpha"),
        ({"diffusion_model.layers.0.attention.to_q.lora_A.weight": torch.ones(2, 8)}, {}, "without its up weight"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to", ["kohya", "diffusers"])
def test_what_cannot_be_recognised_is_refused(
    tmp_path: Path, state: dict[str, Tensor], header: dict[str, str], words: str, to: str
) -> None:
    with pytest.raises(ModelError, match=rf"in\.safetensors.*{words}"):
        converted(tmp_path, state, to, header)
    assert not (tmp_path / "out.safetensors").exists()


def test_an_sdxl_lora_without_a_header_is_known_by_its_text_width(tmp_path: Path) -> None:
    state = pair(
        f"unet.{UNET.replace('down_blocks.0', 'down_blocks.1').replace('attn1.to_q', 'attn2.to_k')}", inputs=2048
    )
    (name,) = {key.partition(".")[0] for key in converted(tmp_path, state, "kohya").state}
    assert name == "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k"


def test_a_compiled_unets_lora_has_the_names_of_an_uncompiled_one(tmp_path: Path) -> None:
    plain = read_lora(save_lora(tmp_path / "a.safetensors", unet=adapt(make_unet(), ATTENTION), layout="diffusers"))
    compiled = {key.replace("unet.", "unet._orig_mod.", 1): value for key, value in plain.state.items()}
    found = converted(tmp_path, compiled, "diffusers", plain.metadata)
    assert found.state.keys() == plain.state.keys()
    assert all(torch.equal(found.state[key], value) for key, value in plain.state.items())


@pytest.mark.parametrize("alpha", [1.0, 4.0, 24.0])
def test_comfyui_reads_the_sd3_lora_at_the_scale_that_was_trained(tmp_path: Path, alpha: float) -> None:
    """ComfyUI maps `transformer.NAME`, and takes scale 1 where there is no `NAME.alpha`, whatever the header says."""
    module = DiffusionLoRA(str(make_sd3_pipeline(tmp_path / "sd3")), rank=4, lora_alpha=alpha)
    module.configure_model()
    adapted = [m for m in module.loaded().denoiser.modules() if hasattr(m, "lora_A")]
    for layer in adapted:
        torch.nn.init.normal_(layer.lora_B["default"].weight)
    module.save_lora(tmp_path / "zorp.safetensors")
    state = read_lora(tmp_path / "zorp.safetensors").state
    assert not any(key.endswith("alpha") for key in state)
    for name, layer in module.loaded().denoiser.named_modules():
        if hasattr(layer, "lora_A"):
            read = (
                state[f"transformer.{name}.lora_B.weight"].float() @ state[f"transformer.{name}.lora_A.weight"].float()
            )
            torch.testing.assert_close(read, layer.get_delta_weight("default"), rtol=5e-3, atol=5e-3)
