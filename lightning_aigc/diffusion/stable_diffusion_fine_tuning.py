"""StableDiffusionFineTuning: a LightningModule that trains Stable Diffusion 1.x, 2.x or SDXL whole or in part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lightning_aigc.diffusion.arguments import check_fine_tuning
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.pipeline_files import save_folder, save_single_file
from lightning_aigc.diffusion.trained_parts import check_patterns, named_parts, train_parts
from lightning_aigc.diffusion.unet_training import UNetTraining
from lightning_aigc.diffusion.whole_model_training import WholeModelTraining


class StableDiffusionFineTuning(WholeModelTraining, UNetTraining):
    """Trains the U-Net and the text encoders of Stable Diffusion, whole or in part, and saves the pipeline.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a single `.safetensors` checkpoint, or
            `embedded:sd`, the tiny model that comes with the package.
        trained_parts: What is trained: unet, text_encoder, for SDXL text_encoder_2, or patterns of parameter names such
            as `unet.*attn2*`. A part of which anything is trained is kept in float32, the others in `base_dtype`.
        text_encoder_lr: Rate of the text encoders; unset means `learning_rate`.
        kwargs: Arguments of `WholeModelTraining`, `UNetTraining` and `DiffusionModule`.
    """

    same_weights_advice = "use the trained_parts and the pretrained_model_name_or_path that it was trained with"

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        trained_parts: Sequence[str] = ("unet",),
        text_encoder_lr: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained_model_name_or_path=pretrained_model_name_or_path, **kwargs)
        self.parts_trained: dict[str, nn.Module] = {}
        """The parts that hold trained weights, by the pipeline's names; their modules are registered elsewhere."""
        check_patterns(trained_parts)
        check_fine_tuning(self.args)

    def adapt(self, parts: Components) -> None:
        super().adapt(parts)
        found = train_parts(parts, self.args.trained_parts)
        self.parts_trained = found
        for name, module in named_parts(parts).items():
            if name in found and name != "unet":
                self.text_encoders.append(module)
            elif name not in found and module.dtype != self.frozen_dtype():
                module.to(self.frozen_dtype())
        self.recompute_text_encoders()

    def save_model(self, path: str | Path) -> list[Path]:
        """Write `path`, a single file, and beside it a diffusers folder of its name; averaged weights if any."""
        path, parts = Path(path), self.loaded()
        folder = path.with_suffix("")
        with self.averaged_weights():
            save_folder(folder, parts, self.parts_trained, self.save_dtype, self.sampling_config())
            save_single_file(path, parts, self.parts_trained, self.save_dtype, self.sampling_config())
        return [folder, path]
