"""Train the tiny Stable Diffusion 3: a transformer on the latents and text encoder of the tiny Stable Diffusion.

Its pipeline has the text encoder twice, each with an identity as its projection, and a T5 whose tokens are zeros.

Legend: N images, C channels, H and W latent height and width, T text tokens, D text width, P pooled width.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
)
from diffusers.training_utils import EMAModel, compute_density_for_timestep_sampling
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from tools.embedded import world
from tools.embedded.train_base import LATENT_CHANNELS, TEXT_WIDTH, encode_base_pictures
from tools.embedded.zero_t5 import add_zero_t5

WIDTH, LAYERS, HEAD = 128, 6, 32
TIMESTEPS = 1000


def build_transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS, num_layers=LAYERS,
        attention_head_dim=HEAD, num_attention_heads=WIDTH // HEAD, joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=WIDTH, pooled_projection_dim=2 * TEXT_WIDTH, pos_embed_max_size=16, qk_norm="rms_norm",
    )  # fmt: skip


def build_pipeline(base: Path, transformer: SD3Transformer2DModel) -> StableDiffusion3Pipeline:
    """A pipeline around the transformer, with the autoencoder, text encoder and tokenizer of `base`."""
    parts = StableDiffusionPipeline.from_pretrained(base, safety_checker=None, local_files_only=True)
    parts.vae.register_to_config(shift_factor=0.0)
    encoders = [_with_projection(parts.text_encoder) for _ in range(2)]
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer, vae=parts.vae, scheduler=FlowMatchEulerDiscreteScheduler(TIMESTEPS, shift=1.0),
        text_encoder=encoders[0], text_encoder_2=encoders[1], text_encoder_3=None,
        tokenizer=parts.tokenizer, tokenizer_2=parts.tokenizer, tokenizer_3=None,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _with_projection(encoder: CLIPTextModel) -> CLIPTextModelWithProjection:
    """The encoder with an identity as its projection."""
    config = CLIPTextConfig(**(encoder.config.to_dict() | {"projection_dim": encoder.config.hidden_size}))
    projected = CLIPTextModelWithProjection(config)
    weights = {f"text_model.{name.removeprefix('text_model.')}": value for name, value in encoder.state_dict().items()}
    projected.load_state_dict(weights | {"text_projection.weight": torch.eye(config.hidden_size)})
    return projected.eval()


def train_transformer(
    pipeline: StableDiffusion3Pipeline, steps: int, pictures: int, batch_size: int, seed: int
) -> None:
    """Train the pipeline's transformer by flow matching with 10 % empty captions; leaves the averaged weights."""
    vae: AutoencoderKL = pipeline.vae
    scale = float(vae.config.scaling_factor)
    latents_NCHW, products = encode_base_pictures(vae, pictures, seed=13)
    latents_NCHW *= scale / vae.config.scaling_factor
    vae.register_to_config(scaling_factor=scale)  # the shipped one, which this set of images would change a little
    rng = random.Random(seed)
    torch.manual_seed(seed)
    transformer = pipeline.transformer.train()
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.99))
    learning_rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-3, total_steps=steps, pct_start=0.05, final_div_factor=100
    )
    average = EMAModel(transformer.parameters(), decay=0.995)
    embeddings: dict[str, tuple[Tensor, Tensor]] = {}
    for step in range(steps):
        chosen = [rng.randrange(len(products)) for _ in range(batch_size)]
        captions = [
            "" if rng.random() < 0.1 else world.describe(products[i], rng, is_brand_known=False)[0] for i in chosen
        ]
        _encode(pipeline, [c for c in dict.fromkeys(captions) if c not in embeddings], embeddings)
        clean, noise = latents_NCHW[chosen], torch.randn(batch_size, *latents_NCHW.shape[1:])
        sigmas = compute_density_for_timestep_sampling("logit_normal", batch_size, 0.0, 1.0)[:, None, None, None]
        with torch.autocast("cpu", torch.bfloat16):
            velocity = transformer(
                hidden_states=(1 - sigmas) * clean + sigmas * noise,
                encoder_hidden_states=torch.stack([embeddings[c][0] for c in captions]),
                pooled_projections=torch.stack([embeddings[c][1] for c in captions]),
                timestep=sigmas.flatten() * TIMESTEPS,
                return_dict=False,
            )[0]
        loss = (velocity.float() - (noise - clean)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        learning_rate.step()
        average.step(transformer.parameters())
        if step % 50 == 0 or step == steps - 1:
            print(f"transformer {step}/{steps}: loss {loss.item():.4f}", flush=True)
    average.copy_to(transformer.parameters())
    transformer.eval()


@torch.no_grad()
def _encode(
    pipeline: StableDiffusion3Pipeline, captions: list[str], embeddings: dict[str, tuple[Tensor, Tensor]]
) -> None:
    """Add each caption's embeddings [T, D] and pooled embedding [P]."""
    if captions:
        encoded, _, pooled, _ = pipeline.encode_prompt(captions, None, None, do_classifier_free_guidance=False)
        embeddings.update(zip(captions, zip(encoded, pooled, strict=True), strict=True))


def make_sd3(base: Path, folder: Path, steps: int, pictures: int, seed: int = 23) -> None:
    """Train on the parts of the pipeline folder `base`, and write a pipeline folder of half-precision weights."""
    torch.manual_seed(seed)
    pipeline = build_pipeline(base, build_transformer())
    train_transformer(pipeline, steps, pictures, batch_size=32, seed=seed)
    modules = (pipeline.transformer, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2)
    for module in modules:
        module.half()
    pipeline.save_pretrained(folder)
    for name in ("text_encoder", "text_encoder_2"):  # transformers would load the config's dtype
        _rewrite(folder / name / "config.json", dtype="float32")
    _rewrite(folder / "vae" / "config.json", _name_or_path=None)  # where it was read from
    add_zero_t5(folder)


def _rewrite(config: Path, **values: str | None) -> None:
    """Set values of a JSON file; None takes one out."""
    kept = {
        name: value
        for name, value in (json.loads(config.read_text(encoding="utf-8")) | values).items()
        if name not in values or value
    }
    config.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
