"""LoKr and LoHa files that LyCORIS and ai-toolkit write: read here, converted, and continued to the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from clients.lora import base_state, largest_error, lokr_delta
from clients.shapes import make_denoiser
from fakes.models.pipelines import assemble, make_text_encoder
from fakes.models.transformer_pipelines import make_flux_pipeline
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.families import FAMILIES, TRANSFORMERS
from lightning_aigc.diffusion.lora.file import convert, read_lora
from lightning_aigc.diffusion.lora.merge import merge_into_pipeline
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.errors import ModelError

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore::UserWarning")]

BLOCKS = {
    "sd": ["Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D"],
    "sdxl": ["Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D"],
    "flux": ["FluxTransformerBlock", "FluxSingleTransformerBlock"],
}
"""Classes whose layers are adapted, by family: those of the preset `full` for U-Nets, and FLUX.1's blocks."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "lokr": {"algo": "lokr"},
    "lokr of a factor": {"algo": "lokr", "factor": 4},
    "lokr with whole factors": {"algo": "lokr", "factor": 4, "full_matrix": True},
    "lokr with both decomposed": {"algo": "lokr", "decompose_both": True, "linear_dim": 1},
    "lokr in Tucker's form": {"algo": "lokr", "use_tucker": True, "factor": 2},
    "loha": {"algo": "loha"},
    "loha in Tucker's form": {"algo": "loha", "use_tucker": True},
}


def lycoris(module: str = "wrapper") -> Any:
    return pytest.importorskip(f"lycoris.{module}", reason="LyCORIS is missing: pip install lycoris-lora")


def pipeline_of(family: str, folder: Path) -> Path:
    if family == "flux":
        return make_flux_pipeline(folder)
    assemble(folder, make_denoiser(family)).save_pretrained(folder)
    return folder


def stirred(network: nn.Module) -> None:
    """Random weights, so that each layer's change is as large as its weight."""
    generator = torch.Generator().manual_seed(6)
    for parameter in network.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)


def make_lycoris(family: str, denoiser: nn.Module, alpha: float, **options: Any) -> Any:
    """A LyCORIS network of random weights, applied to a denoiser as SimpleTuner does it."""
    wrapper = lycoris()
    wrapper.LycorisNetwork.apply_preset({"target_module": BLOCKS[family]})
    options = {"linear_dim": 2, "preset": "full", "warn_on_unmatched": False} | options
    network = wrapper.create_lycoris(denoiser, 1.0, linear_alpha=alpha * options["linear_dim"], **options)
    network.apply_to()
    stirred(network)
    return network.eval()


def read_state(path: Path, base: dict[str, Tensor], family: str | None) -> dict[str, Tensor]:
    """The weights with the file's layers added, as they are merged here."""
    found = dict(base)
    for layer in read_lora(path).factor_layers(family):
        name = f"{layer.module}.weight"
        found[name] = base[name] + layer.delta(base[name].shape)
    return found


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("family", list(BLOCKS))
def test_a_file_of_lycoris_gives_its_merged_weights(tmp_path: Path, family: str, algorithm: str) -> None:
    denoiser = make_denoiser(family).requires_grad_(False)
    base = base_state(denoiser)
    network = make_lycoris(family, denoiser, 1.0, **ALGORITHMS[algorithm])
    network.save_weights(str(tmp_path / "theirs.safetensors"), torch.float32, {})
    network.restore()
    network.merge_to(1.0)
    trained = {name: tensor for name, tensor in denoiser.state_dict().items() if name in base}
    assert trained.keys() == base.keys()
    known = family if family in TRANSFORMERS else None
    assert largest_error(read_state(tmp_path / "theirs.safetensors", base, known), base, trained) < 1e-6
    kohya = convert(tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors", "kohya", known)
    assert largest_error(read_state(kohya, base, known), base, trained) < 1e-6


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if "lokr" in name])
@pytest.mark.parametrize("family", ["sd", "flux"])
def test_a_lokr_is_written_for_diffusers_where_it_loads_it(tmp_path: Path, family: str, algorithm: str) -> None:
    denoiser = make_denoiser(family).requires_grad_(False)
    base, known = base_state(denoiser), family if family in TRANSFORMERS else None
    network = make_lycoris(family, denoiser, 1.0, **ALGORITHMS[algorithm])
    file, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    network.save_weights(str(file), torch.float32, {})
    if family == "sd" and algorithm not in ("lokr of a factor", "lokr in Tucker's form"):
        with pytest.raises(ModelError, match=r"a whole second factor on .*, a convolution|sizes follow no one factor"):
            convert(file, ours, "diffusers", known)
        return
    fresh: Any = make_denoiser(family)
    state = safetensors.torch.load_file(convert(file, ours, "diffusers", known))
    fresh.load_lora_adapter(state, prefix=FAMILIES[family].denoiser_name)
    changed = [name for name, layer in fresh.named_modules() if getattr(layer, "scaling", None)]
    found = base | {f"{name}.weight": base[f"{name}.weight"] + lokr_delta(fresh, name) for name in changed}
    assert largest_error(found, base, read_state(file, base, known)) < 1e-6


@pytest.mark.parametrize("algorithm", ["lokr", "lokr with both decomposed", "loha", "loha in Tucker's form"])
def test_an_alpha_scales_a_layer_as_in_lycoris_forward(tmp_path: Path, algorithm: str) -> None:
    """LyCORIS 4.1 scales by alpha / rank in its forward, and twice where it merges; the forward is what was trained."""
    denoiser = make_denoiser("sd").requires_grad_(False)
    base = base_state(denoiser)
    network = make_lycoris("sd", denoiser, 0.5, **ALGORITHMS[algorithm])
    network.save_weights(str(tmp_path / "theirs.safetensors"), torch.float32, {})
    weights = {f"{each.module}.weight": each for each in read_lora(tmp_path / "theirs.safetensors").factor_layers()}
    assert len(weights) == len(network.loras)
    by_module = {id(module): name for name, module in denoiser.named_modules()}
    for theirs in network.loras:
        name = f"{by_module[id(theirs.org_module[0])]}.weight"
        wanted = theirs.get_weight(theirs.shape).detach()
        found = weights[name].delta(base[name].shape)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("algorithm", ["lokr of a factor", "loha"])
def test_a_file_of_the_plugin_for_sd_scripts_is_read(tmp_path: Path, algorithm: str) -> None:
    kohya, preset = lycoris("kohya"), tmp_path / "preset.toml"
    preset.write_text(f"enable_conv = true\nunet_target_module = {BLOCKS['sd']}\nunet_target_name = []\n")
    denoiser, encoder = make_denoiser("sd").requires_grad_(False), make_text_encoder().requires_grad_(False)
    base = base_state(denoiser)
    options = {"preset": str(preset), "conv_dim": 2, "conv_alpha": 2.0, **ALGORITHMS[algorithm]}
    network = kohya.create_network(1.0, 2, 2.0, None, encoder, denoiser, **options)
    network.apply_to(encoder, denoiser, False, True)
    stirred(network)
    network.save_weights(str(tmp_path / "theirs.safetensors"), torch.float32, {})
    wanted = {each.lora_name: each.get_weight(each.shape).detach() for each in network.unet_loras}
    found = read_state(tmp_path / "theirs.safetensors", base, None)
    assert len(wanted) == sum(not torch.equal(found[name], tensor) for name, tensor in base.items())
    trained = dict(base)
    for name in base:
        theirs = wanted.get("lora_unet_" + name.removesuffix(".weight").replace(".", "_"))
        trained[name] = base[name] if theirs is None else base[name] + theirs
    assert largest_error(found, base, trained) < 1e-6


@pytest.mark.parametrize(
    ("family", "algorithm"),
    [("sd", "lokr of a factor"), ("flux", "lokr"), ("sd", "lokr in Tucker's form"), ("sd", "loha")],
)
def test_a_file_of_lycoris_is_merged_drawn_with_and_continued(tmp_path: Path, family: str, algorithm: str) -> None:
    path = pipeline_of(family, tmp_path / "base")
    components = load_components(str(path))
    base = base_state(components.denoiser)
    network = make_lycoris(family, components.denoiser.requires_grad_(False), 1.0, **ALGORITHMS[algorithm])
    file = tmp_path / "theirs.safetensors"
    network.save_weights(str(file), torch.float32, {})
    network.restore()
    network.merge_to(1.0)
    trained = {name: tensor for name, tensor in components.denoiser.state_dict().items() if name in base}
    merged = merge_into_pipeline(file, path, tmp_path / "merged")
    assert largest_error(dict(load_components(str(merged)).denoiser.state_dict()), base, trained) < 1e-6
    sampler = LoRASampler({"pretrained_model_name_or_path": str(path)}, "32-true", "cpu", file)
    module = DiffusionLoRA(str(path), lora_type="lokr", lora_from=str(file), max_train_steps=1)
    if algorithm == "loha":
        with pytest.raises(ModelError, match="LoHa is read, not trained"):
            module.configure_model()
    else:
        module.configure_model()
    for denoiser in [sampler.components.denoiser] + ([] if algorithm == "loha" else [module.loaded().denoiser]):
        changed = [name for name, layer in denoiser.named_modules() if getattr(layer, "scaling", None)]
        assert len(changed) == len(network.loras)
        found = base | {f"{name}.weight": base[f"{name}.weight"] + lokr_delta(denoiser, name) for name in changed}
        assert largest_error(found, base, trained) < 1e-6


def factors(dimension: int, factor: int) -> tuple[int, int]:
    """ai-toolkit's `factorization` of toolkit/models/lokr.py."""
    if factor > 0 and dimension % factor == 0:
        return factor, dimension // factor
    best = max(n for n in range(1, int(dimension**0.5) + 1) if dimension % n == 0)
    return best, dimension // best


def write_as_ai_toolkit(
    path: Path, family: str, model: nn.Module, *, rank: int | None, factor: int, old: bool = False
) -> dict[str, Tensor]:
    """Write a LoKr by ai-toolkit's rules, and return the weights with it.

    Every linear layer of the blocks is adapted (toolkit/lora_special.py, transformer_only). A rank of None is its
    `lokr_full_rank`: rank and alpha are 9999999999, which float16 holds as inf, and both factors are whole. Names:
    `transformer.` and the module, in newer models `diffusion_model.` (toolkit/network_mixins.py: get_state_dict, and
    convert_lora_weights_before_save of the model); with `old_lokr_format` `lycoris_` and underscores.
    """
    generator = torch.Generator().manual_seed(8)
    state, trained = {}, base_state(model)
    prefix = "transformer." if family in ("flux", "flux_kontext") else "diffusion_model."
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or not any(f".{n}." in name for n in range(3)):
            continue
        (rows, more_rows), (columns, more_columns) = (factors(side, factor) for side in layer.weight.shape)
        w1 = 0.3 * torch.randn(rows, columns, generator=generator)
        key = f"lycoris_{name.replace('.', '_')}" if old else f"{prefix}{name}"
        state[f"{key}.lokr_w1"] = w1
        if rank is None or rank >= max(more_rows, more_columns) / 2:
            w2 = state[f"{key}.lokr_w2"] = 0.3 * torch.randn(more_rows, more_columns, generator=generator)
        else:
            a, b = (torch.randn(*s, generator=generator) for s in ((more_rows, rank), (rank, more_columns)))
            state |= {f"{key}.lokr_w2_a": a, f"{key}.lokr_w2_b": b}
            w2 = a @ b
        state[f"{key}.alpha"] = torch.tensor(9999999999 if rank is None else rank).half()
        trained[f"{name}.weight"] = trained[f"{name}.weight"] + torch.kron(w1, w2)
    safetensors.torch.save_file(state, path, {"format": "pt"})
    return trained


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize(
    ("family", "old"),
    [
        ("flux", False), ("flux", True), ("flux_kontext", False), ("qwen_image", False), ("qwen_image", True),
        ("qwen_image_edit_plus", False), ("z_image", False), ("z_image", True),
    ],
)  # fmt: skip
def test_a_file_by_the_rules_of_ai_toolkit_is_converted(
    tmp_path: Path, family: str, old: bool, rank: int | None
) -> None:
    model = make_denoiser(family)
    base = base_state(model)
    trained = write_as_ai_toolkit(tmp_path / "theirs.safetensors", family, model, rank=rank, factor=-1, old=old)
    assert largest_error(read_state(tmp_path / "theirs.safetensors", base, family), base, trained) < 1e-6
    for layout in ("kohya", "diffusers"):
        ours = convert(tmp_path / "theirs.safetensors", tmp_path / f"{layout}.safetensors", layout, family)  # type: ignore[arg-type]
        assert largest_error(read_state(ours, base, family), base, trained) < 1e-6


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_joined_layers_of_ai_toolkits_own_models_are_cut_apart(tmp_path: Path, kind: str) -> None:
    """Its FLUX.2 and Chroma are the original code, whose query, key and value are one layer, of 9216 rows in klein.

    Its factorization of 9216 is 96 x 96, and of this model's 192 rows 12 x 16: both have boundaries at the thirds.
    """
    name, generator = "diffusion_model.double_blocks.0.img_attn.qkv", torch.Generator().manual_seed(9)
    assert factors(9216, -1) == (96, 96) and factors(192, -1) == (12, 16)
    sizes = {"lokr_w1": (12, 8), "lokr_w2": (16, 8)}
    if kind == "loha":
        sizes = {"hada_w1_a": (192, 2), "hada_w1_b": (2, 64), "hada_w2_a": (192, 2), "hada_w2_b": (2, 64)}
    parts = {part: torch.randn(*size, generator=generator) for part, size in sizes.items()}
    safetensors.torch.save_file({f"{name}.{part}": value for part, value in parts.items()}, tmp_path / "in.safetensors")
    if kind == "lokr":
        wanted = torch.kron(parts["lokr_w1"], parts["lokr_w2"])
    else:
        wanted = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
    ours = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "kohya", "flux2")
    layers = {layer.module: layer.delta(torch.Size((64, 64))) for layer in read_lora(ours).factor_layers("flux2")}
    found = torch.cat([layers[f"transformer_blocks.0.attn.to_{letter}"] for letter in "qkv"])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_factor_without_a_boundary_between_joined_layers_is_refused_in_one_sentence(tmp_path: Path) -> None:
    state = {"diffusion_model.double_blocks.0.img_attn.qkv.lokr_w1": torch.ones(4, 4)}
    state |= {"diffusion_model.double_blocks.0.img_attn.qkv.lokr_w2": torch.ones(48, 16)}
    safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    with pytest.raises(ModelError, match=r"joins .* a second factor of 48 rows, which cannot be cut apart there"):
        convert(tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors", "diffusers", "flux2")


def test_a_lycoris_with_text_encoders_is_refused_in_one_sentence(tmp_path: Path) -> None:
    encoder = make_text_encoder().requires_grad_(False)
    network = lycoris("kohya").create_network(
        1.0, 2, 2.0, None, encoder, make_denoiser("sd"), algo="lokr", preset="attn-mlp"
    )
    network.apply_to(encoder, nn.Identity(), True, False)
    network.save_weights(str(tmp_path / "theirs.safetensors"), torch.float32, {})
    with pytest.raises(ModelError, match="only the denoiser's are read: leave the text encoder out"):
        convert(tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors", "kohya")
