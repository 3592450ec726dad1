"""LoRA files: what diffusers computes from them, what sd-scripts calls them, and what happens to bad ones."""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import argparse
import errno
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from peft import LoraConfig
from torch import nn

from fakes.pipelines import assemble, make_text_encoder
from lightning_aigc import cli
from lightning_aigc.cli import export
from lightning_aigc.diffusion import lora_names
from lightning_aigc.diffusion.lora_file import convert, read_lora, save_lora
from lightning_aigc.diffusion.lora_merge import merge_into_pipeline
from lightning_aigc.diffusion.lora_metadata import LoRAMetadata, hash_base_model
from lightning_aigc.errors import ConfigError, ModelError, UserError

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
FEED_FORWARD = ["ff.net.0.proj", "ff.net.2"]
CONVOLUTIONS = ["conv1", "conv2", "conv_shortcut", "time_emb_proj", "downsamplers.0.conv", "upsamplers.0.conv"]
OUTSIDE = ["conv_in", "time_embedding.linear_1"]
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
EVERYTHING = [*ATTENTION, *FEED_FORWARD, "proj_in", "proj_out", *CONVOLUTIONS, *OUTSIDE]


def make_unet(sdxl: bool = False) -> UNet2DConditionModel:
    torch.manual_seed(0)
    if sdxl:
        # The block types of SDXL: no attention, attention, attention.
        return UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16, 16),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=2,
            transformer_layers_per_block=(1, 2, 2),
            attention_head_dim=(2, 2, 4),
            norm_num_groups=4,
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=16 + 6 * 8,
            use_linear_projection=True,
        ).eval()
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=2,
        norm_num_groups=4,
        cross_attention_dim=16,
    ).eval()


def make_pipeline(folder: Path, sdxl: bool = False) -> StableDiffusionPipeline | StableDiffusionXLPipeline:
    return assemble(folder, make_unet(sdxl), sdxl)


def adapt(model: nn.Module, targets: list[str], **options: object) -> nn.Module:
    """Add a LoRA with random weights that clearly changes the output."""
    model.add_adapter(LoraConfig(**{"r": 4, "lora_alpha": 3, "target_modules": targets, **options}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def run_unet(unet: UNet2DConditionModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    sdxl = unet.config.addition_embed_type == "text_time"
    added = {"text_embeds": torch.randn(2, 16, generator=generator), "time_ids": torch.ones(2, 6)} if sdxl else None
    context = torch.randn(2, 5, unet.config.cross_attention_dim, generator=generator)
    latents = torch.randn(2, 4, 8, 8, generator=generator)
    return unet(latents, torch.tensor([10, 500]), context, added_cond_kwargs=added).sample


@torch.no_grad()
def run_text_encoder(model: nn.Module) -> torch.Tensor:
    return model(torch.tensor([[0, 5, 7, 9, 1]]), output_hidden_states=True).hidden_states[-1]


def assert_same_model(
    pipeline: StableDiffusionPipeline | StableDiffusionXLPipeline,
    unet: nn.Module | None,
    *text_encoders: nn.Module | None,
) -> None:
    pairs = [(pipeline.unet, unet, run_unet, make_unet(isinstance(pipeline, StableDiffusionXLPipeline)))]
    for index, text_encoder in enumerate(text_encoders):
        loaded = pipeline.text_encoder if index == 0 else pipeline.text_encoder_2
        pairs.append((loaded, text_encoder, run_text_encoder, make_text_encoder(with_projection=index == 1)))
    for loaded, trained, run, base in pairs:
        if trained is None:
            continue
        wanted = run(trained)
        torch.testing.assert_close(run(loaded), wanted, rtol=1e-4, atol=1e-5)
        assert (wanted - run(base)).abs().max() > 1e-2, "the LoRA changes nothing, so the comparison proves nothing"


OPTIONS = {
    "attention": (ATTENTION, {}),
    "feed_forward": (ATTENTION + FEED_FORWARD, {"lora_alpha": 8}),
    "everything": (EVERYTHING, {}),
    "rslora": (EVERYTHING, {"use_rslora": True}),
    "mixed_ranks_and_alphas": (
        EVERYTHING,
        {"rank_pattern": {"conv1": 2, "to_q": 6}, "alpha_pattern": {"conv2": 1, "to_k": 7, "ff.net.2": 5}},
    ),
    "rslora_of_mixed_ranks": (EVERYTHING, {"use_rslora": True, "rank_pattern": {"conv1": 2, "to_q": 6}}),
}


FEWER = ("attention", "feed_forward", "rslora")
"""Options that Stable Diffusion walks, and whose layers the other options have too."""


def layouts_of(options: str) -> Iterator[Any]:
    """A layout, and whether it is SDXL's; those that repeat another in other names are long."""
    for layout, sdxl in itertools.product(("kohya", "diffusers"), (False, True)):
        is_long = sdxl and (layout == "diffusers" or options in FEWER)
        name = f"{options}-{layout}-{'sdxl' if sdxl else 'sd'}"
        yield pytest.param(options, layout, sdxl, id=name, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("options", "layout", "sdxl"), [case for options in OPTIONS for case in layouts_of(options)])
def test_diffusers_computes_what_the_trained_model_computes(
    tmp_path: Path, sdxl: bool, options: str, layout: str
) -> None:
    targets, config = OPTIONS[options]
    unet = adapt(make_unet(sdxl), targets, **config)
    text_config = {"use_rslora": config.get("use_rslora", False)}
    if "rank_pattern" in config:
        text_config |= {"rank_pattern": {"fc1": 2, "k_proj": 3}, "alpha_pattern": {"fc2": 1, "v_proj": 9}}
    text_encoders = [adapt(make_text_encoder(), TEXT, **text_config)]
    if sdxl:
        text_encoders.append(adapt(make_text_encoder(with_projection=True), TEXT, **text_config))
    path = save_lora(
        tmp_path / "lora.safetensors", unet=unet, text_encoders=text_encoders, dtype=torch.float32, layout=layout
    )
    pipeline = make_pipeline(tmp_path / "tokenizer", sdxl)
    pipeline.load_lora_weights(path)
    assert_same_model(pipeline, unet, *text_encoders)


@pytest.mark.parametrize("text_targets", [["q_proj", "v_proj"], ["q_proj", "fc1"], ["fc1"], ["out_proj"]], ids=str)
@pytest.mark.parametrize("layout", ["kohya", "diffusers", "converted"])
def test_any_choice_of_text_encoder_layers_loads(tmp_path: Path, text_targets: list[str], layout: str) -> None:
    text_encoder = adapt(make_text_encoder(), text_targets)
    path = tmp_path / "lora.safetensors"
    written = "diffusers" if layout == "converted" else layout
    save_lora(path, text_encoders=[text_encoder], dtype=torch.float32, layout=written)
    if layout == "converted":
        path = convert(path, tmp_path / "kohya.safetensors", "kohya")
    pipeline = make_pipeline(tmp_path / "tokenizer")
    pipeline.load_lora_weights(path)
    assert_same_model(pipeline, None, text_encoder)


def test_a_second_text_encoder_alone_is_sdxl(tmp_path: Path) -> None:
    unet, text_encoder_2 = adapt(make_unet(True), ATTENTION), adapt(make_text_encoder(True), TEXT)
    path = tmp_path / "lora.safetensors"
    save_lora(path, unet=unet, text_encoders=(make_text_encoder(), text_encoder_2), dtype=torch.float32)
    assert {key[:9] for key in read_lora(path).state} == {"lora_unet", "lora_te2_"}
    pipeline = make_pipeline(tmp_path / "tokenizer", sdxl=True)
    pipeline.load_lora_weights(path)
    assert_same_model(pipeline, unet, None, text_encoder_2)


@pytest.mark.parametrize("sdxl", [False, True], ids=["sd", "sdxl"])
def test_dora_is_exact_in_the_diffusers_layout_and_warned_of_in_the_other(tmp_path: Path, sdxl: bool) -> None:
    unet = adapt(make_unet(sdxl), EVERYTHING, use_dora=True)
    text_encoder = adapt(make_text_encoder(), TEXT, use_dora=True)
    with pytest.warns(UserWarning, match=r"lightning export .* --to diffusers"):
        kohya = save_lora(tmp_path / "kohya.safetensors", unet=unet, text_encoders=[text_encoder], dtype=torch.float32)
    scales = {key: value.shape for key, value in read_lora(kohya).state.items() if key.endswith("dora_scale")}
    assert len(scales) == sum(key.endswith("lora_down.weight") for key in read_lora(kohya).state)
    # LyCORIS' shape for magnitudes of outputs: one row an output, ones elsewhere.
    assert all(shape[0] > 1 and set(shape[1:]) == {1} and len(shape) in (2, 4) for shape in scales.values())
    path = convert(kohya, tmp_path / "diffusers.safetensors", "diffusers")
    pipeline = make_pipeline(tmp_path / "tokenizer", sdxl)
    pipeline.load_lora_weights(path)
    assert_same_model(pipeline, unet, text_encoder)


def test_keys_follow_sd_scripts_rule_for_sd1(tmp_path: Path) -> None:
    unet, text_encoder = make_unet(), make_text_encoder()
    # networks/lora.py, create_modules: walk the target classes, take their Linear and Conv2d children, and join
    # prefix, the module's name and the child's name with dots turned into underscores.
    wanted = set()
    for prefix, root, classes in (
        (
            "lora_unet",
            unet,
            {"Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D"},
        ),
        ("lora_te", text_encoder, {"CLIPAttention", "CLIPMLP"}),
    ):
        for name, module in root.named_modules():
            if type(module).__name__ in classes:
                for child_name, child in module.named_modules():
                    if isinstance(child, nn.Linear | nn.Conv2d):
                        # transformers before 5, which sd-scripts uses, called the encoder text_model.encoder
                        full = f"{'text_model.' if prefix == 'lora_te' else ''}{name}.{child_name}"
                        wanted.add(f"{prefix}.{full}".replace(".", "_"))
    adapt(unet, [target for target in EVERYTHING if target not in OUTSIDE])
    adapt(text_encoder, TEXT)
    state = read_lora(save_lora(tmp_path / "a.safetensors", unet=unet, text_encoders=[text_encoder])).state
    assert {key.partition(".")[0] for key in state} == wanted
    assert {key.partition(".")[2] for key in state} == {"lora_down.weight", "lora_up.weight", "alpha"}
    assert state["lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight"].dtype == torch.float16


KNOWN_SDXL_NAMES = {  # from sd-scripts' own SDXL LoRA files
    "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q": "input_blocks_4_1_transformer_blocks_0_attn1_to_q",
    "down_blocks.2.attentions.1.transformer_blocks.9.ff.net.0.proj": (
        "input_blocks_8_1_transformer_blocks_9_ff_net_0_proj"
    ),
    "mid_block.attentions.0.transformer_blocks.9.attn2.to_k": "middle_block_1_transformer_blocks_9_attn2_to_k",
    "up_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0": (
        "output_blocks_0_1_transformer_blocks_0_attn1_to_out_0"
    ),
    "up_blocks.1.attentions.2.proj_out": "output_blocks_5_1_proj_out",
    "up_blocks.1.attentions.0.proj_in": "output_blocks_3_1_proj_in",
    "down_blocks.0.resnets.0.conv1": "input_blocks_1_0_in_layers_2",
    "down_blocks.0.resnets.1.time_emb_proj": "input_blocks_2_0_emb_layers_1",
    "down_blocks.0.downsamplers.0.conv": "input_blocks_3_0_op",
    "down_blocks.1.downsamplers.0.conv": "input_blocks_6_0_op",
    "down_blocks.2.resnets.0.conv_shortcut": "input_blocks_7_0_skip_connection",
    "mid_block.resnets.0.conv1": "middle_block_0_in_layers_2",
    "mid_block.resnets.1.conv2": "middle_block_2_out_layers_3",
    "up_blocks.0.upsamplers.0.conv": "output_blocks_2_2_conv",
    "up_blocks.1.upsamplers.0.conv": "output_blocks_5_2_conv",
    "up_blocks.2.resnets.2.conv_shortcut": "output_blocks_8_0_skip_connection",
    "conv_in": "input_blocks_0_0",
    "conv_out": "out_2",
    "time_embedding.linear_2": "time_embed_2",
    "add_embedding.linear_1": "label_emb_0_0",
}


def test_sdxl_layers_have_the_original_unets_names() -> None:
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
            use_linear_projection=True,
        )
    modules = [name for name, module in unet.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    names = {module: lora_names.to_kohya_name("unet", module, sdxl=True) for module in modules}
    assert len(set(names.values())) == len(modules)
    for module, known in KNOWN_SDXL_NAMES.items():
        assert names[module] == f"lora_unet_{known}"
    for module, name in names.items():
        assert lora_names.from_kohya_name(name) == ("unet", module)
        plain = lora_names.to_kohya_name("unet", module, sdxl=False)
        assert lora_names.from_kohya_name(plain) == ("unet", module)


@pytest.mark.parametrize("sdxl", [False, True], ids=["sd", "sdxl"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.filterwarnings("ignore:.*DoRA in the kohya layout")
def test_converting_there_and_back_keeps_every_bit(tmp_path: Path, sdxl: bool, dora: bool) -> None:
    config = {"rank_pattern": {"conv1": 2}, "alpha_pattern": {"conv2": 1}, "use_dora": dora}
    unet, text_encoder = adapt(make_unet(sdxl), EVERYTHING, **config), adapt(make_text_encoder(), TEXT)
    metadata = {"trigger_phrase": "zorp ünï", "captions": ["zorp, cat", "zorp"], "date": "2026-01-02", "ss_note": "x"}
    first = save_lora(tmp_path / "1.safetensors", unet=unet, text_encoders=[text_encoder], metadata=metadata)
    second = convert(first, tmp_path / "2.safetensors", "diffusers")
    third = convert(second, tmp_path / "3.safetensors", "kohya")
    fourth = convert(third, tmp_path / "4.safetensors", "diffusers")
    assert first.read_bytes() == third.read_bytes()
    assert second.read_bytes() == fourth.read_bytes()
    assert read_lora(second).layout == "diffusers" and read_lora(third).layout == "kohya"


def test_conversion_keeps_alphas_that_differ_between_layers(tmp_path: Path) -> None:
    # As sd-scripts writes with conv_dim, conv_alpha: another rank and alpha on convolutions, alphas in half.
    state = {}
    for name, inputs, outputs, rank, alpha in (
        ("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q", (8,), 8, 4, 2.0),
        ("lora_unet_down_blocks_0_resnets_0_conv1", (8, 3, 3), 8, 2, 1.0),
        ("lora_te_text_model_encoder_layers_0_self_attn_out_proj", (16,), 16, 4, 0.5),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", (16,), 24, 2, 4.0),
    ):
        state[f"{name}.lora_down.weight"] = torch.randn(rank, *inputs).half()
        state[f"{name}.lora_up.weight"] = torch.randn(outputs, rank, *[1] * (len(inputs) - 1)).half()
        state[f"{name}.alpha"] = torch.tensor(alpha).half()
    source = tmp_path / "foreign.safetensors"
    safetensors.torch.save_file(state, source)
    back = convert(convert(source, tmp_path / "d.safetensors", "diffusers"), tmp_path / "k.safetensors", "kohya")
    result = read_lora(back).state
    assert result.keys() == state.keys()
    assert all(torch.equal(result[key], state[key].float() if key.endswith("alpha") else state[key]) for key in state)


def test_rslora_writes_an_alpha_that_plain_readers_understand(tmp_path: Path) -> None:
    unet = adapt(make_unet(), ["to_q"], r=4, lora_alpha=3, use_rslora=True)
    file = read_lora(save_lora(tmp_path / "a.safetensors", unet=unet))
    alphas = {value.item() for key, value in file.state.items() if key.endswith(".alpha")}
    assert alphas == {3 * 2.0}  # alpha / sqrt(4) == 6 / 4
    assert file.metadata["ss_network_alpha"] == "6" and file.metadata["ss_network_dim"] == "4"


def test_half_precision_keeps_the_scale_exact(tmp_path: Path) -> None:
    unet = adapt(make_unet(), ["to_q"], r=3, lora_alpha=7, use_rslora=True)
    file = read_lora(save_lora(tmp_path / "a.safetensors", unet=unet, dtype=torch.bfloat16))
    alpha = next(value for key, value in file.state.items() if key.endswith(".alpha"))
    assert alpha.item() / 3 == pytest.approx(7 / 3**0.5, rel=1e-7)


def test_header_says_what_a1111_and_comfyui_show(tmp_path: Path) -> None:
    unet = adapt(make_unet(), [*ATTENTION, "conv1"], rank_pattern={"conv1": 2})
    metadata = LoRAMetadata(
        output_name="zorp",
        trigger_phrase="zorp",
        base_model_name="some/model",
        base_model_hash="ab" * 32,
        resolution=512,
        num_train_images=20,
        steps=300,
        learning_rate=1e-4,
        captions=("zorp, cat", "zorp, dog"),
        started_at=1.5,
        date="2026-01-02",
    )
    path = save_lora(tmp_path / "a.safetensors", unet=unet, metadata=metadata)
    header = read_lora(path).metadata
    wanted = {
        "ss_base_model_version": "sd_v1",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "4",
        "ss_network_alpha": "3",
        "ss_sd_model_name": "some/model",
        "ss_sd_model_hash": "ab" * 5,
        "ss_new_sd_model_hash": "ab" * 32,
        "ss_resolution": "(512, 512)",
        "ss_num_train_images": "20",
        "ss_steps": "300",
        "ss_learning_rate": "0.0001",
        "ss_output_name": "zorp",
        "ss_training_started_at": "1.5",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.title": "zorp",
        "modelspec.trigger_phrase": "zorp",
        "modelspec.prediction_type": "epsilon",
        "modelspec.resolution": "512x512",
        "modelspec.date": "2026-01-02",
    }
    assert wanted.items() <= header.items()
    assert json.loads(header["ss_tag_frequency"]) == {"captions": {"zorp": 2, "cat": 1, "dog": 1}}
    assert json.loads(header["ss_network_args"]) == {"conv_dim": "2", "conv_alpha": "3"}
    content = path.read_bytes()
    tensors = content[8 + int.from_bytes(content[:8], "little") :]
    assert header["sshs_model_hash"] == hashlib.sha256(tensors).hexdigest()
    assert header["modelspec.hash_sha256"] == "0x" + header["sshs_model_hash"]
    again = save_lora(tmp_path / "b.safetensors", unet=unet, metadata=metadata)
    assert again.read_bytes() == content


@pytest.mark.parametrize(
    ("base_model", "prediction", "architecture", "version"),
    [
        ("sd2", "epsilon", "stable-diffusion-v2-512/lora", "sd_v2"),
        ("sd2", "v_prediction", "stable-diffusion-v2-768-v/lora", "sd_v2_v"),
        ("sdxl", "epsilon", "stable-diffusion-xl-v1-base/lora", "sdxl_base_v1-0"),
    ],
)
def test_header_names_the_base_model(base_model: str, prediction: str, architecture: str, version: str) -> None:
    metadata = LoRAMetadata(prediction_type=prediction)
    header = metadata.to_header(base_model=base_model, rank=4, alpha=4, network_args={})
    assert header["modelspec.architecture"] == architecture and header["ss_base_model_version"] == version
    assert all(isinstance(value, str) for value in header.values())


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.filterwarnings("ignore:.*DoRA in the kohya layout")
def test_merging_leaves_a_plain_pipeline_with_the_blended_weights(tmp_path: Path, strength: float, dora: bool) -> None:
    base = make_pipeline(tmp_path / "tokenizer")
    base.save_pretrained(tmp_path / "base")
    unet = adapt(make_unet(), EVERYTHING, use_dora=dora)
    text_encoder = adapt(make_text_encoder(), TEXT, use_dora=dora)
    path = tmp_path / "lora.safetensors"
    save_lora(path, unet=unet, text_encoders=[text_encoder], dtype=torch.float32)
    merged = StableDiffusionPipeline.from_pretrained(
        merge_into_pipeline(path, tmp_path / "base", tmp_path / "merged", strength)
    )
    assert not any("lora" in name for name, _ in merged.unet.named_parameters())
    before, after = make_unet().state_dict(), merged.unet.state_dict()
    for module in unet.modules():
        if hasattr(module, "merge"):
            module.merge()
    trained = {key.replace(".base_layer", ""): value for key, value in unet.state_dict().items()}
    for key, value in after.items():
        torch.testing.assert_close(value, torch.lerp(before[key], trained[key], strength), rtol=1e-4, atol=1e-6)
    if strength == 1.0:
        assert_same_model(merged, None, text_encoder)


def test_merging_keeps_half_precision_and_refuses_to_overwrite(tmp_path: Path) -> None:
    make_pipeline(tmp_path / "tokenizer").to(torch.float16).save_pretrained(tmp_path / "base")
    path = save_lora(tmp_path / "lora.safetensors", unet=adapt(make_unet(), ATTENTION))
    (tmp_path / "merged").mkdir()
    merge_into_pipeline(path, tmp_path / "base", tmp_path / "merged")
    stored = safetensors.torch.load_file(tmp_path / "merged/unet/diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "lora.safetensors", "merged", "tokenizer"]
    with pytest.raises(ModelError, match="name a new or empty folder"):
        merge_into_pipeline(path, tmp_path / "base", tmp_path / "merged")
    with pytest.raises(ModelError, match="wanted a diffusers pipeline folder"):
        merge_into_pipeline(path, tmp_path, tmp_path / "other")
    other = save_lora(tmp_path / "xl.safetensors", unet=adapt(make_unet(True), ATTENTION))
    with pytest.raises(ModelError, match="trained on another kind of model"):
        merge_into_pipeline(other, tmp_path / "base", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_export_command_converts_and_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_pipeline(tmp_path / "tokenizer").save_pretrained(tmp_path / "base")
    path = save_lora(tmp_path / "lora.safetensors", unet=adapt(make_unet(), ATTENTION))
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)

    def run(*arguments: object) -> int:
        return export.run(parser.parse_args([str(argument) for argument in arguments]))

    assert run(path, "--to", "diffusers", "--output", tmp_path / "d.safetensors") == 0
    assert read_lora(tmp_path / "d.safetensors").layout == "diffusers"
    assert run(path, "--merge_into", tmp_path / "base", "--output", tmp_path / "m", "--strength", 0.8) == 0
    assert (tmp_path / "m" / "model_index.json").is_file()
    assert "wrote" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", str(tmp_path / "absent"), "--to", "kohya", "--output", str(tmp_path / "k.safetensors")])
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("error: got ")
    with pytest.raises(ConfigError, match="the input itself"):
        run(path, "--to", "kohya", "--output", path)
    with pytest.raises(ConfigError, match="belongs to --merge_into"):
        run(path, "--to", "kohya", "--output", tmp_path / "k.safetensors", "--strength", 0.5)


def test_bad_files_are_named_with_a_remedy(tmp_path: Path) -> None:
    good = save_lora(tmp_path / "good.safetensors", unet=adapt(make_unet(), ATTENTION))
    bad = tmp_path / "bad.safetensors"
    for content in (b"", b"PK\x03\x04 a pickle", good.read_bytes()[:-100], good.read_bytes()[:50]):
        bad.write_bytes(content)
        with pytest.raises(ModelError, match=r"bad.safetensors.*truncated or another format"):
            read_lora(bad)
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(ModelError, match=r"wanted a LoRA \.safetensors file"):
            read_lora(path)
    safetensors.torch.save_file({"conv.weight": torch.ones(1)}, bad)
    with pytest.raises(ModelError, match="not LoRA weights"):
        read_lora(bad)
    down = "lora_unet_conv_in.lora_down.weight"
    for state, message in (
        ({down: torch.ones(2, 4)}, "without its up weight"),
        ({"lora_unet_conv_in.hada_w1_a": torch.ones(2)}, "wanted plain LoRA or DoRA"),
        ({down: torch.ones(2, 4), "lora_unet_conv_in.lora_up.weight": torch.ones(4, 3)}, r"wanted \[rank, in\]"),
    ):
        safetensors.torch.save_file(state, bad)
        with pytest.raises(ModelError, match=rf"(?s)bad.safetensors.*{message}"):
            convert(bad, tmp_path / "out.safetensors", "diffusers")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.filterwarnings("ignore:Adapter .* invalid shape")
def test_nothing_to_save_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(ModelError, match=r"unet\.add_adapter"):
        save_lora(path, unet=make_unet())
    with pytest.raises(ModelError, match="got no LoRA to save"):
        save_lora(path, text_encoders=[make_text_encoder()])
    with pytest.raises(ModelError, match="lora_bias=False"):
        save_lora(path, unet=adapt(make_unet(), ["to_out.0"], lora_bias=True))
    with pytest.raises(ModelError, match="wanted one of"):
        save_lora(path, unet=adapt(make_unet(), ["to_q"]), metadata={"triger": "x"})
    assert not path.exists()


def test_values_that_the_file_cannot_hold_are_named(tmp_path: Path) -> None:
    unet = adapt(make_unet(), ["to_q"])
    weight = next(parameter for name, parameter in unet.named_parameters() if "lora_B" in name)
    with torch.no_grad():
        weight[0] = 1e6
        with pytest.raises(ModelError, match=r"attn1\.to_q; save with dtype=torch\.float32"):
            save_lora(tmp_path / "a.safetensors", unet=unet)
        weight[0] = float("nan")
        with pytest.raises(ModelError, match="earlier checkpoint"):
            save_lora(tmp_path / "a.safetensors", unet=unet)


def test_a_full_disk_leaves_the_old_file_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match=r"a\.safetensors.*No space left on device"):
        save_lora(path, unet=adapt(make_unet(), ["to_q"]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"] and path.read_bytes() == b"old"
    assert issubclass(ModelError, UserError)


def test_base_model_hash_covers_the_unet_weights(tmp_path: Path) -> None:
    assert hash_base_model(tmp_path) is None
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"weights")
    assert hash_base_model(tmp_path) == hashlib.sha256(b"weights").hexdigest()
