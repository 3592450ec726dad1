"""LightningModules that fine-tune diffusion models."""

from lightning_aigc.diffusion.controlnet_training import ControlNetTraining
from lightning_aigc.diffusion.diffusion_controlnet import DiffusionControlNet
from lightning_aigc.diffusion.diffusion_fine_tuning import DiffusionFineTuning
from lightning_aigc.diffusion.diffusion_lora import DiffusionLoRA
from lightning_aigc.diffusion.stable_diffusion_fine_tuning import StableDiffusionFineTuning
from lightning_aigc.diffusion.stable_diffusion_lora import StableDiffusionLoRA

__all__ = [
    "ControlNetTraining",
    "DiffusionControlNet",
    "DiffusionFineTuning",
    "DiffusionLoRA",
    "StableDiffusionFineTuning",
    "StableDiffusionLoRA",
]
