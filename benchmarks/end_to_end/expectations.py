"""Cost of a first run of SD 1.5 and SDXL on each card: download, disk, memory and minutes.

    python -m benchmarks.end_to_end.expectations [--output benchmarks/results/end_to_end/expectations.jsonl]
    # the table of first_hour.md
    python -m benchmarks.end_to_end.expectations --table benchmarks/results/end_to_end/expectations.jsonl

Each figure is `measured` (a row of an H100 in benchmarks/results), `counted` (from the real-size architectures, built
without memory, and the shipped configs) or `modelled`. Minutes are modelled: the counted FLOPs of a step, times the
config's steps and accumulation, over UTILISATION of the card's rate, without sampling, encoding and loading. A card's
rate is its float16 or bfloat16 rate with float32 accumulation, twice the float32 rate on GeForce cards of these
generations. Unknown figures are marked in the row.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from benchmarks import RESULTS, ROOT
from benchmarks.common.unet_variants import SD15, SDXL

UTILISATION = 0.3
"""Assumed share of the card's rate that a step reaches."""
CLIP_JUDGE = 151_277_313
"""Parameters of open_clip's ViT-B-32, whose weights are float32."""
GB, MIB = 1e9, 2**20
# Card: example, float32 TFLOP/s as its maker publishes them, or None.
CARDS: dict[str, tuple[str, float | None]] = {
    "4 GB": ("no example: most have no bfloat16", None),
    "6 GB": ("no example: most have no bfloat16", None),
    "8 GB": ("RTX 4060", 15.1),
    "12 GB": ("RTX 3060", 12.7),
    "24 GB": ("RTX 3090", 35.6),
    "910B": ("64 GB", None),
}
# Model and card: shipped config, memory level as `lightning init --card` writes it.
RUNS = {
    ("sd15", "4 GB"): ("sd_qlora_4gb.yaml", "max"),
    ("sdxl", "4 GB"): ("sdxl_qlora_6gb.yaml", "max"),
    ("sd15", "6 GB"): ("sd_lora_8gb.yaml", "max"),
    ("sd15", "8 GB"): ("sd_lora_8gb.yaml", "max"),
    ("sd15", "12 GB"): ("sd_lora.yaml", "lean"),
    ("sd15", "24 GB"): ("sd_lora.yaml", "off"),
    ("sd15", "910B"): ("sd_lora_ascend.yaml", "lean"),
    ("sdxl", "6 GB"): ("sdxl_qlora_6gb.yaml", "max"),
    ("sdxl", "8 GB"): ("sdxl_qlora_6gb.yaml", "max"),
    ("sdxl", "12 GB"): ("sdxl_lora.yaml", "max"),
    ("sdxl", "24 GB"): ("sdxl_lora.yaml", "lean"),
    ("sdxl", "910B"): ("sdxl_lora.yaml", "lean"),
}


def parts(model: str) -> dict[str, nn.Module]:
    """Models of the pipeline with their published shapes, on the meta device."""
    text: dict[str, Any] = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "projection_dim": 768,
    }  # fmt: skip
    larger = {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
        "projection_dim": 1280,
    }  # fmt: skip
    with torch.device("meta"):
        found: dict[str, nn.Module] = {
            "unet": UNet2DConditionModel(**(SDXL if model == "sdxl" else SD15)),
            "vae": AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(128, 256, 512, 512), layers_per_block=2,
            ),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**text)),
        }  # fmt: skip
        if model == "sdxl":
            found["text_encoder_2"] = CLIPTextModelWithProjection(CLIPTextConfig(**larger))
    return found


def lora_parameters(unet: nn.Module, rank: int) -> int:
    """Parameter count of a LoRA on the attention layers."""
    ends = ("to_q", "to_k", "to_v", "to_out.0")
    layers = [m for name, m in unet.named_modules() if name.endswith(ends) and isinstance(m, nn.Linear)]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def rows_of(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()]


QUANTIZED = {("sd15", "4 GB"): "int8", ("sdxl", "4 GB"): "nf4", ("sdxl", "6 GB"): "int8", ("sdxl", "8 GB"): "int8"}
"""`base_quantization` as `lightning init --card` writes it."""


def memory(model: str, level: str, kind: str | None) -> tuple[float, str]:
    """MiB of a step at the level, measured on an H100, or counted on shapes with a quantized base; and of what."""
    if kind is not None:
        found = [
            r
            for r in rows_of("precision/step_shapes.jsonl")
            if (r["model"], r["variant"], r["batch"], r["rank"]) == (model, f"{level}-{kind}", 1, 16)
        ]
        return float(found[-1]["peak_mib"]), "a step of 1 image at rank 16 with a packed base, counted"
    rows = rows_of("cuda/bench_cuda.jsonl")
    if model == "sd15":
        found = [r for r in rows if r.get("benchmark") == "step_memory" and r["variant"] == level and r["batch"] == 4]
        return float(found[-1]["peak_mib"]), "a step of 4 images at rank 64, caches on"
    level = "native" if level == "off" else level
    found = [r for r in rows if r.get("benchmark") == "unet_step" and r["model"] == model and "peak_mib" in r]
    (peak,) = {float(r["peak_mib"]) for r in found if r["variant"] == level}
    return peak, "the U-Net's step of 1 image at rank 64, without the optimizer"


def tflops(model: str, level: str) -> float:
    """Counted TFLOP of a training step with one image."""
    pixels, variant = (1024 if model == "sdxl" else 512), "native" if level == "off" else level
    found = [
        r["tflops"] / r["batch"]
        for r in rows_of("precision/repeated_flops.jsonl")
        if (r["model"], r["pixels"], r["variant"], r["width"]) == (model, pixels, variant, 1.0) and r["lora"]
    ]
    return float(found[-1])


def rows() -> Iterable[dict[str, Any]]:
    """One row per model and card."""
    for model in ("sd15", "sdxl"):
        built = parts(model)
        counts = {name: sum(p.numel() for p in part.parameters()) for name, part in built.items()}
        for card in CARDS:
            config_name, level = RUNS[model, card]
            config = yaml.safe_load((ROOT / "configs" / config_name).read_text(encoding="utf-8"))
            of_model, of_data = config["model"]["init_args"], config["data"]["init_args"]
            lora = lora_parameters(built["unet"], of_model["rank"])
            snapshots = of_model["max_train_steps"] // of_model["checkpointing_steps"]
            snapshots *= 3 * 4 * lora  # weights and both moments, float32
            files = (2 + of_model["max_train_steps"] // of_model["checkpointing_steps"]) * 4 * lora
            latents = 2 * 4 * (of_data["resolution"] // 8) ** 2 * 4
            pictures = of_model["max_train_steps"] * of_data["train_batch_size"]
            pictures *= config["trainer"]["accumulate_grad_batches"]
            example, float32 = CARDS[card]
            work = tflops(model, level) * pictures
            kind = QUANTIZED.get((model, card))
            peak, of = memory(model, level, kind)
            yield {
                "benchmark": "expectations", "model": model, "card": card, "example": example, "config": config_name,
                "memory": level, "base_quantization": kind, "parameters": counts,
                "download_gb": round(4 * sum(counts.values()) / GB, 2),
                "download_fp16_gb": round(2 * sum(counts.values()) / GB, 2),
                "judge_gb": round(4 * CLIP_JUDGE / GB, 2),
                "run_gb": round((snapshots + files) / GB, 2), "cache_mb_a_picture": round(latents / 1e6, 3),
                "peak_mib": peak, "peak_of": of,
                "steps": of_model["max_train_steps"], "pictures": pictures, "tflop": round(work),
                "minutes": None if float32 is None else round(work / (2 * float32 * UTILISATION) / 60),
                "utilisation_assumed": UTILISATION,
            }  # fmt: skip


def table(found: list[dict[str, Any]]) -> str:
    """Format the rows as Markdown."""
    lines = ["| model | card | config, `memory` | download | disk | memory of a step | minutes |", "|" + "---|" * 7]
    for row in found:
        minutes = "not known" if row["minutes"] is None else f"{row['minutes']}, modelled ({row['example']})"
        how = "counted" if row["base_quantization"] else "measured on an H100"
        memory_cell = f"{row['peak_mib'] / 1024:.1f} GiB, {how}"
        level = f"{row['memory']}, {row['base_quantization']}" if row["base_quantization"] else row["memory"]
        lines.append(
            f"| {'SDXL' if row['model'] == 'sdxl' else 'SD 1.5'} | {row['card']} | `{row['config']}`, {level}"
            f" | {row['download_fp16_gb']} or {row['download_gb']} GB, counted | {row['run_gb']} GB, counted"
            f" | {memory_cell}{' (U-Net alone)' if 'U-Net' in row['peak_of'] else ''} | {minutes} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a .jsonl file to write the rows to")
    parser.add_argument("--table", type=Path, metavar="ROWS", help="print the Markdown table of these rows")
    given = parser.parse_args()
    if given.table:
        print(table([json.loads(line) for line in given.table.read_text(encoding="utf-8").splitlines()]))
        return
    found = list(rows())
    text = "".join(json.dumps(row) + "\n" for row in found)
    print(text, end="")
    if given.output:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
