"""Stable Diffusion 1.x and 2.x, and SDXL: U-Nets with one or two CLIP encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import diffusers
import torch
from diffusers import DDIMScheduler
from torch import Tensor

from lightning_aigc.devices import float32_region
from lightning_aigc.diffusion.families.family import Family

if TYPE_CHECKING:
    from lightning_aigc.diffusion.components import Components


class StableDiffusion(Family):
    """One CLIP encoder, whose last hidden state is the condition."""

    name = "sd"
    pipeline = "StableDiffusionPipeline"
    folders: ClassVar[tuple[str, ...]] = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
    controlnet_pipeline = "StableDiffusionControlNetPipeline"

    def make_pipeline(self, parts: Components, scheduler: Any, controlnet: Any = None) -> Any:
        given: dict[str, Any] = {"unet": parts.denoiser, "vae": parts.vae, "scheduler": scheduler}
        for number, pair in enumerate(zip(parts.text_encoders, parts.tokenizers, strict=True)):
            suffix = f"_{number + 1}" if number else ""
            given |= {f"text_encoder{suffix}": pair[0], f"tokenizer{suffix}": pair[1]}
        pipeline_class = getattr(diffusers, self.pipeline)
        if controlnet is not None:
            pipeline_class, given["controlnet"] = getattr(diffusers, self.controlnet_pipeline), controlnet
        pipeline = pipeline_class(**given, **self._without_checkers())
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def make_scheduler(self, config: Mapping[str, Any]) -> Any:
        # Latents are not limited to -1..1; a config from another scheduler may lack this setting.
        return DDIMScheduler.from_config(config, clip_sample=False)

    def encode_prompts(self, parts: Components, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        outputs = []
        for tokenizer, encoder in zip(parts.tokenizers, parts.text_encoders, strict=True):
            encoder = encoder.to(device)
            tokens = tokenizer(
                prompts,
                padding="max_length",
                max_length=tokenizer.model_max_length,
                truncation=True,
                return_tensors="pt",
            )
            mask = tokens.attention_mask.to(device) if getattr(encoder.config, "use_attention_mask", False) else None
            is_trained = any(p.requires_grad for p in encoder.parameters())
            # A trained encoder holds fp32 LoRA weights on a half-precision base and needs the Trainer's autocast.
            with torch.enable_grad() if is_trained and torch.is_grad_enabled() else float32_region(device):
                outputs.append(self._read(encoder, tokens.input_ids.to(device), mask))
        return self._embeddings(outputs)

    def _read(self, encoder: Any, ids_BT: Tensor, mask_BT: Tensor | None) -> Any:
        return encoder(ids_BT, attention_mask=mask_BT)

    def _embeddings(self, outputs: list[Any]) -> dict[str, Tensor]:
        return {"prompt_embeds": outputs[0][0]}

    def _without_checkers(self) -> dict[str, Any]:
        return {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


class StableDiffusionXL(StableDiffusion):
    """Two CLIP encoders, whose hidden states before the last are the condition, and the second's projection."""

    name = "sdxl"
    pipeline = "StableDiffusionXLPipeline"
    folders = (*StableDiffusion.folders, "text_encoder_2", "tokenizer_2")
    controlnet_pipeline = "StableDiffusionXLControlNetPipeline"

    def _read(self, encoder: Any, ids_BT: Tensor, mask_BT: Tensor | None) -> Any:
        return encoder(ids_BT, attention_mask=mask_BT, output_hidden_states=True)

    def _embeddings(self, outputs: list[Any]) -> dict[str, Tensor]:
        hidden_states = [output.hidden_states[-2] for output in outputs]
        return {"prompt_embeds": torch.cat(hidden_states, dim=-1), "pooled_prompt_embeds": outputs[-1][0]}

    def _without_checkers(self) -> dict[str, Any]:
        return {"add_watermarker": False}
