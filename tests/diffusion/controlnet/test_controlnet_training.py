"""ControlNetTraining through real Trainer fits: its losses, its images in diffusers, what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ControlNetModel,
    DDIMScheduler,
    DDPMScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetPipeline,
)
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fakes.models.pipelines import SIDE, make_batch
from fakes.runs.cpu_bits import HAS_EQUAL_BITS
from fakes.runs.seeded_fits import cloned, fit, same
from lightning_aigc.data import EncodedImageData
from lightning_aigc.diffusion import ControlNetTraining
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders

QUICK: dict[str, Any] = {"num_inference_steps": 2, "learning_rate": 1e-3, "max_train_steps": 3, "output_name": "edges"}


def diffusers_losses(batch: dict[str, Any], condition: Tensor, steps: int) -> list[float]:
    """diffusers' train_controlnet.py: its loop, without a loader, accelerate and logging."""
    pipeline = StableDiffusionPipeline.from_pretrained(str(resolve("embedded:sd")), safety_checker=None)
    unet, vae = pipeline.unet.requires_grad_(False), pipeline.vae
    schedule = DDPMScheduler.from_config(pipeline.scheduler.config)
    torch.manual_seed(0)
    controlnet = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32, 96))
    optimizer = torch.optim.AdamW(controlnet.parameters(), lr=1e-3, weight_decay=1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 + step)
        latents = vae.encode(batch["pixel_values"]).latent_dist.sample() * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, schedule.config.num_train_timesteps, (len(latents),))
        noisy = schedule.add_noise(latents, noise, timesteps)
        tokens = pipeline.tokenizer(batch["captions"], padding="max_length", truncation=True, return_tensors="pt")
        hidden = pipeline.text_encoder(tokens.input_ids, return_dict=False)[0].detach()
        down, middle = controlnet(noisy, timesteps, hidden, controlnet_cond=condition, return_dict=False)
        shown = {"down_block_additional_residuals": list(down), "mid_block_additional_residual": middle}
        loss = F.mse_loss(unet(noisy, timesteps, hidden, return_dict=False, **shown)[0].float(), noise.float())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_losses_are_those_of_diffusers_own_loop(tmp_path: Path) -> None:
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    batch = make_batch(["a red mug", "a blue teapot"]) | {"pixel_values": pixels}
    module = ControlNetTraining("embedded:sd", **QUICK)
    torch.manual_seed(0)
    module.configure_model()
    made = module.make_conditions(pixels)
    assert made is not None and 0.01 < float((made > 0).float().mean()) < 0.5
    wanted = diffusers_losses(batch, made.float().expand(-1, 3, -1, -1) / 255, 3)
    data: Any = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    assert fit(module, tmp_path, data=data) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("family", ["sd", "sdxl"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_controlnet_alone_is_trained_and_diffusers_draws_the_same_picture(
    family: str, precision: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(family)
    module = ControlNetTraining(source, **QUICK | {"learning_rate": 0.05, "use_ema": precision == "32-true"})
    module.configure_model()
    start = cloned(module.controlnet)
    fit(module, tmp_path, precision=precision)
    assert module.components is not None
    base = StableDiffusionPipeline.load_config(source)["_class_name"]
    kind: Any = StableDiffusionXLControlNetPipeline if "XL" in base else StableDiffusionControlNetPipeline
    saved = ControlNetModel.from_pretrained(tmp_path / "edges")
    with module.averaged_weights():
        trained = cloned(module.controlnet)
    assert same(trained, cloned(saved)) and not same(start, trained)
    extra = {} if family == "sdxl" else {"safety_checker": None}
    pipeline = kind.from_pretrained(source, controlnet=saved, **extra)
    assert same(cloned(pipeline.unet), {k: v.float() for k, v in cloned(module.components.denoiser).items()}) or (
        precision != "32-true"
    )
    if precision == "32-true":
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
        pipeline.set_progress_bar_config(disable=True)
        shown = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
        options = {"num_inference_steps": 3, "guidance_scale": 3.0}
        seed = torch.Generator().manual_seed(5)
        theirs = pipeline("a red cup", image=shown, generator=seed, output_type="pt", **options).images
        ours = module.sample(["a red cup"], [5], conditions=shown, **options)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if HAS_EQUAL_BITS else 1e-5)
        other = module.sample(["a red cup"], [5], conditions=1 - shown, **options)
        assert float((ours - other).abs().max()) > 1e-3


def test_training_goes_on_from_a_saved_controlnet(sd: str, tmp_path: Path) -> None:
    first = ControlNetTraining(sd, **QUICK)
    fit(first, tmp_path)
    again = ControlNetTraining(sd, controlnet_model_name_or_path=str(tmp_path / "edges"), **QUICK)
    again.configure_model()
    assert same(cloned(first.controlnet), cloned(again.controlnet))
    assert all(p.requires_grad for p in again.controlnet.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("option", ["use_ema", "gradient_checkpointing", "optimizer_in_backward"])
def test_a_resumed_run_ends_in_the_same_bits_and_checkpoints_hold_the_controlnet(
    sd: str, tmp_path: Path, option: str
) -> None:
    def build(steps: int) -> ControlNetTraining:
        torch.manual_seed(0)
        module = ControlNetTraining(sd, **QUICK | {option: True, "max_train_steps": steps})
        module.configure_model()
        return module

    whole, half, again = build(4), build(2), build(4)
    losses = fit(whole, tmp_path / "whole")
    fit(half, tmp_path, ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="two"))
    names = torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"]
    assert names and all(name.startswith("controlnet.") for name in names)
    assert fit(again, tmp_path / "again", ckpt=str(tmp_path / "two.ckpt")) == losses[2:]
    assert same(cloned(whole.controlnet), cloned(again.controlnet))


def test_a_controlnet_of_another_family_or_autoencoder_is_one_sentence(sd: str, sdxl: str, tmp_path: Path) -> None:
    fit(ControlNetTraining(sd, **QUICK | {"max_train_steps": 1}), tmp_path / "run")
    of_sd = str(tmp_path / "run" / "edges")
    with pytest.raises(ModelError, match="is a ControlNet of another family: its cross_attention_dim is 16"):
        ControlNetTraining(sdxl, controlnet_model_name_or_path=of_sd).configure_model()
    unet = StableDiffusionPipeline.from_pretrained(sd, safety_checker=None).unet
    ControlNetModel.from_unet(unet).save_pretrained(tmp_path / "eight")
    with pytest.raises(ModelError, match=r"shrinks conditions by 8, and the autoencoder of .* images by 2"):
        ControlNetTraining(sd, controlnet_model_name_or_path=str(tmp_path / "eight")).configure_model()
    with pytest.raises(ModelError, match="does not load as a ControlNet"):
        ControlNetTraining(sd, controlnet_model_name_or_path=str(tmp_path)).configure_model()
    weights = next((tmp_path / "run" / "edges").glob("*.safetensors"))
    save_file({k: v for k, v in load_file(weights).items() if k != "conv_in.bias"}, weights)
    with pytest.raises(ModelError, match=r"controlnet_model_name_or_path: the files of .*edges lack conv_in.bias"):
        ControlNetTraining(sd, controlnet_model_name_or_path=of_sd).configure_model()


def test_without_conditions_to_show_a_sample_is_refused(sd: str) -> None:
    with pytest.raises(ModelError, match="needs condition images; pass `conditions`"):
        ControlNetTraining(sd, **QUICK).sample(["a red cup"], [0])


def test_shards_which_hold_no_images_are_refused_before_the_first_step(sd: str, tmp_path: Path) -> None:
    module = ControlNetTraining(sd, conditions="canny", max_train_steps=1)
    data = EncodedImageData(str(tmp_path))
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    module.trainer, trainer.datamodule = trainer, data  # type: ignore[attr-defined]
    said = "the shards of EncodedImageData hold latents only; train with ImageCaptionData"
    with pytest.raises(ModelError, match=said):
        module.setup("fit")
