"""The names that people type, pinned: dropping or renaming one must be a decision."""

from __future__ import annotations

import importlib
import inspect

import pytest

import lightning_aigc

NAMES = {
    "lightning_aigc.accelerators": ["NPUAccelerator"],
    "lightning_aigc.callbacks": [
        "AdaptiveLR", "CLIPConvergenceGuard", "ExactSnapshot", "GradientHealthMonitor", "PartialWindowScaling",
        "RunProgress", "RunReport", "SampleGrid", "SaveLoRA",
    ],
    "lightning_aigc.callbacks.health": ["Alert", "GradientHealthMonitor", "HealthThresholds", "check"],
    "lightning_aigc.data": ["DataReport", "Encoder", "ImageCaptionData"],
    "lightning_aigc.diffusion": ["StableDiffusionLoRA"],
    "lightning_aigc.metrics": ["CLIPSimilarity", "clip_similarity"],
    "lightning_aigc.precision": ["FusedBackwardPrecision"],
    "lightning_aigc.schedulers": ["AIGCLRScheduler"],
}  # fmt: skip
ARGUMENTS = {
    ("lightning_aigc.diffusion", "StableDiffusionLoRA"): [
        "pretrained_model_name_or_path", "rank", "lora_alpha", "lora_dropout", "lora_targets", "use_dora", "use_rslora",
        "train_text_encoder", "learning_rate", "text_encoder_lr", "optimizer", "lr_scheduler", "lr_warmup_steps",
        "max_train_steps", "prediction_type", "zero_terminal_snr", "snr_gamma", "debiased_estimation", "loss_type",
        "huber_c", "noise_offset", "prior_loss_weight", "use_ema", "ema_decay", "gradient_checkpointing", "base_dtype",
        "vae_dtype", "revision", "variant", "validation_prompts", "validation_steps", "num_validation_images",
        "validation_seed", "checkpointing_steps", "checkpoints_total_limit", "num_inference_steps", "guidance_scale",
        "sample_time_limit_s", "output_name",
    ],
    ("lightning_aigc.data", "ImageCaptionData"): [
        "train_data_dir", "dataset_name", "shards", "image_column", "caption_column", "dataset_split",
        "caption_extension", "resolution", "train_batch_size", "enable_bucket", "min_bucket_reso", "max_bucket_reso",
        "bucket_reso_steps", "bucket_no_upscale", "center_crop", "random_flip", "trigger_word", "shuffle_caption",
        "keep_tokens", "caption_separator", "caption_dropout_rate", "num_repeats", "missing_captions", "cache_latents",
        "cache_text_embeddings", "cache_dir", "class_data_dir", "class_prompt", "prior_ratio", "mask_dir",
        "use_alpha_mask", "num_workers", "pin_memory", "prefetch_factor", "max_image_pixels", "seed",
    ],
    ("lightning_aigc.callbacks", "ExactSnapshot"): [
        "every_n_steps", "keep_last", "every_n_seconds", "on_signal", "keep_best", "best_mode", "directory",
    ],
    ("lightning_aigc.callbacks", "GradientHealthMonitor"): [
        "every_n_steps", "thresholds", "on_error", "page", "dirpath", "norms_in_logger",
    ],
    ("lightning_aigc.callbacks.health", "Alert"): [
        "step", "check", "layer", "level", "message", "cause", "remedy", "since", "rank",
    ],
    ("lightning_aigc.callbacks", "RunReport"): [
        "clip_model", "clip_pretrained", "prompts", "prior_prompts", "num_images", "seed", "images_shown",
    ],
    ("lightning_aigc.callbacks", "SampleGrid"): [
        "prompts", "every_n_steps", "seeds", "num_images", "seed", "columns", "directory",
    ],
    ("lightning_aigc.callbacks", "SaveLoRA"): ["every_n_steps", "output_name"],
    ("lightning_aigc.precision", "FusedBackwardPrecision"): [
        "precision", "memory", "protect", "strict", "input_grad_density", "attention_grad_density",
    ],
}  # fmt: skip


@pytest.mark.parametrize("module", NAMES)
def test_a_room_exports_these_names(module: str) -> None:
    room = importlib.import_module(module)
    assert sorted(room.__all__) == NAMES[module]
    assert all(hasattr(room, name) for name in room.__all__)


@pytest.mark.parametrize(("module", "name"), ARGUMENTS)
def test_arguments_keep_their_names(module: str, name: str) -> None:
    found = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    missing = set(ARGUMENTS[module, name]) - set(found)
    assert not missing
    assert found[0] == ARGUMENTS[module, name][0]


def test_the_package_has_a_version_and_a_command() -> None:
    from lightning_aigc.cli import main

    assert lightning_aigc.__version__.count(".") == 2
    assert callable(main)


def test_sample_takes_prompts_and_seeds() -> None:
    from lightning_aigc.diffusion import StableDiffusionLoRA

    assert list(inspect.signature(StableDiffusionLoRA.sample).parameters)[1:3] == ["prompts", "seeds"]
