"""Checks of a module's arguments and checkpoints that run before weights are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_aigc.callbacks.output_name import check_output_name
from lightning_aigc.diffusion.lora_targets import lora_config
from lightning_aigc.errors import ModelError


def check_shared_arguments(args: Any) -> None:
    """Check the arguments that all families share. Raises: ModelError naming the first out of range."""
    _at_least_one(args, "validation_steps", "num_validation_images", "checkpointing_steps", "num_inference_steps")
    _positive(args, "learning_rate", "max_train_steps")
    _not_negative(args, "prior_loss_weight", "lr_warmup_steps", "guidance_scale")
    _share(args, "ema_decay")
    if args.checkpoints_total_limit < -1:
        raise ModelError(
            f"model.init_args.checkpoints_total_limit must be at least -1 (all), got {args.checkpoints_total_limit}"
        )
    check_output_name(args.output_name, "model.init_args.output_name")
    if args.vae_dtype not in ("float32", "bfloat16"):
        raise ModelError(f"model.init_args.vae_dtype must be float32 or bfloat16, got {args.vae_dtype}")


def check_objective(args: Any) -> None:
    """Check the noise and loss arguments. Raises: ModelError naming the argument, or two that exclude each other."""
    _positive(args, "snr_gamma", "huber_c")
    _not_negative(args, "noise_offset")
    if args.snr_gamma is not None and args.debiased_estimation:
        raise ModelError("model.init_args.snr_gamma and debiased_estimation are alternative loss weights; set only one")


def check_rank(args: Any) -> None:
    """Check a LoRA's rank, alpha and dropout. Raises: ModelError naming the first out of range."""
    _at_least_one(args, "rank")
    _positive(args, "lora_alpha")
    _share(args, "lora_dropout")


def check_lora(args: Any, lora_alpha: float) -> None:
    """Check the LoRA's arguments. Raises: ModelError naming the first out of range."""
    check_rank(args)
    _positive(args, "text_encoder_lr")
    lora_config(args.lora_targets, args.rank, lora_alpha)


def check_fine_tuning(args: Any) -> None:
    """Check the arguments of StableDiffusionFineTuning. Raises: ModelError naming the first that cannot be."""
    _positive(args, "text_encoder_lr")
    check_whole_weights(args, "StableDiffusionFineTuning", "StableDiffusionLoRA")


def check_whole_weights(args: Any, name: str, lora: str) -> None:
    """Raise ModelError for a packed base under a module that trains whole weights; `lora` names one that takes it."""
    if args.base_quantization is not None:
        raise ModelError(
            f"model.init_args.base_quantization: {args.base_quantization} packs weights that {name} trains or saves"
            f" whole; leave it unset, or train a LoRA on a packed base with {lora}"
        )


def check_controlnet(args: Any) -> None:
    """Check ControlNetTraining's LoRA and reward. Raises: ModelError naming the first argument out of range."""
    if args.rank is not None and args.rank < 1:
        raise ModelError(
            f"model.init_args.rank must be at least 1, got {args.rank}; 16 to 64 is usual, and null trains the whole"
            " ControlNet"
        )
    _not_negative(args, "reward_weight", "reward_max_timestep", "reward_start_step")


def check_trained_weights(saved: Mapping[str, Tensor], trained: Mapping[str, Tensor], advice: str) -> None:
    """Raise ModelError, ending in `advice`, if a checkpoint's weights are not exactly this model's trained weights."""
    missing, foreign = trained.keys() - saved.keys(), saved.keys() - trained.keys()
    if missing or foreign:
        raise ModelError(
            f"the checkpoint holds {len(saved)} weights, this model trains {len(trained)}"
            f" ({len(missing)} missing, {len(foreign)} unknown, such as {sorted(missing | foreign)[0]}); {advice}"
        )
    for name, parameter in trained.items():
        if saved[name].shape != parameter.shape:
            raise ModelError(
                f"the checkpoint's {name} is {list(saved[name].shape)}, this model's {list(parameter.shape)}; {advice}"
            )


def _at_least_one(args: Any, *names: str) -> None:
    for name in names:
        if args[name] < 1:
            raise ModelError(f"model.init_args.{name} must be at least 1, got {args[name]}")


def _positive(args: Any, *names: str) -> None:
    for name in names:
        if args[name] is not None and not 0 < args[name] < math.inf:  # written so that NaN fails too
            raise ModelError(f"model.init_args.{name} must be above 0 and finite, got {args[name]}")


def _not_negative(args: Any, *names: str) -> None:
    for name in names:
        if not 0 <= args[name] < math.inf:
            raise ModelError(f"model.init_args.{name} must not be negative, got {args[name]}")


def _share(args: Any, *names: str) -> None:
    for name in names:
        if not 0 <= args[name] < 1:
            raise ModelError(f"model.init_args.{name} must be in 0..1 and below 1, got {args[name]}")
