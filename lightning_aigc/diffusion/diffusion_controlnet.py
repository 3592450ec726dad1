"""DiffusionControlNet: a LightningModule that trains a ControlNet of a diffusion transformer.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.conditioned_training import ConditionedTraining
from lightning_aigc.diffusion.evaluation import SeededNoise
from lightning_aigc.diffusion.families import CONTROLLED
from lightning_aigc.diffusion.families.controlled_family import to_pixels
from lightning_aigc.diffusion.transformer_controlnet import CHANNELS, make_controlnet, save_controlnet, train_whole
from lightning_aigc.diffusion.transformer_training import TransformerTraining

MOMENTS = "conditioning_moments"
"""Key of a batch whose conditions are encoded already: as `latent_moments`."""


class DiffusionControlNet(ConditionedTraining, TransformerTraining):
    """Trains a ControlNet beside a frozen diffusion transformer, and saves a diffusers folder.

    The family is read from the pipeline's `model_index.json`: Stable Diffusion 3 and 3.5, FLUX.1, Z-Image and
    Qwen-Image (docs/controlnet.md). The condition is encoded by the pipeline's autoencoder. `ControlNetTraining` is the
    same for U-Nets.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, or `embedded:sd3`.
        num_layers: Blocks of a new ControlNet, copies of the transformer's first ones (of FLUX.1 those of two streams),
            of Z-Image's at equal distances; unset is what diffusers' script takes: 12 of Stable Diffusion 3, 4 of
            FLUX.1, 5 of Qwen-Image; 6 of Z-Image, which has no script.
        num_single_layers: FLUX.1's blocks of one stream; unset is 4, and 0 is none.
        kwargs: Arguments of `ConditionedTraining`, `WholeModelTraining`, `TransformerTraining`, `DenoiserTraining` and
            `DiffusionModule`.
    """

    families: ClassVar[tuple[str, ...]] = tuple(CONTROLLED)
    others = "ControlNetTraining trains one of Stable Diffusion 1.x, 2.x and SDXL"
    same_weights_advice = (
        "use the pretrained_model_name_or_path, controlnet_model_name_or_path, num_layers and num_single_layers that it"
        " was trained with"
    )

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        num_layers: int | None = None,
        num_single_layers: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained_model_name_or_path=pretrained_model_name_or_path, **kwargs)

    def loading_dtype(self) -> torch.dtype:
        return self.frozen_dtype()  # the copy begins at what the transformer computes with; in float32 both are large

    def adapt(self, parts: Components) -> None:
        super().adapt(parts)
        args, family = self.args, CONTROLLED[parts.family]
        counts = {"num_layers": args.num_layers, "num_single_layers": args.num_single_layers}
        self.controlnet = make_controlnet(parts, args.controlnet_model_name_or_path, args.revision, **counts)
        train_whole(self.controlnet, family)
        if args.protect_edges:
            self.protected_gradients = tuple(f"controlnet.{name}" for name in family.edge_path(self.controlnet))
        if args.gradient_checkpointing:
            self.controlnet.enable_gradient_checkpointing()

    def condition_channels(self) -> int:
        return CHANNELS

    # Loss ------------------------------------------------------------------------------------------------------------

    def condition_latents(self, batch: dict[str, Any]) -> Tensor:
        """The batch's conditions as the ControlNet reads them, [B, C, H, W]; while it is judged, without noise."""
        moments = batch[MOMENTS] if MOMENTS in batch else self._condition_moments(batch)
        parts = self.loaded()
        draw = torch.randn_like if self.training else torch.zeros_like
        return CONTROLLED[parts.family].condition_latents(parts.vae, self.controlnet, moments, draw)

    def predict(
        self, noisy_BCHW: Tensor, timesteps_B: Tensor, condition: dict[str, Tensor], batch: dict[str, Any]
    ) -> Tensor:
        """The velocity [B, C, H, W] of the transformer and its ControlNet at these noisy latents.

        Raises: ModelError for a picture size that the transformer cannot take.
        """
        assert self.transformer is not None and self.controlnet is not None
        parts, guidance = self.loaded(), self.args.training_guidance
        family, dtype = CONTROLLED[parts.family], weights_dtype(self.transformer)
        family.check_size(self.transformer, parts.vae, *noisy_BCHW.shape[-2:])
        shown_BCHW = self.condition_latents(batch)
        family.lend(self.controlnet, self.transformer)
        added = family.residuals(self.controlnet, noisy_BCHW, timesteps_B, condition, shown_BCHW, guidance)
        added = tree_map_only(Tensor, lambda each: each.to(dtype), added)
        return family.predict(self.transformer, noisy_BCHW, timesteps_B, condition, guidance, added)

    def validation_losses(self, batch: dict[str, Any], noise: SeededNoise) -> Tensor:
        return super().validation_losses(batch | {MOMENTS: self._condition_moments(batch)}, noise)

    def _condition_moments(self, batch: dict[str, Any]) -> Tensor:
        return self.encode_pixels(to_pixels(self.conditioning(batch)))

    # Files -----------------------------------------------------------------------------------------------------------

    def save_model(self, path: str | Path) -> list[Path]:
        """Write a diffusers folder, and beside it `path`, the same weights as one file; averaged weights if any."""
        path, folder = Path(path), Path(path).with_suffix("")
        self.loaded()
        assert self.controlnet is not None
        with self.averaged_weights():
            save_controlnet(folder, path, self.controlnet, self.save_dtype)
        return [folder, path]
