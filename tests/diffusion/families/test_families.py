"""Every family of diffusion transformers under the same bars: loss, LoRA file, resume, packed base, unequal texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    ChromaPipeline,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    FluxPipeline,
    Krea2Pipeline,
    QwenImagePipeline,
)
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from fakes.models.pipelines import SIDE, make_batch
from fakes.runs.rewinding import rewind
from fakes.runs.training_losses import example_losses
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.data.cache.encoded import EmbeddingCache
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.families.flux2 import MANY_STEPS
from lightning_aigc.diffusion.lora.file import LoRAFile, convert, read_lora
from lightning_aigc.diffusion.lora.layers import LoRALayer
from lightning_aigc.diffusion.lora.original_names import to_original
from lightning_aigc.diffusion.objectives.flow import Flow
from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.errors import ModelError

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]
CAPTIONS = ("a red cup", "zorp")  # of unequal length
Folder = Callable[[str], str]


# What diffusers' script of each family computes, written out ---------------------------------------------------------


def sd3_latents(pipeline: Any, moments: Tensor) -> Tensor:
    config = pipeline.vae.config
    return (DiagonalGaussianDistribution(moments).sample() - config.shift_factor) * config.scaling_factor


def sd3_velocity(pipeline: Any, noisy: Tensor, timesteps: Tensor, captions: list[str]) -> Tensor:
    embeddings, _, pooled, _ = pipeline.encode_prompt(captions, None, None, do_classifier_free_guidance=False)
    return pipeline.transformer(
        hidden_states=noisy, timestep=timesteps, encoder_hidden_states=embeddings, pooled_projections=pooled,
        return_dict=False,
    )[0]  # fmt: skip


def flux_velocity(pipeline: Any, noisy: Tensor, timesteps: Tensor, captions: list[str]) -> Tensor:
    batch, channels, height, width = noisy.shape
    embeddings, pooled, text_ids = pipeline.encode_prompt(captions)
    answer = pipeline.transformer(
        hidden_states=FluxPipeline._pack_latents(noisy, batch, channels, height, width), timestep=timesteps / 1000,
        guidance=torch.full((batch,), 1.0), pooled_projections=pooled, encoder_hidden_states=embeddings,
        txt_ids=text_ids, return_dict=False,
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, noisy.device, noisy.dtype),
    )[0]  # fmt: skip
    return FluxPipeline._unpack_latents(answer, 2 * height, 2 * width, 2)


def flux2_latents(pipeline: Any, moments: Tensor) -> Tensor:
    vae = pipeline.vae
    latents = Flux2KleinPipeline._patchify_latents(DiagonalGaussianDistribution(moments).mode())
    mean, variance = vae.bn.running_mean.view(1, -1, 1, 1), vae.bn.running_var.view(1, -1, 1, 1)
    return (latents - mean) / torch.sqrt(variance + vae.config.batch_norm_eps)


def flux2_velocity(pipeline: Any, noisy: Tensor, timesteps: Tensor, captions: list[str]) -> Tensor:
    embeddings, text_ids = pipeline.encode_prompt(captions)
    image_ids = Flux2KleinPipeline._prepare_latent_ids(noisy)
    answer = pipeline.transformer(
        hidden_states=Flux2KleinPipeline._pack_latents(noisy), timestep=timesteps / 1000,
        guidance=torch.full((len(noisy),), 1.0) if pipeline.transformer.config.guidance_embeds else None,
        encoder_hidden_states=embeddings, txt_ids=text_ids, img_ids=image_ids, return_dict=False,
    )[0]  # fmt: skip
    return Flux2KleinPipeline._unpack_latents_with_ids(answer, image_ids)


def z_image_latents(pipeline: Any, moments: Tensor) -> Tensor:
    config = pipeline.vae.config
    return (DiagonalGaussianDistribution(moments).mode() - config.shift_factor) * config.scaling_factor


def z_image_velocity(pipeline: Any, noisy: Tensor, timesteps: Tensor, captions: list[str]) -> Tensor:
    texts, _ = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False)
    answer = pipeline.transformer(
        list(noisy.unsqueeze(2).unbind(dim=0)), (1000 - timesteps) / 1000, texts, return_dict=False
    )[0]
    return -torch.stack(answer, dim=0).squeeze(2)


def qwen_image_latents(pipeline: Any, moments: Tensor) -> Tensor:
    config = pipeline.vae.config
    latents = DiagonalGaussianDistribution(moments).sample()
    mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (config.latents_mean, config.latents_std))
    return (latents - mean) * (1.0 / std)


def qwen_image_velocity(pipeline: Any, noisy: Tensor, timesteps: Tensor, captions: list[str]) -> Tensor:
    batch, channels, height, width = noisy.shape
    embeddings, mask = pipeline.encode_prompt(captions)
    answer = pipeline.transformer(
        hidden_states=QwenImagePipeline._pack_latents(noisy, batch, channels, height, width),
        encoder_hidden_states=embeddings, encoder_hidden_states_mask=mask, timestep=timesteps / 1000,
        img_shapes=[[(1, height // 2, width // 2)]] * batch, return_dict=False,
    )[0]  # fmt: skip
    return QwenImagePipeline._unpack_latents(answer, 2 * height, 2 * width, 2).squeeze(2)


def chroma_velocity(pipeline: Any, noisy: Tensor, timesteps: Tensor, captions: list[str]) -> Tensor:
    batch, channels, height, width = noisy.shape
    embeddings, text_ids, mask, *_ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False)
    image_ids = ChromaPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, noisy.device, noisy.dtype)
    answer = pipeline.transformer(
        hidden_states=ChromaPipeline._pack_latents(noisy, batch, channels, height, width), timestep=timesteps / 1000,
        encoder_hidden_states=embeddings, txt_ids=text_ids, img_ids=image_ids,
        attention_mask=pipeline._prepare_attention_mask(batch, len(image_ids), noisy.dtype, mask), return_dict=False,
    )[0]  # fmt: skip
    return ChromaPipeline._unpack_latents(answer, 2 * height, 2 * width, 2)


def krea2_velocity(pipeline: Any, noisy: Tensor, timesteps: Tensor, captions: list[str]) -> Tensor:
    batch, channels, height, width = noisy.shape
    embeddings, mask = pipeline.encode_prompt(captions)
    ids = Krea2Pipeline.prepare_position_ids(embeddings.shape[1], height // 2, width // 2, noisy.device)
    answer = pipeline.transformer(
        hidden_states=pipeline._pack_latents(noisy, batch, channels, height, width), encoder_hidden_states=embeddings,
        timestep=timesteps / 1000, position_ids=ids, encoder_attention_mask=mask, return_dict=False,
    )[0]  # fmt: skip
    return pipeline._unpack_latents(answer, 2 * height, 2 * width).squeeze(2)


@dataclass(frozen=True)
class Row:
    """Expected values of a family."""

    latents: Callable[[Any, Tensor], Tensor]
    velocity: Callable[[Any, Tensor, Tensor, list[str]], Tensor]
    layers: tuple[str, ...]
    """Layers that both LoRA targets together adapt, one of each kind of block."""
    distilled: tuple[str, ...]
    """Names of distilled models."""
    encoder: str = "text_encoder"
    """A folder that must be there."""
    sampling: tuple[tuple[str, Any], ...] = (("guidance_scale", 3.0),)
    """Arguments of the pipeline that stand for `guidance_scale: 3`."""
    reads_comfyui: bool = True
    """Whether diffusers reads the ComfyUI-named file of a tiny model."""


FAMILIES: dict[str, Row] = {
    "sd3": Row(
        sd3_latents, sd3_velocity, ("transformer_blocks.0.attn2.to_k", "transformer_blocks.0.ff_context.net.2"),
        ("stable-diffusion-3.5-large-turbo", "sd3_Lightning_4steps"), "text_encoder_2", reads_comfyui=False,
    ),
    "flux": Row(
        sd3_latents, flux_velocity,
        ("transformer_blocks.0.attn.to_out.0", "single_transformer_blocks.1.proj_out",
         "single_transformer_blocks.0.proj_mlp"),
        ("FLUX.1-schnell",), "text_encoder_2", reads_comfyui=False,  # diffusers splits by the sizes of FLUX.1 dev
    ),
    "flux2": Row(
        flux2_latents, flux2_velocity,
        ("transformer_blocks.0.attn.to_out.0", "single_transformer_blocks.1.attn.to_out",
         "single_transformer_blocks.0.attn.to_qkv_mlp_proj", "transformer_blocks.0.ff.linear_in"),
        ("FLUX.2-klein-4B-distilled", "FLUX.2-klein-9B"),
    ),
    "z_image": Row(
        z_image_latents, z_image_velocity,
        ("layers.1.attention.to_out.0", "noise_refiner.0.attention.to_q", "context_refiner.0.feed_forward.w3"),
        ("Z-Image-Turbo",),
    ),
    "qwen_image": Row(
        qwen_image_latents, qwen_image_velocity,
        ("transformer_blocks.0.attn.add_q_proj", "transformer_blocks.1.img_mlp.net.2"),
        ("Qwen-Image-Lightning",), sampling=(("true_cfg_scale", 3.0), ("negative_prompt", " ")),
    ),
    "flux2_dev": Row(
        flux2_latents, flux2_velocity,
        ("transformer_blocks.0.attn.to_out.0", "single_transformer_blocks.1.attn.to_out",
         "single_transformer_blocks.0.attn.to_qkv_mlp_proj", "transformer_blocks.0.ff.linear_in"),
        ("FLUX.2-dev-Turbo",),
    ),
    "chroma": Row(
        sd3_latents, chroma_velocity,
        ("transformer_blocks.0.attn.to_out.0", "single_transformer_blocks.1.proj_out",
         "single_transformer_blocks.0.proj_mlp"),
        ("Chroma1-Flash",), reads_comfyui=False,  # diffusers splits by the sizes of FLUX.1 dev
    ),
    "krea2": Row(
        qwen_image_latents, krea2_velocity,
        ("transformer_blocks.0.attn.to_gate", "transformer_blocks.1.ff.down", "transformer_blocks.1.attn.to_out.0"),
        ("Krea-2-Turbo",), reads_comfyui=False,
    ),
}  # fmt: skip


@pytest.fixture(params=list(FAMILIES), scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, transformers: Folder) -> str:
    return transformers(family)


def make_module(path: str, **options: Any) -> DiffusionLoRA:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "rank": 4, "learning_rate": 1e-2, "num_inference_steps": 2, "max_train_steps": 3, "sample_resolution": SIDE,
    }  # fmt: skip
    return DiffusionLoRA(path, **(given | options))


def fit(module: DiffusionLoRA, folder: Path, steps: int = 2, ckpt_path: str | None = None, **options: Any) -> None:
    given: dict[str, Any] = {
        "default_root_dir": folder, "accelerator": "cpu", "devices": 1, "logger": False, "max_steps": steps,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    batches: Any = [make_batch(CAPTIONS, seed=number) for number in range(4)]
    torch.manual_seed(1)
    Trainer(**(given | options)).fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)


def trained(module: DiffusionLoRA) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def load_pipeline(path: str) -> Any:
    optional = TRANSFORMERS[read_family(path)].optional_folders
    pipeline = DiffusionPipeline.from_pretrained(path, **dict.fromkeys(optional))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def read_family(path: str) -> str:
    class_name = json.loads((Path(path) / "model_index.json").read_text())["_class_name"]
    return next(name for name, family in TRANSFORMERS.items() if family.pipeline == class_name)


def test_every_family_has_a_row() -> None:
    """Families that draw nothing without a source are in test_edit_families.py."""
    assert set(FAMILIES) == {name for name, family in TRANSFORMERS.items() if not family.needs_sources}


# What it learns -----------------------------------------------------------------------------------------------------


def test_the_first_loss_is_that_of_diffusers_script(family: str, folder: str) -> None:
    module, batch = make_module(folder, flow_shift=3.0), make_batch(CAPTIONS)
    module.configure_model()
    moments = module.encode_pixels(batch["pixel_values"]).contiguous()  # equal strides, for equal draws
    torch.manual_seed(5)
    found = example_losses(module, batch | {"latent_moments": moments}).mean()

    pipeline, row = load_pipeline(folder), FAMILIES[family]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.manual_seed(5)
    with torch.no_grad():
        latents = row.latents(pipeline, moments)
        noise = torch.randn_like(latents)
        u = torch.sigmoid(torch.normal(mean=0.0, std=1.0, size=(len(latents),)))
        indices = (u * scheduler.config.num_train_timesteps).long()
        timesteps, sigmas = scheduler.timesteps[indices], scheduler.sigmas[indices][:, None, None, None]
        velocity = row.velocity(pipeline, sigmas * noise + (1.0 - sigmas) * latents, timesteps, batch["captions"])
        wanted = (velocity.float() - (noise - latents).float()).square().mean()
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-6, atol=1e-6)


def test_an_automatic_shift_is_that_of_the_familys_pipeline(family: str, folder: str) -> None:
    """The schedule of `flow_shift: auto` passes through the sigmas that the pipeline samples at."""
    steps = MANY_STEPS if family.startswith("flux2") else 50  # FLUX.2 shifts a sampling in few steps further
    module = make_module(folder, num_inference_steps=steps)
    module.configure_model()
    parts = module.loaded()
    latents = module.encoders.latents(make_batch())
    assert isinstance(module.objective, Flow)
    table = module.objective._sigma_table(latents)
    pipeline = load_pipeline(folder)
    pipeline.scheduler.register_to_config(shift_terminal=None)  # which stretches the last steps of sampling
    row = FAMILIES[family]
    seen: list[Tensor] = []

    def record(pipeline: Any, step: int, timestep: Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(pipeline.scheduler.sigmas.clone())
        raise StopIteration

    with pytest.raises(StopIteration):
        pipeline(
            prompt="a",
            height=SIDE,
            width=SIDE,
            num_inference_steps=steps,
            callback_on_step_end=record,
            **dict(row.sampling),
        )
    if family == "sd3":  # its pipeline spaces timesteps by the shifted ends
        assert parts.scheduler_config["shift"] == 3.0 and torch.isclose(table[0], seen[0][0])
        return
    torch.testing.assert_close(seen[0][:steps], table[:: 1000 // steps], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cached", ["", "on disk", "in memory"])
def test_texts_of_unequal_length_batch_as_each_alone(folder: str, cached: str, tmp_path: Path) -> None:
    module, batch = make_module(folder), make_batch(CAPTIONS)
    module.configure_model()
    latents = module.encoders.latents(batch)
    noisy, timesteps = torch.randn_like(latents), torch.tensor([300.0, 700.0])
    if cached:
        cache = EmbeddingCache(tmp_path, [*CAPTIONS, "a red zorp shoe"], module.encoder_identity())
        cache.fill(module, [0, 1, 2], batch_size=3, progress=False)
        if cached == "in memory":
            cache.keep_in_memory()
        batch |= cache.batch([cache.row_of[caption] for caption in CAPTIONS])
    with torch.no_grad():
        together = module.predict(noisy, timesteps, module.encoders.condition(batch, with_gradients=False), batch)
        for at, caption in enumerate(CAPTIONS):
            own = module.encoders.condition({"captions": [caption]}, with_gradients=False)
            alone = module.predict(noisy[at : at + 1], timesteps[at : at + 1], own, batch)
            torch.testing.assert_close(together[at : at + 1], alone, rtol=1e-5, atol=1e-5)


def test_a_fit_moves_every_lora_matrix_and_nothing_else(family: str, folder: str, tmp_path: Path) -> None:
    module = make_module(folder, lora_targets=["attention", "feed_forward"])
    module.configure_model()
    parts = module.loaded()
    models = (parts.denoiser, parts.vae, *parts.text_encoders)
    base = {(i, n): p.clone() for i, m in enumerate(models) for n, p in m.named_parameters() if "lora_" not in n}
    before = trained(module)
    fit(module, tmp_path)
    after = trained(module)
    assert all(any(layer in name for name in after) for layer in FAMILIES[family].layers)
    assert not {name for name in after if "lora_B" in name and torch.equal(before[name], after[name])}
    assert all(
        torch.equal(p, base[i, n]) for i, m in enumerate(models) for n, p in m.named_parameters() if (i, n) in base
    )


# Its file -----------------------------------------------------------------------------------------------------------


def draw(pipeline: Any, row: Row) -> Tensor:
    drawn: Tensor = pipeline(
        prompt="a red cup", num_inference_steps=2, height=SIDE, width=SIDE, generator=torch.Generator().manual_seed(4),
        output_type="pt", **dict(row.sampling),
    ).images.float().clamp(0, 1)  # fmt: skip
    return drawn


@pytest.fixture(scope="module")
def saved(
    folder: str, tmp_path_factory: pytest.TempPathFactory, without_report_page: None
) -> tuple[DiffusionLoRA, Path]:
    """A module after two steps, whose weights are those of its float16 file."""
    tmp_path = tmp_path_factory.mktemp("saved")
    module = make_module(folder, lora_targets=["attention", "feed_forward"], lora_alpha=4.0)
    fit(module, tmp_path)
    module.save_lora(tmp_path / "zorp.safetensors")
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.half().float()
    return module, tmp_path / "zorp.safetensors"


def test_the_file_loads_in_diffusers_and_draws_the_same(
    family: str, folder: str, saved: tuple[DiffusionLoRA, Path]
) -> None:
    module, path = saved
    pipeline, row = load_pipeline(folder), FAMILIES[family]
    without = draw(pipeline, row)
    pipeline.load_lora_weights(str(path))
    ours = module.sample(["a red cup"], [4], guidance_scale=3.0)
    # To the bit, but where equal text tokens run as one, or padding is left out.
    torch.testing.assert_close(ours, draw(pipeline, row), rtol=0, atol=1e-5 if family in ("sd3", "krea2") else 0)
    assert not torch.allclose(ours, without, atol=1e-3)


def test_the_comfyui_file_holds_the_same_layers(family: str, saved: tuple[DiffusionLoRA, Path], tmp_path: Path) -> None:
    path = saved[1].with_suffix(".comfyui.safetensors")
    assert path.exists() == bool(TRANSFORMERS[family].original_layers)
    if not path.exists():
        with pytest.raises(ModelError, match="has diffusers' layout only"):
            convert(saved[1], tmp_path / "other.safetensors", "kohya")
        return
    file, own = read_lora(path), {layer.module: layer for layer in read_lora(saved[1]).layers()}
    assert file.layout == "kohya" and all(key.startswith("lora_unet_") for key in file.state)
    there = {layer.module: layer for layer in file.layers()}
    assert there.keys() == own.keys()
    for name, layer in there.items():
        assert torch.equal(layer.down, own[name].down) and torch.equal(layer.up, own[name].up)
        assert layer.alpha / layer.rank == own[name].alpha / own[name].rank
    without_header = LoRAFile(file.state, "kohya", {})
    assert {layer.module for layer in without_header.layers()} == own.keys()
    back = convert(path, tmp_path / "back.safetensors", "diffusers")
    again = convert(back, tmp_path / "again.safetensors", "kohya")
    assert {k: v.tolist() for k, v in read_lora(again).state.items()} == {k: v.tolist() for k, v in file.state.items()}


def test_diffusers_reads_the_comfyui_file(family: str, folder: str, saved: tuple[DiffusionLoRA, Path]) -> None:
    row, path = FAMILIES[family], saved[1].with_suffix(".comfyui.safetensors")
    if not row.reads_comfyui:
        pytest.skip("diffusers has no converter for a tiny model of this family")
    pipeline = load_pipeline(folder)
    pipeline.load_lora_weights(str(path))
    torch.testing.assert_close(draw(pipeline, row), saved[0].sample(["a red cup"], [4], guidance_scale=3.0))


def test_diffusers_splits_the_comfyui_file_of_flux_1_as_it_was_joined() -> None:
    """At the real widths, which diffusers' converter has as numbers."""
    torch.manual_seed(0)
    shapes = {
        "transformer_blocks.3.attn.to_q": (3072, 3072), "transformer_blocks.3.attn.to_k": (3072, 3072),
        "transformer_blocks.3.attn.to_v": (3072, 3072), "transformer_blocks.3.attn.to_out.0": (3072, 3072),
        "transformer_blocks.3.ff.net.0.proj": (3072, 12288), "transformer_blocks.3.ff_context.net.2": (12288, 3072),
        "single_transformer_blocks.7.attn.to_q": (3072, 3072), "single_transformer_blocks.7.attn.to_k": (3072, 3072),
        "single_transformer_blocks.7.attn.to_v": (3072, 3072), "single_transformer_blocks.7.proj_mlp": (3072, 12288),
        "single_transformer_blocks.7.proj_out": (15360, 3072),
    }  # fmt: skip
    layers = [
        LoRALayer("transformer", name, torch.randn(4, inputs), torch.randn(outputs, 4), alpha=4.0)
        for name, (inputs, outputs) in shapes.items()
    ]
    state = _convert_kohya_flux_lora_to_diffusers(to_original(layers, TRANSFORMERS["flux"]))
    for layer in layers:
        assert torch.equal(state[f"transformer.{layer.module}.lora_A.weight"], layer.down)
        assert torch.equal(state[f"transformer.{layer.module}.lora_B.weight"], layer.up)
    assert len(state) == 2 * len(layers)


# What surrounds it --------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(folder: str, tmp_path: Path) -> None:
    whole, resumed = make_module(folder), make_module(folder)
    fit(whole, tmp_path, steps=3, callbacks=[ExactSnapshot(1)])
    rewind(tmp_path, step=1)
    fit(resumed, tmp_path, steps=3, callbacks=[ExactSnapshot(1)], ckpt_path="latest")
    assert all(torch.equal(p, trained(resumed)[name]) for name, p in trained(whole).items())


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_packed_base_trains_close_to_the_whole_one(folder: str, tmp_path: Path, kind: Any) -> None:
    modules = [make_module(folder), make_module(folder, base_quantization=kind)]
    losses = []
    for module in modules:
        module.configure_model()
        torch.manual_seed(5)
        losses.append(float(example_losses(module, make_batch(CAPTIONS)).mean()))
    assert modules[1].packed_base is not None and modules[1].packed_base.packed > 20
    assert 0 < abs(losses[1] - losses[0]) < (0.02 if kind == "int8" else 0.2) * losses[0]
    fit(modules[1], tmp_path)


def test_a_half_precision_base_trains_and_draws(folder: str, tmp_path: Path) -> None:
    module = make_module(folder, lora_targets=["attention", "feed_forward"])
    fit(module, tmp_path, precision="bf16-mixed")
    assert next(module.loaded().denoiser.parameters()).dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in module.trainable_parameters())
    drawn = module.sample(["a red cup", "zorp"], [4, 5], guidance_scale=3.0)
    assert drawn.shape == (2, 3, SIDE, SIDE) and drawn.isfinite().all() and drawn.std() > 0.01


def test_a_guidance_distilled_transformer_alone_is_told_a_guidance(family: str, folder: str) -> None:
    losses = []
    for guidance in (1.0, 3.5):
        module = make_module(folder, training_guidance=guidance)
        torch.manual_seed(5)
        losses.append(float(example_losses(module, make_batch(CAPTIONS)).mean()))
    assert (losses[0] != losses[1]) == (family in ("flux", "flux2_dev"))


def test_a_sampler_draws_with_either_file_at_a_weight(
    family: str, folder: str, saved: tuple[DiffusionLoRA, Path]
) -> None:
    arguments = {
        "pretrained_model_name_or_path": folder, "num_inference_steps": 2, "guidance_scale": 3.0,
        "sample_resolution": SIDE,
    }  # fmt: skip
    ours = saved[0].sample(["a red cup"], [0], guidance_scale=3.0)
    own = saved[1].with_suffix(".comfyui.safetensors")
    for path in [saved[1]] + ([own] if FAMILIES[family].reads_comfyui else []):
        sampler = LoRASampler(arguments, "32-true", "cpu", path)
        torch.testing.assert_close(sampler.sample([("a red cup", 0)]), ours)
        assert not torch.allclose(sampler.sample([("a red cup", 0)], weight=0.0), ours, atol=1e-3)


# Bad input ----------------------------------------------------------------------------------------------------------


def test_a_missing_text_encoder_is_named(family: str, folder: str, tmp_path: Path) -> None:
    copy, encoder = Path(shutil.copytree(folder, tmp_path / "copy")), FAMILIES[family].encoder
    shutil.rmtree(copy / encoder)
    with pytest.raises(ModelError, match=rf"lacks {encoder}/; copy the whole pipeline folder"):
        DiffusionLoRA(str(copy))


def test_a_distilled_model_is_refused_by_its_name(family: str, folder: str, tmp_path: Path) -> None:
    for name in FAMILIES[family].distilled:
        copy = shutil.copytree(folder, tmp_path / name)
        with pytest.raises(
            ModelError, match=rf"distilled model .* undoes that; train on .*{TRANSFORMERS[family].base}"
        ):
            DiffusionLoRA(str(copy))


def test_a_base_is_not_refused_by_its_name(family: str, folder: str, tmp_path: Path) -> None:
    DiffusionLoRA(str(shutil.copytree(folder, tmp_path / Path(TRANSFORMERS[family].base).name)))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("flux2", {"model_index.json": {"is_distilled": True}}),
        (
            "flux",
            {
                "transformer/config.json": {"guidance_embeds": False},
                "scheduler/scheduler_config.json": {"use_dynamic_shifting": False},
            },
        ),
    ],
)
def test_a_distilled_model_is_refused_by_its_configuration(
    family: str, changes: dict[str, Any], transformers: Folder, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(transformers(family), tmp_path / "renamed"))
    for file, entries in changes.items():
        (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | entries))
    with pytest.raises(ModelError, match=r"by its configuration a distilled model, .*undoes that"):
        DiffusionLoRA(str(copy))


def test_checkpointing_that_leaves_out_a_mask_is_refused(transformers: Folder) -> None:
    """diffusers' checkpointing of Chroma is another function; our levels are tested to be the same."""
    with pytest.raises(ModelError, match=r"gradient_checkpointing is wrong for Chroma in diffusers: .* set grad"):
        make_module(transformers("chroma"), gradient_checkpointing=True)
    make_module(transformers("krea2"), gradient_checkpointing=True).configure_model()


def test_a_model_that_is_told_its_guidance_takes_no_negative_prompt(transformers: Folder) -> None:
    sampler = LoRASampler({"pretrained_model_name_or_path": transformers("flux2_dev")}, "32-true", "cpu", None)
    with pytest.raises(ModelError, match=r"FLUX\.2 dev is told its guidance and takes no negative prompt; leave"):
        sampler.sample([("a red cup", 0)], negative_prompt="zorp")


def test_targets_that_match_nothing_name_those_that_do(folder: str) -> None:
    with pytest.raises(
        ModelError, match=r"lora_targets must name some of attention, feed_forward; got \['convolutions'\]"
    ):
        make_module(folder, lora_targets=["convolutions"]).configure_model()


def test_a_picture_size_that_does_not_fit_is_one_sentence(folder: str) -> None:
    module, batch = make_module(folder), make_batch()
    batch["pixel_values"] = torch.zeros(2, 3, SIDE + 2, SIDE + 2)
    with pytest.raises(ModelError, match=r"images of 34 x 34 pixels do not divide .*resolution to a multiple of 4$"):
        example_losses(module, batch)


def test_an_unknown_family_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "HiDreamImagePipeline"}))
    with pytest.raises(ModelError, match="is a HiDreamImagePipeline; known are ") as refused:
        DiffusionLoRA(str(tmp_path))
    assert all(family.pipeline in str(refused.value) for family in TRANSFORMERS.values())
    assert all(hasattr(diffusers, family.pipeline) for family in TRANSFORMERS.values())
