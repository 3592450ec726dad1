"""Run a real-size Stable Diffusion 1.5 with random weights from `lightning fit` to diffusers, on any device.

    python -m benchmarks.end_to_end.real_size WORKDIR

Builds the pipeline folder from SD 1.5's published configuration (4.3 GB in float32, 2.1 GB in bfloat16), runs
`lightning fit -c configs/sd_lora.yaml` for one optimizer step on three images, and loads the LoRA file in diffusers.
Prints one JSON row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common.rows import keep_row
from lightning_aigc.cli.bench.architectures import SDXL_UNET
from lightning_aigc.embedded import resolve


def build_pipeline(folder: Path, dtype: torch.dtype) -> None:
    """SD 1.5's U-Net (860 M), autoencoder (84 M), text encoder (123 M) with random weights, and the tiny tokenizer."""
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=512,
    )  # fmt: skip
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768
        )
    )
    torch.set_default_dtype(torch.float32)
    tokenizer = CLIPTokenizer.from_pretrained(resolve("embedded:sd") / "tokenizer", model_max_length=77)
    scheduler = PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )
    StableDiffusionPipeline(
        vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


def build_sdxl_pipeline(folder: Path, dtype: torch.dtype) -> None:
    """SDXL's U-Net (2567 M), autoencoder and both text encoders (123 M and 695 M), random in `dtype`."""
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    sizes = {"vocab_size": 49408, "max_position_embeddings": 77}
    text = CLIPTextConfig(**sizes, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                          num_attention_heads=12, projection_dim=768)  # fmt: skip
    text_2 = CLIPTextConfig(**sizes, hidden_size=1280, intermediate_size=5120, num_hidden_layers=32,
                            num_attention_heads=20, projection_dim=1280, hidden_act="gelu")  # fmt: skip
    with torch.device("meta"):
        made: list[torch.nn.Module] = [
            sdxl_unet(UNet2DConditionModel),
            AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=1024, scaling_factor=0.13025,
            ),
        ]  # fmt: skip
    made = [fill(module.to_empty(device="cpu")) for module in made]
    # constructors of transformers models fill their buffers
    made += [fill(CLIPTextModel(text)), fill(CLIPTextModelWithProjection(text_2))]
    torch.set_default_dtype(torch.float32)
    unet, vae, encoder, encoder_2 = made
    tokenizer = CLIPTokenizer.from_pretrained(resolve("embedded:sd") / "tokenizer", model_max_length=77)
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading"
    )
    StableDiffusionXLPipeline(
        vae=vae, text_encoder=encoder, text_encoder_2=encoder_2, tokenizer=tokenizer, tokenizer_2=tokenizer, unet=unet,
        scheduler=scheduler,
    ).save_pretrained(folder)  # fmt: skip


def sdxl_unet(unet_class: Any) -> Any:
    """SDXL's U-Net from its published configuration."""
    return unet_class(**SDXL_UNET)


def fill(module: torch.nn.Module) -> torch.nn.Module:
    """Fill with random weights of typical scale: norms one, biases zero, others normal (a repeated tile, for speed)."""
    tile = torch.randn(1 << 20)
    for name, parameter in module.named_parameters():
        flat = parameter.data.view(-1)
        if parameter.dim() == 1:
            flat.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        spread = 0.5 * (parameter.numel() / parameter.shape[0]) ** -0.5
        for start in range(0, flat.numel(), len(tile)):
            part = flat[start : start + len(tile)]
            part.copy_(tile[: len(part)] * spread)
    return module


def make_photos(folder: Path) -> None:
    """Write three photo-sized images of different shapes, with captions."""
    import random

    from tools.embedded.drawing import draw_brand

    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for i, (width, height) in enumerate([(800, 800), (1024, 768), (600, 900)]):
        draw_brand("mug", rng, 512).resize((width, height)).save(folder / f"mug {i}.jpg", quality=95)
        (folder / f"mug {i}.txt").write_text("a photo of a zorp mug", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    arguments = parser.parse_args()
    pipeline, photos, run = (arguments.workdir / name for name in ("sd15_random", "photos", "run"))
    if not (pipeline / "model_index.json").is_file():
        build_pipeline(pipeline, getattr(torch, arguments.dtype))
    make_photos(photos)
    # The guard needs CLIP from the hub. Without it the report has no score.
    shipped = yaml.safe_load(Path("configs/sd_lora.yaml").read_text(encoding="utf-8"))
    kept = [entry for entry in shipped["trainer"]["callbacks"] if entry["class_path"] != "CLIPConvergenceGuard"]
    mine = {
        "trainer": {"callbacks": kept},
        "model": {"init_args": {"validation_prompts": ["a photo of a zorp mug"], "output_name": "real_size"}},
        "data": {"init_args": {"trigger_word": "zorp"}},
    }
    overrides = arguments.workdir / "real_size.yaml"
    overrides.write_text(yaml.safe_dump(mine), encoding="utf-8")
    command = [
        sys.executable, "-m", "lightning_aigc", "fit", "-c", "configs/sd_lora.yaml", "-c", str(overrides),
        "--model.init_args.pretrained_model_name_or_path", str(pipeline),
        "--data.init_args.train_data_dir", str(photos),
        "--data.init_args.cache_dir", str(arguments.workdir / "cache"), "--trainer.default_root_dir", str(run),
        "--data.init_args.train_batch_size", "1", "--model.init_args.max_train_steps", str(arguments.steps),
    ]  # fmt: skip
    started = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - started

    from diffusers import StableDiffusionPipeline

    loaded = StableDiffusionPipeline.from_pretrained(pipeline, dtype=torch.bfloat16, safety_checker=None)
    summary = json.loads((run / "summary.json").read_text())
    loaded.load_lora_weights(summary["lora_file"])
    adapted = sum("lora_A" in name for name, _ in loaded.unet.named_parameters())
    row = {
        "case": "sd15_random_weights_lora",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__, "steps": summary["steps"], "fit_seconds": summary["seconds"],
        "command_seconds": round(seconds, 1), "peak_memory_mib": summary["peak_memory_mib"],
        "lora_layers_in_diffusers": adapted, "notes": summary["notes"],
    }  # fmt: skip
    keep_row(row, None)
    if not adapted:
        raise SystemExit("error: the LoRA did not reach diffusers' U-Net")


if __name__ == "__main__":
    main()
