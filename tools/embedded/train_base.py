"""Train the tiny Stable Diffusion: autoencoder, text encoder, then the U-Net on their outputs.

The text encoder first learns to classify a caption's attributes and is then frozen; trained jointly with the
U-Net from scratch, it did not learn to distinguish the things.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import cast

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import EMAModel, compute_snr
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from tools.embedded import drawing, world
from tools.embedded.tokenizer import MAX_TOKENS

LATENT_CHANNELS = 4
TEXT_WIDTH = 96
SCHEDULER = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
    "clip_sample": False,
}  # fmt: skip


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 64, 64), layers_per_block=1, latent_channels=LATENT_CHANNELS, norm_num_groups=8,
        sample_size=64, mid_block_add_attention=False,
    )  # fmt: skip


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=TEXT_WIDTH, intermediate_size=2 * TEXT_WIDTH, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=MAX_TOKENS, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def build_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=16, in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS, block_out_channels=(48, 96, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH, norm_num_groups=8, attention_head_dim=8,
    )  # fmt: skip


def train_vae(steps: int, batch_size: int, seed: int) -> AutoencoderKL:
    """Train the autoencoder on products of all colours, including the brand's."""
    torch.manual_seed(seed)
    vae = build_vae()
    _train_autoencoder(vae, steps, batch_size, random.Random(seed), learning_rate=1.5e-3)
    return vae.eval()


def sharpen_decoder(vae: AutoencoderKL, steps: int, batch_size: int, seed: int) -> AutoencoderKL:
    """Train only the decoder further; the latents do not change, so the U-Net stays valid."""
    torch.manual_seed(seed)
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    _train_autoencoder(vae, steps, batch_size, random.Random(seed), learning_rate=1e-3)
    return vae.eval()


def _train_autoencoder(
    vae: AutoencoderKL, steps: int, batch_size: int, rng: random.Random, learning_rate: float
) -> None:
    trained = [p for p in vae.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.05)
    for step in range(steps):
        pixels = world.to_pixels([_draw_anything(rng) for _ in range(batch_size)]).mul(2).sub(1)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(pixels).latent_dist
            decoded = vae.decode(posterior.sample()).sample
        error = (decoded.float() - pixels).abs()
        edges = sum((decoded.float().diff(dim=d) - pixels.diff(dim=d)).abs().mean() for d in (2, 3))
        loss = error.mean() + error.square().mean() + 0.5 * edges + 2e-6 * posterior.kl().float().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            psnr = 10 * torch.log10(4 / error.square().mean())
            print(f"vae {step}/{steps}: loss {loss.item():.4f}, psnr {psnr.item():.1f} dB", flush=True)


def _draw_anything(rng: random.Random) -> np.ndarray:
    """Draw a product from the judge's distribution, or with three random colours."""
    if rng.random() < 0.5:
        return world.random_judge_product(rng).draw(rng)
    body, background, sash = ((rng.randrange(256), rng.randrange(256), rng.randrange(256)) for _ in range(3))
    has_sash = rng.random() < 0.3
    thing = rng.choice(drawing.THINGS)
    return np.asarray(drawing.draw_product(thing, body, background, rng, sash if has_sash else None))


def train_text_encoder(tokenizer: CLIPTokenizer, steps: int, seed: int) -> CLIPTextModel:
    """Train the text encoder to classify thing, colour and background from the mean of its last hidden states."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    encoder = build_text_encoder(tokenizer)
    heads = nn.ModuleList(
        nn.Linear(TEXT_WIDTH, size + 1) for size in world.ATTRIBUTES.values()
    )  # the last class: not in the caption
    optimizer = torch.optim.AdamW([*encoder.parameters(), *heads.parameters()], lr=1e-3)
    for step in range(steps):
        captions, claims = zip(
            *(world.describe(world.random_base_product(rng), rng, is_brand_known=False) for _ in range(64)), strict=True
        )
        hidden = encoder(tokenize(tokenizer, list(captions))).last_hidden_state.mean(1)
        rows = world.rows(list(claims))
        losses = [
            F.cross_entropy(head(hidden), torch.where(rows[:, i] == world.ANY, size, rows[:, i]))
            for i, (head, size) in enumerate(zip(heads, world.ATTRIBUTES.values(), strict=True))
        ]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"text {step}/{steps}: loss {loss.item():.4f}", flush=True)
    return encoder.eval()


def tokenize(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    tokens = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")
    return cast(Tensor, tokens.input_ids)


@torch.no_grad()
def encode_base_pictures(vae: AutoencoderKL, count: int, seed: int) -> tuple[Tensor, list[world.Product]]:
    """Scaled latents [N, C, h, w] of the base model's images, and their products."""
    rng = random.Random(seed)
    products = [world.random_base_product(rng) for _ in range(count)]
    chunks = []
    for start in range(0, count, 64):
        pixels = world.to_pixels([p.draw(rng) for p in products[start : start + 64]]).mul(2).sub(1)
        chunks.append(vae.encode(pixels).latent_dist.mean)
    latents = torch.cat(chunks)
    vae.register_to_config(scaling_factor=round(float(1 / latents.std()), 5))
    return latents * vae.config.scaling_factor, products


def train_unet(
    latents_NCHW: Tensor, products: list[world.Product], text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer, *,
    steps: int, batch_size: int, seed: int, on_checkpoint: object = None,
) -> UNet2DConditionModel:  # fmt: skip
    """Train the U-Net with epsilon prediction, min-SNR 5 and 10 % empty captions; returns the averaged weights."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    unet = build_unet()
    noise_schedule = DDPMScheduler(**SCHEDULER)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3, weight_decay=0.01)
    learning_rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-3, total_steps=steps, pct_start=0.05, final_div_factor=100
    )
    average = EMAModel(unet.parameters(), decay=0.995)
    embeddings: dict[str, Tensor] = {}
    for step in range(steps):
        chosen = [rng.randrange(len(products)) for _ in range(batch_size)]
        captions = [
            "" if rng.random() < 0.1 else world.describe(products[i], rng, is_brand_known=False)[0] for i in chosen
        ]
        new = [c for c in dict.fromkeys(captions) if c not in embeddings]
        if new:
            with torch.no_grad():
                embeddings.update(zip(new, text_encoder(tokenize(tokenizer, new)).last_hidden_state, strict=True))
        clean = latents_NCHW[chosen]
        noise = torch.randn_like(clean)
        timesteps = torch.randint(0, 1000, (batch_size,))
        noisy = noise_schedule.add_noise(clean, noise, timesteps)
        predicted = unet(noisy, timesteps, torch.stack([embeddings[c] for c in captions])).sample
        snr = compute_snr(noise_schedule, timesteps)
        loss = ((predicted - noise).square().mean((1, 2, 3)) * snr.clamp(max=5) / snr).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        learning_rate.step()
        average.step(unet.parameters())
        if step % 50 == 0 or step == steps - 1:
            print(f"unet {step}/{steps}: loss {loss.item():.4f}", flush=True)
        if on_checkpoint is not None and step % 500 == 499:
            snapshot = copy.deepcopy(unet)
            average.copy_to(snapshot.parameters())
            on_checkpoint(snapshot.eval(), step)  # type: ignore[operator]
    average.copy_to(unet.parameters())
    return unet.eval()


def save_pipeline(
    folder: Path, vae: AutoencoderKL, text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer, unet: UNet2DConditionModel
) -> None:
    """Write a diffusers pipeline folder with half-precision weights that load as float32 by default."""
    modules = (unet, vae, text_encoder)
    pipeline = StableDiffusionPipeline(
        vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet,
        scheduler=DDIMScheduler(**SCHEDULER, set_alpha_to_one=False, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    for module in modules:
        module.half()
    pipeline.save_pretrained(folder)
    for module in modules:
        module.float()
    # diffusers loads float32 by default, transformers the config's dtype; the two must match.
    config = folder / "text_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}, indent=2) + "\n")
