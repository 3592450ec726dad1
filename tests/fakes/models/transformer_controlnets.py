"""ControlNets of the families of diffusion transformers: modules to train, and what diffusers computes, written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers import (
    DiffusionPipeline,
    FluxControlNetPipeline,
    QwenImageControlNetPipeline,
    ZImageControlNetModel,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor

from lightning_aigc.diffusion import DiffusionControlNet
from lightning_aigc.diffusion.families import CONTROLLED

QUICK: dict[str, Any] = {"num_inference_steps": 2, "learning_rate": 1e-2, "max_train_steps": 3, "output_name": "edges"}
CAPTIONS = ("a red cup", "zorp")  # of unequal length


def make_module(path: str, **options: Any) -> DiffusionControlNet:
    torch.manual_seed(0)
    module = DiffusionControlNet(path, **(QUICK | options))
    module.configure_model()
    return module


def stirred(module: DiffusionControlNet) -> DiffusionControlNet:
    """The module with a ControlNet whose projections are no longer zero."""
    torch.manual_seed(7)
    for parameter in module.controlnet.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return module


def load_pipeline(family: str, path: str, **parts: Any) -> Any:
    optional = dict.fromkeys(CONTROLLED[family].optional_folders)
    kind: Any = getattr(diffusers, CONTROLLED[family].control.pipeline) if parts else DiffusionPipeline
    pipeline = kind.from_pretrained(path, **optional, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def shifted(vae: Any, moments: Tensor) -> Tensor:
    drawn: Tensor = DiagonalGaussianDistribution(moments).sample()
    return (drawn - float(vae.config.shift_factor)) * float(vae.config.scaling_factor)


def shifted_mean(vae: Any, moments: Tensor) -> Tensor:
    mean: Tensor = DiagonalGaussianDistribution(moments).mode()
    return (mean - float(vae.config.shift_factor)) * float(vae.config.scaling_factor)


def normalised(vae: Any, moments: Tensor) -> Tensor:
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    drawn: Tensor = DiagonalGaussianDistribution(moments).sample()
    return (drawn - mean) * (1.0 / std)


def sd3_velocity(pipeline: Any, controlnet: Any, noisy: Tensor, timesteps: Tensor, shown: Tensor) -> Tensor:
    embeddings, _, pooled, _ = pipeline.encode_prompt(list(CAPTIONS), None, None, do_classifier_free_guidance=False)
    given = {
        "hidden_states": noisy, "timestep": timesteps, "encoder_hidden_states": embeddings,
        "pooled_projections": pooled, "return_dict": False,
    }  # fmt: skip
    samples = controlnet(**given, controlnet_cond=shown)[0]
    velocity: Tensor = pipeline.transformer(**given, block_controlnet_hidden_states=samples)[0]
    return velocity


def flux_velocity(pipeline: Any, controlnet: Any, noisy: Tensor, timesteps: Tensor, shown: Tensor) -> Tensor:
    def pack(latents: Tensor) -> Tensor:
        packed: Tensor = FluxControlNetPipeline._pack_latents(latents, *latents.shape)
        return packed

    batch, _, height, width = noisy.shape
    embeddings, pooled, text_ids = pipeline.encode_prompt(list(CAPTIONS))
    ids = FluxControlNetPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, noisy.device, noisy.dtype)
    given = {
        "hidden_states": pack(noisy), "timestep": timesteps / 1000, "guidance": torch.full((batch,), 1.0),
        "pooled_projections": pooled, "encoder_hidden_states": embeddings, "txt_ids": text_ids, "img_ids": ids,
        "return_dict": False,
    }  # fmt: skip
    doubles, singles = controlnet(**given, controlnet_cond=pack(shown))
    answer = pipeline.transformer(**given, controlnet_block_samples=doubles, controlnet_single_block_samples=singles)[0]
    velocity: Tensor = FluxControlNetPipeline._unpack_latents(answer, 2 * height, 2 * width, 2)
    return velocity


def qwen_image_velocity(pipeline: Any, controlnet: Any, noisy: Tensor, timesteps: Tensor, shown: Tensor) -> Tensor:
    def pack(latents: Tensor) -> Tensor:
        packed: Tensor = QwenImageControlNetPipeline._pack_latents(latents, *latents.shape)
        return packed

    batch, _, height, width = noisy.shape
    embeddings, mask = pipeline.encode_prompt(list(CAPTIONS))
    given = {
        "hidden_states": pack(noisy), "timestep": timesteps / 1000, "encoder_hidden_states": embeddings,
        "encoder_hidden_states_mask": mask, "img_shapes": [[(1, height // 2, width // 2)]] * batch,
        "return_dict": False,
    }  # fmt: skip
    samples = controlnet(**given, controlnet_cond=pack(shown))
    answer = pipeline.transformer(**given, controlnet_block_samples=samples)[0]
    velocity: Tensor = QwenImageControlNetPipeline._unpack_latents(answer, 2 * height, 2 * width, 2).squeeze(2)
    return velocity


def z_image_velocity(pipeline: Any, controlnet: Any, noisy: Tensor, timesteps: Tensor, shown: Tensor) -> Tensor:
    """There is no script; by diffusers' pipeline."""
    embeddings, _ = pipeline.encode_prompt(list(CAPTIONS), do_classifier_free_guidance=False)
    lent = ZImageControlNetModel.from_transformer(without_what_is_lent(controlnet), pipeline.transformer)
    given = list(noisy.unsqueeze(2)), (1000 - timesteps) / 1000, embeddings
    samples = lent(*given, list(shown.unsqueeze(2)))
    answer = pipeline.transformer(*given, controlnet_block_samples=samples)[0]
    return -torch.stack(answer).squeeze(2)


def without_what_is_lent(controlnet: Any) -> Any:
    """diffusers' own ControlNet with these weights."""
    made = ZImageControlNetModel.from_config(dict(controlnet.config))
    made.load_state_dict(controlnet.state_dict())
    return made


SCRIPTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "sd3": (shifted, sd3_velocity),
    "flux": (shifted, flux_velocity),
    "qwen_image": (normalised, qwen_image_velocity),
    "z_image": (shifted_mean, z_image_velocity),
}


def condition_latents(module: Any, batch: dict[str, Any]) -> Any:
    """The batch's conditions as the module's ControlNet reads them, [B, C, H, W]."""
    module.loaded()
    return module.method.condition_latents(module.encoders, batch, is_training=module.training)
