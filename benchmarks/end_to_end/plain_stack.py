"""The plain stack of article_table.py: diffusers' training loop under torch's DDP, as in its scripts.

The text-to-image loop with its options for min-SNR, prior preservation (from DreamBooth's script) and EMA, so that the
objective equals ours. Images are decoded, and encoded by the VAE and the text encoder, in every step; the rate follows
a fixed schedule; torch.save writes the complete state every N steps while the training waits.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers import DDPMScheduler, StableDiffusionPipeline
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.common.diffusers_loop import SameBatches, TokenizedPictures, collate
from benchmarks.end_to_end.article_jobs import EMA_DECAY, MAX_GRAD_NORM, SNR_GAMMA, WARMUP_STEPS, Job, brand_pictures
from benchmarks.end_to_end.article_meter import Meter, Scorer, kept_by_a_step_mib
from lightning_aigc.diffusion.families import FAMILIES, Components
from lightning_aigc.embedded import resolve


class WithPrior(TokenizedPictures):
    """Tokenized images with a flag for class images."""

    def __init__(self, samples: Any, tokenizer: Any, resolution: int) -> None:
        super().__init__([(Path(sample.path), sample.caption) for sample in samples], tokenizer, resolution)
        self.is_prior = [bool(sample.is_prior) for sample in samples]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"is_prior": torch.tensor(self.is_prior[index])}


def make_loader(job: Job, seed: int, folder: Path, tokenizer: Any) -> Any:
    """A plain DataLoader with the batches that our loader gives this rank."""
    data = brand_pictures(job, seed, folder, is_cached=False)
    index = data.index()
    sampler = data._make_sampler(index, dist.get_rank(), dist.get_world_size())
    pictures = WithPrior(index.samples, tokenizer, index.samples[0].placement.width)
    return DataLoader(pictures, batch_sampler=SameBatches(sampler), collate_fn=collate, num_workers=0)


def run_plain(job: Job, seed: int, folder: Path, meter: Meter, scorer: Scorer) -> dict[str, Any]:
    """Train to the last step. Returns: figures that the meter does not measure."""
    pipeline = StableDiffusionPipeline.from_pretrained(str(resolve("embedded:sd")), safety_checker=None)
    schedule = DDPMScheduler.from_config(pipeline.scheduler.config)
    unet, vae, text_encoder, tokenizer = pipeline.unet, pipeline.vae, pipeline.text_encoder, pipeline.tokenizer
    for module in (unet, vae, text_encoder):
        module.requires_grad_(False)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if job.is_full:
        unet.requires_grad_(True)
    else:
        unet.add_adapter(job.lora())
    trained = [p for p in unet.parameters() if p.requires_grad]
    loader = make_loader(job, seed, folder, tokenizer)
    torch.manual_seed(seed + dist.get_rank())  # noise and timesteps differ per rank
    ddp = DistributedDataParallel(unet)
    optimizer = torch.optim.AdamW(trained, lr=job.learning_rate, weight_decay=1e-2)
    lr_schedule = get_scheduler("cosine", optimizer, num_warmup_steps=WARMUP_STEPS, num_training_steps=job.steps)
    ema = EMAModel(trained, decay=EMA_DECAY, use_ema_warmup=True, power=3 / 4)
    parts = Components(
        FAMILIES["sd"], unet, vae, (text_encoder,), (tokenizer,), pipeline.scheduler.config, "embedded:sd"
    )

    @contextlib.contextmanager
    def averaged() -> Iterator[None]:
        ema.store(trained)
        ema.copy_to(trained)
        yield
        ema.restore(trained)

    unet.train()
    batches = endless(loader)
    meter.note_start()
    for step in range(1, job.steps + 1):
        batch = next(batches)
        loss = diffusion_loss(ddp, vae, text_encoder, schedule, batch)
        gathered = [torch.empty(()) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, loss.detach())  # the script logs the mean of all ranks' losses
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        lr_schedule.step()
        optimizer.zero_grad()
        ema.step(trained)
        if step % job.snapshot_steps == 0 and dist.get_rank() == 0:
            save(folder / f"checkpoint-{step}", unet, optimizer, lr_schedule, ema, step)
        if scorer.is_due(step):
            scorer.score(step, parts, schedule.config, averaged)
    meter.pause()
    kept = kept_by_a_step_mib(unet, job.batch + job.batch // 2, tokenizer.model_max_length)
    return {"kept_mib": round(kept, 2), "trained": sum(p.numel() for p in trained), "done": job.steps}


def diffusion_loss(ddp: nn.Module, vae: Any, text_encoder: Any, schedule: Any, batch: dict[str, Tensor]) -> Tensor:
    """Min-SNR-weighted loss of one batch: mean over the brand images plus mean over the class images."""
    with torch.no_grad():
        latents = vae.encode(batch["pixel_values"]).latent_dist.sample() * vae.config.scaling_factor
        hidden = text_encoder(batch["input_ids"], return_dict=False)[0]
    noise = torch.randn_like(latents)
    timesteps = torch.randint(0, schedule.config.num_train_timesteps, (len(latents),))
    noisy = schedule.add_noise(latents, noise, timesteps)
    predicted = ddp(noisy, timesteps, hidden, return_dict=False)[0]
    is_velocity = schedule.config.prediction_type == "v_prediction"
    target = schedule.get_velocity(latents, noise, timesteps) if is_velocity else noise
    snr = compute_snr(schedule, timesteps)
    weights = snr.clamp(max=SNR_GAMMA) / (snr + 1 if is_velocity else snr)
    losses = F.mse_loss(predicted.float(), target.float(), reduction="none").mean((1, 2, 3)) * weights
    is_prior = batch["is_prior"]
    loss: Tensor = losses[~is_prior].mean() + losses[is_prior].mean()
    return loss


def endless(loader: Any) -> Iterator[dict[str, Tensor]]:
    while True:
        yield from loader


def save(folder: Path, unet: nn.Module, optimizer: Any, lr_schedule: Any, ema: EMAModel, step: int) -> None:
    """Save the same state as accelerate's save_state: trained weights, optimizer, schedule, average, RNG states."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = {name: p for name, p in unet.named_parameters() if p.requires_grad}
    torch.save(trained, folder / "model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(lr_schedule.state_dict(), folder / "scheduler.bin")
    torch.save(ema.state_dict(), folder / "ema.bin")
    states = {"step": step, "torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    torch.save(states, folder / "random_states_0.pkl")
