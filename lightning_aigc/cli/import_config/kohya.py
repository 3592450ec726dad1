"""sd-scripts' TOML (or JSON): the arguments of train_network.py and its siblings, and the dataset config.

Source: kohya-ss/sd-scripts, library/train_util.py, train_network.py and docs/config_README-en.md.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any

from lightning_aigc.cli.import_config import common
from lightning_aigc.cli.import_config.imported import (
    HUB,
    LOGGER,
    MEMORY,
    OBJECTIVE,
    SNAPSHOT,
    Imported,
    Missing,
    Rule,
    Take,
    Unneeded,
    as_bool,
    as_int,
)
from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.errors import ConfigError

NAME = "sd-scripts"
ATTENTION = Unneeded("attention is torch's own")
PARTS = Unneeded("a diffusers folder holds all parts of the model")
IMAGES = Missing("images are cropped and mirrored only")
TAGS = Missing("captions are shuffled and dropped as a whole")
DDP = Unneeded("trainer.strategy starts the ranks")
RULES: dict[str, Rule] = {
    "learning_rate": Take("model.learning_rate", float),
    "unet_lr": Take("model.learning_rate", float),
    "max_train_steps": Take("model.max_train_steps", as_int),
    "max_train_epochs": Take("trainer.max_epochs", as_int),
    "train_batch_size": Take("data.train_batch_size", as_int),
    "batch_size": Take("data.train_batch_size", as_int),
    "gradient_accumulation_steps": Take("trainer.accumulate_grad_batches", as_int),
    "max_grad_norm": Take("trainer.gradient_clip_val", float),
    "network_dim": Take("model.rank", as_int),
    "network_alpha": Take("model.lora_alpha", float),
    "network_dropout": Take("model.lora_dropout", float),
    "seed": Take("seed_everything", as_int),
    "noise_offset": Take("model.noise_offset", float),
    "min_snr_gamma": Take("model.snr_gamma", float),
    "debiased_estimation_loss": Take("model.debiased_estimation", as_bool),
    "zero_terminal_snr": Take("model.zero_terminal_snr", as_bool),
    "huber_c": Take("model.huber_c", float),
    "prior_loss_weight": Take("model.prior_loss_weight", float),
    "save_every_n_steps": Take("model.checkpointing_steps", as_int),
    "sample_every_n_steps": Take("model.validation_steps", as_int),
    "shuffle_caption": Take("data.shuffle_caption", as_bool),
    "keep_tokens": Take("data.keep_tokens", as_int),
    "caption_separator": Take("data.caption_separator"),
    "caption_dropout_rate": Take("data.caption_dropout_rate", float),
    "flip_aug": Take("data.random_flip", as_bool),
    "enable_bucket": Take("data.enable_bucket", as_bool),
    "min_bucket_reso": Take("data.min_bucket_reso", lambda value: max(8, as_int(value) // 8 * 8)),
    "max_bucket_reso": Take("data.max_bucket_reso", lambda value: -(-as_int(value) // 8) * 8),
    "bucket_reso_steps": Take("data.bucket_reso_steps", lambda value: -(-as_int(value) // 8) * 8),
    "bucket_no_upscale": Take("data.bucket_no_upscale", as_bool),
    "cache_latents": Take("data.cache_latents", as_bool),
    "max_data_loader_n_workers": Take("data.num_workers", as_int),
    "alpha_mask": Take("data.use_alpha_mask", as_bool),
    "conditioning_data_dir": Take("data.mask_dir"),
    "masked_loss": Unneeded("data.init_args.mask_dir says it"),
    "guidance_scale": Take("model.training_guidance", float),
    "logit_mean": Take("model.logit_mean", float),
    "logit_std": Take("model.logit_std", float),
    "mode_scale": Take("model.mode_scale", float),
    "validation_split": Take("data.validation_split", float),
    "cache_latents_to_disk": Unneeded("cached latents lie on disk"),
    "skip_cache_check": Unneeded("caches are checked fast"),
    "cache_text_encoder_outputs_to_disk": Unneeded("cached embeddings lie on disk"),
    "vae_batch_size": Unneeded("the cache chooses its batch"),
    "text_encoder_batch_size": Unneeded("the cache chooses its batch"),
    "cache_info": Unneeded("checked images are remembered"),
    "gradient_checkpointing": MEMORY,
    "lowram": MEMORY,
    "highvram": MEMORY,
    "blocks_to_swap": MEMORY,
    "cpu_offload_checkpointing": MEMORY,
    "fused_backward_pass": MEMORY,
    "split_mode": MEMORY,
    "disable_mmap_load_safetensors": MEMORY,
    "mem_eff_attn": ATTENTION,
    "xformers": ATTENTION,
    "sdpa": ATTENTION,
    "split_attn": ATTENTION,
    "full_fp16": Unneeded("trained weights are float32"),
    "full_bf16": Unneeded("trained weights are float32"),
    "save_precision": Unneeded("a LoRA is written in float16"),
    "save_model_as": Unneeded("results are .safetensors"),
    "use_safetensors": Unneeded("results are .safetensors"),
    "no_metadata": Missing("results say how they were made"),
    "training_comment": Missing("lightning export --to hub writes a model card"),
    "no_half_vae": Unneeded("the autoencoder is computed in float32"),
    "network_module": Unneeded("DiffusionLoRA"),
    "network_train_unet_only": Unneeded("train_text_encoder says it"),
    "network_train_text_encoder_only": Missing("the denoiser is trained always"),
    "network_weights": Missing("all weights are trained"),
    "dim_from_weights": Unneeded("lora_from takes the file's ranks"),
    "base_weights": Missing("lightning export LORA --merge_into PIPELINE merges it into the base first"),
    "base_weights_multiplier": Missing("belongs to base_weights"),
    "scale_weight_norms": Missing("norms are not limited"),
    "save_every_n_epochs": Missing("checkpointing_steps counts steps"),
    "save_n_epoch_ratio": Missing("checkpointing_steps counts steps"),
    "save_last_n_epochs": Missing("step_files_total_limit counts files"),
    "save_last_n_epochs_state": SNAPSHOT,
    "save_last_n_steps_state": SNAPSHOT,
    "save_state": SNAPSHOT,
    "save_state_on_train_end": SNAPSHOT,
    "resume": Unneeded("lightning fit --resume continues a run"),
    "skip_until_initial_step": SNAPSHOT,
    "initial_epoch": SNAPSHOT,
    "initial_step": SNAPSHOT,
    "sample_at_first": Unneeded("images of step 0 are always drawn"),
    "sample_every_n_epochs": Missing("validation_steps counts steps"),
    "sample_sampler": Unneeded("images are drawn with the base model's scheduler"),
    "logging_dir": LOGGER,
    "log_with": LOGGER,
    "log_prefix": LOGGER,
    "log_tracker_name": LOGGER,
    "log_tracker_config": LOGGER,
    "wandb_run_name": LOGGER,
    "wandb_api_key": LOGGER,
    "log_config": LOGGER,
    "huggingface_repo_id": HUB,
    "huggingface_repo_type": HUB,
    "huggingface_path_in_repo": HUB,
    "huggingface_token": HUB,
    "huggingface_repo_visibility": HUB,
    "save_state_to_huggingface": HUB,
    "resume_from_huggingface": HUB,
    "async_upload": HUB,
    "clip_skip": Missing("the last layer is read, as the base was trained"),
    "max_token_length": Missing("captions are cut at 75 tokens"),
    "weighted_captions": TAGS,
    "caption_tag_dropout_rate": TAGS,
    "caption_dropout_every_n_epochs": TAGS,
    "token_warmup_min": TAGS,
    "token_warmup_step": TAGS,
    "keep_tokens_separator": TAGS,
    "secondary_separator": TAGS,
    "enable_wildcard": TAGS,
    "caption_prefix": Missing("trigger_word is put first"),
    "caption_suffix": Missing("trigger_word is put first"),
    "color_aug": IMAGES,
    "face_crop_aug_range": IMAGES,
    "resize_interpolation": IMAGES,
    "debug_dataset": Unneeded("--dry_run shows the data"),
    "dataset_class": Missing("data.class_path says it"),
    "in_json": Missing("captions are read from metadata.jsonl or files"),
    "metadata_file": Missing("captions are read from metadata.jsonl or files"),
    "persistent_data_loader_workers": Unneeded("workers stay"),
    "tokenizer_cache_dir": Unneeded("HF_HOME says it"),
    "vae": Missing("the base's own autoencoder is loaded"),
    "ae": PARTS,
    "clip_l": PARTS,
    "clip_g": PARTS,
    "t5xxl": PARTS,
    "save_clip": PARTS,
    "save_t5xxl": PARTS,
    "t5xxl_device": PARTS,
    "t5xxl_dtype": PARTS,
    "t5xxl_max_token_length": PARTS,
    "apply_t5_attn_mask": PARTS,
    "apply_lg_attn_mask": PARTS,
    "model_type": PARTS,
    "controlnet_model_name_or_path": PARTS,
    "clip_l_dropout_rate": TAGS,
    "clip_g_dropout_rate": TAGS,
    "t5_dropout_rate": TAGS,
    "pos_emb_random_crop_rate": OBJECTIVE,
    "enable_scaled_pos_embed": OBJECTIVE,
    "model_prediction_type": Unneeded("the objective is the family's own"),
    "sigmoid_scale": Unneeded("logit_std says it"),
    "weighting_scheme": Unneeded("timestep_sampling says it"),
    "training_shift": Take("model.flow_shift", float),
    "multires_noise_iterations": OBJECTIVE,
    "multires_noise_discount": OBJECTIVE,
    "ip_noise_gamma": OBJECTIVE,
    "ip_noise_gamma_random_strength": OBJECTIVE,
    "perlin_noise": OBJECTIVE,
    "adaptive_noise_scale": OBJECTIVE,
    "noise_offset_random_strength": OBJECTIVE,
    "min_timestep": OBJECTIVE,
    "max_timestep": OBJECTIVE,
    "huber_schedule": OBJECTIVE,
    "huber_scale": OBJECTIVE,
    "scale_v_pred_loss_like_noise_pred": OBJECTIVE,
    "v_pred_like_loss": OBJECTIVE,
    "lr_scheduler_type": Missing("set model.lr_scheduler to a class"),
    "lr_scheduler_args": Missing("set model.lr_scheduler to a class"),
    "lr_scheduler_num_cycles": Missing("set model.lr_scheduler to a class"),
    "lr_scheduler_power": Missing("set model.lr_scheduler to a class"),
    "lr_decay_steps": Missing("set model.lr_scheduler to a class"),
    "lr_scheduler_timescale": Missing("set model.lr_scheduler to a class"),
    "lr_scheduler_min_lr_ratio": Missing("set model.lr_scheduler to a class"),
    "optimizer_schedulefree_wrapper": Missing("use the optimizer AdamWScheduleFree"),
    "schedulefree_wrapper_args": Missing("use the optimizer AdamWScheduleFree"),
    "torch_compile": Missing("torch.compile is not used"),
    "dynamo_backend": Missing("torch.compile is not used"),
    "ddp_timeout": DDP,
    "ddp_gradient_as_bucket_view": DDP,
    "ddp_static_graph": DDP,
    "deepspeed": Missing("lightning import-deepspeed reads its file"),
    "validation_seed": Unneeded("timesteps of val_loss are fixed"),
    "validate_every_n_steps": Unneeded("validation_steps says when"),
    "validate_every_n_epochs": Unneeded("validation_steps says when"),
    "max_validation_steps": Unneeded("all held-out images are used"),
    "config_file": Unneeded("it is this file"),
    "output_config": Unneeded("each run writes config.yaml"),
    "zero_stage": DDP,
    "offload_optimizer_device": DDP,
    "offload_optimizer_nvme_path": DDP,
    "offload_param_device": DDP,
    "offload_param_nvme_path": DDP,
    "zero3_init_flag": DDP,
    "zero3_save_16bit_model": DDP,
    "fp16_master_weights_and_gradients": DDP,
    "metadata_usage_hint": HUB,
    "metadata_trigger_phrase": HUB,
    "metadata_thumbnail": HUB,
    "metadata_merged_from": HUB,
    "metadata_preprocessor": HUB,
    "metadata_is_negative_embedding": HUB,
    "metadata_title": HUB,
    "metadata_author": HUB,
    "metadata_description": HUB,
    "metadata_license": HUB,
    "metadata_tags": HUB,
}
RANKS = Missing("rank and lora_alpha are those of all layers")
BLOCK_RATES = Missing("learning_rate is that of all blocks")
LYCORIS = Missing("it is an option of LyCORIS")
NETWORK_ARGS: dict[str, Rule] = {
    "conv_alpha": RANKS,
    "block_dims": RANKS,
    "block_alphas": RANKS,
    "conv_block_dims": RANKS,
    "conv_block_alphas": RANKS,
    "in_dims": RANKS,
    "emb_dims": RANKS,
    "network_reg_dims": RANKS,
    "down_lr_weight": BLOCK_RATES,
    "mid_lr_weight": BLOCK_RATES,
    "up_lr_weight": BLOCK_RATES,
    "block_lr_zero_threshold": BLOCK_RATES,
    "network_reg_lrs": BLOCK_RATES,
    "loraplus_lr_ratio": Missing("both matrices of a LoRA have one rate"),
    "loraplus_unet_lr_ratio": Missing("both matrices of a LoRA have one rate"),
    "loraplus_text_encoder_lr_ratio": Missing("both matrices of a LoRA have one rate"),
    "rank_dropout": Missing("lora_dropout drops inputs of a layer, and neither ranks nor layers"),
    "module_dropout": Missing("lora_dropout drops inputs of a layer, and neither ranks nor layers"),
    "dropout": Unneeded("networks.lora does not read it; network_dropout sets lora_dropout"),
    "train_t5xxl": Missing("text encoders of transformers are not trained"),
    "split_qkv": Unneeded("query, key and value are layers of their own"),
    "verbose": Unneeded("the run says what it trains"),
    "ggpo_beta": OBJECTIVE,
    "ggpo_sigma": OBJECTIVE,
    "train_norm": Missing("norms are not trained"),
    "decompose_both": Missing("the first factor of a LoKr is whole"),
    "unbalanced_factorization": Missing("the first factor of a LoKr has two equal sides"),
    "wd_on_output": Unneeded("belongs to dora_wd"),
    "bypass_mode": Unneeded("it computes the same"),
    "factor": Missing("it is an option of LoKr"),
    "full_matrix": Missing("it is an option of LoKr"),
    **dict.fromkeys(
        ("use_tucker", "use_cp", "use_conv_cp", "disable_conv_cp", "use_scalar", "block_size", "constraint"), LYCORIS
    ),
    "rescaled": LYCORIS,
}
"""Options in network_args that are not taken; others choose layers."""
PRESETS = {
    "full": ["attention", "feed_forward", "convolutions"],
    "full-lin": ["attention", "feed_forward"],
    "attn-mlp": ["attention", "feed_forward"],
    "attn-only": ["attention"],
}
"""Our lora_targets by LyCORIS' presets."""
SAMPLING = {
    "sigmoid": ("logit_normal", 1.0),
    "uniform": ("uniform", 1.0),
    "flux_shift": ("logit_normal", "auto"),
    "qwen_shift": ("logit_normal", "auto"),
    "shift": ("logit_normal", None),
    "sigma": ("uniform", None),
}
"""Our timestep_sampling and flow_shift by sd-scripts' timestep_sampling; None is discrete_flow_shift."""
NOTES = {"model.rank": 4, "model.lora_alpha": 1.0, "model.learning_rate": 2e-6, "trainer.gradient_clip_val": 1.0}


def read(given: dict[str, Any], found: Imported) -> None:
    """Take all keys of a config file, or of a dataset config, and of the dataset config that a config file names."""
    if isinstance(given.get("datasets"), list):
        common.take_base(found, "--base", None, None)
        _take_datasets(given, found)
        _take_bucket_defaults(found)
        found.values["model.output_name"] = ("imported", "no name in a dataset config")
        return
    keys: dict[str, Any] = {}
    for name, value in given.items():  # sections are for people: sd-scripts reads their keys as if there were none
        keys |= value if isinstance(value, dict) else {name: value}
    _take_model(keys, found)
    _take_training(keys, found)
    answered = _take_network(keys, found) | _take_rates(keys, found)
    common.take_name(found, "output_name", str(keys.get("output_name") or found.path.stem), keys.get("output_dir"))
    _take_data(keys, found)
    done = {
        "pretrained_model_name_or_path",
        "v2",
        "v_parameterization",
        "sdxl",
        "optimizer_type",
        "optimizer_args",
        "optimizer",
        "use_8bit_adam",
        "use_lion_optimizer",
        "lr_scheduler",
        "lr_warmup_steps",
        "save_last_n_steps",
        "mixed_precision",
        "fp8_base",
        "fp8_base_unet",
        "network_args",
        "network_module",
        "text_encoder_lr",
        "network_train_unet_only",
        "cache_text_encoder_outputs",
        "output_name",
        "output_dir",
        "train_data_dir",
        "reg_data_dir",
        "resolution",
        "caption_extension",
        "caption_extention",
        "dataset_repeats",
        "dataset_config",
        "sample_prompts",
        "loss_type",
        "timestep_sampling",
        "discrete_flow_shift",
        "gradient_checkpointing",
        "max_train_steps",
        "max_train_epochs",
        "random_crop",
    }
    found.answer(keys, RULES, done | answered)
    for place, value in NOTES.items():
        if not (found.is_full and place in ("model.rank", "model.lora_alpha")):
            found.default(place, value, "not in the file: sd-scripts' default")
    if keys.get("dataset_config"):
        _take_dataset_file(str(keys["dataset_config"]), found)
    found.default("data.train_batch_size", 1, "not in the file: sd-scripts' default")
    _take_bucket_defaults(found)


def _take_bucket_defaults(found: Imported) -> None:
    found.default("data.enable_bucket", False)
    found.default("data.max_bucket_reso", 1024)


def _take_model(keys: dict[str, Any], found: Imported) -> None:
    module = str(keys.get("network_module") or "")
    declared = next(
        (family for mark, family in (("flux", "flux"), ("sd3", "sd3"), ("qwen", "qwen_image")) if mark in module), None
    )
    if declared is None and (keys.get("sdxl") or keys.get("cache_text_encoder_outputs")):
        declared = "sdxl"
    if declared is None and (keys.get("t5xxl") or keys.get("ae")):
        declared = "flux" if keys.get("ae") else "sd3"
    found.is_full = not module and "network_dim" not in keys
    common.take_base(found, "pretrained_model_name_or_path", keys.get("pretrained_model_name_or_path"), declared)
    if keys.get("v_parameterization"):
        found.take("v_parameterization", "model.prediction_type", "v_prediction")
    if keys.get("v2"):
        found.unneeded("v2", "the base model says it")
    for key in ("fp8_base", "fp8_base_unet"):
        if keys.get(key):
            found.take(key, "model.base_quantization", "int8")


def _take_training(keys: dict[str, Any], found: Imported) -> None:
    name = keys.get("optimizer_type") or keys.get("optimizer")
    name = name or ("AdamW8bit" if keys.get("use_8bit_adam") else "Lion" if keys.get("use_lion_optimizer") else None)
    options = keys.get("optimizer_args") or []
    texts = options.split() if isinstance(options, str) else options
    common.take_optimizer(found, "optimizer_type", name, common.parsed_options(texts), "AdamW")
    common.take_schedule(found, "lr_scheduler", keys.get("lr_scheduler"), "constant")
    if keys.get("max_train_epochs"):
        found.take("max_train_epochs", "trainer.max_epochs", as_int(keys["max_train_epochs"]))
        if keys.get("max_train_steps"):
            found.unneeded("max_train_steps", "max_train_epochs takes precedence")
    else:
        steps = as_int(keys.get("max_train_steps") or 1600)
        found.take(
            "max_train_steps", "model.max_train_steps", steps, "" if "max_train_steps" in keys else "its default"
        )
    if keys.get("save_last_n_steps"):
        every = as_int(keys.get("save_every_n_steps") or 0)
        if every:
            files = as_int(keys["save_last_n_steps"]) // every + 1
            found.take("save_last_n_steps", "model.step_files_total_limit", files, "counts files")
        else:
            found.unneeded("save_last_n_steps", "save_every_n_steps is not set")
    if keys.get("lr_warmup_steps"):
        common.take_warmup(found, "lr_warmup_steps", keys["lr_warmup_steps"])
    common.take_precision(found, "mixed_precision", keys.get("mixed_precision"), "no")
    common.take_checkpointing(found, "gradient_checkpointing", keys.get("gradient_checkpointing"), False)
    loss = keys.get("loss_type")
    if loss is not None:
        known = {"l2": "l2", "huber": "huber", "smooth_l1": "smooth_l1", "l1": "smooth_l1"}.get(str(loss))
        found.take("loss_type", "model.loss_type", known or "l2", "" if known == loss else f"the nearest to {loss}")
    kind, shift = keys.get("timestep_sampling"), keys.get("discrete_flow_shift")
    if kind is not None and str(kind) in SAMPLING:
        ours, flow_shift = SAMPLING[str(kind)]
        found.take("timestep_sampling", "model.timestep_sampling", ours)
        found.values["model.flow_shift"] = (flow_shift or float(shift or 3.0), "timestep_sampling")
    elif kind is not None:
        found.missing("timestep_sampling", f"{kind} is none of {', '.join(SAMPLING)}")
    if shift is not None:
        found.unneeded("discrete_flow_shift", "flow_shift says it")


def _take_network(keys: dict[str, Any], found: Imported) -> set[str]:
    """Take the adapter's kind, layers and options, and whether text encoders have one; returns the keys that it used.

    network_dim and network_alpha are left to the rules, unless the adapter is a LoKr of whole factors.
    """
    if found.is_full:
        return set()
    arguments = keys.get("network_args") or []
    options = common.parsed_options(arguments.split() if isinstance(arguments, str) else arguments)
    module = str(keys.get("network_module") or "networks.lora")
    answered: set[str] = set()
    if module.startswith("lycoris"):
        answered = _take_lycoris(module, keys, options, found)
    else:
        if not module.startswith("networks.lora"):
            found.missing("network_module", f"{module} is not networks.lora; a LoRA is trained instead")
        targets = ["attention", "feed_forward", *(["convolutions"] if options.get("conv_dim") else [])]
        found.values["model.lora_targets"] = (targets, "the layers that networks.lora adapts")
    for name, value in options.items():
        key = f"network_args.{name}"
        if any(line.startswith(f"{key}:") for line in found.lines):
            continue
        if name == "conv_dim":
            found.lines.append(f"{key}: model.init_args.lora_targets: convolutions, of the same rank")
        elif value not in (None, False, "False", "false"):
            found.answer({key: value}, {key: NETWORK_ARGS.get(name, common.LAYERS)})
    if keys.get("network_weights"):
        common.take_lora_file(found, "network_weights", str(keys["network_weights"]))
        answered.add("network_weights")
    _take_text_encoders(keys, found)
    return answered


def _take_lycoris(module: str, keys: dict[str, Any], options: dict[str, Any], found: Imported) -> set[str]:
    """Take an adapter of LyCORIS: its LoKr, or a LoRA; returns the keys that it used."""
    algorithm = str(options.get("algo") or "lora").casefold()
    preset = str(options.get("preset") or "full")
    targets = PRESETS.get(preset, PRESETS["attn-mlp"])
    found.values["model.lora_targets"] = (targets, f"the layers of LyCORIS' preset {preset}")
    if "preset" in options:
        found.take("network_args.preset", "model.lora_targets", targets, "" if preset in PRESETS else f"not {preset}")
    for name, place in (("dora_wd", "use_dora"), ("rs_lora", "use_rslora")):
        if as_bool(options.get(name) or False):
            found.take(f"network_args.{name}", f"model.{place}", True)
    answered: set[str] = set()
    if options.get("dropout"):
        found.take("network_args.dropout", "model.lora_dropout", float(options["dropout"]))
        if "network_dropout" in keys:
            found.unneeded("network_dropout", "dropout of network_args takes precedence")
            answered.add("network_dropout")
    dim = as_int(keys.get("network_dim") or 4)
    if algorithm == "lokr":
        common.take_lokr(found, "network_args.algo", ("network_args.factor", options.get("factor")))
        is_full = as_bool(options.get("full_matrix") or False)
        reason = common.reason_of_whole("full_matrix", is_full=is_full, rank_key="network_dim", rank=dim)
        if reason is not None:
            used = [key for key in ("network_dim", "network_alpha") if key in keys]
            if is_full:
                found.unneeded("network_args.full_matrix", "model.init_args.rank: 10000 makes the second factor whole")
            common.take_whole_lokr(found, used, reason)
            answered |= set(used)
    elif algorithm not in ("lora", "locon"):
        found.missing("network_args.algo", f"{algorithm} is neither lora nor lokr; a LoRA is trained instead")
        if dim >= common.WHOLE_RANK:
            found.take("network_dim", "model.rank", 64, f"{dim} is for the whole matrices of {algorithm}")
            answered.add("network_dim")
    elif "algo" in options:
        found.unneeded("network_args.algo", f"{algorithm} is a LoRA")
    found.unneeded("network_module", f"{module}: DiffusionLoRA trains its LoRA and its LoKr")
    return answered


def _take_text_encoders(keys: dict[str, Any], found: Imported) -> None:
    only_unet = as_bool(keys.get("network_train_unet_only") or False)
    rate = keys.get("text_encoder_lr")
    if only_unet or keys.get("cache_text_encoder_outputs"):
        if rate is not None:
            found.unneeded("text_encoder_lr", "the text encoders are not trained")
        return
    rates = [float(each) for each in (rate if isinstance(rate, list) else [rate])] if rate is not None else []
    if found.value("model.lora_type") == "lokr":
        common.leave_out_text_encoders(found, "text_encoder_lr" if any(rates) else None)
        if rates and not any(rates):
            found.unneeded("text_encoder_lr", "a rate of 0 trains no text encoder")
        return
    found.default("model.train_text_encoder", True, "network_train_unet_only is not set")
    if not rates:
        return
    remark = f"the first of {', '.join(map(str, rates))}, which is that of all text encoders" if len(rates) > 1 else ""
    if FAMILIES[str(found.family)].trains_text_encoders:
        common.take_text_encoder_rate(found, "text_encoder_lr", rates[0], remark)  # networks.lora reads the first
    else:  # said to have no counterpart, unless it is 0 for all
        common.take_text_encoder_rate(found, "text_encoder_lr", max(rates))


def _take_rates(keys: dict[str, Any], found: Imported) -> set[str]:
    """Take learning_rate where unet_lr takes its place for the denoiser; returns the keys that it used."""
    if keys.get("unet_lr") is None:
        return set()
    if found.is_full:
        found.unneeded("unet_lr", "a fine-tuning of all weights reads learning_rate")
        return {"unet_lr"}
    if float(keys["unet_lr"]) == 0:
        found.missing("unet_lr", "0 trains the text encoders alone, and here the denoiser is trained always")
        return {"unet_lr"}
    of_text = found.value("model.train_text_encoder") and FAMILIES[str(found.family)].trains_text_encoders
    if not of_text or "model.text_encoder_lr" in found.values:
        if keys.get("learning_rate") is not None:
            found.unneeded("learning_rate", "unet_lr and text_encoder_lr take precedence")
    elif keys.get("learning_rate") is not None:
        remark = "that of the denoiser is unet_lr"
        common.take_text_encoder_rate(found, "learning_rate", float(keys["learning_rate"]), remark)
    else:
        found.default("model.text_encoder_lr", NOTES["model.learning_rate"])
    return {"learning_rate"}


def _take_data(keys: dict[str, Any], found: Imported) -> None:
    if keys.get("train_data_dir"):
        found.take(
            "train_data_dir", "data.train_data_dir", str(keys["train_data_dir"]), "10_name folders repeat, as there"
        )
    if keys.get("reg_data_dir"):
        found.take("reg_data_dir", "data.class_data_dir", str(keys["reg_data_dir"]))
    if keys.get("dataset_repeats"):
        common.take_repeats(
            found, "dataset_repeats", str(keys.get("train_data_dir") or ""), as_int(keys["dataset_repeats"])
        )
    if as_bool(keys.get("random_crop") or False):
        common.take_random_crop(found, "random_crop", as_bool(keys.get("cache_latents") or False))
    if keys.get("resolution"):
        _take_resolution("resolution", keys["resolution"], found)
    ending = keys.get("caption_extension") or keys.get("caption_extention")
    if ending:
        found.take("caption_extension", "data.caption_extension", f".{str(ending).lstrip('.')}")
    elif keys.get("train_data_dir"):
        found.default("data.caption_extension", ".caption", "not in the file: sd-scripts' default")
    if keys.get("cache_text_encoder_outputs"):
        found.take("cache_text_encoder_outputs", "data.cache_text_embeddings", True)
    if keys.get("sample_prompts"):
        _take_prompt_file(str(keys["sample_prompts"]), found)


def _take_resolution(key: str, value: Any, found: Imported) -> None:
    sides = [
        as_int(side)
        for side in (value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value])
    ]
    side = sides[0] if len(set(sides)) == 1 else (sides[0] * sides[-1]) ** 0.5
    common.take_side(found, key, side, "" if len(set(sides)) == 1 else f"the square of the area of {value}")


def _take_prompt_file(name: str, found: Imported) -> None:
    """Take the prompts of a text file, without the options after `--`."""
    file = common.named_file(found, name)
    if file is None:
        found.missing("sample_prompts", f"{name} is not there; set model.init_args.validation_prompts")
        return
    lines = file.read_text(encoding="utf-8-sig").splitlines()
    prompts = [line for line in lines if line.strip() and not line.startswith("#")]
    common.take_prompts(found, "sample_prompts", prompts, None, " --")


def _take_dataset_file(name: str, found: Imported) -> None:
    file = common.named_file(found, name)
    if file is None:
        found.missing("dataset_config", f"{name} is not there; set data.init_args.train_data_dir, or copy it")
        return
    try:
        text = file.read_text(encoding="utf-8-sig")
        given = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}; correct it") from error
    _take_datasets(given, found)


def _take_datasets(given: dict[str, Any], found: Imported) -> None:
    """Take a dataset config: the first dataset's settings, over those of [general], and the folders of all subsets."""
    general = dict(given.get("general") or {})
    datasets = [each for each in given.get("datasets") or [] if isinstance(each, dict)]
    subsets = [(dataset, subset) for dataset in datasets for subset in dataset.get("subsets") or []]
    own = [(dataset, subset) for dataset, subset in subsets if not subset.get("is_reg")]
    if not own:
        raise ConfigError(f"{found.path}: the dataset config has no subset with images; give one with image_dir")
    first, subset = own[0]
    settings = general | {key: value for key, value in first.items() if key != "subsets"} | subset
    folders = [
        (str(each.get("image_dir")), as_int((general | dataset | each).get("num_repeats") or 1))
        for dataset, each in own
    ]
    common.take_folders(found, "datasets.subsets.image_dir", folders, "datasets.subsets.num_repeats")
    classes = [each for _, each in subsets if each.get("is_reg")]
    if classes:
        found.take("datasets.subsets.is_reg", "data.class_data_dir", str(classes[0].get("image_dir")))
        if classes[0].get("class_tokens"):
            found.take("datasets.subsets.class_tokens", "data.class_prompt", str(classes[0]["class_tokens"]))
    if subset.get("class_tokens"):
        found.take(
            "datasets.subsets.class_tokens",
            "data.trigger_word",
            str(subset["class_tokens"]).split()[0],
            f"the first word of {subset['class_tokens']}; it is put into captions that lack it",
        )
        found.values["data.missing_captions"] = ("trigger", "class_tokens stands for a missing caption")
    if settings.get("caption_extension"):
        ending = str(settings["caption_extension"]).lstrip(".")
        found.take("datasets.caption_extension", "data.caption_extension", f".{ending}")
    found.default("data.caption_extension", ".caption")
    if settings.get("resolution"):
        _take_resolution("datasets.resolution", settings["resolution"], found)
    if as_bool(settings.get("random_crop") or False):
        common.take_random_crop(found, "datasets.random_crop", bool(found.value("data.cache_latents")))
    sizes = {str(each.get("resolution")) for each in datasets if each.get("resolution")}
    if len(sizes) > 1:
        found.missing("datasets[1].resolution", "one size is trained: the first dataset's")
    done = {
        f"datasets.{key}"
        for key in (
            "image_dir",
            "num_repeats",
            "is_reg",
            "class_tokens",
            "caption_extension",
            "resolution",
            "random_crop",
        )
    }
    found.answer(
        {f"datasets.{key}": value for key, value in settings.items()},
        {f"datasets.{key}": rule for key, rule in RULES.items()},
        done,
    )
