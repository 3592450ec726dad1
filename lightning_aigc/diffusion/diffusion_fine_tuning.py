"""DiffusionFineTuning: a LightningModule that trains a diffusion transformer's own weights, whole or in part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_aigc.diffusion.arguments import check_whole_weights
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.pipeline_files import save_folder, save_transformer
from lightning_aigc.diffusion.trained_parts import check_patterns, train_parts
from lightning_aigc.diffusion.transformer_training import TransformerTraining
from lightning_aigc.diffusion.whole_model_training import WholeModelTraining


class DiffusionFineTuning(WholeModelTraining, TransformerTraining):
    """Trains the weights of a diffusion transformer, whole or in part, and saves the pipeline.

    The family is read from the pipeline's `model_index.json` (docs/diffusion_transformers.md).
    `StableDiffusionFineTuning` is the same for U-Nets.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, or `embedded:sd3`.
        trained_parts: What is trained: transformer, or patterns of parameter names such as `transformer.*attn*`. The
            transformer is kept in float32; text encoders stay frozen, in `base_dtype`.
        kwargs: Arguments of `WholeModelTraining`, `TransformerTraining`, `DenoiserTraining` and `DiffusionModule`.
    """

    same_weights_advice = "use the trained_parts and the pretrained_model_name_or_path that it was trained with"

    def __init__(
        self, pretrained_model_name_or_path: str, trained_parts: Sequence[str] = ("transformer",), **kwargs: Any
    ) -> None:
        super().__init__(pretrained_model_name_or_path=pretrained_model_name_or_path, **kwargs)
        self.parts_trained: dict[str, nn.Module] = {}
        """The transformer, by its name in the pipeline; it is registered as `transformer`."""
        check_patterns(trained_parts)
        check_whole_weights(self.args, "DiffusionFineTuning", "DiffusionLoRA")

    def text_encoder_dtype(self) -> torch.dtype:
        return self.frozen_dtype()

    def adapt(self, parts: Components) -> None:
        super().adapt(parts)
        self.parts_trained = train_parts(parts, self.args.trained_parts)

    def save_model(self, path: str | Path) -> list[Path]:
        """Write `path`, the transformer alone, and beside it a diffusers folder; averaged weights if any."""
        path, parts = Path(path), self.loaded()
        folder = path.with_suffix("")
        with self.averaged_weights():
            save_folder(folder, parts, self.parts_trained, self.save_dtype, self.sampling_config())
            save_transformer(path, parts.denoiser, self.save_dtype, self.sampling_config())
        return [folder, path]
