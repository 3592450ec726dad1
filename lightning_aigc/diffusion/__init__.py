"""LightningModules that fine-tune diffusion models."""

from lightning_aigc.diffusion.controlnet.training import ControlNet, ControlNetTraining, DiffusionControlNet
from lightning_aigc.diffusion.lora.training import DiffusionLoRA, LoRA, StableDiffusionLoRA
from lightning_aigc.diffusion.training.full_fine_tuning import (
    DiffusionFineTuning,
    FullFineTuning,
    StableDiffusionFineTuning,
)
from lightning_aigc.diffusion.training.module import DiffusionTraining

__all__ = [
    "ControlNet",
    "ControlNetTraining",
    "DiffusionControlNet",
    "DiffusionFineTuning",
    "DiffusionLoRA",
    "DiffusionTraining",
    "FullFineTuning",
    "LoRA",
    "StableDiffusionFineTuning",
    "StableDiffusionLoRA",
]
