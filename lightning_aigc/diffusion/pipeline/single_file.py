"""Load a single-file checkpoint of Stable Diffusion 1, 2 or SDXL without the hub: its configs are written here.

A single file has weights alone. diffusers reads the configs and the tokenizer from a pipeline's folder, which it would
download. The vocabulary of the tokenizers is CLIP's, as open_clip ships it.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch

from lightning_aigc.diffusion.families import FAMILIES, Family
from lightning_aigc.diffusion.pipeline.saved_schedule import of_single_file
from lightning_aigc.errors import ModelError

KEY = "model.init_args.pretrained_model_name_or_path"
U_NET_CHECKPOINTS = ("v1", "v2", "xl", "inpainting", "playground", "instruct-pix2pix", "upscale")
"""Prefixes of diffusers' model types for single files that contain a U-Net. diffusers falls back to one of them for
unknown files."""
MERGES = 49152 - 256 - 2
"""Merges of CLIP's vocabulary: 49,152 tokens, less the bytes and the two special tokens."""

_SCHEDULER = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
    "clip_sample": False, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1,
}  # fmt: skip
_VAE = {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 4, "norm_num_groups": 32,
}  # fmt: skip
_UNET = {
    "block_out_channels": [320, 640, 1280, 1280], "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3, "in_channels": 4, "out_channels": 4,
    "layers_per_block": 2,
}  # fmt: skip
_CLIP = {
    "model_type": "clip_text_model", "vocab_size": 49408, "max_position_embeddings": 77, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_CLIP_L = _CLIP | {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "projection_dim": 768, "hidden_act": "quick_gelu",
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "v1": {
        "scheduler": ("PNDMScheduler", _SCHEDULER),
        "text_encoder": ("CLIPTextModel", _CLIP_L),
        "tokenizer": ("CLIPTokenizer", {"pad_token": "<|endoftext|>"}),
        "unet": ("UNet2DConditionModel", _UNET | {"cross_attention_dim": 768, "sample_size": 64}),
        "vae": ("AutoencoderKL", _VAE | {"sample_size": 512}),
    },
    "v2": {
        "scheduler": ("DDIMScheduler", _SCHEDULER | {"prediction_type": "v_prediction"}),
        "text_encoder": (
            "CLIPTextModel",
            _CLIP | {
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16,
                "projection_dim": 512, "hidden_act": "gelu",
            },
        ),
        "tokenizer": ("CLIPTokenizer", {"pad_token": "!"}),
        "unet": (
            "UNet2DConditionModel",
            _UNET | {
                "cross_attention_dim": 1024, "sample_size": 96, "attention_head_dim": [5, 10, 20, 20],
                "use_linear_projection": True, "upcast_attention": True,
            },
        ),
        "vae": ("AutoencoderKL", _VAE | {"sample_size": 768}),
    },
    "xl_base": {
        "scheduler": ("EulerDiscreteScheduler", _SCHEDULER | {"timestep_spacing": "leading"}),
        "text_encoder": ("CLIPTextModel", _CLIP_L),
        "text_encoder_2": (
            "CLIPTextModelWithProjection",
            _CLIP | {
                "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
                "projection_dim": 1280, "hidden_act": "gelu",
            },
        ),
        "tokenizer": ("CLIPTokenizer", {"pad_token": "<|endoftext|>"}),
        "tokenizer_2": ("CLIPTokenizer", {"pad_token": "!"}),
        "unet": (
            "UNet2DConditionModel",
            _UNET | {
                "block_out_channels": [320, 640, 1280],
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                "cross_attention_dim": 2048, "sample_size": 128, "attention_head_dim": [5, 10, 20],
                "transformer_layers_per_block": [1, 2, 10], "use_linear_projection": True,
                "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
            },
        ),
        "vae": ("AutoencoderKL", _VAE | {"sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True}),
    },
}  # fmt: skip
"""Class and config of each component, by diffusers' type of the checkpoint: those of stable-diffusion-v1-5,
stable-diffusion-2-1 and stable-diffusion-xl-base-1.0, which diffusers takes for every file of the type."""


def type_of_checkpoint(path: Path) -> str:
    """diffusers' type of a single-file checkpoint, from its keys. Raises: ModelError for one that holds no U-Net."""
    from diffusers.loaders.single_file_utils import infer_diffusers_model_type, load_single_file_checkpoint

    weights = load_single_file_checkpoint(str(path))
    if any("lora_" in name or "lokr_" in name for name in weights):
        raise ModelError(
            f"{KEY}: {path} is a LoRA, which has no base model in it; give its base, and to train the LoRA on, set"
            f" model.init_args.lora_from: {path}"
        )
    kind = infer_diffusers_model_type(weights)
    if not kind.startswith(U_NET_CHECKPOINTS):
        raise ModelError(
            f"{KEY}: {path} is a checkpoint of {kind}; single files are read of Stable Diffusion 1.x, 2.x and SDXL"
            " alone, so give the pipeline's folder or hub id, and for another transformer set denoiser_file to the file"
        )
    return str(kind)


def family_of_checkpoint(path: Path) -> Family:
    """The family of a single-file checkpoint. Raises: ModelError for one that holds no U-Net."""
    return family_of_type(type_of_checkpoint(path))


@contextlib.contextmanager
def configs_of(kind: str) -> Iterator[Path | None]:
    """A temporary pipeline folder without weights for a type of checkpoint; None for one that `CONFIGS` has not."""
    if kind not in CONFIGS:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        write_configs(kind, Path(folder))
        yield Path(folder)


def family_of_type(kind: str) -> Family:
    """The family of diffusers' type of a U-Net's checkpoint."""
    return FAMILIES["sdxl" if kind.startswith("xl") else "sd"]


def load_single_file(path: Path, dtypes: Mapping[str, torch.dtype]) -> Any:
    """A pipeline with the file's weights, the VAE in `dtypes["vae"]` and the rest in `dtypes["unet"]`.

    The configs of other types than `CONFIGS` has, such as Playground's, come from the hub.
    """
    kind = type_of_checkpoint(path)
    pipeline_class = getattr(diffusers, family_of_type(kind).pipeline)
    with configs_of(kind) as folder:
        options = {} if folder is None else {"config": str(folder), "local_files_only": True}
        pipeline = pipeline_class.from_single_file(str(path), dtype=dtypes["unet"], **options)
    for name, network in pipeline.components.items():
        absent = [each for each, weight in getattr(network, "state_dict", dict)().items() if weight.is_meta]
        if absent:  # diffusers leaves a text encoder's without memory
            raise ModelError(missing_weights(str(path), [f"{each} of {name}" for each in absent]))
    pipeline.vae.to(dtype=dtypes["vae"])
    scheduler = pipeline.scheduler
    pipeline.register_modules(scheduler=scheduler.from_config(scheduler.config, **of_single_file(path)))
    return pipeline


def missing_weights(name: str, names: Sequence[str], key: str = KEY) -> str:
    """The sentence for files that lack these weights."""
    others = f" and {len(names) - 1} more" if names[1:] else ""
    return f"{key}: the files of {name} lack {names[0]}{others}; download or copy them again"


def write_configs(kind: str, folder: Path) -> None:
    """Write a pipeline's folder without weights."""
    family = family_of_type(kind)
    index: dict[str, Any] = {"_class_name": family.pipeline, "feature_extractor": [None, None]}
    if family.name == "sdxl":
        index |= {"image_encoder": [None, None], "force_zeros_for_empty_prompt": True}
    else:
        index |= {"safety_checker": [None, None], "requires_safety_checker": False}
    for name, (class_name, config) in CONFIGS[kind].items():
        index[name] = ["transformers" if class_name.startswith("CLIP") else "diffusers", class_name]
        (folder / name).mkdir()
        if class_name == "CLIPTokenizer":
            _write_tokenizer(folder / name, config)
        elif name == "scheduler":
            _write(folder / name / "scheduler_config.json", {"_class_name": class_name, **config})
        else:
            _write(folder / name / "config.json", {"_class_name": class_name, **config})
    _write(folder / "model_index.json", index)


def _write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    merges = list(_merges())
    alphabet = _byte_characters()
    tokens = [*alphabet, *(f"{each}</w>" for each in alphabet), *("".join(merge.split()) for merge in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    _write(folder / "vocab.json", {token: place for place, token in enumerate(tokens)})
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", **config}
    _write(folder / "special_tokens_map.json", special)
    described = special | {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "do_lower_case": True}
    _write(folder / "tokenizer_config.json", described)


def _merges() -> Iterator[str]:
    """CLIP's merges, from open_clip's file, without importing open_clip."""
    spec = importlib.util.find_spec("open_clip")
    assert spec is not None and spec.origin is not None  # a dependency of this package
    with gzip.open(Path(spec.origin).with_name("bpe_simple_vocab_16e6.txt.gz"), "rt", encoding="utf-8") as file:
        next(file)  # the version
        for _ in range(MERGES):
            yield next(file).rstrip("\n")


def _byte_characters() -> list[str]:
    """A visible character for each byte, in the vocabulary's order; of openai/gpt-2's `bytes_to_unicode`."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = 256 - len(visible)
    return [chr(each) for each in visible] + [chr(256 + place) for place in range(others)]


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
