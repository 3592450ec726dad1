"""Family: the questions that a family of diffusion transformers answers.

Legend: B batch, C channels, H and W latent height and width, T text tokens, D text width, P pooled width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_aigc.errors import ModelError

if TYPE_CHECKING:
    from lightning_aigc.diffusion.components import Components


class Family(ABC):
    """One family of diffusion transformers, as diffusers has it."""

    name: ClassVar[str]
    pipeline: ClassVar[str]
    """diffusers' class, as `model_index.json` names it."""
    folders: ClassVar[tuple[str, ...]]
    """What a pipeline folder must hold."""
    optional_folders: ClassVar[tuple[str, ...]] = ()
    """What it may lack, though diffusers' pipeline knows it."""
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]]
    """Suffixes of layer names by LoRA target."""
    modelspec: ClassVar[str]
    """Stability AI's architecture id, for LoRA files."""
    base: ClassVar[str]
    """A model of this family that is not distilled, for error messages."""

    @abstractmethod
    def make_pipeline(self, parts: Components, scheduler: Any) -> Any:
        """diffusers' pipeline around these components."""

    @abstractmethod
    def encode_prompts(self, parts: Components, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        """Encode to `prompt_embeds` [B, T, D] and `pooled_prompt_embeds` [B, P], as the family's pipeline does."""

    @abstractmethod
    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, condition: Mapping[str, Tensor]
    ) -> Tensor:
        """The velocity [B, C, H, W], which points from the picture to the noise, at timesteps in 0..1000."""

    def check_size(self, denoiser: Any, height: int, width: int, pixels_per_latent: int) -> None:
        """Raise ModelError for latents that do not divide into the transformer's patches."""
        patch = int(denoiser.config.patch_size)
        if height % patch or width % patch:
            multiple = patch * pixels_per_latent
            raise ModelError(
                f"pictures of {width * pixels_per_latent} x {height * pixels_per_latent} pixels do not divide into the"
                f" transformer's patches; set data.init_args.resolution to a multiple of {multiple}"
            )
