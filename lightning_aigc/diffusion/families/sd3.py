"""Stable Diffusion 3 and 3.5: a transformer over text and image tokens together (MMDiT).

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.families.family import Components, StepMemory
from lightning_aigc.diffusion.families.tokens import sources_of
from lightning_aigc.diffusion.families.transformer_control import TransformerControl
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

T5_TOKENS = 256
"""T5 tokens in the pipeline; zeros where there is no T5."""


class StableDiffusion3Control(TransformerControl):
    """ControlNet with InstantX's two differences: unshifted latents and no pooled text."""

    def residuals(
        self,
        components: Components,
        controlnet: Any,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        hint: Tensor,
        batch: Mapping[str, Any],
        guidance: float = 1.0,
    ) -> dict[str, Any]:
        if _is_instantx(controlnet):
            condition = {**condition, "pooled_prompt_embeds": torch.zeros_like(condition["pooled_prompt_embeds"])}
        made = super().residuals(components, controlnet, noisy_BCHW, timesteps_B, condition, hint, batch, guidance)
        return {"block_controlnet_hidden_states": made["controlnet_block_samples"]}

    def condition_latents(
        self, components: Components, controlnet: Any, moments_B2CHW: Tensor, draw: Callable[[Tensor], Tensor]
    ) -> Tensor:
        latents_BCHW = super().condition_latents(components, controlnet, moments_B2CHW, draw)
        if _is_instantx(controlnet):
            config = components.vae.config
            return latents_BCHW + float(config.shift_factor) * float(config.scaling_factor)
        return latents_BCHW

    def control_counts(self, blocks: int) -> list[int]:
        return list(range(1, blocks // 2 + 1))  # the last block takes no residual, so a larger depth has an unread one


class StableDiffusion3(TransformerFamily):
    """Two CLIP encoders and, where the folder has it, T5; without it its tokens are zeros, as in diffusers."""

    name = "sd3"
    title = "Stable Diffusion 3"
    base = "stabilityai/stable-diffusion-3.5-medium"
    name_pattern = r"^(?!.*(qwen.?image|(?<![a-z])z.?image|klein|flux)).*(stable.?diffusion.?v?3|(?<![a-z])sd.?3)"
    header_patterns: ClassVar[Mapping[str, str]] = {"sd3": r"sd3|stablediffusion3"}
    pipeline = "StableDiffusion3Pipeline"
    folders = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
    optional_folders = ("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor")
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention": (
            "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
            "attn.add_v_proj", "attn.to_add_out", "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0",
        ),
        "feed_forward": ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    }  # fmt: skip
    control = StableDiffusion3Control(
        "SD3ControlNetModel",
        "StableDiffusion3ControlNetPipeline",
        layers={"num_layers": 12},
        path=("pos_embed_input", "controlnet_blocks"),
        # False: the pipeline shifts the condition's latents and passes the pooled text, as diffusers' script trains.
        config={"force_zeros_for_pooled_projection": False},
    )
    shipped_config = "sd3_lora.yaml"
    step_memory = StepMemory("SD 3.5 medium", {None: 6.0, "int8": 4.1, "nf4": 3.0}, off_gib=13.8, tokens=2200)
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = frozenset({(1536, 24), (2432, 38)})
    caption_tokens: ClassVar[Mapping[str, int]] = {"tokenizer": 75, "tokenizer_3": 255}
    modelspec = "stable-diffusion-3"
    max_sources = 1

    def make_pipeline(self, components: Components, scheduler: Any, controlnet: Any = None) -> Any:
        pipeline = super().make_pipeline(components, scheduler, controlnet)
        if components.denoiser is None and pipeline.text_encoder_3 is None:
            # The pipeline asks the transformer how wide T5's zeros are.
            from diffusers import SD3Transformer2DModel

            config = SD3Transformer2DModel.load_config(str(resolve(components.source)), subfolder="transformer")
            pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**config))
        return pipeline

    def prepare(self, network: nn.Module, components: Components) -> None:
        clip, *others = components.tokenizers
        if len(others) < 2:  # there is no T5
            from lightning_aigc.precision.blocks.equal_tokens import run_equal_tokens_once

            run_equal_tokens_once(network, int(clip.model_max_length), T5_TOKENS)

    def encode_with(self, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        embeddings, _, pooled, _ = pipeline.encode_prompt(
            prompts, None, None, device=device, do_classifier_free_guidance=False
        )
        return {"prompt_embeds": embeddings, "pooled_prompt_embeds": pooled}

    def inputs(
        self,
        network: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float,
    ) -> dict[str, Any]:
        dtype = weights_dtype(network)
        return {
            "hidden_states": noisy_BCHW.to(dtype),
            "timestep": timesteps_B,
            "encoder_hidden_states": condition["prompt_embeds"].to(dtype),
            "pooled_projections": condition["pooled_prompt_embeds"].to(dtype),
        }

    def velocity(
        self,
        denoiser: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float = 1.0,
        residuals: Mapping[str, Any] | None = None,
    ) -> Tensor:
        inputs = self.inputs(denoiser, noisy_BCHW, timesteps_B, condition, guidance)
        given = {**inputs, **(residuals or {}), "return_dict": False}
        sources = sources_of(condition)
        answer: Tensor = call_with_source(denoiser, sources[0], given)[0] if sources else denoiser(**given)[0]
        return answer

    def source_arguments(
        self,
        pipeline: Any,
        components: Components,
        images: Sequence[Sequence[Image]],
        latents: Sequence[Tensor],
        size: tuple[int, int],
    ) -> dict[str, Any]:
        pipeline.transformer = EditingTransformer(components.denoiser, latents[0])
        return {}

    def check_size(self, denoiser: Any, vae: Any, height: int, width: int) -> None:
        super().check_size(denoiser, vae, height, width)
        config, pixels_per_latent = denoiser.config, self.pixels_per_latent(vae)
        largest = int(config.pos_embed_max_size) * int(config.patch_size)
        if max(height, width) > largest:
            raise ModelError(
                f"images of {width * pixels_per_latent} x {height * pixels_per_latent} pixels are larger than this"
                f" transformer has positions for; set data.init_args.resolution and max_bucket_reso so that no side is"
                f" over {largest * pixels_per_latent}"
            )


def call_with_source(transformer: nn.Module, source_BCHW: Tensor, given: dict[str, Any]) -> Any:
    """The transformer's output for an edit: its source's tokens follow the noisy ones, at the same positions.

    The model was not trained to edit, and diffusers has no such pipeline: a LoRA learns it, and tells the source by
    being clean. At positions of their own the tokens teach less (docs/edit.md).

    Raises: ModelError for a source of another size than the image.
    """
    noisy_BCHW: Tensor = given["hidden_states"]
    if source_BCHW.shape[-2:] != noisy_BCHW.shape[-2:]:
        raise ModelError(
            "Stable Diffusion 3 edits in place: a source needs the size of its image; set data.init_args.source_fit:"
            " crop"
        )
    embedding: Any = transformer.pos_embed
    own, height = embedding.cropped_pos_embed, noisy_BCHW.shape[-2]
    embedding.cropped_pos_embed = lambda _, width: torch.cat([own(height, width)] * 2, dim=1)
    try:
        both = torch.cat([noisy_BCHW, source_BCHW.to(noisy_BCHW)], dim=-2)
        answers = transformer(**(given | {"hidden_states": both}))
    finally:
        del embedding.cropped_pos_embed
    return tuple(answer[..., :height, :] for answer in answers)


class EditingTransformer:
    """The transformer for the pipeline of an edit, with its sources.

    Args:
        transformer: The family's transformer.
        source_BCHW: Scaled latents of the sources; under guidance the pipeline's batch repeats them.
    """

    def __init__(self, transformer: Any, source_BCHW: Tensor) -> None:
        self.transformer, self.source_BCHW = transformer, source_BCHW

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transformer, name)

    def __call__(self, **given: Any) -> Any:
        repeats = len(given["hidden_states"]) // len(self.source_BCHW)
        return call_with_source(self.transformer, self.source_BCHW.repeat(repeats, 1, 1, 1), given)


def _is_instantx(controlnet: Any) -> bool:
    """Whether a ControlNet reads unshifted latents and no pooled text, as InstantX's and the pipeline's default."""
    return bool(controlnet.config.force_zeros_for_pooled_projection)
