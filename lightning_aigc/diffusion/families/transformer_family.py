"""TransformerFamily: base class of the diffusion transformers, with the defaults of diffusers' two-stream models.

Legend: B batch, C channels, H and W latent height and width, N image tokens, T text tokens, D text width.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import diffusers
import torch
from torch import Tensor, nn

from lightning_aigc.devices import float32_region
from lightning_aigc.diffusion.families.family import Components, Family
from lightning_aigc.diffusion.families.tokens import check_divides, pad_texts, sources_of
from lightning_aigc.diffusion.families.transformer_control import TransformerControl
from lightning_aigc.diffusion.objectives import Flow, Objective, ObjectiveSettings
from lightning_aigc.diffusion.objectives.flow import linear_mu
from lightning_aigc.errors import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig
    from PIL.Image import Image

NO_SOURCES = (
    "edits images, and there are none to start from; set data.init_args.source_data_dir to a folder with a source for"
    " each image, or list them in metadata.jsonl under source"
)
TRUE_CFG = "true_cfg_scale"
"""Argument of pipelines that draw with a negative prompt above 1 alone."""
DISTILLED = re.compile(r"(?i)(?<![a-z])(turbo|schnell|lightning|hyper|distilled)(?![a-z])")
"""In the names of few-step models."""


class TransformerFamily(Family):
    """One family of diffusion transformers, trained by flow matching.

    A family of two-stream models defines `inputs`, and where its network reads tokens, `tokens` and `latents_of`;
    another family overrides `velocity`.
    """

    denoiser_name = "transformer"
    is_flow = True
    encodes_text_first = True
    control: ClassVar[TransformerControl | None] = None

    modelspec: ClassVar[str]
    """Stability AI's architecture id, for LoRA files."""
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]]
    """By LoRA target, the suffixes of layer names; `*` matches anything."""
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The original model's layer names, as in sd-scripts and ComfyUI, with the diffusers layers whose outputs each
    concatenates; `{}` is a number. The blocks' modulations are among them, which sd-scripts and ai-toolkit adapt. Empty
    where files have diffusers' layout only."""
    original_names: ClassVar[Mapping[str, str]] = {}
    """The original model's names of all other modules and parameters that are called differently in diffusers. Empty
    where other programs read a transformer under diffusers' names."""
    swapped_halves: ClassVar[tuple[str, ...]] = ()
    """Modules whose rows, shift then scale in the original, diffusers keeps as scale then shift."""
    widening: ClassVar[Mapping[str, int]] = {}
    """Output-to-input ratio of fused original layers, by name suffix; 1 where missing."""
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = frozenset()
    """Width and number of `transformer_blocks` of the published models, where other families have these blocks too."""
    distilled_name: ClassVar[str | None] = None
    """Regular expression for names of this family's distilled models, in addition to the usual words."""
    negative_prompt: ClassVar[str | None] = ""
    """Default negative prompt; None for guidance-distilled models."""
    guidance_argument: ClassVar[str] = "guidance_scale"
    """The pipeline's argument for the guidance scale."""
    last_text: ClassVar[tuple[str, ...]] = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "ff_context")
    """Layers of a two-stream block that only the next block's text reads."""

    def marker_tensors(self, denoiser: Any) -> dict[str, Tensor]:
        """Tensors of a single file by which other programs tell settings of the model that no weight shows."""
        return {}

    # Training --------------------------------------------------------------------------------------------------------

    def objective(self, components: Components, settings: ObjectiveSettings) -> Objective:
        patch = self.patch_size(components.denoiser)
        return Flow(components.scheduler_config, settings, patch_size=patch, mu=self.mu)

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
        self.check_size(components.denoiser, components.vae, *noisy_BCHW.shape[-2:])
        if self.needs_sources and not sources_of(condition):
            raise ModelError(f"{self.title} {NO_SOURCES}")
        return self.velocity(components.denoiser, noisy_BCHW, timesteps_B, condition, guidance, residuals)

    def velocity(
        self,
        denoiser: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float = 1.0,
        residuals: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The velocity [B, C, H, W], which points from the image to the noise, at timesteps in 0..1000."""
        inputs = self.inputs(denoiser, noisy_BCHW, timesteps_B, condition, guidance)
        answer: Tensor = denoiser(**inputs, **(residuals or {}), return_dict=False)[0]
        return self.latents_of(answer, *noisy_BCHW.shape[-2:])

    def inputs(
        self,
        network: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float,
    ) -> dict[str, Any]:
        """The arguments that the transformer and its ControlNet have in common."""
        raise NotImplementedError

    def tokens(self, latents_BCHW: Tensor) -> Tensor:
        """Latents in the transformer's input layout."""
        return latents_BCHW

    def latents_of(self, answer: Tensor, height: int, width: int) -> Tensor:
        """Latents [B, C, H, W] from the transformer's output; H and W are given."""
        return answer

    def unread_layers(self, network: Any) -> tuple[str, ...]:
        """Layers of the transformer, or its ControlNet, whose output nothing reads, so that they do not learn."""
        if not hasattr(network.config, "num_layers") or getattr(network.config, "num_single_layers", None):
            return ()  # single-stream blocks follow, and read the text
        last = int(network.config.num_layers) - 1
        return tuple(f"transformer_blocks.{last}.{name}" for name in self.last_text)

    def unread_names(self, components: Components) -> set[str]:
        unread = self.unread_layers(components.denoiser)
        names = [name for name, _ in components.denoiser.named_parameters()]
        return {f"transformer.{name}" for name in names if name.startswith(unread)}

    # Text and sampling -----------------------------------------------------------------------------------------------

    def make_pipeline(self, components: Components, scheduler: Any, controlnet: Any = None) -> Any:
        known = sorted((*self.folders, *self.optional_folders))
        given: dict[str, Any] = {"transformer": components.denoiser, "vae": components.vae, "scheduler": scheduler}
        for kind, present in (("text_encoder", components.text_encoders), ("tokenizer", components.tokenizers)):
            names = [name for name in known if name.startswith(kind)]
            given |= dict(itertools.zip_longest(names, present))
        given |= components.pipeline_options
        if "processor" in known:
            given["processor"] = components.processor
        pipeline = getattr(diffusers, self.pipeline)(**given)
        if controlnet is not None:
            assert self.control is not None
            pipeline = self.control.make_pipeline(pipeline, components, controlnet)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def make_scheduler(self, config: Mapping[str, Any]) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler.from_config(config)

    def encode_prompts(
        self,
        components: Components,
        prompts: list[str],
        device: torch.device,
        sources: Sequence[Sequence[Image]] | None = None,
    ) -> dict[str, Tensor]:
        if components.stored_texts is not None:
            return components.stored_texts.encode(prompts, device)
        for encoder in components.text_encoders:
            encoder.to(device)
        pipeline = self.make_pipeline(components, scheduler=None)
        with torch.no_grad(), float32_region(device):
            if not self.text_sees_sources:
                return self.encode_with(pipeline, list(prompts), device)
            if sources is None:
                raise ModelError(f"{self.title} {NO_SOURCES}")
            pairs = zip(prompts, sources, strict=True)
            return pad_texts([self.encode_instruction(pipeline, text, images, device) for text, images in pairs])

    def encode_with(self, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        """The result of `encode_prompts`, from the family's pipeline; not for a family with `text_sees_sources`."""
        raise NotImplementedError

    def encode_instruction(
        self, pipeline: Any, instruction: str, sources: Sequence[Image], device: torch.device
    ) -> Tensor:
        """Embeddings [T, D] of an instruction and the sources of its edit, for a family with `text_sees_sources`."""
        raise NotImplementedError

    def embedding_arguments(self, condition: Mapping[str, Tensor]) -> dict[str, Any]:
        """The pipeline's arguments for the result of `encode_prompts`."""
        return dict(condition)

    def sampling_arguments(
        self,
        components: Components,
        prompts: list[str],
        negative_prompts: list[str] | None,
        guidance_scale: float,
        device: torch.device,
        sources: Sequence[Sequence[Image]] | None = None,
    ) -> dict[str, Any]:
        given = self.embedding_arguments(self.encode_prompts(components, prompts, device, sources))
        is_guided = self.guidance_argument != TRUE_CFG or guidance_scale > 1  # else the pipeline warns and reads none
        if negative_prompts is None and self.negative_prompt is not None and is_guided:
            negative_prompts = [self.negative_prompt] * len(prompts)
        if negative_prompts is not None:
            encoded = self.encode_prompts(components, negative_prompts, device, sources)
            negative = self.embedding_arguments(encoded)
            given |= {f"negative_{name}": value for name, value in negative.items()}
        return {**given, self.guidance_argument: guidance_scale}

    def lora_config(self, components: Components, targets: Sequence[str], **options: Any) -> LoraConfig:
        if options.pop("use_dora", False):
            raise ModelError(
                f"model.init_args.use_dora adapts U-Nets, and {self.title} is a transformer; set use_dora: false"
            )
        from peft import LoraConfig

        return LoraConfig(
            r=options.pop("rank"),
            lora_alpha=options.pop("alpha"),
            target_modules=self.adapted_layers(components.denoiser, targets),
            lora_dropout=options.pop("dropout"),
            init_lora_weights="gaussian",
            **options,
        )

    def adapted_layers(self, denoiser: nn.Module, targets: Sequence[str]) -> list[str]:
        """Names of the linear layers that these LoRA targets cover.

        Full names, because a suffix such as `to_out` is a list of layers in some blocks and a layer in others. Layers
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

    def patch_size(self, denoiser: Any) -> int:
        """Scaled latent pixels per side of a token."""
        return int(denoiser.config.patch_size)

    def size_step(self, denoiser: Any, vae: Any) -> int:
        return self.patch_size(denoiser) * self.pixels_per_latent(vae)

    def sample_size(self, denoiser: Any) -> int:
        return int(getattr(denoiser.config, "sample_size", 128))  # 1024 pixels, where the config does not tell

    def mu(self, config: Mapping[str, Any], tokens: int) -> float:
        """The exponent of a dynamic shift for an image of this many tokens, from the scheduler's config."""
        return linear_mu(config, tokens)

    def is_distilled(
        self, index: Mapping[str, Any], transformer: Mapping[str, Any], scheduler: Mapping[str, Any]
    ) -> bool:
        """Whether these configs belong to a few-step model; some models are known by their name only."""
        return False

    def distilled_reason(self, name: str, configs: Sequence[Mapping[str, Any]]) -> str | None:
        found = DISTILLED.search(name) or (re.search(self.distilled_name, name) if self.distilled_name else None)
        if found is not None:
            return f"by its name a distilled model ({found[0]})"
        return "by its configuration a distilled model" if configs and self.is_distilled(*configs) else None

    def check_size(self, denoiser: Any, vae: Any, height: int, width: int) -> None:
        check_divides(self.patch_size(denoiser), self.pixels_per_latent(vae), height, width)
