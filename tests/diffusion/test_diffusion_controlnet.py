"""DiffusionControlNet in every family that has one: diffusers' loss, what is trained, files, pictures, resume."""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetModel,
    FluxControlNetPipeline,
    QwenImageControlNetPipeline,
    SD3ControlNetModel,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from fakes.pipelines import SIDE, make_batch
from fakes.seeded_fits import cloned, fit, same
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.callbacks.health.parameter_names import zero_convolution_gates
from lightning_aigc.diffusion import DiffusionControlNet
from lightning_aigc.diffusion.controlnet_sampling import ControlNetSampler
from lightning_aigc.diffusion.families import CONTROLLED
from lightning_aigc.errors import ModelError
from lightning_aigc.precision import FusedBackwardPrecision

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),  # diffusers' ControlNet imports it
]

QUICK: dict[str, Any] = {"num_inference_steps": 2, "learning_rate": 1e-2, "max_train_steps": 3, "output_name": "edges"}
CAPTIONS = ("a red cup", "zorp")  # of unequal length
Folder = Callable[[str], str]


# What diffusers' script of each family computes, written out ---------------------------------------------------------


def shifted(vae: Any, moments: Tensor) -> Tensor:
    drawn: Tensor = DiagonalGaussianDistribution(moments).sample()
    return (drawn - float(vae.config.shift_factor)) * float(vae.config.scaling_factor)


def normalised(vae: Any, moments: Tensor) -> Tensor:
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    drawn: Tensor = DiagonalGaussianDistribution(moments).sample()
    return (drawn - mean) * (1.0 / std)


def sd3_velocity(pipeline: Any, controlnet: Any, noisy: Tensor, timesteps: Tensor, shown: Tensor) -> Tensor:
    embeddings, _, pooled, _ = pipeline.encode_prompt(list(CAPTIONS), None, None, do_classifier_free_guidance=False)
    given = {
        "hidden_states": noisy, "timestep": timesteps, "encoder_hidden_states": embeddings,
        "pooled_projections": pooled, "return_dict": False,
    }  # fmt: skip
    samples = controlnet(**given, controlnet_cond=shown)[0]
    velocity: Tensor = pipeline.transformer(**given, block_controlnet_hidden_states=samples)[0]
    return velocity


def flux_velocity(pipeline: Any, controlnet: Any, noisy: Tensor, timesteps: Tensor, shown: Tensor) -> Tensor:
    def pack(latents: Tensor) -> Tensor:
        packed: Tensor = FluxControlNetPipeline._pack_latents(latents, *latents.shape)
        return packed

    batch, _, height, width = noisy.shape
    embeddings, pooled, text_ids = pipeline.encode_prompt(list(CAPTIONS))
    ids = FluxControlNetPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, noisy.device, noisy.dtype)
    given = {
        "hidden_states": pack(noisy), "timestep": timesteps / 1000, "guidance": torch.full((batch,), 1.0),
        "pooled_projections": pooled, "encoder_hidden_states": embeddings, "txt_ids": text_ids, "img_ids": ids,
        "return_dict": False,
    }  # fmt: skip
    doubles, singles = controlnet(**given, controlnet_cond=pack(shown))
    answer = pipeline.transformer(**given, controlnet_block_samples=doubles, controlnet_single_block_samples=singles)[0]
    velocity: Tensor = FluxControlNetPipeline._unpack_latents(answer, 2 * height, 2 * width, 2)
    return velocity


def qwen_image_velocity(pipeline: Any, controlnet: Any, noisy: Tensor, timesteps: Tensor, shown: Tensor) -> Tensor:
    def pack(latents: Tensor) -> Tensor:
        packed: Tensor = QwenImageControlNetPipeline._pack_latents(latents, *latents.shape)
        return packed

    batch, _, height, width = noisy.shape
    embeddings, mask = pipeline.encode_prompt(list(CAPTIONS))
    given = {
        "hidden_states": pack(noisy), "timestep": timesteps / 1000, "encoder_hidden_states": embeddings,
        "encoder_hidden_states_mask": mask, "img_shapes": [[(1, height // 2, width // 2)]] * batch,
        "return_dict": False,
    }  # fmt: skip
    samples = controlnet(**given, controlnet_cond=pack(shown))
    answer = pipeline.transformer(**given, controlnet_block_samples=samples)[0]
    velocity: Tensor = QwenImageControlNetPipeline._unpack_latents(answer, 2 * height, 2 * width, 2).squeeze(2)
    return velocity


SCRIPTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "sd3": (shifted, sd3_velocity),
    "flux": (shifted, flux_velocity),
    "qwen_image": (normalised, qwen_image_velocity),
}


@pytest.fixture(params=list(SCRIPTS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(family: str, transformers: Folder) -> str:
    return transformers(family)


def make_module(path: str, **options: Any) -> DiffusionControlNet:
    torch.manual_seed(0)
    module = DiffusionControlNet(path, **(QUICK | options))
    module.configure_model()
    return module


def stirred(module: DiffusionControlNet) -> DiffusionControlNet:
    """The module with a ControlNet whose projections are no longer zero."""
    torch.manual_seed(7)
    for parameter in module.controlnet.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return module


def load_pipeline(family: str, path: str, **parts: Any) -> Any:
    optional = dict.fromkeys(CONTROLLED[family].optional_folders)
    kind: Any = getattr(diffusers, CONTROLLED[family].controlnet_pipeline) if parts else DiffusionPipeline
    pipeline = kind.from_pretrained(path, **optional, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_every_family_with_a_controlnet_is_tested() -> None:
    assert set(SCRIPTS) == set(CONTROLLED)


# What it learns ------------------------------------------------------------------------------------------------------


def test_the_first_loss_is_that_of_diffusers_script(family: str, folder: str) -> None:
    module = stirred(make_module(folder, flow_shift=3.0))
    batch = make_batch(CAPTIONS)
    conditions = torch.randint(0, 256, (2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(1)).byte()
    moments = module.encode_pixels(batch["pixel_values"]).contiguous()  # equal strides, for equal draws
    shown_moments = module.encode_pixels(conditions.float() / 255 * 2 - 1).contiguous()
    given = batch | {"latent_moments": moments, "conditioning": conditions, "conditioning_moments": shown_moments}
    torch.manual_seed(5)
    found = module.example_losses(given).mean()

    pipeline, (encode, velocity_of) = load_pipeline(family, folder), SCRIPTS[family]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.manual_seed(5)
    with torch.no_grad():
        latents = encode(pipeline.vae, moments)
        noise = torch.randn_like(latents)
        u = torch.sigmoid(torch.normal(mean=0.0, std=1.0, size=(len(latents),)))
        indices = (u * scheduler.config.num_train_timesteps).long()
        timesteps, sigmas = scheduler.timesteps[indices], scheduler.sigmas[indices][:, None, None, None]
        noisy, shown = (1.0 - sigmas) * latents + sigmas * noise, encode(pipeline.vae, shown_moments)
        velocity = velocity_of(pipeline, module.controlnet, noisy, timesteps, shown)
        wanted = (velocity.float() - (noise - latents).float()).square().mean()
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-6, atol=1e-6)


def test_conditions_are_encoded_as_pictures(family: str, folder: str) -> None:
    module = make_module(folder)
    conditions = torch.randint(0, 256, (2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(1)).byte()
    batch = make_batch(CAPTIONS) | {"conditioning": conditions}
    given = batch | {"conditioning_moments": module.encode_pixels(conditions.float() / 255 * 2 - 1)}
    module.eval()
    assert torch.equal(module.condition_latents(batch), module.condition_latents(given))


def test_a_new_controlnet_leaves_the_transformers_prediction_as_it_is(family: str, folder: str) -> None:
    module, batch = make_module(folder), make_batch(CAPTIONS)
    pipeline = load_pipeline(family, folder)
    latents, timesteps = module.encoders.latents(batch), torch.tensor([300.0, 700.0])
    condition = module.encoders.condition(batch, with_gradients=False)
    with torch.no_grad():
        found = module.predict(latents, timesteps, condition, batch)
        wanted = CONTROLLED[family].predict(pipeline.transformer, latents, timesteps, condition, 1.0)
    assert torch.equal(found, wanted)
    copied = {n for n, t in pipeline.transformer.state_dict().items() if n in module.controlnet.state_dict()}
    own = {name.split(".")[0] for name in module.controlnet.state_dict().keys() - copied}
    assert own == set(CONTROLLED[family].control_path) & own and all(
        torch.equal(module.controlnet.state_dict()[name], pipeline.transformer.state_dict()[name]) for name in copied
    )
    assert dict(pipeline.transformer.config)["num_layers"] == module.transformer.config["num_layers"]  # type: ignore[index, union-attr]


def test_a_fit_moves_every_trained_weight_of_the_controlnet_and_nothing_else(
    family: str, folder: str, tmp_path: Path
) -> None:
    module = make_module(folder, learning_rate=0.05)
    before, base = cloned(module.controlnet), cloned(module.transformer)
    fit(module, tmp_path, batch=make_batch(CAPTIONS))
    assert same(base, cloned(module.transformer))
    after = cloned(module.controlnet)
    moved = {f"controlnet.{name}" for name in before if not torch.equal(before[name], after[name])}
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert moved == trained and all(name.startswith("controlnet.") for name in trained)
    assert all(p.grad is not None for p in module.trainable_parameters())


@pytest.mark.parametrize("memory", ["balanced", "lean", "max"])
def test_blocks_of_the_controlnet_run_again_too_and_give_the_same_loss(
    memory: str, transformers: Folder, tmp_path: Path
) -> None:
    plain = fit(stirred(make_module(transformers("sd3"))), tmp_path / "plain", batch=make_batch(CAPTIONS))
    module = stirred(make_module(transformers("sd3")))
    plugin: Any = FusedBackwardPrecision("32-true", memory=memory)  # type: ignore[arg-type]
    plugin.convert_module(module)
    summary = vars(module)["_fused_backward_swaps"].summary()
    assert "3 JointTransformerBlock" in summary  # two of the transformer and one of the ControlNet
    plugin.teardown()
    assert fit(module, tmp_path / memory, batch=make_batch(CAPTIONS), plugins=[plugin]) == pytest.approx(
        plain, rel=1e-5
    )


def test_gradients_begin_behind_the_zero_projections(family: str, folder: str) -> None:
    """Which gradients are zero at the first step is what the health monitor expects."""
    module = make_module(folder)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gates = zero_convolution_gates(tuple(named))
    module.example_losses(make_batch(CAPTIONS)).mean().backward()
    zero = {name for name, p in named.items() if p.grad is None or not p.grad.any()}
    assert zero == set(gates)
    assert all(gate in named and gate not in zero for before in gates.values() for gate in before)


def test_its_edge_path_is_protected_and_covers_modules(family: str, folder: str) -> None:
    module = make_module(folder)
    names = [name for name, _ in module.named_modules()]
    assert module.protected_gradients and all(part in names for part in module.protected_gradients)
    assert make_module(folder, protect_edges=False).protected_gradients == ()


# Its files and pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_ema", [False, True])
def test_the_folder_loads_in_diffusers_pipeline_and_draws_the_same_picture(
    family: str, folder: str, use_ema: bool, tmp_path: Path
) -> None:
    module = make_module(folder, learning_rate=0.05, use_ema=use_ema)
    fit(module, tmp_path, batch=make_batch(CAPTIONS))
    kind: Any = getattr(diffusers, CONTROLLED[family].controlnet)
    saved = kind.from_pretrained(tmp_path / "edges")
    with module.averaged_weights():
        assert same(cloned(module.controlnet), cloned(saved))
    shown = torch.rand(1, 3, SIDE, SIDE * 2, generator=torch.Generator().manual_seed(1))  # not square
    ours = module.sample(["a red cup"], [5], guidance_scale=3.0, conditions=shown)
    assert ours.shape == (1, 3, SIDE, SIDE * 2)
    assert torch.equal(ours, module.sample(["a red cup"], [5], guidance_scale=3.0, conditions=shown))
    pipeline = load_pipeline(family, folder, controlnet=saved)
    scale: dict[str, Any] = {"guidance_scale": 3.0}
    if family == "qwen_image":
        scale = {"true_cfg_scale": 3.0, "negative_prompt": " "}
    torch.manual_seed(5)  # SD 3's pipeline draws the condition's latents from it
    theirs = pipeline(
        prompt="a red cup", control_image=shown * 2 - 1, height=SIDE, width=SIDE * 2, num_inference_steps=2,
        generator=torch.Generator().manual_seed(5), output_type="pt", controlnet_conditioning_scale=1.0, **scale,
    ).images.float().clamp(0, 1)  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    other = module.sample(["a red cup"], [5], guidance_scale=3.0, conditions=1 - shown)
    assert not torch.allclose(ours, other, atol=1e-3)


def test_sampling_leaves_the_random_state_alone(transformers: Folder) -> None:
    module = make_module(transformers("sd3"))
    before = torch.get_rng_state()
    module.sample(["a red cup"], [5], conditions=torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator()))
    assert torch.equal(before, torch.get_rng_state())


def test_training_goes_on_from_a_saved_controlnet(family: str, folder: str, tmp_path: Path) -> None:
    first = make_module(folder)
    fit(first, tmp_path, batch=make_batch(CAPTIONS))
    again = make_module(folder, controlnet_model_name_or_path=str(tmp_path / "edges"))
    assert same(cloned(first.controlnet), cloned(again.controlnet))
    trained = [{name for name, p in module.named_parameters() if p.requires_grad} for module in (first, again)]
    assert trained[0] == trained[1]


def test_an_instantx_controlnet_reads_unshifted_latents_and_no_pooled_text(
    transformers: Folder, tmp_path: Path
) -> None:
    """As its pipeline gives them to it, by its config."""
    folder = transformers("sd3")
    own = stirred(make_module(folder))
    config = {**own.controlnet.config, "force_zeros_for_pooled_projection": True}
    SD3ControlNetModel.from_config(config).save_pretrained(tmp_path / "instantx")
    module = make_module(folder, controlnet_model_name_or_path=str(tmp_path / "instantx"))
    vae, batch = module.loaded().vae, make_batch(CAPTIONS)
    found, shifted_latents = (m.eval().condition_latents(batch) for m in (module, own))
    torch.testing.assert_close(found, shifted_latents + vae.config.shift_factor * vae.config.scaling_factor)
    seen: list[Tensor] = []
    module.controlnet.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["pooled_projections"]), with_kwargs=True
    )
    with torch.no_grad():
        module.example_losses(batch)
    assert not seen[0].any()


@pytest.mark.parametrize("option", ["use_ema", "gradient_checkpointing", "optimizer_in_backward"])
def test_a_resumed_run_ends_in_the_same_bits_and_checkpoints_hold_the_controlnet(
    transformers: Folder, tmp_path: Path, option: str
) -> None:
    def build(steps: int) -> DiffusionControlNet:
        return make_module(transformers("sd3"), **{option: True, "max_train_steps": steps})

    whole, half, again = build(4), build(2), build(4)
    losses = fit(whole, tmp_path / "whole")
    fit(half, tmp_path, ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="two"))
    names = torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"]
    assert names and all(name.startswith("controlnet.") for name in names)
    assert fit(again, tmp_path / "again", ckpt=str(tmp_path / "two.ckpt")) == losses[2:]
    assert same(cloned(whole.controlnet), cloned(again.controlnet))


def test_a_stopped_run_goes_on_to_the_same_bits(family: str, folder: str, tmp_path: Path) -> None:
    """Its random states return with it, which the condition's latents are drawn from."""

    def run(module: DiffusionControlNet, name: str, steps: int, ckpt_path: str | None = None) -> None:
        quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
        trainer = Trainer(
            default_root_dir=tmp_path / name, accelerator="cpu", devices=1, max_steps=steps,
            enable_model_summary=False, callbacks=[ExactSnapshot(1)], **quiet,
        )  # fmt: skip
        batches: Any = [make_batch(CAPTIONS, seed=number) for number in range(4)]
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)

    whole, half, again = (make_module(folder, max_train_steps=None) for _ in range(3))
    run(whole, "whole", 4)
    run(half, "half", 2)
    run(again, "half", 4, ckpt_path="latest")
    assert same(cloned(whole.controlnet), cloned(again.controlnet))
    assert not same(cloned(whole.controlnet), cloned(half.controlnet))


def test_beside_a_half_precision_transformer_it_trains_in_float32_and_draws(
    family: str, folder: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = DiffusionControlNet(folder, **QUICK)
    losses = fit(module, tmp_path, batch=make_batch(CAPTIONS), precision="bf16-mixed")
    assert all(math.isfinite(loss) for loss in losses)
    assert module.transformer is not None and next(module.transformer.parameters()).dtype == torch.bfloat16
    assert {p.dtype for p in module.controlnet.parameters()} == {torch.float32}
    shown = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    assert module.sample(["a red cup"], [5], conditions=shown).isfinite().all()
    arguments = {"pretrained_model_name_or_path": folder, "num_inference_steps": 2}
    sampler = ControlNetSampler(arguments, "bf16-mixed", "cpu", tmp_path / "edges")  # all networks in bfloat16
    assert sampler.sample(["a red cup"], [5], shown).isfinite().all()


def test_a_packed_base_leaves_the_controlnet_in_float32(transformers: Folder, tmp_path: Path) -> None:
    module = make_module(transformers("sd3"), base_quantization="int8")
    fit(module, tmp_path)
    assert {p.dtype for p in module.controlnet.parameters()} == {torch.float32}
    assert module.packed_base is not None


# What cannot be ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["z_image", "flux2"])
def test_a_family_without_a_controlnet_is_one_sentence_that_names_those_with(other: str, transformers: Folder) -> None:
    names = "StableDiffusion3Pipeline and FluxPipeline and QwenImagePipeline"
    with pytest.raises(ModelError, match=f"this model trains {names}, and"):
        DiffusionControlNet(transformers(other))


def test_a_u_nets_pipeline_is_one_sentence_that_names_its_class(sd: str) -> None:
    with pytest.raises(ModelError, match=r"is a StableDiffusionPipeline; .*ControlNetTraining trains one of Stable"):
        DiffusionControlNet(sd)


def test_a_condition_without_files_or_pictures_is_one_sentence(transformers: Folder) -> None:
    module = make_module(transformers("sd3"), conditions="folder")
    with pytest.raises(ModelError, match=r"the batch has no conditions; set data\.init_args\.conditioning_data_dir"):
        module.example_losses(make_batch(CAPTIONS))
    with pytest.raises(ModelError, match="draws what it is shown"):
        make_module(transformers("sd3")).sample(["a red cup"], [0])


def test_a_size_that_does_not_divide_is_one_sentence(family: str, folder: str) -> None:
    module, batch = make_module(folder), make_batch(CAPTIONS)
    batch["pixel_values"] = torch.rand(2, 3, SIDE, 34) * 2 - 1
    with pytest.raises(ModelError, match=r"34 x 32 pixels do not divide .* multiple of 4"):
        module.example_losses(batch)
    for width in (34, 33):
        with pytest.raises(ModelError, match=rf"{width} x 32 pixels do not divide .* multiple of 4"):
            module.sample(["a red cup"], [0], conditions=torch.rand(1, 3, SIDE, width))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sd3", {"num_layers": 2}, "num_layers: the transformer's 2 blocks do not read 2 of a .* use one of 1"),
        ("flux", {"num_layers": 0}, "num_layers: the transformer's 1 blocks do not read 0"),
        ("flux", {"num_single_layers": 3}, "num_single_layers: .* use one of 0, 1, 2"),
        ("sd3", {"num_single_layers": 1}, "num_single_layers: StableDiffusion3Pipeline has no such blocks"),
    ],
)
def test_a_number_of_blocks_that_cannot_be_is_one_sentence(
    name: str, options: dict[str, int], said: str, transformers: Folder
) -> None:
    with pytest.raises(ModelError, match=said):
        make_module(transformers(name), **options)


def test_of_a_controlnets_blocks_the_transformer_reads_each() -> None:
    """By the rules of diffusers' transformers: SD 3's last block takes nothing."""
    for blocks in (1, 2, 3, 19, 24, 38):
        for count in CONTROLLED["sd3"].control_counts(blocks):
            assert {int(i / (blocks / count)) for i in range(blocks - 1)} == set(range(count))
        for count in CONTROLLED["flux"].control_counts(blocks):
            assert {i // -(-blocks // count) for i in range(blocks)} == set(range(count))
    assert 12 in CONTROLLED["sd3"].control_counts(24) and 4 in CONTROLLED["flux"].control_counts(19)


def test_a_flux_controlnet_without_single_blocks_trains(transformers: Folder, tmp_path: Path) -> None:
    module = make_module(transformers("flux"), num_single_layers=0)
    fit(module, tmp_path, batch=make_batch(CAPTIONS))
    assert all(p.grad is not None for p in module.trainable_parameters())


def test_a_controlnet_of_another_kind_is_one_sentence(transformers: Folder, tmp_path: Path) -> None:
    of_sd3, of_flux = make_module(transformers("sd3")).controlnet, make_module(transformers("flux")).controlnet
    of_sd3.save_pretrained(tmp_path / "sd3")
    given = {"controlnet_model_name_or_path": str(tmp_path / "sd3")}
    with pytest.raises(ModelError, match="is a SD3ControlNetModel, and this base takes a FluxControlNetModel"):
        make_module(transformers("flux"), **given)
    with pytest.raises(ModelError, match=r"num_layers is of a new ControlNet, and .*controlnet_model_name_or_path"):
        make_module(transformers("sd3"), num_layers=1, **given)
    config = {**of_flux.config, "_use_default_values": []}  # which would win
    FluxControlNetModel.from_config(config | {"num_mode": 3}).save_pretrained(tmp_path / "union")
    FluxControlNetModel.from_config(config | {"pooled_projection_dim": 8}).save_pretrained(tmp_path / "other")
    for name, said in (("union", "reads more than one picture's latents"), ("other", "its pooled_projection_dim is 8")):
        with pytest.raises(ModelError, match=said):
            make_module(transformers("flux"), controlnet_model_name_or_path=str(tmp_path / name))
    shutil.rmtree(tmp_path / "sd3")
    with pytest.raises(ModelError, match="does not load as a ControlNet"):
        make_module(transformers("sd3"), **given)
