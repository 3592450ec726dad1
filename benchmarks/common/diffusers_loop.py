"""Reimplementation of diffusers' text-to-image LoRA training loop, the baseline of lora_step.py and step_memory.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from diffusers import DDPMScheduler, StableDiffusionPipeline
from diffusers.optimization import get_scheduler
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from tqdm import tqdm

from lightning_aigc.data import ImageCaptionData

LEARNING_RATE, MAX_GRAD_NORM, RANK = 1e-4, 1.0, 16
SEED_OF_STEPS = 1000


class TokenizedPictures(Dataset[dict[str, Any]]):
    """Items decoded, resized, cropped, scaled and tokenized on access, as in diffusers' script."""

    def __init__(self, items: list[tuple[Path, str]], tokenizer: Any, resolution: int) -> None:
        self.items, self.tokenizer = items, tokenizer
        self.transform = transforms.Compose(
            [
                transforms.Resize(resolution, interpolation=transforms.InterpolationMode.LANCZOS),
                transforms.CenterCrop(resolution),
                transforms.ToTensor(),
                transforms.Normalize([0.5], [0.5]),
            ]
        )

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, caption = self.items[index]
        tokens = self.tokenizer(
            caption,
            max_length=self.tokenizer.model_max_length,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        return {"pixel_values": self.transform(Image.open(path).convert("RGB")), "input_ids": tokens.input_ids[0]}


class SameBatches:
    """Batches of ImageCaptionData's sampler, epoch after epoch, for a plain DataLoader."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.epoch = sampler, 0
        self.batch_size, self.drop_last = sampler.batch_size, False

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        plans = list(self.sampler.plans(self.epoch))
        self.epoch += 1
        for plan in plans:
            yield list(plan.samples)


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.stack([item[name] for item in items]).contiguous() for name in items[0]}


def plain_loader(data: ImageCaptionData, tokenizer: Any) -> Any:
    """A plain DataLoader with the same batches as `data`."""
    index = data.index()
    items = [(Path(sample.path), sample.caption) for sample in index.samples]
    resolution = index.samples[0].placement.width
    return DataLoader(
        TokenizedPictures(items, tokenizer, resolution),
        batch_sampler=SameBatches(data._make_sampler(index, 0, 1)),
        collate_fn=collate,
        num_workers=0,
    )


def diffusers_steps(
    data: ImageCaptionData, folder: Path, precision: str, model: Path, rank: int = RANK, device: str = "cpu"
) -> Iterator[float]:
    """diffusers' loop as a generator: each `next` runs one step and yields its loss."""
    accelerator = Accelerator(
        mixed_precision="bf16" if precision.startswith("bf16") else "no",
        cpu=device == "cpu",
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs")),
    )
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    pipeline = StableDiffusionPipeline.from_pretrained(str(model), safety_checker=None)
    schedule = DDPMScheduler.from_config(pipeline.scheduler.config)
    unet, vae, text_encoder = pipeline.unet, pipeline.vae, pipeline.text_encoder
    for module in (unet, vae, text_encoder):
        module.requires_grad_(False)
        module.to(accelerator.device, dtype=dtype)
    torch.manual_seed(0)
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    unet.add_adapter(peft.LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=targets))
    trained = [p for p in unet.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
    loader = plain_loader(data, pipeline.tokenizer)
    lr_schedule = get_scheduler("constant", optimizer=optimizer)
    unet, optimizer, loader, lr_schedule = accelerator.prepare(unet, optimizer, loader, lr_schedule)
    accelerator.init_trackers("text2image-fine-tune")
    bar = tqdm(desc="Steps", disable=not accelerator.is_local_main_process)
    global_step = 0
    while True:
        unet.train()
        train_loss = 0.0
        for batch in loader:
            torch.manual_seed(SEED_OF_STEPS + global_step)
            with accelerator.accumulate(unet):
                latents = vae.encode(batch["pixel_values"].to(dtype=dtype)).latent_dist.sample()
                latents = latents * vae.config.scaling_factor
                noise = torch.randn_like(latents)
                timesteps = torch.randint(
                    0, schedule.config.num_train_timesteps, (len(latents),), device=latents.device
                )
                noisy = schedule.add_noise(latents, noise, timesteps.long())
                hidden = text_encoder(batch["input_ids"], return_dict=False)[0]
                predicted = unet(noisy, timesteps, hidden, return_dict=False)[0]
                loss = F.mse_loss(predicted.float(), noise.float(), reduction="mean")
                train_loss += accelerator.gather(loss.repeat(len(latents))).mean().item()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, MAX_GRAD_NORM)
                optimizer.step()
                lr_schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                bar.update(1)
                global_step += 1
                accelerator.log({"train_loss": train_loss}, step=global_step)
                train_loss = 0.0
            bar.set_postfix(step_loss=loss.detach().item(), lr=lr_schedule.get_last_lr()[0])
            yield loss.item()
