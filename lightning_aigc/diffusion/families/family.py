"""Family: everything that is specific to one model family. Components: a loaded pipeline.

A latent is *unscaled* as the autoencoder has it, and *scaled* as the denoiser reads it.

Legend: B batch, N images, C channels, H and W latent height and width, S pixels, T text tokens, D text width, P
pooled width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from lightning_aigc.diffusion.objectives import Objective, ObjectiveSettings

if TYPE_CHECKING:
    from peft import LoraConfig
    from PIL.Image import Image


class TextSource(Protocol):
    """Stored embeddings, used after the text encoders were freed."""

    identity: str
    """The text encoders' part of cache keys."""

    def encode(self, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        """The text encoders' output for these prompts, padded to the longest."""
        ...


@dataclass
class Components:
    """The components of a pipeline, all frozen and in eval mode."""

    family: Family
    denoiser: Any
    """The U-Net or the transformer."""
    vae: Any
    text_encoders: tuple[nn.Module, ...]
    tokenizers: tuple[Any, ...]
    scheduler_config: Mapping[str, Any]
    source: str
    """The folder, file or hub id as the user gave it."""
    zeros_for_empty: bool = False
    """Whether the pipeline takes zeros for a prompt that is not given, as SDXL's does by its config."""
    pipeline_options: Mapping[str, Any] = field(default_factory=dict)
    """Values of the family's `pipeline_options`."""
    processor: Any = None
    """The preparation of images and text for a text encoder that sees images."""
    stored_texts: TextSource | None = None
    """Embeddings that replace freed text encoders."""

    def named_networks(self) -> dict[str, nn.Module]:
        """The networks that can be trained, by the pipeline's names: the denoiser, for U-Nets the text encoders too."""
        names = ("text_encoder", "text_encoder_2") if self.family.trains_text_encoders else ()
        return {self.family.denoiser_name: self.denoiser} | dict(zip(names, self.text_encoders, strict=False))


@dataclass(frozen=True)
class CardRow:
    """The values of `lightning init` for a family on one card."""

    config: str
    """The shipped config."""
    memory: str
    """Memory level of the precision plugin."""
    reason: str
    """Reason for the memory level."""
    quantization: str | None = None
    """`base_quantization`, where the full base would not fit."""
    quantization_reason: str = ""


BYTES_A_WEIGHT: Mapping[str | None, float] = {None: 2.0, "int8": 1.0625, "nf4": 0.5625}
"""With the scales of a block."""


@dataclass(frozen=True)
class StepMemory:
    """Peak memory of a LoRA step at 1024 px and batch 1, in GiB, counted on shapes (docs/results)."""

    model: str
    """The model that was counted."""
    gib: Mapping[str | None, float]
    """At `memory: max`, by the base's quantization; None is the full base."""
    off_gib: float | None = None
    """At `memory: off` with the full base, where that was counted."""
    tokens: int = 0
    """Tokens that a weight of the blocks reads, on average: in two-stream blocks half of the weights read the image and
    half the text. 0 where base weights cannot wait in host memory."""

    @property
    def billions(self) -> float:
        """Weights that are quantized, in 2**30, from the difference that their quantization makes."""
        full, nf4 = self.gib[None], self.gib["nf4"]
        return (full - nf4) / (BYTES_A_WEIGHT[None] - BYTES_A_WEIGHT["nf4"])

    def gib_of(self, kind: str | None) -> float:
        """The peak with this quantization; counted, or from the others where it was not."""
        return self.gib.get(kind, self.gib[None] - self.billions * (BYTES_A_WEIGHT[None] - BYTES_A_WEIGHT[kind]))


class Control(ABC):
    """A family's ControlNet in diffusers. It reads conditions [N, C, S, S] in 0..1."""

    network: ClassVar[str]
    """diffusers' class of the ControlNet."""
    pipeline: ClassVar[str]
    """diffusers' class of the pipeline."""
    reads_latents: ClassVar[bool] = True
    """Whether the ControlNet reads the condition as latents; else as pixels."""

    @abstractmethod
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
        """The ControlNet's output, as arguments of the denoiser.

        hint: the condition, as latents [B, C, H, W] where `reads_latents`, else as pixels [B, C, S, S].
        """

    @abstractmethod
    def edge_path(self, controlnet: nn.Module) -> tuple[str, ...]:
        """Names of the modules that read the condition and of those that write the residuals."""

    @abstractmethod
    def sampling_arguments(self, components: Components, conditions_NCSS: Tensor, scale: float) -> dict[str, Any]:
        """The arguments of the ControlNet's pipeline for conditions in 0..1, on the pipeline's device.

        Raises: ModelError for a size that the model cannot take.
        """


class Family(ABC):
    """One family of pipelines, as diffusers has it. A new family is one file in this folder."""

    # Identity --------------------------------------------------------------------------------------------------------

    name: ClassVar[str]
    """Key of the family: in `lightning init --base`, in caches and in errors."""
    title: ClassVar[str]
    base: ClassVar[str]
    """Hub id of the default base model."""
    short_name: ClassVar[str | None] = None
    """Name of the default base in `lightning init --base`; None is `name`."""
    name_pattern: ClassVar[str | None] = None
    """Regular expression for hub ids of this family, in lower case; None is never guessed from a name."""
    header_patterns: ClassVar[Mapping[str, str]]
    """By base model, the regular expression for the header of its LoRA files, in lower-case letters and digits."""
    pipeline: ClassVar[str]
    """diffusers' class, as `model_index.json` names it."""
    folders: ClassVar[tuple[str, ...]]
    """The folders that a pipeline must have."""
    pipeline_options: ClassVar[tuple[str, ...]] = ()
    """Entries of `model_index.json` that are arguments of the pipeline, and no folders."""
    optional_folders: ClassVar[tuple[str, ...]] = ()
    """Folders of diffusers' pipeline that may be absent."""
    denoiser_name: ClassVar[str]
    """The denoiser's folder and attribute: unet or transformer."""
    native_side: ClassVar[int] = 1024
    """Side of the training images in pixels, where a config does not tell."""
    cards: ClassVar[Mapping[str, CardRow]] = {}
    """By card, the values of `lightning init`; empty where they follow from `step_memory`."""
    shipped_config: ClassVar[str]
    """The config that `lightning init` starts from, where `cards` has no row."""
    step_memory: ClassVar[StepMemory | None] = None
    training_adapters: ClassVar[str | None] = None
    """Hub id with training adapters for a few-step model of this family."""
    few_steps: ClassVar[int] = 8
    """Denoising steps of a few-step model of this family."""
    few_step_guidance: ClassVar[float] = 1.0
    """Guidance scale that its pipeline computes without a second prediction."""
    is_flow: ClassVar[bool]
    """Whether the family is trained by flow matching; else by DDPM."""
    trains_text_encoders: ClassVar[bool] = False
    """Whether a LoRA or full fine-tuning may train the text encoders."""
    encodes_text_first: ClassVar[bool] = False
    """Whether cached captions are encoded before the denoiser is loaded, because both would not fit in memory."""
    caption_tokens: ClassVar[Mapping[str, int]] = {"tokenizer": 75}
    """By tokenizer, the most caption tokens that its encoder reads."""
    checkpointing_fault: ClassVar[str | None] = None
    """The reason why diffusers' `gradient_checkpointing` would train another function; None where it does not."""
    draws_latents: ClassVar[bool] = True
    """Whether training samples the autoencoder's distribution or takes its mean, as diffusers' script."""
    control: ClassVar[Control | None] = None
    """The family's ControlNet; None where diffusers has none."""
    max_sources: ClassVar[int] = 0
    """Most images that an edit of this family starts from; 0 where it draws from text alone."""
    smallest_source: ClassVar[int] = 1
    """Least side in pixels of a source that the family's pipeline takes."""
    needs_sources: ClassVar[bool] = False
    """Whether every image is an edit."""
    text_sees_sources: ClassVar[bool] = False
    """Whether the text encoder reads an instruction together with the sources of its edit."""
    edit_pipeline: ClassVar[str | None] = None
    """diffusers' class that edits with this family; None where there is none."""
    edits_in_batches: ClassVar[bool] = True
    """Whether the pipeline draws edits of unequal sources in one batch."""

    # Training --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def objective(self, components: Components, settings: ObjectiveSettings) -> Objective:
        """The training objective."""

    @abstractmethod
    def predict(
        self,
        components: Components,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        batch: Mapping[str, Any],
        guidance: float = 1.0,
        residuals: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The denoiser's output [B, C, H, W].

        Args:
            condition: The output of `encode_prompts`, and the sources of an edit, `tokens.sources_of`.
            batch: SDXL reads the images' sizes from it.
            guidance: Guidance input of a guidance-distilled transformer; other models have none.
            residuals: The output of `Control.residuals`.

        Raises: ModelError for a size that the model cannot take.
        """

    @abstractmethod
    def lora_config(self, components: Components, targets: Sequence[str], **options: Any) -> LoraConfig:
        """The peft configuration of the denoiser's LoRA. Raises: ModelError for an unknown target."""

    def unread_names(self, components: Components) -> set[str]:
        """Names of the weights whose output the loss does not depend on, as `named_networks` prefixes them."""
        return set()

    def prepare(self, network: nn.Module, components: Components) -> None:  # noqa: B027  a hook
        """Change the forward of the denoiser or its ControlNet; called once after loading."""

    # Text ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def make_pipeline(self, components: Components, scheduler: Any, controlnet: Any = None) -> Any:
        """diffusers' pipeline with these components."""

    @abstractmethod
    def make_scheduler(self, config: Mapping[str, Any]) -> Any:
        """The scheduler for sampling."""

    @abstractmethod
    def encode_prompts(
        self,
        components: Components,
        prompts: list[str],
        device: torch.device,
        sources: Sequence[Sequence[Image]] | None = None,
    ) -> dict[str, Tensor]:
        """Encode to `prompt_embeds` [B, T, D] and the denoiser's other inputs, as the family's pipeline does.

        Where captions have unequal lengths, `prompt_lengths` int64 [B] counts the tokens that are not padding.

        Args:
            sources: Those of each prompt, for a family with `text_sees_sources`.
        """

    # Latents ---------------------------------------------------------------------------------------------------------

    def pixels_per_latent(self, vae: Any) -> int:
        """Pixels per side of an unscaled latent's pixel."""
        return int(2 ** (len(vae.config.block_out_channels) - 1))

    def size_step(self, denoiser: Any, vae: Any) -> int:
        """Pixels that each side of an image must be a multiple of."""
        return self.pixels_per_latent(vae)

    def check_size(self, denoiser: Any, vae: Any, height: int, width: int) -> None:  # noqa: B027  a hook
        """Raise ModelError for scaled latents of a size that the denoiser cannot take."""

    def channels_read(self, vae_config: Mapping[str, Any]) -> int | None:
        """Channels of this autoencoder's latents as the denoiser reads them; None where the config does not tell."""
        return vae_config.get("latent_channels")

    def encode(self, vae: Any, pixels_B3HW: Tensor) -> Tensor:
        """Mean and log-variance of unscaled latents, [B, 2C, H, W], from pixels in -1..1."""
        moments: Tensor = vae.encode(pixels_B3HW).latent_dist.parameters
        return moments

    def decode(self, vae: Any, latents_BCHW: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in -1..1 from unscaled latents."""
        pixels: Tensor = vae.decode(latents_BCHW).sample
        return pixels

    def scale(self, vae: Any, latents_BCHW: Tensor) -> Tensor:
        """Scaled latents from unscaled ones."""
        shift = float(getattr(vae.config, "shift_factor", None) or 0.0)
        return (latents_BCHW - shift) * float(vae.config.scaling_factor)

    def unscale(self, vae: Any, sampled: Tensor, height: int, width: int) -> Tensor:
        """Unscaled latents [B, C, H, W] from the pipeline's result for `output_type="latent"`; H and W are given."""
        shift = float(getattr(vae.config, "shift_factor", None) or 0.0)
        return sampled / float(vae.config.scaling_factor) + shift

    def latents(self, vae: Any, moments_B2CHW: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Scaled latents; `draw` returns Gaussian noise with the shape of its argument."""
        mean, log_variance = moments_B2CHW.chunk(2, dim=1)
        if self.draws_latents:
            mean = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * draw(mean)
        return self.scale(vae, mean)

    # Sampling --------------------------------------------------------------------------------------------------------

    def sample_size(self, denoiser: Any) -> int:
        """Unscaled latent pixels per side of a sample."""
        return int(denoiser.config.sample_size)

    def sampling_arguments(
        self,
        components: Components,
        prompts: list[str],
        negative_prompts: list[str] | None,
        guidance_scale: float,
        device: torch.device,
        sources: Sequence[Sequence[Image]] | None = None,
    ) -> dict[str, Any]:
        """The pipeline's arguments for prompts and guidance; `sources` as in `encode_prompts`."""
        return {"prompt": prompts, "negative_prompt": negative_prompts, "guidance_scale": guidance_scale}

    def source_arguments(
        self,
        pipeline: Any,
        components: Components,
        images: Sequence[Sequence[Image]],
        latents: Sequence[Tensor],
        size: tuple[int, int],
    ) -> dict[str, Any]:
        """The pipeline's arguments for the sources of an edit; may change the pipeline.

        Args:
            images: The sources of each prompt.
            latents: The same sources by number, scaled [B, C, h, w]; those of all prompts have equal sizes.
            size: (width, height) of the image.
        """
        raise NotImplementedError

    # Distilled models ------------------------------------------------------------------------------------------------

    def distilled_reason(self, name: str, configs: Sequence[Mapping[str, Any]]) -> str | None:
        """The reason why this is a few-step model, which training would undo; None for a model that can be trained.

        Args:
            name: The last component of the folder or hub id.
            configs: Those of pipeline, transformer and scheduler; empty where they are not known.
        """
        return None
