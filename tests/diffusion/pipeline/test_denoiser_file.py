"""`denoiser_file`: a transformer's weights from the files that ComfyUI reads, float8 and scaled, beside a pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fakes.models.pipelines import make_batch
from fakes.runs.training_losses import example_losses
from lightning_aigc.diffusion import DiffusionFineTuning, DiffusionLoRA
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.pipeline.single_file_names import original_tensors
from lightning_aigc.diffusion.pipeline.tensor_stream import DeferredTensor, write_tensors
from lightning_aigc.diffusion.samplers.lora import base_of_run
from lightning_aigc.errors import ModelError
from lightning_aigc_kernels.packed_weight import packed_weights

pytestmark = pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated")
FLOAT8 = torch.float8_e4m3fn
PREFIX = "model.diffusion_model."
OWN_NAMES = "chroma"
"""Its converter in diffusers splits layers of 3,072 numbers, whatever the model's are."""


def denoiser(folder: str, file: Path | None = None, dtype: torch.dtype = torch.float32) -> Any:
    name = None if file is None else str(file)
    return load_components(folder, denoiser_dtype=dtype, takes_distilled=True, denoiser_file=name).denoiser


def state_of(folder: str) -> dict[str, Tensor]:
    return dict(denoiser(folder).state_dict())


def other(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other weights of the same shapes."""
    torch.manual_seed(1)
    return {name: torch.randn_like(tensor) * tensor.std(correction=0).clamp(min=0.01) for name, tensor in state.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", list(TRANSFORMERS))
def test_the_weights_are_the_files_to_the_bit(
    transformers: Callable[[str], str], tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    folder, file = transformers(family), tmp_path / "other.safetensors"
    wanted = other(state_of(folder))
    tensors: Mapping[str, DeferredTensor] = {name: DeferredTensor.of(tensor) for name, tensor in wanted.items()}
    if family != OWN_NAMES:
        tensors = {PREFIX + name: tensor for name, tensor in original_tensors(tensors, TRANSFORMERS[family]).items()}
    write_tensors(file, tensors)
    found, of_folder = denoiser(folder, file, dtype), denoiser(folder, dtype=dtype)
    assert not found.training and not any(p.requires_grad for p in found.parameters())
    kept = {name: tensor.dtype for name, tensor in of_folder.state_dict().items()}
    assert found.state_dict().keys() == kept.keys()
    assert all(torch.equal(tensor, wanted[name].to(kept[name])) for name, tensor in found.state_dict().items())
    for name, buffer in of_folder.named_buffers():
        assert found.get_buffer(name).dtype == buffer.dtype
        assert name in wanted or torch.equal(found.get_buffer(name), buffer)


def scaled(
    state: Mapping[str, Tensor], weight: str, given: str, rows: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A file with float8 matrices and their scales under these names, and the weights that it means."""
    file, means = {"scaled_fp8": torch.empty(2, dtype=FLOAT8)}, {}
    for name, tensor in state.items():
        file[name] = means[name] = tensor
        if tensor.ndim == 2 and name.endswith(".weight"):
            scale = (tensor.abs().amax(1, keepdim=True) if rows else tensor.abs().max()) / 448
            file[name] = (tensor / scale).to(FLOAT8)
            means[name] = file[name].float() * scale
            layer = name.removesuffix(".weight")
            file |= {f"{layer}.{weight}": scale, f"{layer}.{given}": torch.tensor(0.5)}
    return file, means


@pytest.mark.parametrize(
    ("weight", "given", "rows"), [("weight_scale", "input_scale", False), ("scale_weight", "scale_input", True)]
)
def test_a_scaled_float8_file_trains_and_packs_to_its_values(
    transformers: Callable[[str], str], tmp_path: Path, weight: str, given: str, rows: bool
) -> None:
    folder, path = transformers("z_image"), tmp_path / "scaled.safetensors"
    file, means = scaled(other(state_of(folder)), weight, given, rows)
    safetensors.torch.save_file(file, path)
    losses = {}
    for kind in (None, "fp8"):
        module = DiffusionLoRA(folder, denoiser_file=str(path), rank=4, base_quantization=kind, max_train_steps=1)  # type: ignore[arg-type]
        network = module.loaded().denoiser
        found = {name.replace(".base_layer", ""): p for name, p in network.named_parameters()}
        packed = {name.replace(".base_layer", ""): weight.dequantize() for name, weight in packed_weights(network)}
        assert bool(packed) == (kind == "fp8")
        whole_blocks = {name for name, tensor in means.items() if not rows or tensor.shape[-1] % 64 == 0}
        assert not packed or whole_blocks & packed.keys()
        for name in whole_blocks:
            torch.testing.assert_close(packed.get(name, found[name].detach()), means[name], rtol=1e-6, atol=0)
        torch.manual_seed(3)
        losses[kind] = example_losses(module, make_batch()).detach()
    assert losses[None].isfinite().all()
    torch.testing.assert_close(losses["fp8"], losses[None], rtol=2e-3, atol=1e-4)  # text encoders are packed too


def test_a_sample_after_the_run_has_the_files_weights(transformers: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    wanted = other(state_of(transformers("sd3")))
    safetensors.torch.save_file(wanted, path)
    folder = str(shutil.copytree(transformers("sd3"), tmp_path / "without_weights"))
    for file in Path(folder, "transformer").glob("*.safetensors"):
        file.unlink()
    components, _ = base_of_run({"pretrained_model_name_or_path": folder, "denoiser_file": str(path)}, "32-true")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in components.denoiser.state_dict().items())


def test_a_fine_tuned_models_own_file_is_a_base(transformers: Callable[[str], str], tmp_path: Path) -> None:
    module = DiffusionFineTuning(transformers("flux2"), output_name="tuned")
    module.configure_model()
    with torch.no_grad():
        module.loaded().denoiser.x_embedder.weight += 1
    _, single = module.save_model(tmp_path / "tuned.safetensors")
    found = denoiser(transformers("flux2"), single).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in module.loaded().denoiser.state_dict().items())


@pytest.mark.long
def test_the_official_names_of_flux_1_at_its_width(tmp_path: Path, transformers: Callable[[str], str]) -> None:
    """A block of each kind, as `flux1-dev` has them, with scales; diffusers' converter has the width as a number."""
    torch.manual_seed(0)
    width, shapes = 3072, {"img_in": (3072, 16), "txt_in": (3072, 4096), "final_layer.linear": (16, 3072)}
    for name, inputs in (("time_in", 256), ("vector_in", 768), ("guidance_in", 256)):
        shapes |= {f"{name}.in_layer": (width, inputs), f"{name}.out_layer": (width, width)}
    for side in ("img", "txt"):
        block = f"double_blocks.0.{side}"
        shapes |= {f"{block}_mod.lin": (6 * width, width), f"{block}_attn.qkv": (3 * width, width)}
        shapes |= {f"{block}_attn.proj": (width, width)}
        shapes |= {f"{block}_mlp.0": (4 * width, width), f"{block}_mlp.2": (width, 4 * width)}
    shapes |= {"single_blocks.0.linear1": (7 * width, width), "single_blocks.0.linear2": (width, 5 * width)}
    shapes |= {
        "single_blocks.0.modulation.lin": (3 * width, width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
    }
    file: dict[str, Tensor] = {"scaled_fp8": torch.empty(0, dtype=FLOAT8)}
    for name, (outputs, inputs) in shapes.items():
        file[f"{name}.weight"] = torch.randint(-100, 100, (outputs, inputs), dtype=torch.int8).to(FLOAT8)
        file |= {f"{name}.bias": torch.randn(outputs), f"{name}.weight_scale": torch.tensor(0.5**10)}
    for norm in ("double_blocks.0.img_attn", "double_blocks.0.txt_attn", "single_blocks.0"):
        file |= {f"{norm}.norm.{each}_norm.scale": torch.randn(128) for each in ("query", "key")}
    safetensors.torch.save_file({PREFIX + name: tensor for name, tensor in file.items()}, tmp_path / "flux.safetensors")
    folder = Path(shutil.copytree(transformers("flux"), tmp_path / "base")) / "transformer" / "config.json"
    config = json.loads(folder.read_text()) | {
        "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128, "num_attention_heads": 24,
        "joint_attention_dim": 4096, "pooled_projection_dim": 768, "in_channels": 16, "out_channels": None,
        "axes_dims_rope": [16, 56, 56], "guidance_embeds": True,
    }  # fmt: skip
    folder.write_text(json.dumps(config))
    found = denoiser(str(folder.parents[1]), tmp_path / "flux.safetensors", torch.bfloat16)
    qkv = file["double_blocks.0.img_attn.qkv.weight"].to(torch.bfloat16) * 0.5**10
    block = found.transformer_blocks[0].attn
    assert torch.equal(torch.cat([each.weight for each in (block.to_q, block.to_k, block.to_v)]), qkv)


# Bad files ------------------------------------------------------------------------------------------------------------


def refused(folder: str, file: object, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        DiffusionLoRA(folder, denoiser_file=str(file), **options).configure_model()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_of_another_model_is_one_sentence(transformers: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file(state_of(transformers("z_image")), path)
    assert "does not load as the transformer of" in refused(transformers("qwen_image"), path)
    state = state_of(transformers("qwen_image"))
    left_out = next(iter(state))
    safetensors.torch.save_file({name: tensor for name, tensor in state.items() if name != left_out}, path)
    assert "it lacks some of the layers" in refused(transformers("qwen_image"), path)
    state[left_out] = torch.zeros(3, 3)
    safetensors.torch.save_file(state, path)
    assert "give a file and a pipeline of the same model" in refused(transformers("qwen_image"), path)


@pytest.mark.parametrize(
    ("numbers", "scale", "described", "said"),
    [
        ((torch.uint8, (32, 16)), (32, 1), None, "uint8 with 32x1 scales"),
        ((FLOAT8, (32, 32)), (2, 2), None, "float8_e4m3fn with 2x2 scales"),
        ((torch.uint8, (512, 1)), None, None, "uint8 without a scale"),  # of bitsandbytes
        ((torch.int8, (32, 32)), (), {"format": "convrot_w4a4"}, "in the format convrot_w4a4"),
    ],
)
def test_formats_of_other_scales_are_refused(
    transformers: Callable[[str], str], tmp_path: Path, numbers: Any, scale: Any, described: Any, said: str
) -> None:
    dtype, shape = numbers
    state = {"x.weight": torch.zeros(shape, dtype=dtype), "x.weight_scale": torch.ones(scale or ())}
    if scale is None:
        del state["x.weight_scale"]
    if described is not None:
        state["x.comfy_quant"] = torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    assert said in refused(transformers("z_image"), tmp_path / "a.safetensors")


def test_the_headers_formats_count_for_the_denoiser_alone(transformers: Callable[[str], str], tmp_path: Path) -> None:
    """A file of a whole pipeline may have text encoders in other formats."""
    state = {PREFIX + name: tensor for name, tensor in state_of(transformers("z_image")).items()}
    for layer, is_read in (("text_encoders.qwen.layers.0", True), (f"{PREFIX}layers.0.attention.to_q", False)):
        header = {"_quantization_metadata": json.dumps({"layers": {layer: {"format": "nvfp4"}}})}
        safetensors.torch.save_file(state, tmp_path / "all.safetensors", header)
        if is_read:
            denoiser(transformers("z_image"), tmp_path / "all.safetensors")
        else:
            assert "in the format nvfp4" in refused(transformers("z_image"), tmp_path / "all.safetensors")


def test_wrong_files_and_families(transformers: Callable[[str], str], sd: str, tmp_path: Path) -> None:
    path = tmp_path / "z_image_turbo_fp8.safetensors"
    path.write_bytes(b"no header")
    assert f"pretrained_model_name_or_path: {path}" in refused(sd, path)
    folder = transformers("z_image")
    assert "by its name a distilled model (turbo)" in refused(folder, path)
    assert "there is no file" in refused(folder, tmp_path / "missing.safetensors")
    assert "is no safetensors file" in refused(folder, tmp_path / "model.gguf")
    broken = path.rename(tmp_path / "base.safetensors")
    assert "cannot be read as safetensors" in refused(folder, broken)
