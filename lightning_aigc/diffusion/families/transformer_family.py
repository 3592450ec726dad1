"""TransformerFamily: the questions that a family of diffusion transformers answers beside those of every family.

Legend: B batch, C channels, H and W latent height and width, N picture tokens, T text tokens, D text width.
"""

from __future__ import annotations

import fnmatch
import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from lightning_aigc.devices import float32_region
from lightning_aigc.diffusion.families.family import Family
from lightning_aigc.errors import ModelError

if TYPE_CHECKING:
    from lightning_aigc.diffusion.components import Components


class TransformerFamily(Family):
    """One family of diffusion transformers, trained by flow matching."""

    modelspec: ClassVar[str]
    """Stability AI's architecture id, for LoRA files."""
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]]
    """By LoRA target, the ends of layer names; `*` stands for anything."""
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The model's own names of layers, as sd-scripts and ComfyUI have them, with the layers of diffusers whose outputs
    each holds one after the other; `{}` is a number. Empty where files have diffusers' layout only."""
    widening: ClassVar[Mapping[str, int]] = {}
    """Ends of names of layers that have this many times as many outputs as inputs; of layers that share their original
    with others, the rest has as many."""
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = frozenset()
    """Width and number of `transformer_blocks` of the published models, where other families have these blocks too."""
    distilled_name: ClassVar[str | None] = None
    """A pattern in the names of this family's distilled models, beside the usual words."""
    negative_prompt: ClassVar[str | None] = ""
    """What guidance leads away from, unless something else is given; None where the model is told its guidance."""
    guidance_argument: ClassVar[str] = "guidance_scale"
    """The pipeline's name of the scale of its guidance."""
    base: ClassVar[str]
    """A model of this family that is not distilled, for error messages."""

    def make_pipeline(self, parts: Components, scheduler: Any, controlnet: Any = None) -> Any:
        known = sorted((*self.folders, *self.optional_folders))
        given: dict[str, Any] = {"transformer": parts.denoiser, "vae": parts.vae, "scheduler": scheduler}
        for kind, present in (("text_encoder", parts.text_encoders), ("tokenizer", parts.tokenizers)):
            names = [name for name in known if name.startswith(kind)]
            given |= dict(itertools.zip_longest(names, present))
        pipeline = getattr(diffusers, self.pipeline)(**given)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def make_scheduler(self, config: Mapping[str, Any]) -> Any:
        return FlowMatchEulerDiscreteScheduler.from_config(config)

    def encode_prompts(self, parts: Components, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        if parts.stored_texts is not None:
            return parts.stored_texts.encode(prompts, device)
        for encoder in parts.text_encoders:
            encoder.to(device)
        pipeline = self.make_pipeline(parts, scheduler=None)
        with torch.no_grad(), float32_region(device):
            return self.encode_with(pipeline, list(prompts), device)

    @abstractmethod
    def encode_with(self, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        """What `encode_prompts` returns, by the family's pipeline."""

    def embedding_arguments(self, condition: Mapping[str, Tensor]) -> dict[str, Any]:
        """The pipeline's arguments for what `encode_prompts` returned."""
        return dict(condition)

    def sampling_arguments(
        self,
        parts: Components,
        prompts: list[str],
        negative_prompts: list[str] | None,
        guidance_scale: float,
        device: torch.device,
    ) -> dict[str, Any]:
        given = self.embedding_arguments(self.encode_prompts(parts, prompts, device))
        if negative_prompts is None and self.negative_prompt is not None:
            negative_prompts = [self.negative_prompt] * len(prompts)
        if negative_prompts is not None:
            negative = self.embedding_arguments(self.encode_prompts(parts, negative_prompts, device))
            given |= {f"negative_{name}": value for name, value in negative.items()}
        return {**given, self.guidance_argument: guidance_scale}

    @abstractmethod
    def predict(
        self,
        denoiser: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float = 1.0,
    ) -> Tensor:
        """The velocity [B, C, H, W], which points from the picture to the noise, at timesteps in 0..1000.

        guidance: what a guidance-distilled transformer is told; others do not read it.
        """

    def adapted_layers(self, denoiser: nn.Module, targets: Sequence[str]) -> list[str]:
        """Names of the linear layers that these LoRA targets cover.

        Whole names, because an end such as `to_out` is a list of layers in some blocks and a layer in others. Layers
        that nothing reads are left out: their B would stay zero.

        Raises: ModelError for an unknown target, or where nothing is covered.
        """
        unknown = [target for target in targets if target not in self.lora_layers]
        known = ", ".join(self.lora_layers)
        if unknown or not targets:
            raise ModelError(f"model.init_args.lora_targets must name some of {known}; got {list(targets)}")
        ends = [f"*.{layer}" for target in targets for layer in self.lora_layers[target]]
        unread = self.unread_layers(denoiser)
        linears = [
            name
            for name, layer in denoiser.named_modules()
            if isinstance(layer, nn.Linear) and not name.startswith(unread)
        ]
        adapted = [name for name in linears if any(fnmatch.fnmatchcase(f".{name}", end) for end in ends)]
        if not adapted:
            raise ModelError(
                f"model.init_args.lora_targets {list(targets)} match no layer of this {type(denoiser).__name__}; name"
                f" more of {known}"
            )
        return adapted

    def prepare(self, network: nn.Module, parts: Components) -> None:
        """Change how the transformer, or its ControlNet, runs; called once when it is loaded."""

    def unread_layers(self, network: Any) -> tuple[str, ...]:
        """Layers of the transformer, or of its ControlNet, whose output nothing reads, so that they do not learn."""
        return ()

    def patch_size(self, denoiser: Any) -> int:
        """Scaled latent pixels to a side of a token."""
        return int(denoiser.config.patch_size)

    def size_step(self, denoiser: Any, vae: Any) -> int:
        return self.patch_size(denoiser) * self.pixels_per_latent(vae)

    def sample_size(self, denoiser: Any) -> int:
        return int(getattr(denoiser.config, "sample_size", 128))  # 1024 pixels, where the config does not say

    def mu(self, config: Mapping[str, Any], tokens: int) -> float:
        """The exponent of a dynamic shift for a picture of so many tokens, by the scheduler's config."""
        return linear_mu(config, tokens)

    def is_distilled(
        self, index: Mapping[str, Any], transformer: Mapping[str, Any], scheduler: Mapping[str, Any]
    ) -> bool:
        """Whether these configs are of a model that was distilled to few steps; a name may say so where they do not."""
        return False

    def check_size(self, denoiser: Any, vae: Any, height: int, width: int) -> None:
        """Raise ModelError for scaled latents of a size that the transformer cannot take."""
        check_divides(self.patch_size(denoiser), self.pixels_per_latent(vae), height, width)


def linear_mu(config: Mapping[str, Any], tokens: int) -> float:
    """The exponent of a dynamic shift, on the line through the scheduler's two lengths of sequences."""
    slope = (config["max_shift"] - config["base_shift"]) / (config["max_image_seq_len"] - config["base_image_seq_len"])
    return float(config["base_shift"] + slope * (tokens - config["base_image_seq_len"]))


def check_divides(patch: int, pixels_per_latent: int, height: int, width: int) -> None:
    """Raise ModelError for latents that do not divide into patches of so many latent pixels."""
    if height % patch or width % patch:
        raise ModelError(
            f"pictures of {width * pixels_per_latent} x {height * pixels_per_latent} pixels do not divide into the"
            " transformer's patches; set data.init_args.bucket_reso_steps and resolution to a multiple of"
            f" {patch * pixels_per_latent}"
        )


def pack(latents_BCHW: Tensor) -> Tensor:
    """Tokens [B, H / 2 x W / 2, 4C] of 2 x 2 latent pixels each, channel by channel."""
    batch, channels, height, width = latents_BCHW.shape
    patches = latents_BCHW.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens_BNC: Tensor, height: int, width: int) -> Tensor:
    """Latents [B, C, H, W] of `pack`'s tokens."""
    batch, _, channels = tokens_BNC.shape
    patches = tokens_BNC.reshape(batch, height // 2, width // 2, channels // 4, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)


def pad_texts(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """`prompt_embeds` [B, T, D], padded with zeros to the longest text, and `prompt_lengths` int64 [B]."""
    lengths = torch.tensor([len(text) for text in texts], device=texts[0].device)
    return {"prompt_embeds": nn.utils.rnn.pad_sequence(list(texts), batch_first=True), "prompt_lengths": lengths}
