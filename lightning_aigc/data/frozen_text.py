"""Name the setting of a module's own class that keeps its text encoders as they are."""

from __future__ import annotations


def frozen_text_setting(module: object) -> str:
    """For an error message: DiffusionLoRA has `train_text_encoder`, whole fine-tuning has `trained_parts`."""
    if "trained_parts" in getattr(module, "hparams", {}):
        return "model.init_args.trained_parts: [unet]"
    return "model.init_args.train_text_encoder: false"
