"""The names that people type, pinned: dropping or renaming a name must be a decision."""

from __future__ import annotations

import importlib
import inspect

import pytest

import lightning_aigc

NAMES = {
    "lightning_aigc.accelerators": ["NPUAccelerator"],
    "lightning_aigc.callbacks": [
        "AdaptiveLR", "CLIPConvergenceGuard", "ControlGuard", "EdgeReport", "ExactSnapshot", "FineTuneCheck",
        "GradientHealthMonitor", "PartialWindowScaling", "RunProgress", "RunReport", "SampleGrid", "SaveLoRA",
        "SaveModel", "StallWatch",
    ],
    "lightning_aigc.callbacks.health": ["Alert", "GradientHealthMonitor", "HealthThresholds", "check"],
    "lightning_aigc.checkpoint": [
        "Snapshot", "SnapshotCheckpointIO", "SnapshotWriter", "find_snapshots", "newest_complete", "pack", "unpack",
    ],
    "lightning_aigc.data": ["DataReport", "EncodedImageData", "Encoder", "ImageCaptionData"],
    "lightning_aigc.diffusion": [
        "ControlNet",
        "ControlNetSampler",
        "ControlNetTraining",
        "DiffusionControlNet",
        "DiffusionFineTuning",
        "DiffusionLoRA",
        "DiffusionTraining",
        "FullFineTuning",
        "LoRA",
        "LoRASampler",
        "StableDiffusionFineTuning",
        "StableDiffusionLoRA",
        "convert",
        "merge_into_pipeline",
        "read_lora",
        "save_lora",
    ],
    "lightning_aigc.gradient_sync": ["GradientCompressor", "SyncError", "SyncOptions"],
    "lightning_aigc.metrics": [
        "CLIPSimilarity", "EdgeFidelity", "EditSimilarity", "canny", "clip_similarity", "edge_magnitude",
        "edit_direction",
    ],
    "lightning_aigc.precision": ["FusedBackwardPrecision"],
    "lightning_aigc.quantization": ["BaseQuantization", "Kind", "PackedBase", "quantize_frozen_"],
    "lightning_aigc.report": ["RunRecord"],
    "lightning_aigc.schedulers": ["AIGCLRScheduler"],
    "lightning_aigc.strategies": ["NPUSparseStrategy", "ZeROStrategy"],
    "lightning_aigc_kernels": [
        "AttentionStream", "FallbackWarning", "GradientProtection", "KnownAttention", "LoRAProjection",
        "NormParameters", "PackedWeight",
        "add_quantized_rows", "dequantize_blocks", "feed_forward", "frozen_conv2d", "frozen_linear",
        "gated_residual", "geglu", "group_norm_silu", "group_norm_silu_conv2d", "joint_attention", "keep_largest",
        "keep_largest_per_head", "lora_attention", "modulated_norm", "qk_norm_rope", "quantize_blocks",
        "rotary_from_complex", "rotary_from_repeated", "silu_mul", "sparse_attention_backward", "swiglu",
    ],
}  # fmt: skip
DEFINED = {
    "lightning_aigc.accumulation": ["AccumulationWindow", "effective_batch_size", "scale_to_mean"],
    "lightning_aigc.errors": [
        "ConfigError", "DataError", "ImageWarning", "ModelError", "SamplingTooSlow", "SnapshotError", "UserError",
    ],
    "lightning_aigc.protocols": [
        "CachesCaptions", "ComparesTrainingData", "CountsTokens", "DescribesTrainingData", "HasEditSources",
        "HasExampleBatch", "HasHeldOutBatches",
        "HasOutputName", "HasPackedBase", "HasReferenceImages", "HasShardedTensors", "HasSnapshotState",
        "HasValidationPrompts", "PreservesCaptions", "ProtectsGradients", "SamplesEdits", "SavesLoRA", "SavesModel",
        "SupportsSampling",
    ],
}  # fmt: skip
"""The public classes and functions of modules that are typed by their own name."""
ARGUMENTS = {
    ("lightning_aigc.diffusion", "StableDiffusionLoRA"): [
        "pretrained_model_name_or_path", "rank", "lora_alpha", "lora_dropout", "lora_targets", "use_dora", "use_rslora",
        "train_text_encoder", "learning_rate", "text_encoder_lr", "optimizer", "lr_scheduler", "lr_warmup_steps",
        "max_train_steps", "prediction_type", "zero_terminal_snr", "snr_gamma", "debiased_estimation", "loss_type",
        "huber_c", "noise_offset", "prior_loss_weight", "use_ema", "ema_decay", "gradient_checkpointing", "base_dtype",
        "base_quantization", "base_quantization_skip", "vae_dtype", "revision", "variant", "validation_prompts",
        "validation_steps", "num_validation_images",
        "validation_seed", "checkpointing_steps", "checkpoints_total_limit", "step_files_total_limit",
        "num_inference_steps", "guidance_scale", "sample_time_limit_s", "output_name",
    ],
    ("lightning_aigc.diffusion", "StableDiffusionFineTuning"): [
        "pretrained_model_name_or_path", "trained_parts", "text_encoder_lr", "optimizer_in_backward", "save_dtype",
        "save_every_n_steps", "prediction_type", "learning_rate", "use_ema", "output_name",
    ],
    ("lightning_aigc.diffusion", "DiffusionFineTuning"): [
        "pretrained_model_name_or_path", "trained_parts", "optimizer_in_backward", "save_dtype", "save_every_n_steps",
        "timestep_sampling", "flow_shift", "learning_rate", "use_ema", "output_name",
    ],
    ("lightning_aigc.diffusion", "ControlNetTraining"): [
        "pretrained_model_name_or_path", "controlnet_model_name_or_path", "rank", "conditions", "canny_thresholds",
        "protect_edges", "optimizer_in_backward",
        "save_dtype", "save_every_n_steps", "learning_rate", "output_name",
    ],
    ("lightning_aigc.diffusion", "DiffusionControlNet"): [
        "pretrained_model_name_or_path", "num_layers", "num_single_layers", "controlnet_model_name_or_path",
        "conditions", "canny_thresholds", "protect_edges", "optimizer_in_backward", "save_dtype", "save_every_n_steps",
        "timestep_sampling", "flow_shift", "training_guidance", "learning_rate", "use_ema", "output_name",
    ],
    ("lightning_aigc.callbacks", "ControlGuard"): [
        "every_n_steps", "num_images", "patience", "give_up_after", "save_best",
    ],
    ("lightning_aigc.callbacks", "EdgeReport"): ["num_images", "every_n_steps", "shown", "tolerance", "seed"],
    ("lightning_aigc.metrics", "EdgeFidelity"): ["tolerance", "low", "high"],
    ("lightning_aigc.data", "ImageCaptionData"): [
        "train_data_dir", "dataset_name", "shards", "image_column", "caption_column", "dataset_split",
        "caption_extension", "resolution", "train_batch_size", "enable_bucket", "min_bucket_reso", "max_bucket_reso",
        "bucket_reso_steps", "bucket_no_upscale", "center_crop", "random_flip", "trigger_word", "shuffle_caption",
        "keep_tokens", "caption_separator", "caption_dropout_rate", "num_repeats", "missing_captions", "cache_latents",
        "cache_text_embeddings", "cache_dir", "class_data_dir", "class_prompt", "prior_ratio", "validation_split",
        "validation_data_dir", "mask_dir", "conditioning_data_dir", "use_alpha_mask", "num_workers", "pin_memory",
        "prefetch_factor", "max_image_pixels", "seed",
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
    ("lightning_aigc.callbacks", "FineTuneCheck"): [
        "prompts", "class_prompts", "num_images", "seed", "clip_model", "clip_pretrained", "reference_images",
    ],
    ("lightning_aigc.callbacks", "RunReport"): [
        "clip_model", "clip_pretrained", "prompts", "prior_prompts", "num_images", "seed", "images_shown",
    ],
    ("lightning_aigc.callbacks", "SampleGrid"): [
        "prompts", "every_n_steps", "seeds", "num_images", "seed", "columns", "directory",
    ],
    ("lightning_aigc.callbacks", "SaveLoRA"): ["every_n_steps", "output_name"],
    ("lightning_aigc.callbacks", "StallWatch"): ["after_s"],
    ("lightning_aigc.precision", "FusedBackwardPrecision"): [
        "precision", "memory", "protect", "strict", "input_grad_density", "attention_grad_density",
    ],
}  # fmt: skip


@pytest.mark.parametrize("module", NAMES)
def test_a_room_exports_these_names(module: str) -> None:
    room = importlib.import_module(module)
    assert sorted(room.__all__) == NAMES[module]
    assert all(hasattr(room, name) for name in room.__all__)


@pytest.mark.parametrize("module", DEFINED)
def test_a_module_defines_these_names(module: str) -> None:
    room = importlib.import_module(module)
    defined = [name for name, value in vars(room).items() if getattr(value, "__module__", None) == module]
    assert sorted(name for name in defined if not name.startswith("_")) == DEFINED[module]


@pytest.mark.parametrize(("module", "name"), ARGUMENTS)
def test_arguments_keep_their_names(module: str, name: str) -> None:
    found = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    missing = set(ARGUMENTS[module, name]) - set(found)
    assert not missing
    assert found[0] == ARGUMENTS[module, name][0]


@pytest.mark.parametrize(
    ("former", "name"),
    [
        ("StableDiffusionLoRA", "DiffusionLoRA"),
        ("StableDiffusionFineTuning", "DiffusionFineTuning"),
        ("ControlNetTraining", "DiffusionControlNet"),
    ],
)
def test_the_earlier_names_for_u_nets_take_the_same_arguments(former: str, name: str) -> None:
    room = importlib.import_module("lightning_aigc.diffusion")
    assert issubclass(getattr(room, former), getattr(room, name))
    assert inspect.signature(getattr(room, former)) == inspect.signature(getattr(room, name))


def test_the_package_has_a_version_and_a_command() -> None:
    from lightning_aigc.cli import main

    assert lightning_aigc.__version__.count(".") == 2
    assert callable(main)


def test_sample_takes_prompts_and_seeds() -> None:
    from lightning_aigc.diffusion import StableDiffusionLoRA

    assert list(inspect.signature(StableDiffusionLoRA.sample).parameters)[1:3] == ["prompts", "seeds"]
