"""Stable Diffusion and SDXL pipelines with random weights, small enough for steps of milliseconds."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from lightning_aigc.diffusion.pipeline import single_file

WORDS = ["a", "red", "blue", "cup", "shoe", "zorp"]
SIDE = 32
"""Pixels of a picture: 16 latent pixels."""
SINGLE_SDXL: dict[str, Any] = {"sdxl": True, "second_width": 24, "second_layers": 10}
"""Sizes of `make_pipeline` that diffusers recognizes as SDXL in a single file: by the tenth layer, and by the width."""


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    tokens = ["<|startoftext|>", "<|endoftext|>", *(f"{word}</w>" for word in WORDS)]
    tokens += sorted({letter for word in WORDS for letter in word} | {f"{w[-1]}</w>" for w in WORDS})
    merges = []
    for word in WORDS:
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        while len(pieces) > 1:  # join from the left: r e d</w>, re d</w>, red</w>
            merges.append(f"{pieces[0]} {pieces[1]}")
            pieces = [pieces[0] + pieces[1], *pieces[2:]]
            tokens.append(pieces[0])
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *dict.fromkeys(merges)]) + "\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=12)


def make_text_encoder(with_projection: bool = False, width: int = 16, layers: int = 2) -> CLIPTextModel:
    torch.manual_seed(1 + with_projection)
    config = CLIPTextConfig(
        vocab_size=60,  # room for every token of the tokenizer
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=12,
        projection_dim=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if with_projection else CLIPTextModel)(config).eval()


def make_pipeline(
    folder: Path, sdxl: bool = False, second_width: int = 16, second_layers: int = 2, **scheduler: Any
) -> Path:
    """Save a pipeline folder; returns it. `second_width` and `second_layers` are of SDXL's second text encoder."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "sample_size": SIDE // 2,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 1,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
        "cross_attention_dim": 16,
    }
    if sdxl:
        shape |= {
            "cross_attention_dim": 16 + second_width,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 16 + 6 * 8,
            "use_linear_projection": True,
        }
    unet = UNet2DConditionModel(**shape)
    assemble(folder, unet, sdxl, second_width, second_layers, **scheduler).save_pretrained(folder)
    return folder


@functools.cache
def tiny_configs() -> dict[str, str]:
    """Folders without weights of the tiny pipelines, by diffusers' type of a single file."""
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for kind, sizes in (("v1", {}), ("xl_base", SINGLE_SDXL)):
        for weights in make_pipeline(root / kind, **sizes).rglob("*.safetensors"):
            weights.unlink()
    return {path.name: str(path) for path in root.iterdir()}


def read_single_files_with(configs: Mapping[str, str]) -> None:
    """Let this process read tiny single files with the configs in these folders instead of the published ones."""
    single_file.write_configs = lambda kind, folder: shutil.copytree(configs[kind], folder, dirs_exist_ok=True)


def assemble(
    folder: Path,
    unet: UNet2DConditionModel,
    sdxl: bool = False,
    second_width: int = 16,
    second_layers: int = 2,
    **scheduler: Any,
) -> StableDiffusionPipeline | StableDiffusionXLPipeline:
    """A pipeline around this U-Net; the tokenizer's files go to `folder`."""
    tokenizer = make_tokenizer(folder / "tokenizer")
    parts: dict[str, Any] = {
        "unet": unet,
        "vae": AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            latent_channels=4,
        ),
        "text_encoder": make_text_encoder(),
        "tokenizer": tokenizer,
        "scheduler": DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            steps_offset=1,
            **scheduler,
        ),
    }
    if sdxl:
        encoder = make_text_encoder(with_projection=True, width=second_width, layers=second_layers)
        return StableDiffusionXLPipeline(**parts, text_encoder_2=encoder, tokenizer_2=tokenizer)
    return StableDiffusionPipeline(**parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False)


def make_sd3_pipeline(folder: Path, shift: float = 3.0, blocks: int = 2) -> Path:
    """Save a Stable Diffusion 3 pipeline without T5; returns its folder."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(folder / "tokenizer")
    encoders = [make_text_encoder(with_projection=True, width=width) for width in (16, 24)]
    StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=SIDE // 2,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=blocks,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=48,
            caption_projection_dim=64,
            pooled_projection_dim=32,
            pos_embed_max_size=16,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
        ),
        vae=AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            latent_channels=4,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        text_encoder=encoders[0],
        text_encoder_2=encoders[1],
        text_encoder_3=None,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=None,
    ).save_pretrained(folder)
    return folder


def make_batch(
    captions: Sequence[str] = ("a red cup", "a zorp shoe"), priors: int = 0, seed: int = 0
) -> dict[str, Any]:
    """A batch as ImageCaptionData makes it, the last `priors` of it class pictures."""
    count = len(captions)
    pixels: Tensor = torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    sizes = torch.tensor([[SIDE, SIDE]] * count)
    return {
        "pixel_values": pixels,
        "captions": list(captions),
        "is_prior": [number >= count - priors for number in range(count)],
        "original_size": sizes,
        "crop_top_left": torch.zeros_like(sizes),
        "target_size": sizes,
        "names": [f"{number}.png" for number in range(count)],
    }
