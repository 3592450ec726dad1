"""Single-file checkpoints as a base, without the hub: their configs, their tokenizers, and trainings on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fakes.runs.seeded_fits import fit, same
from lightning_aigc.diffusion import DiffusionControlNet, DiffusionFineTuning, DiffusionLoRA
from lightning_aigc.diffusion.families import FAMILIES, Components
from lightning_aigc.diffusion.lora.file import save_lora
from lightning_aigc.diffusion.lora.merge import _stored_dtype, merge_into_pipeline
from lightning_aigc.diffusion.pipeline import single_file
from lightning_aigc.diffusion.pipeline.caption_tokens import count_tokens
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.pipeline.saving import save_single_file
from lightning_aigc.errors import ModelError

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]
KINDS = {"v1": "sd", "v2": "sd", "xl_base": "sdxl"}
PARAMETERS = {
    "v1": {"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480},
    "v2": {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840},
    "xl_base": {
        "unet": 2_567_463_684, "vae": 83_653_863, "text_encoder": 123_060_480, "text_encoder_2": 694_659_840,
    },
}  # fmt: skip
"""Parameters of the published models."""
QUICK: dict[str, Any] = {"num_inference_steps": 2, "learning_rate": 1e-3, "max_train_steps": 2}


def modules(kind: str, folder: Path) -> dict[str, nn.Module]:
    """The networks of a type, without memory."""
    single_file.write_configs(kind, folder)
    made: dict[str, nn.Module] = {}
    for name, (class_name, _) in single_file.CONFIGS[kind].items():
        if (folder / name / "config.json").is_file():
            with torch.device("meta"):
                if class_name.startswith("CLIP"):
                    made_of: Any = getattr(transformers, class_name)
                    made[name] = made_of(made_of.config_class.from_pretrained(folder / name))
                else:
                    made_of = getattr(diffusers, class_name)
                    made[name] = made_of.from_config(made_of.load_config(folder / name))
    return made


@pytest.mark.parametrize("kind", PARAMETERS)
def test_the_networks_of_the_configs_have_the_published_models_parameters(kind: str, tmp_path: Path) -> None:
    counts = {name: sum(p.numel() for p in made.parameters()) for name, made in modules(kind, tmp_path).items()}
    assert counts == PARAMETERS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizers_are_clips(kind: str, tmp_path: Path) -> None:
    """The numbers are those of openai/clip-vit-large-patch14; the padding differs by model."""
    single_file.write_configs(kind, tmp_path)
    for folder, padding in {"tokenizer": 0 if kind == "v2" else 49407, "tokenizer_2": 0}.items():
        if (tmp_path / folder).is_dir():
            tokenizer = transformers.CLIPTokenizer.from_pretrained(tmp_path / folder)
            read = tokenizer("a photo of a Cat, naïve 咖啡", padding="max_length").input_ids
            words = [320, 1125, 539, 320, 2368, 267, 1097, 35689, 563, 161, 240, 244, 161, 243, 350]
            assert read == [49406, *words, 49407] + [padding] * 60


@pytest.fixture
def tiny_file(sd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tiny pipeline as a single file, which is read with the tiny configs; with tensors that old files have."""
    path = tmp_path / "tiny.safetensors"
    components = load_components(sd)
    save_single_file(path, components, {"unet": components.denoiser}, torch.float32)
    old = {
        "alphas_cumprod": torch.ones(1000), "model_ema.decay": torch.ones(()), "model_ema.num_updates": torch.tensor(7),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None],
    }  # fmt: skip
    save_file(load_file(path) | old, path)

    def write_tiny_configs(kind: str, folder: Path) -> None:
        assert kind == "v1" and single_file.family_of_type(kind).name == "sd"
        shutil.copytree(sd, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))

    monkeypatch.setattr(single_file, "write_configs", write_tiny_configs)
    return str(path)


def test_a_lora_of_a_single_file_is_the_one_of_its_folder(sd: str, tiny_file: str, tmp_path: Path) -> None:
    weights: list[dict[str, Tensor]] = []
    for base in (sd, tiny_file):
        torch.manual_seed(0)
        module = DiffusionLoRA(base, rank=2, **QUICK)
        fit(module, tmp_path / str(len(weights)))
        weights.append({name: p.detach() for name, p in module.named_parameters() if p.requires_grad})
    assert same(*weights)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_full_fine_tuning_of_a_single_file_is_written_as_both_kinds(
    precision: str, sd: str, tiny_file: str, tmp_path: Path
) -> None:
    module = DiffusionFineTuning(tiny_file, output_name="tuned", **QUICK)
    fit(module, tmp_path, precision=precision)
    before = load_components(sd)
    of_folder, of_file = (load_components(str(tmp_path / name)) for name in ("tuned", "tuned.safetensors"))
    assert same(dict(of_folder.denoiser.state_dict()), dict(of_file.denoiser.state_dict()))
    assert not same(dict(before.denoiser.state_dict()), dict(of_file.denoiser.state_dict()))
    assert same(dict(before.vae.state_dict()), dict(of_folder.vae.state_dict()))


def test_a_controlnet_trains_on_a_single_file(tiny_file: str, tmp_path: Path) -> None:
    module = DiffusionControlNet(tiny_file, **QUICK)
    module.configure_model()
    assert module.loaded().source == tiny_file


def test_captions_are_counted_by_the_files_own_tokenizer(sd: str, tiny_file: str) -> None:
    captions = ["a red cup", "cup " * 200]
    counted = count_tokens(tiny_file, None, captions)
    assert counted is not None and counted == count_tokens(sd, None, captions) and counted[0][1] > counted[1]
    assert count_tokens(__file__, None, captions) is None


def adapted(folder: str) -> Any:
    """The folder's U-Net with a LoRA that is not zero."""
    unet = load_components(folder).denoiser
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    return unet


def test_a_lora_is_merged_into_and_out_of_single_files(sd: str, tiny_file: str, tmp_path: Path) -> None:
    lora = save_lora(tmp_path / "lora.safetensors", unet=adapted(sd))
    outputs = [
        merge_into_pipeline(lora, source, tmp_path / f"{place}{ending}", 0.5)
        for place, source in enumerate((sd, tiny_file))
        for ending in ("", ".safetensors")
    ]
    first, *others = ({n: dict(m.state_dict()) for n, m in networks(path).items()} for path in outputs)
    assert all(same(other[name], first[name]) for other in others for name in first)
    assert not same(first["unet"], dict(networks(Path(sd))["unet"].state_dict()))
    with pytest.raises(ModelError, match=r"1.safetensors, which already exists; name a new .*file"):
        merge_into_pipeline(lora, sd, outputs[-1])


def test_a_transformer_is_not_merged_into_a_single_file(transformers: Callable[[str], str], tmp_path: Path) -> None:
    folder = transformers("sd3")
    denoiser = load_components(folder).denoiser
    denoiser.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    lora = save_lora(tmp_path / "lora.safetensors", transformer=denoiser, layout="diffusers")
    with pytest.raises(ModelError, match="a single file holds Stable Diffusion or SDXL, so name a folder"):
        merge_into_pipeline(lora, folder, tmp_path / "merged.safetensors")


def networks(source: Path) -> dict[str, nn.Module]:
    read = load_components(str(source))
    return {"unet": read.denoiser, "vae": read.vae, "text_encoder": read.text_encoders[0]}


def test_a_merge_keeps_the_precision_of_each_component_of_a_single_file(sd: str, tmp_path: Path) -> None:
    """With the published sizes' names; their configs are not read."""
    path = tmp_path / "file.safetensors"
    tensors = {
        "model.diffusion_model.a": torch.zeros(1, dtype=torch.float16), "first_stage_model.a": torch.zeros(1),
        "cond_stage_model.transformer.a": torch.zeros(1, dtype=torch.bfloat16), "model_ema.a": torch.zeros(1),
    }  # fmt: skip
    save_file(tensors, path)
    dtypes = [_stored_dtype(path, name) for name in ("unet", "vae", "text_encoder")]
    assert dtypes == [torch.float16, torch.float32, torch.bfloat16]


def without(path: Path, name: str) -> Path:
    """The file without the weights whose names hold `name`."""
    kept = {key: tensor for key, tensor in load_file(path).items() if name not in key}
    assert len(kept) < len(load_file(path))
    save_file(kept, path)
    return path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("input_blocks.1.0.in_layers.2", "lack weights of the U-Net or the VAE;"),
        ("layers.0.mlp.fc1.bias", r"lack .*layers.0.mlp.fc1.bias of text_encoder;"),
        ("first_stage_model.", "has no AutoencoderKL; give a checkpoint with U-Net, VAE and text encoders, or"),
        ("cond_stage_model.", "has no CLIPTextModel; give"),
    ],
)
def test_a_file_that_lacks_weights_is_one_sentence(name: str, said: str, tiny_file: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_components(str(without(Path(tiny_file), name)))


@pytest.mark.parametrize(
    ("component", "name", "said"),
    [
        ("unet", "conv_in.weight", "lack conv_in.weight of unet;"),
        ("vae", "encoder.conv_", r"lack encoder.conv_\w+.\w+ of vae and 5 more; download or copy them again"),
        ("text_encoder", "mlp.fc1.weight", r"lack .*layers.\{0, 1\}.mlp.fc1.weight of text_encoder;"),
    ],
)
def test_a_folder_that_lacks_weights_is_one_sentence(
    component: str, name: str, said: str, sd: str, tmp_path: Path
) -> None:
    """transformers draws what it does not find at random, and a run would train on that."""
    folder = shutil.copytree(sd, tmp_path / "base")
    without(next((folder / component).glob("*.safetensors")), name)
    with pytest.raises(ModelError, match=said):
        load_components(str(folder))
    lora = save_lora(tmp_path / "lora.safetensors", unet=adapted(sd))
    with pytest.raises(ModelError, match=f"--merge_into: the files of .*base {said}"):
        merge_into_pipeline(lora, folder, tmp_path / "merged")


def test_a_type_whose_configs_are_not_here_needs_the_hub(tiny_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_file, "CONFIGS", {})
    with pytest.raises(ModelError, match=r"configs come from the hub, and .*give the model's diffusers folder"):
        load_components(tiny_file)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_the_published_sizes_loads_to_the_bit(kind: str, tmp_path: Path) -> None:
    """SDXL takes 7 GB on disk and 14 GB of memory."""
    made = {name: each.to(torch.float16).to_empty(device="cpu") for name, each in modules(kind, tmp_path).items()}
    for each in made.values():
        for tensor in each.state_dict().values():
            tensor.copy_(torch.arange(tensor.numel()).view_as(tensor).remainder(1009))  # exact in half precision
    components = Components(
        FAMILIES[KINDS[kind]], made["unet"], made["vae"],
        tuple(each for name, each in made.items() if name.startswith("text_encoder")), (),
        dict(single_file.CONFIGS[kind]["scheduler"][1]), source="nothing",
    )  # fmt: skip
    path = tmp_path / "model.safetensors"
    save_single_file(path, components, made, torch.float16)
    assert single_file.type_of_checkpoint(path) == kind
    read = load_components(str(path), denoiser_dtype=torch.float16, vae_dtype=torch.float16)
    assert len(read.tokenizers) == len(read.text_encoders) == len(components.text_encoders)
    for wanted, got in zip(
        (components.denoiser, components.vae, *components.text_encoders),
        (read.denoiser, read.vae, *read.text_encoders),
        strict=True,
    ):
        assert same(dict(wanted.state_dict()), dict(got.state_dict()))
