"""Z-Image: one stream of text and image tokens, with lists as inputs, reversed time and a negated output.

Legend: B batch, C channels, F frames (one), H and W latent height and width, T text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.families.family import Components, StepMemory
from lightning_aigc.diffusion.families.tokens import pad_texts
from lightning_aigc.diffusion.families.transformer_control import TransformerControl
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily

STACKS = ("layers", "noise_refiner", "context_refiner")
LENT = (
    "t_scale", "t_embedder", "all_x_embedder", "cap_embedder", "rope_embedder", "noise_refiner", "context_refiner",
    "x_pad_token", "cap_pad_token",
)  # fmt: skip
"""The transformer's modules that a ControlNet runs, as diffusers' `from_transformer` passes them."""


class ZImageControl(TransformerControl):
    """ControlNet that runs modules of its transformer."""

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
        dtype = controlnet.x_pad_token.dtype  # the transformer's modules read the latents and the text
        missing = int(controlnet.config.control_in_dim) - hint.shape[1]
        hint = nn.functional.pad(hint, (0, 0, 0, 0, 0, missing))  # as diffusers' pipeline does
        inputs = _inputs(dtype, noisy_BCHW, timesteps_B, condition)
        samples = controlnet(**inputs, control_context=list(hint.to(dtype).unsqueeze(2)))
        return {"controlnet_block_samples": samples}

    def lend(self, controlnet: nn.Module, transformer: nn.Module) -> None:
        # As diffusers' `from_transformer`, but no part of the ControlNet: what is lent is not saved or trained.
        for name in LENT:
            controlnet._modules.pop(name, None)
            controlnet._parameters.pop(name, None)
            vars(controlnet)[name] = getattr(transformer, name)
        # diffusers 0.42.1 forgets to set what forward asks under gradients.
        vars(controlnet).setdefault("gradient_checkpointing", False)

    def edge_path(self, controlnet: nn.Module) -> tuple[str, ...]:
        read = ("control_all_x_embedder", "control_noise_refiner")
        names = [name for name, _ in controlnet.named_modules()]  # some ControlNets have no refiner of their own
        return tuple(name for name in names if name in read or name.endswith(("before_proj", "after_proj")))

    def block_counts(self, transformer: Any) -> dict[str, int]:
        return {"num_layers": int(transformer.config.n_layers)}

    def control_counts(self, blocks: int) -> list[int]:
        return list(range(1, blocks + 1))

    def control_config(self, transformer: Any, counts: Mapping[str, int]) -> dict[str, Any]:
        blocks, count = int(transformer.config.n_layers), counts["num_layers"]
        places = [number * blocks // count for number in range(count)]
        return {"control_layers_places": places, "control_in_dim": int(transformer.config.in_channels)}

    def copied_weights(self, controlnet: Any, transformer: nn.Module) -> dict[str, Tensor]:
        held, places = transformer.state_dict(), controlnet.config.control_layers_places

        def origin(name: str) -> str:
            stack, _, rest = name.removeprefix("control_").partition(".")
            number, _, layer = rest.partition(".")
            return f"{stack}.{places[int(number)]}.{layer}" if stack == "layers" else f"{stack}.{rest}"

        return {name: held[origin(name)] for name in controlnet.state_dict() if origin(name) in held}

    def misfit(self, controlnet: Any, transformer: Any) -> str | None:
        last, layers = max(controlnet.config.control_layers_places), int(transformer.config.n_layers)
        if last >= layers:
            return f"adds to layer {last} of a transformer that has layers 0 to {layers - 1}"
        read, channels = int(controlnet.config.control_in_dim), int(transformer.config.in_channels)
        if read < channels:
            return f"reads conditions of {read} channels, and this autoencoder's latents have {channels}"
        return None


class ZImage(TransformerFamily):
    """Qwen3 hidden states of each caption's own length; FLUX.1's autoencoder."""

    name = "z_image"
    title = "Z-Image"
    base = "Tongyi-MAI/Z-Image"
    name_pattern = r"^(?!.*qwen.?image).*(?<![a-z])z.?image"
    header_patterns: ClassVar[Mapping[str, str]] = {"z_image": r"zimage"}
    pipeline = "ZImagePipeline"
    folders = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention": ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
        "feed_forward": ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    }
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        f"{stack}.{{}}.{original}": tuple(f"{stack}.{{}}.{layer}" for layer in layers)
        for stack in STACKS
        for original, layers in {
            "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
            "attention.out": ("attention.to_out.0",),
            "feed_forward.w1": ("feed_forward.w1",),
            "feed_forward.w2": ("feed_forward.w2",),
            "feed_forward.w3": ("feed_forward.w3",),
            "adaLN_modulation.0": ("adaLN_modulation.0",),
        }.items()
    }
    original_names: ClassVar[Mapping[str, str]] = {
        **{f"{stack}.{{}}.attention.norm_{x}": f"{stack}.{{}}.attention.{x}_norm" for stack in STACKS for x in "qk"},
        "all_x_embedder.2-1": "x_embedder",
        "all_final_layer.2-1": "final_layer",
    }
    control = ZImageControl("ZImageControlNetModel", "ZImageControlNetPipeline", layers={"num_layers": 6})
    training_adapters = "ostris/zimage_turbo_training_adapter"
    few_step_guidance = 0.0
    shipped_config = "z_image_qlora_8gb.yaml"
    step_memory = StepMemory("Z-Image", {None: 13.9, "int8": 8.5, "nf4": 5.7}, tokens=4200)
    caption_tokens: ClassVar[Mapping[str, int]] = {"tokenizer": 512}
    modelspec = "z-image"
    draws_latents = False

    def encode_with(self, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        texts, _ = pipeline.encode_prompt(prompts, device=device, do_classifier_free_guidance=False)
        return pad_texts(texts)

    def embedding_arguments(self, condition: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"prompt_embeds": _own_lengths(condition["prompt_embeds"], condition)}

    def velocity(
        self,
        denoiser: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float = 1.0,
        residuals: Mapping[str, Any] | None = None,
    ) -> Tensor:
        given = _inputs(weights_dtype(denoiser), noisy_BCHW, timesteps_B, condition)
        answers_CFHW = denoiser(**given, **(residuals or {}), return_dict=False)[0]
        return -torch.stack(answers_CFHW).squeeze(2)

    def patch_size(self, denoiser: Any) -> int:
        return int(denoiser.config.all_patch_size[0])


def _inputs(
    dtype: torch.dtype, noisy_BCHW: Tensor, timesteps_B: Tensor, condition: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The arguments that the transformer and its ControlNet both take."""
    return {
        "x": list(noisy_BCHW.to(dtype).unsqueeze(2)),
        "t": (1000 - timesteps_B) / 1000,
        "cap_feats": _own_lengths(condition["prompt_embeds"].to(dtype), condition),
    }


def _own_lengths(embeddings_BTD: Tensor, condition: Mapping[str, Tensor]) -> list[Tensor]:
    """Each text without its padding."""
    lengths = condition["prompt_lengths"].tolist()
    return [text_TD[:length] for text_TD, length in zip(embeddings_BTD, lengths, strict=True)]
