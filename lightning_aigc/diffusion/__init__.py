"""LightningModules that fine-tune diffusion models, LoRA files, and samplers of finished runs."""

from lightning_aigc.diffusion.controlnet.training import ControlNet, ControlNetTraining, DiffusionControlNet
from lightning_aigc.diffusion.lora.file import convert, read_lora, save_lora
from lightning_aigc.diffusion.lora.merge import merge_into_pipeline
from lightning_aigc.diffusion.lora.training import DiffusionLoRA, LoRA, StableDiffusionLoRA
from lightning_aigc.diffusion.samplers.controlnet import ControlNetSampler
from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.diffusion.training.full_fine_tuning import (
    DiffusionFineTuning,
    FullFineTuning,
    StableDiffusionFineTuning,
)
from lightning_aigc.diffusion.training.module import DiffusionTraining

__all__ = [
    "ControlNet",
    "ControlNetSampler",
    "ControlNetTraining",
    "DiffusionControlNet",
    "DiffusionFineTuning",
    "DiffusionLoRA",
    "DiffusionTraining",
    "FullFineTuning",
    "LoRA",
    "LoRASampler",
    "StableDiffusionFineTuning",
    "StableDiffusionLoRA",
    "convert",
    "merge_into_pipeline",
    "read_lora",
    "save_lora",
]
