"""Every file of a run says what it trained, prediction type, terminal SNR and flow shift, and draws so elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import yaml
from diffusers import (
    DiffusionPipeline,
    PNDMScheduler,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from torch import Tensor, nn

from fakes.models.pipelines import SIDE
from fakes.models.transformer_pipelines import MAKE
from lightning_aigc.diffusion import (
    DiffusionFineTuning,
    DiffusionLoRA,
    StableDiffusionFineTuning,
    StableDiffusionLoRA,
)
from lightning_aigc.diffusion.lora.file import convert, read_lora
from lightning_aigc.diffusion.lora.merge import merge_into_pipeline
from lightning_aigc.diffusion.pipeline.saved_schedule import of_single_file
from lightning_aigc.diffusion.samplers.lora import base_of_run
from lightning_aigc.embedded import resolve

OBJECTIVES: dict[str, dict[str, Any]] = {
    "epsilon": {"prediction_type": "epsilon"},
    "v_prediction": {"prediction_type": "v_prediction"},
    "zero_terminal_snr": {"prediction_type": "v_prediction", "zero_terminal_snr": True},
}
SCALES = {"qwen_image": "true_cfg_scale"}


def changed(module: Any, networks: nn.Module) -> Any:
    """The module with other weights where it trains, as after a fit."""
    torch.manual_seed(0)
    for parameter in networks.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn_like(parameter)
    return module


def plain_image(folder: Path, scale: str = "guidance_scale", **arguments: Any) -> Tensor:
    """Draw with a folder by diffusers alone; parts that its index has as null are named, as diffusers wants."""
    index = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, value in index.items() if value == [None, None]}
    pipeline = DiffusionPipeline.from_pretrained(folder, **absent)
    if scale == "true_cfg_scale":
        arguments["negative_prompt"] = " "
    drawn: Tensor = pipeline(
        prompt="a red cup", num_inference_steps=3, height=SIDE, width=SIDE, output_type="pt",
        generator=torch.Generator().manual_seed(4), **{scale: 3.0}, **arguments,
    ).images.float().clamp(0, 1)  # fmt: skip
    return drawn


def own_image(module: Any) -> Tensor:
    drawn: Tensor = module.sample(["a red cup"], [4], num_inference_steps=3, guidance_scale=3.0)
    return drawn


@pytest.fixture(params=["sd", "sdxl"])
def u_net_folder(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_a_u_nets_folder_draws_in_plain_diffusers_what_the_run_drew(
    u_net_folder: str, objective: str, tmp_path: Path
) -> None:
    module = StableDiffusionFineTuning(u_net_folder, num_inference_steps=3, **OBJECTIVES[objective])
    module.configure_model()
    assert module.unet is not None
    changed(module, module.unet)
    folder, _ = module.save_model(tmp_path / "tuned.safetensors")
    saved = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    wanted = {key: module.sampling_config()[key] for key in ("prediction_type", "timestep_spacing")}
    assert saved.items() >= wanted.items()
    assert saved["rescale_betas_zero_snr"] == (objective == "zero_terminal_snr")
    torch.testing.assert_close(plain_image(folder), own_image(module), rtol=0, atol=0)


def test_a_base_of_another_sampler_is_saved_with_the_one_that_the_run_drew_with(sd: str, tmp_path: Path) -> None:
    base = DiffusionPipeline.from_pretrained(sd, safety_checker=None)
    base.register_modules(scheduler=PNDMScheduler.from_config(base.scheduler.config, skip_prk_steps=True))
    base.save_pretrained(tmp_path / "base")
    module = StableDiffusionFineTuning(str(tmp_path / "base"), num_inference_steps=3)
    module.configure_model()
    folder, _ = module.save_model(tmp_path / "tuned.safetensors")
    assert json.loads((folder / "model_index.json").read_text())["scheduler"] == ["diffusers", "DDIMScheduler"]
    torch.testing.assert_close(plain_image(folder), own_image(module), rtol=0, atol=0)


@pytest.mark.parametrize("family", list(MAKE))
@pytest.mark.parametrize("shift", ["auto", 1.7])
def test_a_transformers_folder_draws_in_plain_diffusers_what_the_run_drew(
    family: str, shift: Any, transformers: Callable[[str], str], tmp_path: Path
) -> None:
    module = DiffusionFineTuning(transformers(family), flow_shift=shift, num_inference_steps=3, sample_resolution=SIDE)
    module.configure_model()
    assert module.transformer is not None
    changed(module, module.transformer)
    folder, single = module.save_model(tmp_path / "tuned.safetensors")
    saved = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert shift == "auto" or (saved["shift"], saved["use_dynamic_shifting"]) == (1.7, False)
    with safetensors.safe_open(single, "pt") as file:
        assert shift == "auto" or file.metadata()["ss_discrete_flow_shift"] == "1.7"
    # SD 3 without T5 runs equal text tokens as one, which changes the order of a sum; a run unscales latents itself.
    tolerance = 1e-5 if family == "sd3" else 1e-6
    found = plain_image(folder, SCALES.get(family, "guidance_scale"))
    torch.testing.assert_close(found, own_image(module), rtol=0, atol=tolerance)


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_a_merged_u_net_draws_what_its_lora_was_trained_for(u_net_folder: str, objective: str, tmp_path: Path) -> None:
    module = StableDiffusionLoRA(u_net_folder, rank=4, num_inference_steps=3, **OBJECTIVES[objective])
    module.configure_model()
    assert module.unet is not None
    changed(module, module.unet)
    module.save_lora(tmp_path / "zorp.safetensors")
    module.unet.float().apply(_rounded)
    header = read_lora(tmp_path / "zorp.safetensors").metadata
    assert header["modelspec.prediction_type"] == ("epsilon" if objective == "epsilon" else "v")
    assert header.get("ss_zero_terminal_snr") == ("True" if objective == "zero_terminal_snr" else None)
    # the scheduler is in the header of a converted file too
    lora = convert(tmp_path / "zorp.safetensors", tmp_path / "d.safetensors", "diffusers")
    merged = merge_into_pipeline(lora, u_net_folder, tmp_path / "merged")
    saved = json.loads((merged / "scheduler" / "scheduler_config.json").read_text())
    assert saved["prediction_type"] == module.sampling_config()["prediction_type"]
    torch.testing.assert_close(plain_image(merged), own_image(module), rtol=0, atol=2e-4)


def _rounded(module: nn.Module) -> None:
    """LoRA weights as their float16 file has them."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            setattr(module, name, nn.Parameter(parameter.detach().half().float()))


@pytest.mark.parametrize("family", list(MAKE))
def test_a_merged_transformer_has_the_shift_of_its_lora(
    family: str, transformers: Callable[[str], str], tmp_path: Path
) -> None:
    folder = transformers(family)
    module = DiffusionLoRA(folder, rank=4, flow_shift=1.7, num_inference_steps=3, sample_resolution=SIDE)
    module.configure_model()
    assert module.transformer is not None
    changed(module, module.transformer)
    module.save_lora(tmp_path / "zorp.safetensors")
    module.transformer.float().apply(_rounded)
    assert read_lora(tmp_path / "zorp.safetensors").metadata["ss_discrete_flow_shift"] == "1.7"
    merged = merge_into_pipeline(tmp_path / "zorp.safetensors", folder, tmp_path / "merged")
    found = plain_image(merged, SCALES.get(family, "guidance_scale"))
    torch.testing.assert_close(found, own_image(module), rtol=0, atol=2e-4)
    _, config = base_of_run({"pretrained_model_name_or_path": folder, "flow_shift": 1.7}, "32-true")
    assert (config["shift"], config["use_dynamic_shifting"]) == (1.7, False)  # `lightning sample` draws with it too


def test_a_lora_of_another_program_gives_its_objective_to_the_merged_folder(sd: str, tmp_path: Path) -> None:
    """sd-scripts' header, without our scheduler."""
    module = StableDiffusionLoRA(sd, rank=2, **OBJECTIVES["zero_terminal_snr"])
    module.configure_model()
    module.save_lora(tmp_path / "zorp.safetensors")
    file = read_lora(tmp_path / "zorp.safetensors")
    header = {key: value for key, value in file.metadata.items() if not key.startswith("lightning_aigc")}
    safetensors.torch.save_file(file.state, tmp_path / "foreign.safetensors", header)
    merged = merge_into_pipeline(tmp_path / "foreign.safetensors", sd, tmp_path / "merged")
    saved = json.loads((merged / "scheduler" / "scheduler_config.json").read_text())
    kept = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    assert saved.items() >= kept.items()


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_a_single_file_is_marked_and_read_back(u_net_folder: str, objective: str, tmp_path: Path) -> None:
    module = StableDiffusionFineTuning(u_net_folder, num_inference_steps=3, **OBJECTIVES[objective])
    module.configure_model()
    _, single = module.save_model(tmp_path / "tuned.safetensors")
    is_v, is_zero = objective != "epsilon", objective == "zero_terminal_snr"
    with safetensors.safe_open(single, "pt") as file:
        names = set(file.keys())
        assert file.metadata()["modelspec.prediction_type"] == ("v" if is_v else "epsilon")
    assert ("v_pred" in names, "ztsnr" in names) == (is_v, is_zero)
    config, is_sdxl = tmp_path / "tuned.yaml", module.loaded().family.name == "sdxl"
    assert config.exists() == (is_v and not is_sdxl)  # A1111 knows SDXL's by the marker
    if config.exists():
        params = yaml.safe_load(config.read_text())["model"]["params"]
        assert params["parameterization"] == "v"
        assert params["unet_config"]["params"]["channel_mult"] == [1, 2]
    kind = StableDiffusionXLPipeline if is_sdxl else StableDiffusionPipeline
    base = kind.from_single_file(str(single), config=u_net_folder, local_files_only=True)
    read = base.scheduler.from_config(base.scheduler.config, **of_single_file(single)).config
    for key in ("prediction_type", "timestep_spacing"):
        assert read[key] == module.sampling_config()[key]
    assert read["rescale_betas_zero_snr"] == is_zero


def test_embedded_sd3_and_what_is_made_of_it_load_in_plain_diffusers(tmp_path: Path) -> None:
    """Nothing is named, which diffusers wants for a part that the index has as null."""
    module = DiffusionFineTuning("embedded:sd3", flow_shift=2.0, num_inference_steps=3, sample_resolution=SIDE)
    module.configure_model()
    assert len(module.loaded().tokenizers) == 2  # the T5 that answers zeros is not loaded here
    assert module.transformer is not None
    changed(module, module.transformer)
    tuned, _ = module.save_model(tmp_path / "tuned.safetensors")
    lora = DiffusionLoRA("embedded:sd3", rank=2)
    lora.configure_model()
    lora.save_lora(tmp_path / "zorp.safetensors")
    merged = merge_into_pipeline(tmp_path / "zorp.safetensors", resolve("embedded:sd3"), tmp_path / "merged")
    for folder in (resolve("embedded:sd3"), tuned, merged):
        assert StableDiffusion3Pipeline.from_pretrained(folder).text_encoder_3 is not None
    torch.testing.assert_close(plain_image(tuned), own_image(module), rtol=0, atol=1e-4)
