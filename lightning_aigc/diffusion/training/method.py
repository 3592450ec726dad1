"""Method: the choice of the trained weights. `LoRA`, `FullFineTuning` and `ControlNet` are methods.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_aigc._lightning import Callback, LightningModule, Trainer
from lightning_aigc.diffusion.families import FAMILIES, Components, Family
from lightning_aigc.diffusion.pipeline.encoders import FrozenEncoders
from lightning_aigc.diffusion.pipeline.image_sizes import check_sources
from lightning_aigc.diffusion.training.preservation import Preservation
from lightning_aigc.diffusion.training.settings import READERS, TrainingSettings
from lightning_aigc.embedded.folders import resolve
from lightning_aigc.setting_checks import Readers, unread_settings

CONTROLNET_SOURCE = "controlnet_model_name_or_path"


@dataclass
class Method(ABC):
    """Choice of the trained weights; its fields are flat keys of `model.init_args`. A new method is one file."""

    families: ClassVar[Mapping[str, Family]] = FAMILIES
    """The families that this method trains."""
    hint: ClassVar[str] = ""
    """A clause for the error about another family."""
    same_weights_advice: ClassVar[str]
    """Remedy for a checkpoint with other weights."""
    ignored_on_resume: ClassVar[frozenset[str]] = frozenset()
    """Fields that do not change the bits of a training."""
    reads_conditions: ClassVar[bool] = False
    """Whether it trains on a condition of each image."""
    readers: ClassVar[Readers] = {}
    """Its settings that need another one."""
    text_encoder_lr: ClassVar[float | None] = None
    """Rate of trained text encoders; None is `learning_rate`."""

    @property
    def options(self) -> dict[str, Any]:
        """The fields by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    @property
    def trains_half_weights(self) -> bool:
        """Whether the trained weights follow the precision to bfloat16, because their steps round stochastically."""
        return False

    @property
    def takes_distilled(self) -> bool:
        """Whether a few-step base can be trained."""
        return False

    @property
    def streams_base(self) -> bool:
        """Whether a part of the base waits in host memory."""
        return False

    @property
    def base_digest(self) -> str | None:
        """Hash of what the method adds to the base's weights for the training; None for nothing."""
        return None

    def base_was_packed(self) -> None:  # noqa: B027  a hook
        """Follow `base_quantization`, which has packed the network's frozen weights."""

    def place_base(self, module: LightningModule, components: Components, settings: TrainingSettings) -> None:  # noqa: B027
        """Place the base's weights once all layers are there and before the module moves to its device."""

    def sampling_base(self) -> AbstractContextManager[None]:
        """Compute with the base as users have it until the block ends."""
        return contextlib.nullcontext()

    def sampling_choices(self, settings: TrainingSettings, family: Family) -> tuple[int, float]:
        """Denoising steps and guidance scale of a sample."""
        return settings.num_inference_steps, settings.guidance_scale

    @property
    def preservation(self) -> Preservation | None:
        """The part of the loss that holds the base's predictions; None for no such part."""
        return None

    def check(self, settings: TrainingSettings, family: Family | None) -> None:  # noqa: B027  a hook
        """Check the options before weights are read; the family is None for a hub id, and is checked after loading.

        Raises: ModelError or ConfigError.
        """

    def unread(self, settings: TrainingSettings, data: Any, module_name: str) -> list[str]:
        """Return a sentence for each option that is given and that changes nothing with the others and these data."""
        parts = [each for part in (self, settings) for each in fields(part) if each.init]
        given = self.options | {each.name: getattr(settings, each.name) for each in fields(settings)}
        said = unread_settings(given, {each.name: each.default for each in parts}, {**READERS, **self.readers})
        if getattr(data, "has_condition_files", False) and not self.reads_conditions:
            said.append(
                f"{module_name} does not read the data's conditions; train a DiffusionControlNet, or set"
                " data.init_args.conditioning_data_dir: null"
            )
        sources = (settings.pretrained_model_name_or_path, settings.denoiser_file, given.get(CONTROLNET_SOURCE))
        if settings.revision is not None and all(resolve(name).exists() for name in sources if name):
            said.append("model.init_args.revision changes nothing for files of this disk; remove it")
        if settings.prior_loss_weight != 1 and getattr(data, "has_class_images", True) is False:
            said.append(
                "model.init_args.prior_loss_weight changes nothing without class images; set"
                " data.init_args.class_data_dir: FOLDER, or remove prior_loss_weight"
            )
        return said

    def check_sources(self, family: Family, settings: TrainingSettings, count: int) -> None:
        """Check before weights are read that the family takes as many source images as the data has for each image.

        Raises: ModelError.
        """
        check_sources(family, settings.pretrained_model_name_or_path, count)

    def denoiser_dtype(self, family: Family, frozen: torch.dtype) -> torch.dtype:
        """Dtype to load the denoiser in; `frozen` is that of a frozen base."""
        return frozen

    def text_encoder_dtype(self, family: Family, frozen: torch.dtype) -> torch.dtype:
        """Dtype to load the text encoders in."""
        return self.denoiser_dtype(family, frozen)

    @abstractmethod
    def prepare(self, components: Components, settings: TrainingSettings, frozen: torch.dtype) -> dict[str, nn.Module]:
        """Add the trained layers, or let weights take gradients.

        Returns: modules to register by name, such as `controlnet` or `text_encoders`; the denoiser is registered.
        """

    def predict(
        self,
        encoders: FrozenEncoders,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: dict[str, Tensor],
        batch: dict[str, Any],
        guidance: float,
        *,
        is_training: bool,
    ) -> Tensor:
        """The model's output [B, C, H, W] for these noisy latents."""
        components = encoders.components
        return components.family.predict(components, noisy_BCHW, timesteps_B, condition, batch, guidance)

    def make_optimizer(
        self, build: Callable[[Any], Optimizer], groups: list[dict[str, Any]], trainer: Trainer | None
    ) -> Optimizer:
        """The optimizer of the trained weights."""
        return build(groups)

    @abstractmethod
    def saver(self, settings: TrainingSettings) -> Callback:
        """The callback that saves the result, unless the Trainer has one of its class."""


def recompute_text_encoders(encoders: Sequence[nn.Module]) -> None:
    """Recompute the activations of trained text encoders in backward."""
    for encoder in encoders:
        # transformers 5 renamed it, and recomputes in train mode only; CLIP has no dropout.
        enable = getattr(encoder, "activation_checkpointing_enable", None) or encoder.gradient_checkpointing_enable
        enable()  # type: ignore[operator]
        encoder.train()
