"""FLUX.2 klein and dev: latents of 2 x 2 pixels in their channels, normalised by the autoencoder's own statistics.

Legend: B batch, C channels, H and W latent height and width, N image tokens, T text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.families import packed_latents
from lightning_aigc.diffusion.families.family import Components, StepMemory
from lightning_aigc.diffusion.families.tokens import check_divides, sources_of
from lightning_aigc.diffusion.families.transformer_control import ConditionEncoder
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily
from lightning_aigc.errors import ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_REFERENCES = 10
"""Images that an edit starts from; the pipelines take any number, and each adds its tokens to every step."""
TIME_STEP = 10
"""Distance of two references on the positions' first axis, on which the noisy image is at 0."""
MANY_STEPS = 200
"""Steps of sampling for which the pipeline's formula gives the training's shift. It shifts a sampling in few steps
further, against the error of large steps, which training does not make; at 200 steps it is the line through the
scheduler's own `base_shift` and `max_shift`."""


def flux2_velocity(
    self: Any,
    denoiser: nn.Module,
    noisy_BCHW: Tensor,
    timesteps_B: Tensor,
    condition: Mapping[str, Tensor],
    guidance: float = 1.0,
    residuals: Mapping[str, Any] | None = None,
) -> Tensor:
    """The velocity [B, C, H, W]; tokens of references follow the noisy ones, at times of their own."""
    dtype, device = weights_dtype(denoiser), noisy_BCHW.device
    height, width = noisy_BCHW.shape[-2:]
    embeddings_BTD = condition["prompt_embeds"].to(dtype)
    has_guidance = denoiser.config.guidance_embeds  # type: ignore[union-attr]
    tokens, ids = [noisy_BCHW.flatten(2)], [positions(height, width, 1, device)]
    for number, source in enumerate(sources_of(condition), start=1):
        tokens.append(source.flatten(2))
        rows, columns = source.shape[-2:]
        ids.append(positions(rows, columns, 1, device, time=TIME_STEP * number))
    velocity_BNC: Tensor = denoiser(
        hidden_states=torch.cat(tokens, dim=2).transpose(1, 2).to(dtype),
        timestep=timesteps_B / 1000,
        guidance=torch.full_like(timesteps_B, guidance) if has_guidance else None,
        encoder_hidden_states=embeddings_BTD,
        txt_ids=positions(1, 1, embeddings_BTD.shape[1], device).expand(len(embeddings_BTD), -1, -1),
        img_ids=torch.cat(ids).expand(len(embeddings_BTD), -1, -1),
        return_dict=False,
    )[0]
    return velocity_BNC[:, : height * width].transpose(1, 2).reshape(noisy_BCHW.shape)


def reference_arguments(
    self: Any,
    pipeline: Any,
    components: Components,
    images: Sequence[Sequence[Image]],
    latents: Sequence[Tensor],
    size: tuple[int, int],
) -> dict[str, Any]:
    """The pipeline's argument for the references of one image, which it encodes without autocast."""
    pipeline.vae = ConditionEncoder(components.vae, components.vae.dtype)
    return {"image": list(images[0])}


def normalized(self: Any, vae: Any, latents_BCHW: Tensor) -> Tensor:
    """Latents of 2 x 2 pixels in the channels, normalised by the autoencoder's statistics."""
    check_divides(2, self.pixels_per_latent(vae), *latents_BCHW.shape[-2:])
    batch, channels, height, width = latents_BCHW.shape
    patches = latents_BCHW.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    mean, std = statistics(vae, latents_BCHW)
    return (patches.reshape(batch, channels * 4, height // 2, width // 2) - mean) / std


def statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of 2 x 2 pixels, [1, 4C, 1, 1]."""
    mean: Tensor = vae.bn.running_mean.view(1, -1, 1, 1).to(like)
    variance: Tensor = vae.bn.running_var.view(1, -1, 1, 1)
    return mean, torch.sqrt(variance + float(vae.config.batch_norm_eps)).to(like)


def mu_of_many_steps(self: Any, config: Mapping[str, Any], tokens: int) -> float:
    """The exponent of the training's shift for an image of this many tokens."""
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    return float(compute_empirical_mu(tokens, MANY_STEPS))


def positions(height: int, width: int, layers: int, device: torch.device, time: int = 0) -> Tensor:
    """Time, row, column and layer of each token, int64 [height x width x layers, 4]."""
    axes = [torch.arange(size, device=device) for size in (height, width, layers)]
    return torch.cartesian_prod(torch.full((1,), time, device=device), *axes)


def encode_hidden_states(self: Any, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
    """The hidden states of the text encoder's three layers, from the pipeline."""
    return {"prompt_embeds": pipeline.encode_prompt(prompts, device=device)[0]}


def size_step(self: Any, denoiser: Any, vae: Any) -> int:
    """Pixels that each side of an image must be a multiple of."""
    return int(2 * self.pixels_per_latent(vae))


def patch_size(self: Any, denoiser: Any) -> int:
    """Scaled latent pixels per side of a token; scaled latents hold 2 x 2 pixels in their channels."""
    return 1


class Flux2Klein(TransformerFamily):
    """Hidden states of three layers of Qwen3, 512 tokens for every caption."""

    name = "flux2"
    title = "FLUX.2 klein"
    base = "black-forest-labs/FLUX.2-klein-base-4B"
    name_pattern = r"^(?!.*(qwen.?image|(?<![a-z])z.?image)).*klein"
    header_patterns: ClassVar[Mapping[str, str]] = {"flux2": r"flux2(?!dev)"}
    shipped_config = "flux2_klein_lora.yaml"
    step_memory = StepMemory("FLUX.2 klein 4B", {None: 9.5, "int8": 6.1, "nf4": 4.3}, tokens=4000)
    pipeline = "Flux2KleinPipeline"
    folders = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention": (
            "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
            "attn.add_v_proj", "attn.to_add_out", "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
            "single_transformer_blocks.*.attn.to_out",
        ),
        "feed_forward": ("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
    }  # fmt: skip
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        f"double_blocks.{{}}.{original}": tuple(f"transformer_blocks.{{}}.{layer}" for layer in layers)
        for original, layers in {
            "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "img_attn.proj": ("attn.to_out.0",),
            "txt_attn.proj": ("attn.to_add_out",),
            "img_mlp.0": ("ff.linear_in",),
            "img_mlp.2": ("ff.linear_out",),
            "txt_mlp.0": ("ff_context.linear_in",),
            "txt_mlp.2": ("ff_context.linear_out",),
        }.items()
    } | {
        "single_blocks.{}.linear1": ("single_transformer_blocks.{}.attn.to_qkv_mlp_proj",),
        "single_blocks.{}.linear2": ("single_transformer_blocks.{}.attn.to_out",),
    }
    original_names: ClassVar[Mapping[str, str]] = {
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
        "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
        "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
        "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
        "single_stream_modulation.linear": "single_stream_modulation.lin",
        "transformer_blocks.{}.attn.norm_q.weight": "double_blocks.{}.img_attn.norm.query_norm.scale",
        "transformer_blocks.{}.attn.norm_k.weight": "double_blocks.{}.img_attn.norm.key_norm.scale",
        "transformer_blocks.{}.attn.norm_added_q.weight": "double_blocks.{}.txt_attn.norm.query_norm.scale",
        "transformer_blocks.{}.attn.norm_added_k.weight": "double_blocks.{}.txt_attn.norm.key_norm.scale",
        "single_transformer_blocks.{}.attn.norm_q.weight": "single_blocks.{}.norm.query_norm.scale",
        "single_transformer_blocks.{}.attn.norm_k.weight": "single_blocks.{}.norm.key_norm.scale",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
    }
    swapped_halves: ClassVar[tuple[str, ...]] = ("norm_out.linear",)
    widening: ClassVar[Mapping[str, int]] = {"linear_in": 6, "attn.to_qkv_mlp_proj": 9}
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = frozenset({(3072, 5), (4096, 8)})
    caption_tokens: ClassVar[Mapping[str, int]] = {"tokenizer": 512}
    modelspec = "flux-2-klein"
    max_sources = MOST_REFERENCES
    smallest_source = 64
    edit_pipeline = "Flux2KleinPipeline"
    edits_in_batches = False
    distilled_name = r"(?i)klein-\d+b"  # the models to train on are named klein-base-4B
    draws_latents = False

    encode_with = encode_hidden_states
    scale = normalized
    velocity = flux2_velocity
    source_arguments = reference_arguments
    channels_read = packed_latents.channels_read
    size_step = size_step
    patch_size = patch_size
    mu = mu_of_many_steps

    def unscale(self, vae: Any, sampled: Tensor, height: int, width: int) -> Tensor:
        return sampled  # by the pipeline

    def is_distilled(
        self, index: Mapping[str, Any], transformer: Mapping[str, Any], scheduler: Mapping[str, Any]
    ) -> bool:
        return bool(index.get("is_distilled"))


class Flux2Dev(TransformerFamily):
    """Hidden states of three layers of Mistral, 512 tokens for every caption; its guidance is an input."""

    name = "flux2_dev"
    title = "FLUX.2 dev"
    base = "black-forest-labs/FLUX.2-dev"
    name_pattern = r"^(?!.*klein).*flux.?2.?dev"
    header_patterns: ClassVar[Mapping[str, str]] = {"flux2_dev": r"flux2dev"}
    shipped_config = Flux2Klein.shipped_config
    step_memory = StepMemory("FLUX.2 dev", {None: 67.2, "int8": 39.0, "nf4": 24.0}, tokens=4000)
    pipeline = "Flux2Pipeline"
    folders = Flux2Klein.folders
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = Flux2Klein.lora_layers
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = Flux2Klein.original_layers
    original_names: ClassVar[Mapping[str, str]] = Flux2Klein.original_names
    swapped_halves: ClassVar[tuple[str, ...]] = Flux2Klein.swapped_halves
    widening: ClassVar[Mapping[str, int]] = Flux2Klein.widening
    negative_prompt = None
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = frozenset({(6144, 8)})
    caption_tokens: ClassVar[Mapping[str, int]] = {"tokenizer": 460}  # 512 with the system message, of about 50
    modelspec = "flux-2-dev"
    max_sources = MOST_REFERENCES
    smallest_source = 64
    edit_pipeline = "Flux2Pipeline"
    edits_in_batches = False
    draws_latents = False

    encode_with = encode_hidden_states
    scale = normalized
    velocity = flux2_velocity
    source_arguments = reference_arguments
    channels_read = packed_latents.channels_read
    size_step = size_step
    patch_size = patch_size
    mu = mu_of_many_steps

    def sampling_arguments(
        self,
        components: Components,
        prompts: list[str],
        negative_prompts: list[str] | None,
        guidance_scale: float,
        device: torch.device,
        sources: Sequence[Sequence[Image]] | None = None,
    ) -> dict[str, Any]:
        if negative_prompts is not None:
            raise ModelError(f"{self.title} is told its guidance and takes no negative prompt; leave it out")
        return super().sampling_arguments(components, prompts, None, guidance_scale, device)

    def unscale(self, vae: Any, sampled: Tensor, height: int, width: int) -> Tensor:
        patches = sampled.transpose(1, 2).reshape(len(sampled), -1, height // 2, width // 2)
        mean, std = statistics(vae, patches)
        pixels = (patches * std + mean).reshape(len(sampled), -1, 2, 2, height // 2, width // 2)
        return pixels.permute(0, 1, 4, 2, 5, 3).reshape(len(sampled), -1, height, width)
