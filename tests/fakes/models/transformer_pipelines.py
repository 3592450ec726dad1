"""Pipelines of the families of diffusion transformers with random weights, true in shape and small."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from fakes.models.pipelines import make_sd3_pipeline, make_text_encoder, make_tokenizer

WIDTH = 32
"""Width of every text encoder but CLIP."""
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_CHAT = (
    "{% for message in messages %}[INST]{% for part in message.content %}{{ part.text }}{% endfor %}[/INST]{% endfor %}"
)
DYNAMIC = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}


def make_qwen_tokenizer() -> Qwen2Tokenizer:
    """A token a byte, and the chat's three special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: number for number, token in enumerate([*special, *sorted(ByteLevel.alphabet())])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], extra_special_tokens=special[1:])
    tokenizer.chat_template = CHAT
    return tokenizer


def make_t5_tokenizer() -> T5Tokenizer:
    """A token a letter."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    return T5Tokenizer(vocab=[*vocabulary, *((letter, -2.0) for letter in "abcdefghijklmnopqrstuvwxyz")], extra_ids=0)


def qwen_shape(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 300, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip


def _vae(kind: Any = AutoencoderKL, **options: Any) -> Any:
    shape: dict[str, Any] = {
        "block_out_channels": (8, 8), "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4, "latent_channels": 4,
        "layers_per_block": 1,
    }  # fmt: skip
    return kind(**(shape | options))


def make_z_image_pipeline(folder: Path) -> Path:
    torch.manual_seed(0)
    ZImagePipeline(
        transformer=ZImageTransformer2DModel(
            in_channels=4, dim=64, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=WIDTH,
            axes_dims=[4, 6, 6], axes_lens=[600, 64, 64],
        ),
        vae=_vae(scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=Qwen3Model(Qwen3Config(**qwen_shape(2), head_dim=16)),
        tokenizer=make_qwen_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def make_flux2_pipeline(folder: Path) -> Path:
    torch.manual_seed(0)
    vae = _vae(AutoencoderKLFlux2, latent_channels=4)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    Flux2KleinPipeline(
        transformer=Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
            joint_attention_dim=3 * WIDTH, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
        ),
        vae=vae,
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**qwen_shape(28), head_dim=16)),
        tokenizer=make_qwen_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(**DYNAMIC, shift=3.0),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def make_flux_pipeline(folder: Path) -> Path:
    torch.manual_seed(0)
    t5 = T5Config(
        vocab_size=40, d_model=WIDTH, d_kv=16, d_ff=48, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
            joint_attention_dim=WIDTH, pooled_projection_dim=16, axes_dims_rope=(4, 6, 6), guidance_embeds=True,
        ),
        vae=_vae(scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=make_text_encoder(),
        tokenizer=make_tokenizer(folder / "tokenizer"),
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=make_t5_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(**DYNAMIC, shift=3.0),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def make_qwen_image_pipeline(folder: Path) -> Path:
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    text = qwen_shape(2) | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
            joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6),
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.1, -0.2, 0.3, -0.4], latents_std=[1.5, 0.7, 1.1, 0.9],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
        tokenizer=make_qwen_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            **(DYNAMIC | {"max_shift": 0.9, "max_image_seq_len": 8192}), shift_terminal=0.02
        ),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def make_chroma_pipeline(folder: Path) -> Path:
    torch.manual_seed(0)
    t5 = T5Config(
        vocab_size=40, d_model=WIDTH, d_kv=16, d_ff=48, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    ChromaPipeline(
        transformer=ChromaTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
            joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6), approximator_num_channels=16,
            approximator_hidden_dim=32, approximator_layers=1,
        ),
        vae=_vae(scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=T5EncoderModel(t5),
        tokenizer=make_t5_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def make_krea2_pipeline(folder: Path) -> Path:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    text = qwen_shape(4) | {"head_dim": 16, "rope_parameters": rope}
    pipeline = Krea2Pipeline(
        transformer=Krea2Transformer2DModel(
            in_channels=16, num_layers=3, attention_head_dim=16, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=96, timestep_embed_dim=32, text_hidden_dim=WIDTH, num_text_layers=3,
            text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=48,
            num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.1, -0.2, 0.3, -0.4], latents_std=[1.5, 0.7, 1.1, 0.9],
        ),
        text_encoder=Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision)),
        tokenizer=make_qwen_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(**(DYNAMIC | {"max_image_seq_len": 6400})),
        text_encoder_select_layers=(1, 2, 4),
    )  # fmt: skip
    for name, parameter in pipeline.transformer.named_parameters():
        if "scale_shift_table" in name:  # zeros, by which no block would change anything
            torch.nn.init.normal_(parameter, std=0.5)
    pipeline.save_pretrained(folder)
    return folder


def make_flux2_dev_pipeline(folder: Path) -> Path:
    klein = Flux2KleinPipeline.from_pretrained(make_flux2_pipeline(folder))
    torch.manual_seed(1)
    special = ["<unk>", "<s>", "</s>", "<pad>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"]
    vocabulary = {token: number for number, token in enumerate([*special, *sorted(ByteLevel.alphabet())])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], extra_special_tokens=special[1:])
    tokenizer.pad_token = "<pad>"
    text = {
        "vocab_size": 300, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 31,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "model_type": "mistral",
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    given: dict[str, Any] = klein.components | {
        "transformer": Flux2Transformer2DModel.from_config(klein.transformer.config, guidance_embeds=True),
        "text_encoder": Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision)),
        "tokenizer": PixtralProcessor(
            image_processor=PixtralImageProcessor(patch_size=14), tokenizer=tokenizer, patch_size=14,
            chat_template=MISTRAL_CHAT,
        ),
    }  # fmt: skip
    shutil.rmtree(folder / "text_encoder")
    shutil.rmtree(folder / "tokenizer")
    Flux2Pipeline(**given).save_pretrained(folder)
    return folder


MAKE: dict[str, Callable[[Path], Path]] = {
    "sd3": make_sd3_pipeline,
    "flux": make_flux_pipeline,
    "flux2": make_flux2_pipeline,
    "z_image": make_z_image_pipeline,
    "qwen_image": make_qwen_image_pipeline,
    "flux2_dev": make_flux2_dev_pipeline,
    "chroma": make_chroma_pipeline,
    "krea2": make_krea2_pipeline,
}
"""By family."""
