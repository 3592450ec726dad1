"""Reimplementation of diffusers' examples/controlnet/train_controlnet.py loop, the baseline of controlnet/step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from diffusers import ControlNetModel, DDPMScheduler, StableDiffusionPipeline
from diffusers.optimization import get_scheduler
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms
from tqdm import tqdm

from benchmarks.common.diffusers_loop import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    SEED_OF_STEPS,
    SameBatches,
    TokenizedPictures,
    collate,
)
from lightning_aigc.data import ImageCaptionData

HINT_CHANNELS = (16, 32, 96)
"""Channels for the embedded autoencoder's downsampling factor 4; the script's (16, 32, 96, 256) are for factor 8."""


class PicturesAndConditions(TokenizedPictures):
    """Items decoded with their condition, resized, cropped and tokenized on access, as in the script."""

    def __init__(self, items: list[tuple[Path, str]], conditions: Path, tokenizer: Any, resolution: int) -> None:
        super().__init__(items, tokenizer, resolution)
        self.conditions = conditions
        self.condition_transform = transforms.Compose(
            [
                transforms.Resize(resolution, interpolation=transforms.InterpolationMode.LANCZOS),
                transforms.CenterCrop(resolution),
                transforms.ToTensor(),
            ]
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        condition = Image.open(self.conditions / self.items[index][0].name).convert("RGB")
        return super().__getitem__(index) | {"conditioning": self.condition_transform(condition)}


def controlnet_steps(data: ImageCaptionData, conditions: Path, folder: Path, model: Path) -> Iterator[float]:
    """The script's loop as a generator: each `next` runs one step and yields its loss."""
    accelerator = Accelerator(
        mixed_precision="no",
        cpu=True,
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs")),
    )
    pipeline = StableDiffusionPipeline.from_pretrained(str(model), safety_checker=None)
    schedule = DDPMScheduler.from_config(pipeline.scheduler.config)
    unet, vae, text_encoder = pipeline.unet, pipeline.vae, pipeline.text_encoder
    for module in (unet, vae, text_encoder):
        module.requires_grad_(False)
    torch.manual_seed(0)
    controlnet: Any = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=HINT_CHANNELS)
    controlnet.train()
    optimizer = torch.optim.AdamW(controlnet.parameters(), lr=LEARNING_RATE, weight_decay=1e-2, eps=1e-8)
    index = data.index()
    items = [(Path(sample.path), sample.caption) for sample in index.samples]
    loader: Any = DataLoader(
        PicturesAndConditions(items, conditions, pipeline.tokenizer, index.samples[0].placement.width),
        batch_sampler=SameBatches(data._make_sampler(index, 0, 1)),
        collate_fn=collate,
        num_workers=0,
    )
    lr_schedule = get_scheduler("constant", optimizer=optimizer)
    controlnet, optimizer, loader, lr_schedule = accelerator.prepare(controlnet, optimizer, loader, lr_schedule)
    accelerator.init_trackers("train_controlnet")
    bar = tqdm(desc="Steps", disable=not accelerator.is_local_main_process)
    global_step = 0
    while True:
        for batch in loader:
            torch.manual_seed(SEED_OF_STEPS + global_step)
            with accelerator.accumulate(controlnet):
                latents = vae.encode(batch["pixel_values"]).latent_dist.sample() * vae.config.scaling_factor
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, schedule.config.num_train_timesteps, (len(latents),))
                noisy = schedule.add_noise(latents.float(), noise.float(), timesteps)
                hidden = text_encoder(batch["input_ids"], return_dict=False)[0]
                down, middle = controlnet(
                    noisy, timesteps, hidden, controlnet_cond=batch["conditioning"], return_dict=False
                )
                predicted = unet(
                    noisy,
                    timesteps,
                    hidden,
                    down_block_additional_residuals=list(down),
                    mid_block_additional_residual=middle,
                    return_dict=False,
                )[0]
                loss = F.mse_loss(predicted.float(), noise.float(), reduction="mean")
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(controlnet.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                lr_schedule.step()
                optimizer.zero_grad(set_to_none=True)
            if accelerator.sync_gradients:
                bar.update(1)
                global_step += 1
            logs = {"loss": loss.detach().item(), "lr": lr_schedule.get_last_lr()[0]}
            bar.set_postfix(**logs)
            accelerator.log(logs, step=global_step)
            yield loss.item()
