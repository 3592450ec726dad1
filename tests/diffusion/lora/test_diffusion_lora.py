"""DiffusionLoRA: a LoRA on a diffusion transformer, from its first loss to the file that diffusers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from fakes.models.pipelines import SIDE, make_batch, make_sd3_pipeline
from fakes.runs.training_losses import example_losses
from lightning_aigc.diffusion import DiffusionLoRA, StableDiffusionLoRA
from lightning_aigc.diffusion.lora.file import read_lora
from lightning_aigc.diffusion.objectives.losses import with_prior
from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.errors import ModelError
from lightning_aigc.precision import FusedBackwardPrecision

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_sd3_pipeline(tmp_path_factory.mktemp("sd3")))


def make_module(path: str, **options: Any) -> DiffusionLoRA:
    torch.manual_seed(0)
    given: dict[str, Any] = {"rank": 4, "learning_rate": 1e-2, "num_inference_steps": 2, "max_train_steps": 3}
    return DiffusionLoRA(path, **(given | options))


def loader(steps: int = 3) -> DataLoader[Any]:
    return DataLoader([make_batch(seed=number) for number in range(steps)], batch_size=None)  # type: ignore[arg-type]


def fit(module: DiffusionLoRA, folder: Path, steps: int = 3, ckpt_path: str | None = None, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "default_root_dir": folder, "accelerator": "cpu", "devices": 1, "logger": False, "max_steps": steps,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = Trainer(**(given | options))
    torch.manual_seed(1)
    trainer.fit(module, loader(4 if steps < 5 else steps), ckpt_path=ckpt_path)
    return trainer


def trained(module: DiffusionLoRA) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def test_class_images_are_told_apart_on_the_host_without_a_wait_for_the_device(sd3: str) -> None:
    batch = make_batch(["a cup"] * 4, priors=1)
    moved = make_module(sd3).transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved["is_prior"] == [False, False, False, True]
    assert {x.device.type for x in moved.values() if isinstance(x, Tensor)} == {"meta"}
    loss_B = torch.tensor([1.0, 2.0, 3.0, 8.0], requires_grad=True)
    total, user, prior = with_prior(loss_B, moved["is_prior"], 0.5)
    assert (total.item(), user.item()) == (6.0, 2.0) and prior is not None and prior.item() == 8.0
    total.backward()  # type: ignore[no-untyped-call]
    assert loss_B.grad is not None and torch.allclose(loss_B.grad, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.5]))
    assert with_prior(loss_B, [False] * 4, 0.5)[2] is None


# What it learns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["none", "sigma_squared"])
def test_the_first_loss_is_that_of_diffusers_script(sd3: str, weighting: Any) -> None:
    module, batch = make_module(sd3, loss_weighting=weighting), make_batch()
    module.configure_model()
    moments = module.encode_pixels(batch["pixel_values"]).contiguous()  # equal strides, for equal draws
    torch.manual_seed(5)
    found = example_losses(module, batch | {"latent_moments": moments}).mean()

    pipeline = StableDiffusion3Pipeline.from_pretrained(
        sd3, text_encoder_3=None, tokenizer_3=None, image_encoder=None, feature_extractor=None
    )
    scheduler, vae = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config), pipeline.vae
    torch.manual_seed(5)
    with torch.no_grad():
        latents = DiagonalGaussianDistribution(moments).sample()
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        u = torch.sigmoid(torch.normal(mean=0.0, std=1.0, size=(len(latents),)))
        indices = (u * scheduler.config.num_train_timesteps).long()
        timesteps, sigmas = scheduler.timesteps[indices], scheduler.sigmas[indices][:, None, None, None]
        noisy = sigmas * noise + (1.0 - sigmas) * latents
        embeddings, _, pooled, _ = pipeline.encode_prompt(
            batch["captions"], None, None, do_classifier_free_guidance=False
        )
        answer = pipeline.transformer(
            hidden_states=noisy, timestep=timesteps, encoder_hidden_states=embeddings, pooled_projections=pooled,
            return_dict=False,
        )[0]  # fmt: skip
        if weighting == "sigma_squared":
            answer, target = answer * (-sigmas) + noisy, latents
        else:
            target = noise - latents
        wanted = (answer.float() - target.float()).square().mean()
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-6, atol=1e-6)


def test_a_fit_moves_every_lora_matrix_and_nothing_else(sd3: str, tmp_path: Path) -> None:
    module = make_module(sd3, lora_targets=["attention", "feed_forward"])
    module.configure_model()
    parts = module.loaded()
    models = (parts.denoiser, parts.vae, *parts.text_encoders)
    base = {(i, n): p.clone() for i, m in enumerate(models) for n, p in m.named_parameters() if "lora_" not in n}
    before = trained(module)
    fit(module, tmp_path)
    after = trained(module)
    kinds = ("to_q", "to_add_out", "add_v_proj", "attn2.to_k", "ff.net.2", "ff_context.net.0.proj")
    assert all(any(kind in name for name in after) for kind in kinds)
    assert not {name for name in after if "lora_B" in name and torch.equal(before[name], after[name])}
    assert all(
        torch.equal(p, base[i, n]) for i, m in enumerate(models) for n, p in m.named_parameters() if (i, n) in base
    )


def test_the_loss_falls(sd3: str, tmp_path: Path) -> None:
    module = make_module(sd3, rank=8, lora_targets=["attention", "feed_forward"])
    module.configure_model()

    def loss() -> float:
        torch.manual_seed(7)
        with torch.no_grad():
            return float(torch.stack([example_losses(module, make_batch()).mean() for _ in range(8)]).mean())

    before = loss()
    fit(module, tmp_path, steps=30)
    assert loss() < 0.95 * before  # the output layer is frozen, and the images are noise


def test_held_out_pictures_have_one_loss_whatever_the_batch(sd3: str, tmp_path: Path) -> None:
    module = make_module(sd3)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    (first,) = trainer.validate(module, loader(2), verbose=False)
    (second,) = trainer.validate(module, loader(2), verbose=False)
    assert first == second and first["val_loss"] > 0


# What surrounds it --------------------------------------------------------------------------------------------------


def test_the_files_layers_and_header_are_read_back(sd3: str, tmp_path: Path) -> None:
    module = make_module(sd3)
    fit(module, tmp_path)
    module.save_lora(tmp_path / "zorp.safetensors", trigger_phrase="zorp")
    file = read_lora(tmp_path / "zorp.safetensors")
    assert file.layout == "diffusers" and {layer.component for layer in file.layers()} == {"transformer"}
    assert file.metadata["modelspec.architecture"] == "stable-diffusion-3/lora"
    assert "modelspec.prediction_type" not in file.metadata
    assert len(file.metadata["ss_new_sd_model_hash"]) == 64


def test_a_sampler_draws_with_the_file_at_a_weight(sd3: str, tmp_path: Path) -> None:
    module = make_module(sd3)
    fit(module, tmp_path, steps=5)
    path = tmp_path / "zorp.safetensors"
    module.save_lora(path)
    arguments = {"pretrained_model_name_or_path": sd3, "num_inference_steps": 2, "guidance_scale": 3.0}
    sampler = LoRASampler(arguments, "32-true", "cpu", path)
    whole, none = sampler.sample([("a red cup", 0)]), sampler.sample([("a red cup", 0)], weight=0.0)
    ours = module.sample(["a red cup"], [0], guidance_scale=3.0)
    torch.testing.assert_close(whole, ours, atol=2e-2, rtol=0)
    assert (whole - none).abs().max() > 5 * (whole - ours).abs().max()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_level_max_keeps_the_gradients_and_little_of_what_is_kept(sd3: str, precision: Any) -> None:
    module = make_module(sd3)
    module.configure_model()
    transformer = module.loaded().denoiser
    plugins = {memory: FusedBackwardPrecision(precision, memory=memory) for memory in ("off", "max")}
    gradients, kept = {}, {}
    for memory, plugin in plugins.items():
        plugin.convert_module(module)
        torch.manual_seed(3)
        owned = {p.untyped_storage().data_ptr() for p in module.loaded().denoiser.parameters()}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, owned: set[int] = owned, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with plugin.forward_context(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = example_losses(module, make_batch()).mean()
        loss.backward()
        gradients[memory] = {n: p.grad.clone() for n, p in transformer.named_parameters() if p.grad is not None}
        kept[memory] = sum(saved.values())
        module.zero_grad()
        plugin.teardown()
    assert gradients["off"].keys() == gradients["max"].keys() and gradients["off"]
    for name, gradient in gradients["off"].items():
        torch.testing.assert_close(gradients["max"][name], gradient, rtol=1e-4, atol=1e-6)
    assert kept["max"] < 0.35 * kept["off"]  # two blocks of four tokens' width; the rows have real proportions


# Bad input ----------------------------------------------------------------------------------------------------------


def test_an_option_of_the_other_kind_of_model_is_one_sentence(sd3: str, sd: str) -> None:
    with pytest.raises(ModelError, match=r"snr_gamma: 5.0 is an option of DDPM, and Stable Diffusion 3 trains by flow"):
        DiffusionLoRA(sd3, snr_gamma=5.0)
    with pytest.raises(ModelError, match=r"flow_shift: 3.0 is an option of flow matching, and SD 1.5 trains by DDPM"):
        StableDiffusionLoRA(sd, flow_shift=3.0)
    with pytest.raises(ModelError, match=r"use_dora: True is for Stable Diffusion 1.x, 2.x and SDXL"):
        DiffusionLoRA(sd3, use_dora=True)
    with pytest.raises(ModelError, match=r"train_text_encoder: True is for Stable Diffusion 1.x, 2.x and SDXL"):
        DiffusionLoRA(sd3, train_text_encoder=True)


@pytest.mark.parametrize(
    ("side", "words"),
    [(SIDE + 2, "set data.init_args.bucket_reso_steps and resolution to a multiple of 4"), (128, "over 64")],
)
def test_a_picture_size_that_does_not_fit_is_one_sentence(sd3: str, side: int, words: str) -> None:
    module, batch = make_module(sd3), make_batch()
    batch["pixel_values"] = torch.zeros(2, 3, side, side)
    with pytest.raises(ModelError, match=rf"images of {side} x {side} pixels .*{words}"):
        example_losses(module, batch)


@pytest.mark.parametrize(
    ("option", "words"),
    [({"flow_shift": 0.0}, "flow_shift must be auto or a number above 0, got 0.0"), ({"logit_std": -1.0}, "logit_std"),
     ({"rank": 0}, "rank must be at least 1")],
)  # fmt: skip
def test_an_argument_out_of_range_is_named(sd3: str, option: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make_module(sd3, **option)
