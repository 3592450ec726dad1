"""LoKr: its first step, memory, file and readers; files of other programs; LoHa; and runs that begin with a file."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import safetensors.torch
import torch
from peft import LoHaConfig, LoKrConfig, inject_adapter_in_model
from torch import Tensor, nn

from fakes.models.pipelines import make_batch
from fakes.runs.training_losses import example_losses
from lightning_aigc.cli import main
from lightning_aigc.cli.hub.contents import find_contents
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.diffusion.lora.file import LoRAMetadata, convert, read_lora, save_lokr
from lightning_aigc.diffusion.lora.lokr_layers import FactoredConv2d, compute_by_factors
from lightning_aigc.diffusion.lora.merge import merge_into_pipeline
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.errors import ModelError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.report.record import LoRAFile
from lightning_aigc.report.usage import diffusers_snippet

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FAMILY_NAMES = ["sd", "sdxl", "flux", "sd3", "flux2", "qwen_image", "z_image", "krea2"]
LOKR: dict[str, Any] = {
    "lora_type": "lokr",
    "lokr_factor": 2,
    "rank": 64,
    "lora_targets": ["attention", "feed_forward"],
}


@pytest.fixture(scope="module")
def folder_of(sd: str, sdxl: str, transformers: Callable[[str], str]) -> Callable[[str], str]:
    return lambda family: {"sd": sd, "sdxl": sdxl}.get(family) or transformers(family)


def make_module(path: str, **options: Any) -> DiffusionLoRA:
    torch.manual_seed(0)
    module = DiffusionLoRA(path, **({"rank": 4, "max_train_steps": 1} | options))
    module.configure_model()
    return module


def trained(path: str, **options: Any) -> DiffusionLoRA:
    """A module whose adapter changes the output."""
    module = make_module(path, **options)
    torch.manual_seed(5)
    for parameter in module.trainable_parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    return module


def loss(module: DiffusionLoRA) -> Tensor:
    torch.manual_seed(3)
    return example_losses(module, make_batch())


def deltas(network: nn.Module) -> dict[str, Tensor]:
    """Changes of the weights by peft's own arithmetic."""
    found: dict[str, Tensor] = {}
    for name, module in network.named_modules():
        if hasattr(module, "get_delta_weight") and getattr(module, "scaling", None):
            found[name] = module.get_delta_weight(next(iter(module.scaling)))  # type: ignore[operator]
    return found


@pytest.mark.parametrize(
    "family",
    ["sd", "flux", *(pytest.param(name, marks=pytest.mark.long) for name in FAMILY_NAMES[1:] if name != "flux")],
)
@pytest.mark.parametrize("rank", [64, 2])
def test_a_file_is_read_by_diffusers_and_our_sampler_as_it_was_trained(
    family: str, rank: int, folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    path = folder_of(family)
    assert torch.equal(loss(make_module(path, **LOKR)), loss(make_module(path, lora_targets=LOKR["lora_targets"])))
    module = trained(path, **LOKR | {"rank": rank, "lora_alpha": 3.0})
    file = tmp_path / "lokr.safetensors"
    wanted, denoiser = deltas(module.loaded().denoiser), FAMILIES[family].denoiser_name
    described = LoRAMetadata(base_model=family if FAMILIES[family].is_flow else None)
    save_lokr(file, denoiser, module.loaded().denoiser, described, torch.float32)
    converted = convert(file, tmp_path / "converted.safetensors", "diffusers")
    assert wanted
    sampler = LoRASampler({"pretrained_model_name_or_path": path}, "32-true", "cpu", file)
    network = load_components(path).denoiser
    network.load_lora_adapter(safetensors.torch.load_file(converted), prefix=denoiser)
    for found in (deltas(sampler.components.denoiser), deltas(network)):
        assert found.keys() == wanted.keys()
        for name, delta in wanted.items():
            torch.testing.assert_close(found[name], delta, rtol=1e-6, atol=1e-6 * float(delta.abs().max()))


@pytest.mark.parametrize("rank", [64, 2])
def test_a_lokr_on_convolutions_is_merged_and_continued(sd: str, tmp_path: Path, rank: int) -> None:
    module = trained(sd, **LOKR | {"rank": rank, "lora_targets": ["attention", "convolutions"]})
    file = save_lokr(tmp_path / "mug.safetensors", "unet", module.loaded().denoiser, LoRAMetadata(), torch.float32)
    wanted = deltas(module.loaded().denoiser)
    assert any(delta.ndim == 4 and delta.shape[-1] == 3 for delta in wanted.values())
    continued = deltas(make_module(sd, lora_type="lokr", lora_from=str(file)).loaded().denoiser)
    merged = load_components(str(merge_into_pipeline(file, sd, tmp_path / "merged"))).denoiser
    base = load_components(sd).denoiser
    for name, delta in wanted.items():
        torch.testing.assert_close(continued[name], delta, rtol=1e-6, atol=1e-6 * float(delta.abs().max()))
        whole = base.get_submodule(name).weight + delta
        torch.testing.assert_close(merged.get_submodule(name).weight, whole, rtol=1e-5, atol=1e-6)


def test_a_transformers_lokr_has_a_second_file_with_the_models_own_names(
    folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    module = trained(folder_of("flux2"), **LOKR | {"rank": 2})
    module.save_lora(tmp_path / "mug.safetensors")
    plain, own = (read_lora(tmp_path / f"mug{end}.safetensors") for end in ("", ".comfyui"))
    names = {key.partition(".lokr_")[0] for key in own.state}
    # ComfyUI knows diffusers' names of those layers of FLUX.2 alone that the original joins.
    assert "lora_unet_single_blocks_0_linear1" in names and "transformer.transformer_blocks.0.attn.to_q" in names
    assert "lora_unet_double_blocks_0_img_mlp_0" in names
    found, wanted = ({layer.module: layer.parts for layer in file.factor_layers()} for file in (own, plain))
    assert found.keys() == wanted.keys() == deltas(module.loaded().denoiser).keys()
    assert all(torch.equal(found[m][part], wanted[m][part]) for m in wanted for part in wanted[m])
    again = convert(tmp_path / "mug.safetensors", tmp_path / "again.safetensors", "kohya")
    assert read_lora(again).state.keys() == own.state.keys()


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_the_cards_lines_load_it_in_diffusers(family: str, folder_of: Callable[[str], str], tmp_path: Path) -> None:
    module = trained(folder_of(family), **LOKR)
    module.save_lora(tmp_path / "v1.5.safetensors")
    (tmp_path / "config.yaml").touch()
    contents = find_contents(tmp_path / "v1.5.safetensors")
    part = FAMILIES[family].denoiser_name
    assert contents.lokr_of == part
    lora = LoRAFile(str(tmp_path / "v1.5.safetensors"), None, folder_of(family), lokr_of=part)
    *lines, draws = diffusers_snippet(lora, "a cup").splitlines()
    for line in lines:
        if line.startswith("# once: lightning export "):
            with pytest.raises(SystemExit, match="0"):
                main(shlex.split(line.removeprefix("# once: lightning ")))
    known: dict[str, Any] = {}
    exec("\n".join(lines), known)
    assert draws.startswith("pipe(")
    wanted, found = deltas(module.loaded().denoiser), deltas(getattr(known["pipe"], part))
    assert found.keys() == wanted.keys()
    for name, delta in wanted.items():
        torch.testing.assert_close(found[name], 0.8 * delta, rtol=2e-3, atol=1e-3 * float(delta.abs().max()))


@pytest.mark.parametrize("base", [None, "int8", "nf4"])
def test_a_lokr_on_any_base_has_the_gradients_of_pefts_own_forward(sd: str, base: str | None) -> None:
    module = trained(
        sd, **LOKR | {"lora_targets": ["attention", "feed_forward", "convolutions"]}, base_quantization=base
    )
    assert any(type(layer) is FactoredConv2d for layer in module.modules())
    loss(module).mean().backward()
    ours = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    for layer in module.modules():
        if type(layer).__name__.startswith("Factored"):
            layer.__class__ = type(layer).__mro__[2]  # peft's
    loss(module).mean().backward()
    assert ours.keys() == {name for name, p in module.named_parameters() if p.grad is not None}
    for name, p in module.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(ours[name], p.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("memory", ["lean", "max"])
@pytest.mark.parametrize("family", ["sd", pytest.param("flux", marks=pytest.mark.long)])
def test_memory_levels_give_a_lokrs_native_gradients(family: str, memory: str, folder_of: Callable[[str], str]) -> None:
    gradients = []
    for level in (None, memory):
        module = trained(folder_of(family), **LOKR)
        if level is not None:
            FusedBackwardPrecision(precision="32-true", memory=level).convert_module(module)
        loss(module).mean().backward()
        gradients.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, rtol=1e-4, atol=1e-6)


def test_the_factored_forward_keeps_no_tensor_of_the_weights_size() -> None:
    net = nn.Sequential(nn.Linear(256, 256, bias=False)).requires_grad_(False)
    inject_adapter_in_model(LoKrConfig(r=1000, alpha=1000, decompose_factor=8, target_modules=["0"]), net)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    sizes = []
    for convert_layers in (False, True):
        if convert_layers:
            compute_by_factors(net)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            net(torch.randn(4, 256, requires_grad=True))
        sizes.append(sum(size for size in kept.values() if size != 256 * 256 * 4 or not convert_layers))
        largest = max(size for address, size in kept.items() if address != net[0].base_layer.weight.data_ptr())  # type: ignore[union-attr, operator]
        assert (largest < 64 * 1024) == convert_layers
    assert sizes[1] < sizes[0]


# Files of other programs --------------------------------------------------------------------------------------------


def other_programs_file(path: Path, names: dict[str, str], scaled: bool, seed: int = 0) -> dict[str, Tensor]:
    """A LoKr as LyCORIS writes it, with alpha; returns the change of each weight [16, 16] by its file's name."""
    torch.manual_seed(seed)
    state, changes = {}, {}
    for name in names:
        w1, a, b = torch.randn(2, 2), torch.randn(8, 2), torch.randn(2, 8)
        state |= {f"{name}.lokr_w1": w1, f"{name}.alpha": torch.tensor(6.0)}
        state |= {f"{name}.lokr_w2_a": a, f"{name}.lokr_w2_b": b} if scaled else {f"{name}.lokr_w2": a @ b}
        changes[names[name]] = torch.kron(w1, a @ b) * (3.0 if scaled else 1.0)
    safetensors.torch.save_file(state, path)
    return changes


@pytest.mark.parametrize("scaled", [True, False])
def test_lycoris_scale_counts_where_a_factor_is_decomposed_and_not_where_both_are_whole(
    sd: str, tmp_path: Path, scaled: bool
) -> None:
    dotted = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    names = {f"lycoris_{dotted.replace('.', '_')}": dotted}
    changes = other_programs_file(tmp_path / "in.safetensors", names, scaled)
    layer = read_lora(tmp_path / "in.safetensors").factor_layers()[0]
    assert (layer.component, layer.module) == ("unet", dotted)
    torch.testing.assert_close(layer.delta(torch.Size((16, 16))), changes[dotted])
    merged = tmp_path / "merged"
    merge_into_pipeline(tmp_path / "in.safetensors", sd, merged)
    before, after = (
        diffusers.UNet2DConditionModel.from_pretrained(folder, subfolder="unet").get_submodule(dotted).weight
        for folder in (sd, merged)
    )
    torch.testing.assert_close(after - before, changes[dotted], rtol=1e-4, atol=1e-5)


def test_a_loha_is_read_drawn_and_merged_and_diffusers_layout_refuses_it(sd: str, tmp_path: Path) -> None:
    module = make_module(sd)
    denoiser = module.loaded().denoiser
    denoiser.delete_adapters("default")
    denoiser.add_adapter(LoHaConfig(r=2, alpha=6, target_modules=["to_q"], init_weights=False))
    wanted = deltas(denoiser)
    state = {}
    for name in wanted:
        for part in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"):
            value = getattr(denoiser.get_submodule(name), part)["default"].detach()
            state[f"lora_unet_{name.replace('.', '_')}.{part}"] = value.clone()
        state[f"lora_unet_{name.replace('.', '_')}.alpha"] = torch.tensor(6.0)
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    layers = read_lora(tmp_path / "in.safetensors").factor_layers()
    assert {layer.module for layer in layers} == wanted.keys()
    for layer in layers:
        torch.testing.assert_close(layer.delta(wanted[layer.module].shape), wanted[layer.module])
    arguments = {"pretrained_model_name_or_path": sd}
    found = deltas(LoRASampler(arguments, "32-true", "cpu", tmp_path / "in.safetensors").components.denoiser)
    for name, delta in wanted.items():
        torch.testing.assert_close(found[name], delta)
    with pytest.raises(ModelError, match="diffusers reads LoRA and LoKr alone; write it with --to kohya"):
        convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "diffusers")
    kohya = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert {key.rpartition(".")[0] for key in safetensors.torch.load_file(kohya)} == {
        k.rpartition(".")[0] for k in state
    }


# lora_from ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sd", "flux", pytest.param("z_image", marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_a_run_begins_with_the_loss_that_a_file_ended_with(
    family: str, layout: Any, folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    path = folder_of(family)
    module = trained(path, rank=3, lora_alpha=6.0, lora_targets=["attention"])
    module.save_lora(tmp_path / "first.safetensors")
    file = convert(tmp_path / "first.safetensors", tmp_path / "in.safetensors", layout)
    continued = make_module(path, rank=16, lora_targets=["feed_forward"], lora_from=str(file))
    torch.testing.assert_close(loss(continued), loss(module), rtol=2e-3, atol=1e-5)  # the file is float16
    assert not torch.allclose(loss(continued), loss(make_module(path)), rtol=1e-3)
    continued.save_lora(tmp_path / "again.safetensors")
    again, first = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("again", "first"))
    assert again.keys() == first.keys() and all(torch.equal(again[key], first[key]) for key in first)


def test_a_run_continues_a_lokr_and_its_file_is_the_same(sd: str, tmp_path: Path) -> None:
    module = trained(sd, **LOKR)
    module.save_lora(tmp_path / "first.safetensors")
    continued = make_module(sd, lora_type="lokr", lora_from=str(tmp_path / "first.safetensors"))
    torch.testing.assert_close(loss(continued), loss(module), rtol=2e-3, atol=1e-5)
    assert all(p.requires_grad for n, p in continued.named_parameters() if "lokr_" in n)
    continued.save_lora(tmp_path / "again.safetensors")
    again, first = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("again", "first"))
    assert again.keys() == first.keys() and all(torch.equal(again[key], first[key]) for key in first)


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_type": "lokr", "lokr_factor": 7}, r"lokr_factor: 7 does not divide 16, a side of"),
        ({"lora_type": "lokr", "lokr_factor": 1}, "lokr_factor must be at least 2, got 1"),
        ({"lora_type": "lokr", "use_dora": True}, "use_dora: True is an option of LoRA, and lora_type is lokr"),
        ({"lora_type": "lokr", "train_text_encoder": True}, "train_text_encoder: True is an option of LoRA"),
        ({"lora_from": "/no/such.safetensors"}, "there is no file /no/such.safetensors"),
    ],
)
def test_options_that_do_not_go_together_are_refused(sd: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        make_module(sd, **options)


def test_a_file_of_another_kind_or_base_is_refused(sd: str, sdxl: str, tmp_path: Path) -> None:
    trained(sd, **LOKR).save_lora(tmp_path / "lokr.safetensors")
    with pytest.raises(
        ModelError, match=r"is a LoKr, and the run trains a LoRA; set model\.init_args\.lora_type: lokr"
    ):
        make_module(sd, lora_from=str(tmp_path / "lokr.safetensors"))
    with pytest.raises(ModelError, match="is a LoRA of another base model"):
        make_module(sdxl, lora_type="lokr", lora_from=str(tmp_path / "lokr.safetensors"))
    state = safetensors.torch.load_file(tmp_path / "lokr.safetensors")
    name = next(iter(state)).rpartition(".")[0]
    for wrong, said in (
        ({f"{name}.oft_blocks": torch.ones(2, 2, 2)}, "got OFT .* nothing converts it exactly"),
        ({f"{name}.dora_scale": torch.ones(2)}, "with magnitudes"),
        ({f"{name}.lora_up.weight": torch.ones(2, 2)}, "wanted one kind in a file"),
    ):
        safetensors.torch.save_file(state | wrong, tmp_path / "wrong.safetensors")
        with pytest.raises(ModelError, match=said):
            convert(tmp_path / "wrong.safetensors", tmp_path / "out.safetensors")
