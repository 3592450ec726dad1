"""Tiny U-Nets and text encoders with a LoRA of random weights, and what they compute."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from peft import LoraConfig
from torch import nn

from fakes.models.pipelines import assemble, make_text_encoder

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
FEED_FORWARD = ["ff.net.0.proj", "ff.net.2"]
CONVOLUTIONS = ["conv1", "conv2", "conv_shortcut", "time_emb_proj", "downsamplers.0.conv", "upsamplers.0.conv"]
OUTSIDE = ["conv_in", "time_embedding.linear_1"]
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
EVERYTHING = [*ATTENTION, *FEED_FORWARD, "proj_in", "proj_out", *CONVOLUTIONS, *OUTSIDE]


def make_unet(sdxl: bool = False) -> UNet2DConditionModel:
    torch.manual_seed(0)
    if sdxl:
        # The block types of SDXL: no attention, attention, attention.
        return UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16, 16),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=2,
            transformer_layers_per_block=(1, 2, 2),
            attention_head_dim=(2, 2, 4),
            norm_num_groups=4,
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=16 + 6 * 8,
            use_linear_projection=True,
        ).eval()
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=2,
        norm_num_groups=4,
        cross_attention_dim=16,
    ).eval()


def make_pipeline(folder: Path, sdxl: bool = False) -> StableDiffusionPipeline | StableDiffusionXLPipeline:
    return assemble(folder, make_unet(sdxl), sdxl)


def adapt(model: nn.Module, targets: list[str], **options: object) -> nn.Module:
    """Add a LoRA with random weights that clearly changes the output."""
    model.add_adapter(LoraConfig(**{"r": 4, "lora_alpha": 3, "target_modules": targets, **options}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def run_unet(unet: UNet2DConditionModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    sdxl = unet.config.addition_embed_type == "text_time"
    added = {"text_embeds": torch.randn(2, 16, generator=generator), "time_ids": torch.ones(2, 6)} if sdxl else None
    context = torch.randn(2, 5, unet.config.cross_attention_dim, generator=generator)
    latents = torch.randn(2, 4, 8, 8, generator=generator)
    return unet(latents, torch.tensor([10, 500]), context, added_cond_kwargs=added).sample


@torch.no_grad()
def run_text_encoder(model: nn.Module) -> torch.Tensor:
    return model(torch.tensor([[0, 5, 7, 9, 1]]), output_hidden_states=True).hidden_states[-1]


def assert_same_model(
    pipeline: StableDiffusionPipeline | StableDiffusionXLPipeline,
    unet: nn.Module | None,
    *text_encoders: nn.Module | None,
) -> None:
    pairs = [(pipeline.unet, unet, run_unet, make_unet(isinstance(pipeline, StableDiffusionXLPipeline)))]
    for index, text_encoder in enumerate(text_encoders):
        loaded = pipeline.text_encoder if index == 0 else pipeline.text_encoder_2
        pairs.append((loaded, text_encoder, run_text_encoder, make_text_encoder(with_projection=index == 1)))
    for loaded, trained, run, base in pairs:
        if trained is None:
            continue
        wanted = run(trained)
        torch.testing.assert_close(run(loaded), wanted, rtol=1e-4, atol=1e-5)
        assert (wanted - run(base)).abs().max() > 1e-2, "the LoRA changes nothing, so the comparison proves nothing"
