"""The config of a short training, made of a row of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw, ImageOps
from safetensors.torch import load_file, save_file

from fakes.models.edit_pipelines import MAKE_EDIT
from fakes.models.pipelines import SIDE, SINGLE_SDXL, make_pipeline
from fakes.models.transformer_pipelines import MAKE
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.pipeline.saving import save_single_file
from pairs.options import CONTROL, LARGE_SOURCES, SEEN, U_NETS, Row

STEPS = 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
    "Adafactor": {"class_path": "torch.optim.Adafactor", "init_args": {"lr": 1e-2}},
    "Prodigy": {"class_path": "prodigyopt.Prodigy", "init_args": {"lr": 1.0}},
    "AdamWScheduleFree": {"class_path": "schedulefree.AdamWScheduleFree", "init_args": {"lr": 1e-3}},
    "SGD": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1e-1}},
}
STRATEGIES: dict[str, Any] = {
    "npu_sparse_local": {
        "class_path": "NPUSparseStrategy",
        "init_args": {"mode": "local", "local_steps": 2, "average": "top_k", "top_k": 512, "outer_momentum": 0.2},
    },
}
FULL_SHARE, U_NET_SHARE = 0.8, 0.89
"""Shares of a base's files in float32, for a budget: less than all, more than what is never packed."""
HALF_SHARE = 0.45
"""Share of a base's files, for a budget: less than the half that bfloat16 takes, more than what is never packed."""
RATES: dict[str, Any] = {
    "cosine": "cosine",
    "plateau": {"class_path": "lightning.pytorch.cli.ReduceLROnPlateau", "init_args": {"monitor": "loss"}},
}
OTHER_OBJECTIVE: dict[bool, dict[str, Any]] = {
    True: {"loss_type": "huber", "snr_gamma": 5.0, "noise_offset": 0.05},
    False: {"loss_type": "smooth_l1", "timestep_sampling": "mode", "flow_shift": 2.0, "loss_weighting": "cosmap"},
}
"""Options of the objective, for a U-Net or not."""
KIND = {
    ("lora", True): "StableDiffusionLoRA", ("lora", False): "DiffusionLoRA",
    ("full", True): "StableDiffusionFineTuning", ("full", False): "DiffusionFineTuning",
    ("controlnet", True): "ControlNetTraining", ("controlnet", False): "DiffusionControlNet",
}  # fmt: skip


def make_base(family: str, folder: Path) -> Path:
    """A tiny pipeline of the family with random weights."""
    if family in U_NETS:
        return make_pipeline(folder, **(SINGLE_SDXL if family == "sdxl" else {}))
    return (MAKE | MAKE_EDIT)[family](folder)


def make_single_file(base: Path, family: str, file: Path) -> Path:
    """The base as a checkpoint; of a transformer, which has none that is read, its own weights."""
    if family not in U_NETS:
        return next(base.glob("transformer/*.safetensors"))
    components = load_components(str(base))
    save_single_file(file, components, {"unet": components.denoiser}, torch.float32)
    return file


def make_images(folder: Path, word: str, count: int) -> Path:
    """Drawn images of two shapes, with captions."""
    folder.mkdir(parents=True)
    for number in range(count):
        width = SIDE if number % 3 else SIDE * 2
        image = Image.new("RGB", (width, SIDE), (40 + 20 * number, 90, 200 - 20 * number))
        ImageDraw.Draw(image).ellipse((4, 4, 20 + number, 20), fill=(250, 250 - 20 * number, 30))
        image.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a {word} {('cup', 'shoe')[number % 2]} number {number}")
    return folder


def make_sources(folder: Path, images: Path) -> Path:
    """Sources of an edit, twice as large as their images and in other colours."""
    folder.mkdir(parents=True)
    for path in sorted(images.glob("*.png")):
        with Image.open(path) as image:
            ImageOps.invert(image).resize((2 * image.width, 2 * image.height)).save(folder / path.name)
    return folder


def make_masks(folder: Path, images: Path) -> Path:
    """Masks of the left half of each image."""
    folder.mkdir(parents=True)
    for path in sorted(images.glob("*.png")):
        with Image.open(path) as image:
            mask = Image.new("L", image.size)
            mask.paste(255, (0, 0, image.width // 2, image.height))
            mask.save(folder / path.name)
    return folder


def make_training_adapter(file: Path, base: Path, family: str) -> Path:
    """A LoRA file of the denoiser's queries and keys, as trainers of training adapters write it."""
    part = "unet" if family in U_NETS else "transformer"
    state = {}
    for weights in base.glob(f"{part}/*.safetensors"):
        for name, weight in load_file(weights).items():
            if weight.dim() == 2 and name.endswith(("to_q.weight", "to_k.weight")):
                layer = f"{part}.{name.removesuffix('.weight')}"
                state[f"{layer}.lora_A.weight"] = 0.05 * torch.ones(2, weight.shape[1])
                state[f"{layer}.lora_B.weight"] = 0.05 * torch.ones(len(weight), 2)
    assert state, f"{base} has no attention"
    save_file(state, file)
    return file


def kind_of(row: Row) -> str:
    """The model class of a row."""
    method = {"dora": "lora", "lokr": "lora", "controlnet_lora": "controlnet"}.get(row["method"], row["method"])
    return KIND[method, row["family"] in U_NETS]


class Inputs(NamedTuple):
    """Files that a config names; those that the row does not use need not exist."""

    base: Path
    model: Path  # the base, or its single file
    images: Path
    class_images: Path
    sources: Path
    masks: Path
    shards: Path
    adapter: Path
    lora: Path


def make_config(row: Row, inputs: Inputs, root: Path) -> dict[str, Any]:
    """A config that trains `STEPS` steps in `root`."""
    base = inputs.base
    is_lora = row["method"] in ("lora", "dora", "lokr")
    model: dict[str, Any] = {
        "pretrained_model_name_or_path": str(inputs.model),
        "max_train_steps": STEPS,
        "optimizer": OPTIMIZERS[row["optimizer"]],
        "lr_scheduler": RATES.get(row["rate"], "constant"),
        "use_ema": row["ema"],
        "gradient_checkpointing": row["checkpointing"],
        "base_quantization": quantization_of(row, base),
        "validation_prompts": ["a zorp cup"],
        "validation_steps": 2,
        "num_validation_images": 1,
        "num_inference_steps": 2,
        "checkpointing_steps": 2,
        "step_files_total_limit": 1 if row["step_files"] == "one" else -1,
        "output_name": "zorp",
    }
    if row["objective"] == "other":
        model |= OTHER_OBJECTIVE[row["family"] in U_NETS]
    if row["family"] not in U_NETS:
        model["sample_resolution"] = SIDE
    if row["weights"] == "file":
        model["denoiser_file"] = str(next(base.glob("transformer/*.safetensors"), base / "of_a_unet.safetensors"))
    if is_lora or row["method"] == "controlnet_lora":
        model["rank"] = 4
    if is_lora and row["streamed"]:
        model["base_location"] = {"device": 0.5}
    if is_lora and row["adapter"]:
        model["training_adapter"] = str(inputs.adapter)
    if is_lora and row["continued"]:
        model["lora_from"] = str(inputs.lora)
    if is_lora and row["preserve"] != "none":
        model["preserve"] = row["preserve"]
    if is_lora and row["preserve"] == "class":
        model["class_word"] = "plain"
    if row["method"] == "dora":
        model["use_dora"] = True
    if row["method"] == "lokr":
        model |= {"lora_type": "lokr", "lokr_factor": 2}
    if row["method"] in CONTROL:
        model["conditions"] = "canny"
    if row["text_encoder"] and is_lora:
        model["train_text_encoder"] = True
    elif row["text_encoder"]:
        model["trained_parts"] = ["unet" if row["family"] in U_NETS else "transformer", "text_encoder"]
    return {
        "seed_everything": 7,
        "threads": 1,
        "trainer": _trainer(row, root),
        "model": {"class_path": kind_of(row), "init_args": model},
        "data": _data(row, inputs, root),
    }


def quantization_of(row: Row, base: Path) -> Any:
    """The model's `base_quantization`."""
    if row["base"] != "budget":
        return None if row["base"] == "whole" else row["base"]
    # Text encoders leave before the transformer is loaded, where nothing asks for them any more.
    has_texts = row["family"] in (*U_NETS, *SEEN) or row["caches"] != "both"
    folders = ("unet", "transformer", *(["text_encoder*"] if has_texts else []))
    bytes_ = sum(file.stat().st_size for name in folders for file in base.glob(f"{name}/*.safetensors"))
    full_share = U_NET_SHARE if row["family"] in U_NETS else FULL_SHARE
    return {"target_mib": (full_share if row["precision"] == "32-true" else HALF_SHARE) * bytes_ / 2**20}


def precision_of(row: Row) -> dict[str, Any]:
    """The trainer's entries for precision and memory."""
    if row["memory"] == "stock":
        return {"precision": row["precision"]}
    memory = {"kept": 0.7} if row["memory"] == "budget" else row["memory"]
    options = {"precision": row["precision"], "memory": memory, "graph": row["graph"]}
    return {"plugins": {"class_path": "FusedBackwardPrecision", "init_args": options}}


def _strategy(row: Row) -> Any:
    """The strategy; Adafactor steps in proportion to a weight, so that in four steps top_k sends none of a zero one."""
    chosen = STRATEGIES.get(row["strategy"], row["strategy"])
    if row["strategy"] == "npu_sparse_local" and row["optimizer"] == "Adafactor":
        init_args = {name: value for name, value in chosen["init_args"].items() if name != "top_k"}
        return {**chosen, "init_args": {**init_args, "average": "int8"}}
    return chosen


def _trainer(row: Row, root: Path) -> dict[str, Any]:
    report: dict[str, Any] = {"num_images": 1}
    if row["source"] == "pairs":
        report["clip_model"] = "embedded:clip"  # for scores of edits
    callbacks: list[dict[str, Any]] = [
        {"class_path": "GradientHealthMonitor"},
        {"class_path": "RunReport", "init_args": report},
    ]
    if row["guard"]:
        guard = {"every_n_steps": 2, "num_images": 2, "clip_model": "embedded:clip"}
        if row["source"] == "pairs":
            guard["metric"] = "edit"
        callbacks.append({"class_path": "CLIPConvergenceGuard", "init_args": guard})
    if row["rate"] == "adaptive":
        callbacks.append({"class_path": "AdaptiveLR", "init_args": {"search": "auto"}})
    ranks = 1 if row["strategy"] == "auto" else 2
    return {
        "default_root_dir": str(root),
        "accelerator": row["device"],
        "devices": 1 if row["device"] == "npu" else ranks,
        "num_nodes": ranks if row["device"] == "npu" else 1,
        "strategy": _strategy(row),
        "accumulate_grad_batches": row["accumulation"],
        "gradient_clip_val": row["clipping"],
        "log_every_n_steps": 1,
        "callbacks": callbacks,
        **precision_of(row),
    }


def _data(row: Row, inputs: Inputs, root: Path) -> dict[str, Any]:
    if row["source"] == "shards":
        streamed: dict[str, Any] = {"shards_dir": str(inputs.shards), "train_batch_size": 2, "num_workers": 0}
        if row["held_out"]:
            streamed["validation_shards_dir"] = str(inputs.shards)
        return {"class_path": "EncodedImageData", "init_args": streamed}
    given = folder_data(row, inputs.images, inputs.class_images, root.parent)
    if row["masks"]:
        given["mask_dir"] = str(inputs.masks)
    if row["captions"] == "shuffled":
        given |= {"shuffle_caption": True, "caption_separator": " ", "keep_tokens": 1, "caption_dropout_rate": 0.3}
    if row["crops"] == "random":
        given |= {"center_crop": False, "random_flip": True}
    if row["source"] == "pairs":
        given["source_data_dir"] = str(inputs.sources)
        if row["family"] in SEEN:
            given |= {"source_fit": "own", "source_resolution": 2 * SIDE}
        if row["family"] in LARGE_SOURCES:
            given |= {"source_fit": "own", "source_resolution": 4 * SIDE}
    return {"class_path": "ImageCaptionData", "init_args": given}


def folder_data(row: Row, images: Path, class_images: Path, cache: Path) -> dict[str, Any]:
    """Arguments of ImageCaptionData for a row."""
    return {
        "train_data_dir": str(images),
        "class_data_dir": str(class_images) if row["class_images"] else None,
        "resolution": SIDE,
        "min_bucket_reso": SIDE // 2,
        "bucket_reso_steps": SIDE // 2,
        "train_batch_size": 2,
        "trigger_word": "zorp",
        "validation_split": 0.2 if row["held_out"] else 0.0,
        "cache_latents": row["caches"] != "none",
        "cache_text_embeddings": row["caches"] == "both",
        "cache_dir": str(cache / "cache"),
        "num_workers": 0,
    }
