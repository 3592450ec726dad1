"""Every family that edits under the same bars: loss, picture, batch, LoRA file, resume, sizes of its sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from lightning.pytorch import Trainer
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from fakes.models.edit_pipelines import make_image, show_small, to_pixels
from fakes.models.pipelines import SIDE, make_batch
from fakes.runs.rewinding import rewind
from fakes.runs.training_losses import example_losses
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.diffusion import DiffusionFineTuning, DiffusionLoRA, DiffusionTraining
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.families.tokens import source_name
from lightning_aigc.diffusion.pipeline.encoders import seen_sources
from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.errors import ModelError
from lightning_aigc.protocols import SamplesEdits

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]
CAPTIONS = ("a red cup", "zorp")  # of unequal length
Folder = Callable[[str], str]
STEPS = 3


# What diffusers' script and pipeline of each family compute, written out ----------------------------------------------


def kontext_latents(pipeline: Any, pixels: Tensor) -> Tensor:
    config = pipeline.vae.config
    return (pipeline.vae.encode(pixels).latent_dist.mode() - config.shift_factor) * config.scaling_factor


def kontext_velocity(pipeline: Any, noisy: Tensor, sources: list[Tensor], timesteps: Tensor, captions: Any) -> Tensor:
    batch, channels, height, width = noisy.shape
    embeddings, pooled, text_ids = pipeline.encode_prompt(captions)
    ids = FluxKontextPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", torch.float32)
    packed = FluxKontextPipeline._pack_latents(noisy, batch, channels, height, width)
    tokens, all_ids = [packed], [ids]
    for number, source in enumerate(sources, start=1):
        rows, columns = source.shape[-2:]
        more = FluxKontextPipeline._prepare_latent_image_ids(batch, rows // 2, columns // 2, "cpu", torch.float32)
        more[..., 0] = number
        tokens.append(FluxKontextPipeline._pack_latents(source, batch, channels, rows, columns))
        all_ids.append(more)
    answer = pipeline.transformer(
        hidden_states=torch.cat(tokens, dim=1), timestep=timesteps / 1000, guidance=torch.full((batch,), 1.0),
        pooled_projections=pooled, encoder_hidden_states=embeddings, txt_ids=text_ids, img_ids=torch.cat(all_ids),
        return_dict=False,
    )[0][:, : packed.shape[1]]  # fmt: skip
    return FluxKontextPipeline._unpack_latents(answer, 2 * height, 2 * width, 2)


def kontext_image(pipeline: Any, sources: Sequence[Image.Image], **given: Any) -> Any:
    return pipeline(image=sources[0], _auto_resize=False, max_area=given["height"] * given["width"], **given).images


def sd3_velocity(pipeline: Any, noisy: Tensor, sources: list[Tensor], timesteps: Tensor, captions: Any) -> Tensor:
    """Tokens of the source at the target's own positions, written out: diffusers has no pipeline of it."""
    net, (height, width) = pipeline.transformer, noisy.shape[-2:]
    embeddings, _, pooled, _ = pipeline.encode_prompt(captions, None, None, do_classifier_free_guidance=False)
    tokens = torch.cat([net.pos_embed(noisy), net.pos_embed(sources[0])], dim=1)
    temb, text = net.time_text_embed(timesteps, pooled), net.context_embedder(embeddings)
    for block in net.transformer_blocks:
        text, tokens = block(hidden_states=tokens, encoder_hidden_states=text, temb=temb)
    tokens = net.proj_out(net.norm_out(tokens, temb))[:, : height * width // 4]
    patches = tokens.reshape(len(noisy), height // 2, width // 2, 2, 2, -1)
    return patches.permute(0, 5, 1, 3, 2, 4).reshape(noisy.shape)


def flux2_latents(pipeline: Any, pixels: Tensor) -> Tensor:
    return pipeline._encode_vae_image(pixels, generator=None)


def flux2_velocity(pipeline: Any, noisy: Tensor, sources: list[Tensor], timesteps: Tensor, captions: Any) -> Tensor:
    embeddings, text_ids = pipeline.encode_prompt(captions)
    ids = pipeline._prepare_latent_ids(noisy)
    more = pipeline._prepare_image_ids([source[:1] for source in sources]).expand(len(noisy), -1, -1)
    packed = pipeline._pack_latents(noisy)
    has_guidance = pipeline.transformer.config.guidance_embeds
    answer = pipeline.transformer(
        hidden_states=torch.cat([packed, *map(pipeline._pack_latents, sources)], dim=1), timestep=timesteps / 1000,
        guidance=torch.full((len(noisy),), 1.0) if has_guidance else None, encoder_hidden_states=embeddings,
        txt_ids=text_ids, img_ids=torch.cat([ids, more], dim=1), return_dict=False,
    )[0][:, : packed.shape[1]]  # fmt: skip
    return pipeline._unpack_latents_with_ids(answer, ids)


def flux2_image(pipeline: Any, sources: Sequence[Image.Image], **given: Any) -> Any:
    return pipeline(image=list(sources), **given).images


def qwen_latents(pipeline: Any, pixels: Tensor) -> Tensor:
    return pipeline._encode_vae_image(pixels.unsqueeze(2), generator=None).squeeze(2)


def qwen_velocity(pipeline: Any, noisy: Tensor, sources: list[Tensor], timesteps: Tensor, captions: Any) -> Tensor:
    """`captions` are instructions with the images that the text encoder sees: of each example its text alone."""
    batch, channels, height, width = noisy.shape
    found = [pipeline.encode_prompt(text, image=images)[0][0] for text, images in captions]
    longest = max(map(len, found))
    embeddings = torch.stack([torch.nn.functional.pad(each, (0, 0, 0, longest - len(each))) for each in found])
    mask = torch.stack([torch.arange(longest) < len(each) for each in found]).long()
    shapes = [(1, each.shape[-2] // 2, each.shape[-1] // 2) for each in (noisy, *sources)]
    packed = [pipeline._pack_latents(each, batch, channels, *each.shape[-2:]) for each in (noisy, *sources)]
    answer = pipeline.transformer(
        hidden_states=torch.cat(packed, dim=1), timestep=timesteps / 1000, encoder_hidden_states=embeddings,
        encoder_hidden_states_mask=mask, img_shapes=[shapes] * batch, return_dict=False,
    )[0][:, : packed[0].shape[1]]  # fmt: skip
    return pipeline._unpack_latents(answer, 2 * height, 2 * width, 2).squeeze(2)


def seen_by_edit(pipeline: Any, images: Sequence[Image.Image]) -> Any:
    width, height, _ = pipeline_qwenimage_edit.calculate_dimensions(1024 * 1024, images[0].width / images[0].height)
    return pipeline.image_processor.resize(images[0], height, width)


def seen_by_plus(pipeline: Any, images: Sequence[Image.Image]) -> Any:
    sizes = [pipeline_qwenimage_edit_plus.calculate_dimensions(384 * 384, each.width / each.height) for each in images]
    return [
        pipeline.image_processor.resize(image, height, width)
        for image, (width, height) in zip(images, sizes, strict=True)
    ]


def qwen_edit_image(pipeline: Any, sources: Sequence[Image.Image], **given: Any) -> Any:
    return pipeline(image=sources[0], **given).images


@dataclass(frozen=True)
class Row:
    """Expected values of a family."""

    latents: Callable[[Any, Tensor], Tensor]
    velocity: Callable[[Any, Tensor, list[Tensor], Tensor, Any], Tensor]
    draw: Callable[..., Any] | None = None
    """The pipeline's images, by its own preparation of the sources; None where diffusers has no pipeline that edits."""
    sampling: tuple[tuple[str, Any], ...] = (("guidance_scale", 1.0),)
    """Arguments of the pipeline that stand for the guidance 1."""
    guided: tuple[tuple[str, Any], ...] = (("guidance_scale", 3.0),)
    """The same for the guidance 3."""
    seen: Callable[[Any, Sequence[Image.Image]], Any] | None = None
    """The images that the pipeline shows to its text encoder; None where it reads text alone."""


TRUE_CFG_1 = (("true_cfg_scale", 1.0),)
TRUE_CFG_3 = (("true_cfg_scale", 3.0), ("negative_prompt", " "))
FAMILIES: dict[str, Row] = {
    "flux_kontext": Row(kontext_latents, kontext_velocity, kontext_image),
    "flux2": Row(flux2_latents, flux2_velocity, flux2_image),
    "flux2_dev": Row(flux2_latents, flux2_velocity, flux2_image),
    "qwen_image_edit": Row(
        qwen_latents, qwen_velocity, qwen_edit_image, TRUE_CFG_1, TRUE_CFG_3, seen_by_edit,
    ),
    "qwen_image_edit_plus": Row(
        qwen_latents, qwen_velocity, flux2_image, TRUE_CFG_1, TRUE_CFG_3, seen_by_plus,
    ),
}  # fmt: skip
"""Families whose pipeline in diffusers edits."""
SOURCE_SIZES = [(96, 64), (64, 128)]
"""(width, height) of sources; families that read several get them in this order."""


@pytest.fixture(params=list(FAMILIES), scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def unscaled_sources() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        show_small(patch, *SOURCE_SIZES, (SIDE, SIDE))
        yield


@pytest.fixture(scope="module")
def folder(family: str, transformers: Folder) -> str:
    return transformers(family)


def source_sizes(family: str) -> list[tuple[int, int]]:
    return SOURCE_SIZES[: min(2, TRANSFORMERS[family].max_sources)]


def make_edit_batch(family: str, captions: Sequence[str] = CAPTIONS, seed: int = 0) -> dict[str, Any]:
    batch = make_batch(captions, seed=seed)
    batch["sources"] = [
        to_pixels(*(make_image(100 * seed + 10 * number + at, *size) for at in range(len(captions))))
        for number, size in enumerate(source_sizes(family))
    ]
    return batch


def make_module(path: str, **options: Any) -> DiffusionLoRA:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "rank": 4, "learning_rate": 1e-2, "num_inference_steps": STEPS, "max_train_steps": 3, "guidance_scale": 1.0,
    }  # fmt: skip
    return DiffusionLoRA(path, **(given | options))


def load_pipeline(path: str, family: str) -> Any:
    optional = dict.fromkeys(TRANSFORMERS[family].optional_folders)
    pipeline = getattr(diffusers, TRANSFORMERS[family].pipeline).from_pretrained(path, **optional)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def fit(
    module: DiffusionTraining, family: str, folder: Path, steps: int = 2, ckpt_path: str | None = None, **options: Any
) -> None:
    given: dict[str, Any] = {
        "default_root_dir": folder, "accelerator": "cpu", "devices": 1, "logger": False, "max_steps": steps,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    batches: Any = [make_edit_batch(family, seed=number) for number in range(4)]
    torch.manual_seed(1)
    Trainer(**(given | options)).fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)


def trained(module: DiffusionLoRA) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def test_every_family_that_edits_has_a_row_and_a_tiny_pipeline() -> None:
    edit = {name for name, family in TRANSFORMERS.items() if family.max_sources}
    assert edit == set(FAMILIES) | {"sd3"}  # which has its own tests below


# What it learns -----------------------------------------------------------------------------------------------------


def test_the_first_loss_is_that_of_diffusers_script(family: str, folder: str) -> None:
    module, batch = make_module(folder, flow_shift=3.0), make_edit_batch(family)
    module.configure_model()
    torch.manual_seed(5)
    found = example_losses(module, batch).mean()

    pipeline, row = load_pipeline(folder, family), FAMILIES[family]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.manual_seed(5)
    with torch.no_grad():
        latents = row.latents(pipeline, batch["pixel_values"])
        sources = [row.latents(pipeline, source) for source in batch["sources"]]
        noise = torch.randn_like(latents)
        u = torch.sigmoid(torch.normal(mean=0.0, std=1.0, size=(len(latents),)))
        indices = (u * scheduler.config.num_train_timesteps).long()
        timesteps, sigmas = scheduler.timesteps[indices], scheduler.sigmas[indices][:, None, None, None]
        noisy = sigmas * noise + (1.0 - sigmas) * latents
        captions = batch["captions"]
        if row.seen is not None:
            captions = [
                (text, row.seen(pipeline, images))
                for text, images in zip(captions, seen_sources(batch["sources"]), strict=True)
            ]
        velocity = row.velocity(pipeline, noisy, sources, timesteps, captions)
        wanted = (velocity.float() - (noise - latents).float()).square().mean()
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-6, atol=1e-6)


def test_an_example_in_a_batch_is_as_it_is_alone(family: str, folder: str) -> None:
    module, batch = make_module(folder), make_edit_batch(family)
    module.configure_model()
    latents = module.encoders.latents(batch)
    noisy, timesteps = torch.randn_like(latents), torch.tensor([300.0, 700.0])
    with torch.no_grad():
        together = module.predict(noisy, timesteps, module.encoders.condition(batch, with_gradients=False), batch)
        for at, caption in enumerate(CAPTIONS):
            own = {"captions": [caption], "sources": [each[at : at + 1] for each in batch["sources"]]}
            condition = module.encoders.condition(own, with_gradients=False)
            alone = module.predict(noisy[at : at + 1], timesteps[at : at + 1], condition, own)
            torch.testing.assert_close(together[at : at + 1], alone, rtol=1e-6, atol=1e-6 * float(alone.abs().max()))


def test_the_prediction_depends_on_each_source_and_on_their_order(family: str, folder: str) -> None:
    module, batch = make_module(folder), make_edit_batch(family)
    module.configure_model()
    noisy, timesteps = torch.randn_like(module.encoders.latents(batch)), torch.tensor([300.0, 700.0])

    def predict(sources: list[Tensor]) -> Tensor:
        condition = module.encoders.condition(batch | {"sources": sources}, with_gradients=False)
        with torch.no_grad():
            return module.predict(noisy, timesteps, condition, batch)

    usual, sources = predict(batch["sources"]), batch["sources"]
    for number in range(len(sources)):
        other = [source.flip(0) if at == number else source for at, source in enumerate(sources)]
        assert not torch.allclose(predict(other), usual, atol=1e-4)
    if len(sources) > 1:
        assert not torch.allclose(predict(sources[::-1]), usual, atol=1e-4)


# What it draws ------------------------------------------------------------------------------------------------------


def draw(pipeline: Any, row: Row, sources: Sequence[Image.Image], seed: int = 4, guided: bool = False) -> Tensor:
    width, height = sources[0].size
    assert row.draw is not None
    images = row.draw(
        pipeline, sources, prompt="a red cup", num_inference_steps=STEPS, height=height, width=width,
        generator=torch.Generator().manual_seed(seed), output_type="pt", **dict(row.guided if guided else row.sampling),
    )  # fmt: skip
    drawn: Tensor = images.float().clamp(0, 1)
    return drawn


def last_latents(pipeline: Any, row: Row, sources: Sequence[Image.Image]) -> Tensor:
    """The pipeline's scaled latents after its last step, [1, C, H, W]."""
    seen: list[Tensor] = []

    def keep(_: Any, step: int, timestep: Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(tensors["latents"])
        return tensors

    width, height = sources[0].size
    assert row.draw is not None
    row.draw(
        pipeline, sources, prompt="a red cup", num_inference_steps=STEPS, height=height, width=width,
        generator=torch.Generator().manual_seed(4), output_type="latent", callback_on_step_end=keep,
        **dict(row.sampling),
    )  # fmt: skip
    tokens = seen[-1]
    rows, columns = height // 4, width // 4
    if "Flux2" in type(pipeline).__name__:
        return tokens.transpose(1, 2).reshape(1, -1, rows, columns)
    patches = tokens.reshape(1, rows, columns, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(1, -1, 2 * rows, 2 * columns)


@pytest.mark.parametrize("guided", [False, True])
def test_our_picture_is_the_pipelines(family: str, folder: str, guided: bool) -> None:
    module, row = make_module(folder), FAMILIES[family]
    sources = [make_image(number, *size) for number, size in enumerate(source_sizes(family))]
    ours = module.sample(["a red cup"], [4], guidance_scale=3.0 if guided else 1.0, sources=[sources])
    theirs = draw(load_pipeline(folder, family), row, sources, guided=guided)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_what_is_trained_is_what_the_pipeline_draws(family: str, folder: str) -> None:
    """An Euler loop over our prediction ends at the pipeline's picture."""
    module, row = make_module(folder), FAMILIES[family]
    module.configure_model()
    pipeline = load_pipeline(folder, family)
    sources = [make_image(number, *size) for number, size in enumerate(source_sizes(family))]
    wanted = last_latents(pipeline, row, sources)
    batch = {"captions": ["a red cup"], "sources": [to_pixels(source) for source in sources]}
    condition = module.encoders.condition(batch, with_gradients=False)
    assert source_name(len(sources)) in condition
    width, height = sources[0].size
    like = module.encoders.latents({"pixel_values": torch.zeros(1, 3, height, width)})
    latents = torch.randn(like.shape, generator=torch.Generator().manual_seed(4))
    sigmas = pipeline.scheduler.sigmas
    with torch.no_grad():
        for timestep, now, then in zip(pipeline.scheduler.timesteps, sigmas[:-1], sigmas[1:], strict=True):
            latents = latents + (then - now) * module.predict(latents, timestep[None], condition, batch)
    drawn = row.latents(pipeline, to_pixels(make_image(0, width, height)))
    assert drawn.shape == latents.shape
    torch.testing.assert_close(latents, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.fixture
def saved(family: str, folder: str, tmp_path: Path) -> tuple[DiffusionLoRA, Path]:
    """A module after two steps, whose weights are those of its float16 file."""
    module = make_module(folder, lora_targets=["attention", "feed_forward"], lora_alpha=4.0)
    fit(module, family, tmp_path)
    module.save_lora(tmp_path / "zorp.safetensors")
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.half().float()
    return module, tmp_path / "zorp.safetensors"


def test_the_file_loads_in_diffusers_and_draws_the_same(
    family: str, folder: str, saved: tuple[DiffusionLoRA, Path]
) -> None:
    module, path = saved
    pipeline, row = load_pipeline(folder, family), FAMILIES[family]
    sources = [make_image(number, *size) for number, size in enumerate(source_sizes(family))]
    without = draw(pipeline, row, sources)
    pipeline.load_lora_weights(str(path))
    ours = module.sample(["a red cup"], [4], sources=[sources])
    torch.testing.assert_close(ours, draw(pipeline, row, sources), rtol=0, atol=1e-5)
    assert not torch.allclose(ours, without, atol=1e-3)
    arguments = {"pretrained_model_name_or_path": folder, "num_inference_steps": STEPS, "guidance_scale": 1.0}
    sampler = LoRASampler(arguments, "32-true", "cpu", path)
    torch.testing.assert_close(sampler.sample([("a red cup", 4)], sources=[sources]), ours)


def test_full_fine_tuning_saves_a_pipeline_that_draws_the_same(family: str, folder: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = DiffusionFineTuning(folder, learning_rate=1e-3, num_inference_steps=STEPS, guidance_scale=1.0)
    fit(module, family, tmp_path)
    saved, _ = module.save_model(tmp_path / "tuned.safetensors")
    sources = [make_image(number, *size) for number, size in enumerate(source_sizes(family))]
    theirs = draw(load_pipeline(str(saved), family), FAMILIES[family], sources)
    ours = module.sample(["a red cup"], [4], sources=[sources])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert not torch.allclose(ours, draw(load_pipeline(folder, family), FAMILIES[family], sources), atol=1e-3)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(family: str, folder: str, tmp_path: Path) -> None:
    whole, resumed = make_module(folder), make_module(folder)
    fit(whole, family, tmp_path, steps=3, callbacks=[ExactSnapshot(1)])
    rewind(tmp_path, step=1)
    fit(resumed, family, tmp_path, steps=3, callbacks=[ExactSnapshot(1)], ckpt_path="latest")
    assert all(torch.equal(p, trained(resumed)[name]) for name, p in trained(whole).items())


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_packed_base_trains_close_to_the_whole_one(family: str, folder: str, tmp_path: Path, kind: Any) -> None:
    modules = [make_module(folder), make_module(folder, base_quantization=kind)]
    losses = []
    for module in modules:
        module.configure_model()
        torch.manual_seed(5)
        losses.append(float(example_losses(module, make_edit_batch(family)).mean()))
    assert modules[1].packed_base is not None and modules[1].packed_base.packed > 20
    assert 0 < abs(losses[1] - losses[0]) < (0.02 if kind == "int8" else 0.2) * losses[0]
    fit(modules[1], family, tmp_path)


def test_a_half_precision_base_trains_and_draws(family: str, folder: str, tmp_path: Path) -> None:
    module = make_module(folder, lora_targets=["attention", "feed_forward"])
    fit(module, family, tmp_path, precision="bf16-mixed")
    sources = [[make_image(10 * at + n, *size) for n, size in enumerate(source_sizes(family))] for at in range(2)]
    drawn = module.sample(["a red cup", "zorp"], [4, 5], guidance_scale=3.0, sources=sources)
    assert drawn.shape == (2, 3, 64, 96) and drawn.isfinite().all() and drawn.std() > 0.01


# Bad input ----------------------------------------------------------------------------------------------------------


def test_an_edit_model_without_sources_is_one_sentence(family: str, folder: str) -> None:
    module = make_module(folder)
    if not TRANSFORMERS[family].needs_sources:  # it draws from text too
        assert example_losses(module, make_batch(CAPTIONS)).isfinite().all()
        return
    with pytest.raises(ModelError, match="edits images, and there are none to start from"):
        example_losses(module, make_batch(CAPTIONS))
    with pytest.raises(
        ModelError, match="edits images: give the images to start from, `sources` of `sample` or --source"
    ):
        module.sample(["a red cup"], [4])


def test_more_sources_than_the_family_reads_is_one_sentence(family: str, folder: str) -> None:
    most = TRANSFORMERS[family].max_sources
    with pytest.raises(ModelError, match=f"got {most + 1} source images for one image, and .* takes {most} at most"):
        make_module(folder).sample(["a red cup"], [4], sources=[[make_image(0, 64, 64)] * (most + 1)])


# Stable Diffusion 3, whose edits are drawn by our sampler alone ------------------------------------------------------


def test_stable_diffusion_3_reads_a_source_at_the_images_own_positions(transformers: Folder) -> None:
    folder = transformers("sd3")
    module, batch = make_module(folder), make_batch(CAPTIONS)
    batch["sources"] = [to_pixels(*(make_image(number, SIDE, SIDE) for number in range(2)))]
    module.configure_model()
    condition = module.encoders.condition(batch, with_gradients=False)
    noisy, timesteps = torch.randn_like(condition["source_1"]), torch.tensor([300.0, 700.0])
    pipeline = load_pipeline(folder, "sd3")
    with torch.no_grad():
        found = module.predict(noisy, timesteps, condition, batch)
        wanted = sd3_velocity(pipeline, noisy, [condition["source_1"]], timesteps, list(CAPTIONS))
        without = module.predict(noisy, timesteps, {k: v for k, v in condition.items() if k != "source_1"}, batch)
        alone = module.predict(noisy[1:], timesteps[1:], {name: each[1:] for name, each in condition.items()}, batch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1:], alone, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, without, atol=1e-3)


def test_stable_diffusion_3_draws_an_edit_by_the_pipelines_steps(transformers: Folder) -> None:
    """The sampler's image is that of an Euler loop over the prediction, with guidance, for two sources in one batch."""
    module = make_module(transformers("sd3"), flow_shift=1.0)
    module.configure_model()
    parts = module.loaded()
    images = [make_image(number, SIDE, SIDE) for number in range(2)]
    ours = module.sample(list(CAPTIONS), [4, 5], guidance_scale=3.0, sources=[[image] for image in images])
    batch: dict[str, Any] = {"captions": list(CAPTIONS), "sources": [to_pixels(*images)]}
    condition = module.encoders.condition(batch, with_gradients=False)
    negative = module.encoders.condition(batch | {"captions": ["", ""]}, with_gradients=False)
    latents = torch.cat([
        torch.randn(condition["source_1"][:1].shape, generator=torch.Generator().manual_seed(seed)) for seed in (4, 5)
    ])  # fmt: skip
    scheduler = parts.family.make_scheduler(module.sampling_config())
    scheduler.set_timesteps(STEPS)
    with torch.no_grad():
        for timestep, now, then in zip(scheduler.timesteps, scheduler.sigmas, scheduler.sigmas[1:], strict=False):
            given, without = (
                module.predict(latents, timestep.expand(2), each, batch) for each in (condition, negative)
            )
            latents = latents + (then - now) * (without + 3.0 * (given - without))
        unscaled = parts.family.unscale(parts.vae, latents, *latents.shape[-2:])
        wanted = parts.family.decode(parts.vae, unscaled).div(2).add(0.5).clamp(0, 1)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)


def test_a_source_of_another_size_is_refused_where_an_edit_is_in_place(transformers: Folder) -> None:
    module, batch = make_module(transformers("sd3")), make_batch(CAPTIONS)
    batch["sources"] = [to_pixels(*(make_image(number, 64, SIDE) for number in range(2)))]
    with pytest.raises(ModelError, match=r"a source needs the size of its image; set data.init_args.source_fit: crop"):
        example_losses(module, batch)


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_half_precision_weights_alone_draw_from_sources(transformers: Folder, name: str) -> None:
    module = make_module(transformers(name))
    module.configure_model()
    for network in (module.loaded().denoiser, *module.loaded().text_encoders):
        network.to(torch.bfloat16)
    image = module.sample(["a red cup"], [0], num_inference_steps=2, sources=[[make_image(0, SIDE, SIDE)]])
    assert image.isfinite().all()


def test_without_guidance_no_negative_prompt_is_encoded(transformers: Folder) -> None:
    module = make_module(transformers("qwen_image_edit"))
    module.configure_model()
    given = (module.loaded(), ["a red cup"], None)
    for scale in (1.0, 3.0):
        found = module.loaded().family.sampling_arguments(*given, scale, module.device, [[make_image(0, SIDE, SIDE)]])
        assert ("negative_prompt_embeds" in found) == (scale > 1)


def test_callbacks_ask_whether_a_module_edits_before_there_are_weights(transformers: Folder) -> None:
    module = make_module(transformers("flux2"))
    assert isinstance(module, SamplesEdits) and module.edit_pipeline == "Flux2KleinPipeline"
    assert module.components is None


def test_preservation_is_refused_where_the_images_are_edits(transformers: Folder) -> None:
    module = make_module(transformers("sd3"), preserve="blank")
    with pytest.raises(ModelError, match=r"the data has edits of source images; set model\.init_args\.preserve: null"):
        module.method.check_sources(TRANSFORMERS["sd3"], module.settings, 1)
    module.method.check_sources(TRANSFORMERS["sd3"], module.settings, 0)
