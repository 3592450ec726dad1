"""Stable Diffusion 1.x and 2.x, and SDXL: U-Nets with one or two CLIP encoders.

Legend: B batch, C channels, H and W latent height and width, S pixels, T text tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import diffusers
import torch
from torch import Tensor, nn

from lightning_aigc.devices import float32_region, weights_dtype
from lightning_aigc.diffusion.families.family import CardRow, Components, Control, Family
from lightning_aigc.diffusion.families.unet_lora import unet_lora_config
from lightning_aigc.diffusion.objectives import DDPM, Objective, ObjectiveSettings

if TYPE_CHECKING:
    from peft import LoraConfig
    from PIL.Image import Image

NOT_RUN = "not run on this chip yet"
INT8 = "the frozen U-Net in 8 bits; no loss was seen (docs/quantized_base.md)"
EDGE_PATH = (
    "controlnet_cond_embedding", "conv_in", "down_blocks.0", "controlnet_down_blocks", "controlnet_mid_block",
)  # fmt: skip
"""The ControlNet's modules that read the condition and those that write the residuals. In the first tens of steps the
first one's gradient is some hundred times fainter than the zero convolutions', so whatever keeps the largest entries
keeps little of it (benchmarks/edge_gradients.py)."""


class UNetControl(Control):
    """ControlNet of a U-Net; its hint embedding reads pixels."""

    network = "ControlNetModel"
    reads_latents = False

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline  # type: ignore[misc]  # one class serves both families

    def residuals(
        self,
        components: Components,
        controlnet: Any,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        hint: Tensor,
        batch: Mapping[str, Any],
        guidance: float = 1.0,
    ) -> dict[str, Any]:
        family: Any = components.family
        dtype = weights_dtype(controlnet)
        added = family.added_conditions(condition, batch, noisy_BCHW.device, weights_dtype(components.denoiser))
        down, middle = controlnet(
            noisy_BCHW.to(dtype),
            timesteps_B,
            condition["prompt_embeds"].to(dtype),
            controlnet_cond=hint.to(dtype),
            added_cond_kwargs=None if added is None else {name: value.to(dtype) for name, value in added.items()},
            return_dict=False,
        )
        return {
            "down_block_additional_residuals": list(down),
            "mid_block_additional_residual": middle,
        }

    def edge_path(self, controlnet: nn.Module) -> tuple[str, ...]:
        return EDGE_PATH

    def sampling_arguments(self, components: Components, conditions_NCSS: Tensor, scale: float) -> dict[str, Any]:
        return {"image": conditions_NCSS, "controlnet_conditioning_scale": scale}


class StableDiffusion(Family):
    """One CLIP encoder; its last hidden state is the condition."""

    name = "sd"
    title = "SD 1.5"
    base = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    short_name: ClassVar[str | None] = "sd15"
    header_patterns: ClassVar[Mapping[str, str]] = {
        "sd1": r"sdv?1|stablediffusionv?1", "sd2": r"sdv?2|stablediffusionv?2",
    }  # fmt: skip
    pipeline = "StableDiffusionPipeline"
    folders: ClassVar[tuple[str, ...]] = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
    denoiser_name = "unet"
    native_side = 512
    is_flow = False
    trains_text_encoders = True
    control = UNetControl("StableDiffusionControlNetPipeline")
    shipped_config = "sd_lora.yaml"
    cards: ClassVar[Mapping[str, CardRow]] = {
        "4gb": CardRow("sd_qlora_4gb.yaml", "max", "blocks are recomputed in backward", "int8", INT8),
        "6gb": CardRow("sd_lora_8gb.yaml", "max", "a step took 2.4 GiB on an H100 (docs/first_hour.md)"),
        "8gb": CardRow("sd_lora_8gb.yaml", "max", "blocks are recomputed in backward"),
        "12gb": CardRow("sd_lora.yaml", "lean", "a step of 4 images took 2.8 GiB on an H100 (docs/first_hour.md)"),
        "24gb": CardRow(
            "sd_lora.yaml", "off", "fastest: nothing is recomputed; a step of 4 images took 6.3 GiB on an H100"
        ),
        "910b": CardRow("sd_lora_ascend.yaml", "lean", NOT_RUN),
    }

    def objective(self, components: Components, settings: ObjectiveSettings) -> Objective:
        return DDPM(components.scheduler_config, settings)

    def predict(
        self,
        components: Components,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        batch: Mapping[str, Any],
        guidance: float = 1.0,
        residuals: Mapping[str, Any] | None = None,
    ) -> Tensor:
        unet = components.denoiser
        dtype = weights_dtype(unet)
        predicted_BCHW: Tensor = unet(
            noisy_BCHW.to(dtype),
            timesteps_B,
            condition["prompt_embeds"].to(dtype),
            added_cond_kwargs=self.added_conditions(condition, batch, noisy_BCHW.device, dtype),
            **(residuals or {}),
        ).sample
        return predicted_BCHW

    def added_conditions(
        self, condition: Mapping[str, Tensor], batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor] | None:
        """SDXL's pooled embeddings and image sizes; None for the others."""
        return None

    def lora_config(self, components: Components, targets: Sequence[str], **options: Any) -> LoraConfig:
        return unet_lora_config(targets, **options)

    def make_pipeline(self, components: Components, scheduler: Any, controlnet: Any = None) -> Any:
        given: dict[str, Any] = {"unet": components.denoiser, "vae": components.vae, "scheduler": scheduler}
        for number, pair in enumerate(zip(components.text_encoders, components.tokenizers, strict=True)):
            suffix = f"_{number + 1}" if number else ""
            given |= {f"text_encoder{suffix}": pair[0], f"tokenizer{suffix}": pair[1]}
        pipeline_class = getattr(diffusers, self.pipeline)
        if controlnet is not None:
            pipeline_class, given["controlnet"] = getattr(diffusers, self.control.pipeline), controlnet
        pipeline = pipeline_class(**given, **self._pipeline_config(components))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def make_scheduler(self, config: Mapping[str, Any]) -> Any:
        # Latents are not limited to -1..1; a config from another scheduler may lack this setting.
        from diffusers import DDIMScheduler

        return DDIMScheduler.from_config(config, clip_sample=False)

    def encode_prompts(
        self,
        components: Components,
        prompts: list[str],
        device: torch.device,
        sources: Sequence[Sequence[Image]] | None = None,
    ) -> dict[str, Tensor]:
        outputs = []
        for tokenizer, encoder in zip(components.tokenizers, components.text_encoders, strict=True):
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
            with contextlib.nullcontext() if is_trained else float32_region(device):
                outputs.append(self._read(encoder, tokens.input_ids.to(device), mask))
        embeddings = self._embeddings(outputs)
        if components.zeros_for_empty and not all(prompts):
            is_given_B = torch.tensor([bool(prompt) for prompt in prompts], device=device)
            embeddings = {n: t * is_given_B.view(-1, *[1] * (t.ndim - 1)) for n, t in embeddings.items()}
        return embeddings

    def _read(self, encoder: Any, ids_BT: Tensor, mask_BT: Tensor | None) -> Any:
        return encoder(ids_BT, attention_mask=mask_BT)

    def _embeddings(self, outputs: list[Any]) -> dict[str, Tensor]:
        return {"prompt_embeds": outputs[0][0]}

    def _pipeline_config(self, components: Components) -> dict[str, Any]:
        """Arguments of the pipeline's class that are no networks."""
        return {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


class StableDiffusionXL(StableDiffusion):
    """Two CLIP encoders; their hidden states before the last, and the second's projection, are the condition."""

    name = "sdxl"
    title = "SDXL"
    base = "stabilityai/stable-diffusion-xl-base-1.0"
    short_name = None
    name_pattern = r"^(?!.*(qwen.?image|z.?image|klein|flux|stable.?diffusion.?v?3|sd.?3)).*xl"
    header_patterns: ClassVar[Mapping[str, str]] = {"sdxl": r"sdxl|stablediffusionxl"}
    pipeline = "StableDiffusionXLPipeline"
    folders = (*StableDiffusion.folders, "text_encoder_2", "tokenizer_2")
    native_side = 1024
    control = UNetControl("StableDiffusionXLControlNetPipeline")
    shipped_config = "sdxl_lora.yaml"
    cards: ClassVar[Mapping[str, CardRow]] = {
        "4gb": CardRow(
            "sdxl_qlora_6gb.yaml", "max", "2.5 GiB and the card's context, by counting (docs/quantized_base.md)", "nf4",
            "int8 needs 1 GiB more; the LoRA loses a little on the full-precision base",
        ),
        "6gb": CardRow(
            "sdxl_qlora_6gb.yaml", "max", "3.5 GiB and the card's context, by counting (docs/quantized_base.md)",
            "int8", INT8,
        ),
        "8gb": CardRow(
            "sdxl_qlora_6gb.yaml", "max", "3.5 GiB and the card's context, by counting (docs/quantized_base.md)",
            "int8", "a full base takes 5.8 GiB for the step alone; no loss was seen in 8 bits",
        ),
        "12gb": CardRow("sdxl_lora.yaml", "max", "the U-Net's step took 5.8 GiB on an H100; lean took 6.6"),
        "24gb": CardRow("sdxl_lora.yaml", "lean", "the U-Net's step took 6.6 GiB on an H100"),
        "910b": CardRow("sdxl_lora.yaml", "lean", NOT_RUN),
    }  # fmt: skip

    def added_conditions(
        self, condition: Mapping[str, Tensor], batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor] | None:
        sizes = [batch[k].to(device) for k in ("original_size", "crop_top_left", "target_size")]
        return {
            "text_embeds": condition["pooled_prompt_embeds"].to(dtype),
            "time_ids": torch.cat(sizes, dim=1).to(dtype),
        }

    def unread_names(self, components: Components) -> set[str]:
        # The first text encoder's hidden state before the last is taken.
        first = components.text_encoders[0]
        last = int(first.config.num_hidden_layers) - 1  # type: ignore[union-attr, arg-type]
        fragments = (f"encoder.layers.{last}.", "final_layer_norm.")
        return {f"text_encoder.{n}" for n, _ in first.named_parameters() if any(f in n for f in fragments)}

    def _read(self, encoder: Any, ids_BT: Tensor, mask_BT: Tensor | None) -> Any:
        return encoder(ids_BT, attention_mask=mask_BT, output_hidden_states=True)

    def _embeddings(self, outputs: list[Any]) -> dict[str, Tensor]:
        hidden_states = [output.hidden_states[-2] for output in outputs]
        return {"prompt_embeds": torch.cat(hidden_states, dim=-1), "pooled_prompt_embeds": outputs[-1][0]}

    def _pipeline_config(self, components: Components) -> dict[str, Any]:
        return {"add_watermarker": False, "force_zeros_for_empty_prompt": components.zeros_for_empty}
