"""LoRA files: what diffusers computes from them, what sd-scripts calls them, and what happens to bad ones."""

from __future__ import annotations

import argparse
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from diffusers import UNet2DConditionModel
from torch import nn

from fakes.models.lora_models import (
    ATTENTION,
    EVERYTHING,
    FEED_FORWARD,
    OUTSIDE,
    TEXT,
    adapt,
    assert_same_model,
    make_pipeline,
    make_unet,
)
from fakes.models.pipelines import make_text_encoder
from lightning_aigc import cli
from lightning_aigc.cli import export
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.lora import names as lora_names
from lightning_aigc.diffusion.lora.file import convert, read_lora, save_lora
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ConfigError, ModelError, UserError

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


def test_export_command_converts_and_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_pipeline(tmp_path / "tokenizer").save_pretrained(tmp_path / "base")
    path = save_lora(tmp_path / "lora.safetensors", unet=adapt(make_unet(), ATTENTION))
    module = DiffusionLoRA("embedded:sd", rank=2, lora_targets=["attention"])
    module.configure_model()
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    module.save_lora(tiny := tmp_path / "tiny.safetensors")
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)

    def run(*arguments: object) -> int:
        return export.run(parser.parse_args([str(argument) for argument in arguments]))

    assert run(path, "--to", "diffusers", "--output", tmp_path / "d.safetensors") == 0
    assert read_lora(tmp_path / "d.safetensors").layout == "diffusers"
    assert run(path, "--merge_into", tmp_path / "base", "--output", tmp_path / "m", "--strength", 0.8) == 0
    assert (tmp_path / "m" / "model_index.json").is_file()
    assert run(tiny, "--merge_into", "embedded:sd", "--output", tmp_path / "e") == 0
    merged = safetensors.torch.load_file(tmp_path / "e" / "unet" / "diffusion_pytorch_model.safetensors")
    base = safetensors.torch.load_file(resolve("embedded:sd") / "unet" / "diffusion_pytorch_model.safetensors")
    changed = [name for name in base if not torch.equal(base[name], merged[name])]
    assert changed and all("attn" in name for name in changed)
    with pytest.raises(ModelError, match=r"File exists; choose another folder"):
        run(tiny, "--merge_into", "embedded:sd", "--output", path / "m")
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
        ({"lora_unet_conv_in.hada_w1_a": torch.ones(2, 2)}, "with only hada_w1_a; the file is incomplete"),
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
        with pytest.raises(
            ModelError,
            match=r"attn1\.to_q has values of up to 1e\+06, which torch\.float16 does not hold: the training "
            r"diverged, so none is saved; lower model\.init_args\.learning_rate \(in Python, dtype=torch\.float32",
        ):
            save_lora(tmp_path / "a.safetensors", unet=unet)
        weight[0] = float("nan")
        with pytest.raises(ModelError, match="are not finite: the training diverged, so none is saved; lower"):
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
