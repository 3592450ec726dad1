"""LightningModules that fine-tune diffusion models."""

from lightning_aigc.diffusion.stable_diffusion_lora import StableDiffusionLoRA

__all__ = ["StableDiffusionLoRA"]
