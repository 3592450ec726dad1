"""SimpleTuner's config.json, and the data backend file that it names.

Source: bghira/SimpleTuner, documentation/OPTIONS.md, and simpletuner_sdk's field registry for defaults.
"""

from __future__ import annotations

import re
from typing import Any

from lightning_aigc.cli.import_config import common
from lightning_aigc.cli.import_config.imported import (
    HUB,
    LOGGER,
    MEMORY,
    OBJECTIVE,
    Imported,
    Missing,
    Rule,
    Take,
    Unneeded,
    as_bool,
    as_int,
)

NAME = "SimpleTuner"
CACHE = Unneeded("data.init_args.cache_dir holds the caches")
DEVICE = Unneeded("trainer.devices, num_nodes and strategy start the ranks")
SAMPLES = Missing("samples are drawn alike in every check")
IMAGES = Missing("resolution and buckets say how images are cut")
TEXT = Unneeded("the family's own text encoders and lengths")
CONTROL = Missing("configs/controlnet_canny.yaml trains a ControlNet")
RULES: dict[str, Rule] = {
    "aws_max_pool_connections": CACHE,
    "max_workers": CACHE,
    "enable_multiprocessing": CACHE,
    "override_dataset_config": CACHE,
    "ignore_missing_files": CACHE,
    "merge_environment_config": CACHE,
    "configs_dir": CACHE,
    "accelerator_cache_clear_interval": MEMORY,
    "keep_vae_loaded": MEMORY,
    "fully_unload_text_encoder": MEMORY,
    "unet_attention_slice": MEMORY,
    "disable_segmented_timestep_sampling": OBJECTIVE,
    "inference_scheduler_timestep_spacing": OBJECTIVE,
    "training_scheduler_timestep_spacing": OBJECTIVE,
    "layer_freeze_strategy": OBJECTIVE,
    "masked_loss_probability": OBJECTIVE,
    "diffusion_blocks_config": OBJECTIVE,
    "init_lokr_norm": common.LAYERS,
    "init_lora_ema": common.LAYERS,
    "init_lora_step": common.LAYERS,
    "peft_lora_mode": common.LAYERS,
    "singlora_ramp_up_steps": common.LAYERS,
    "slider_lora_target": common.LAYERS,
    "same_network": common.LAYERS,
    "max_upscale_threshold": IMAGES,
    "maximum_image_size": IMAGES,
    "target_downsample_size": IMAGES,
    "data_aesthetic_score": IMAGES,
    "conditioning_multidataset_sampling": IMAGES,
    "disable_multiline_split": IMAGES,
    "modelspec_comment": HUB,
    "publishing_config": HUB,
    "push_to_hub_background": HUB,
    "custom_tracker": LOGGER,
    "local_rank": DEVICE,
    "find_unused_parameters": DEVICE,
    "validate_after_epoch": SAMPLES,
    "validate_after_step": SAMPLES,
    "evaluation_type": SAMPLES,
    "enable_watermark": SAMPLES,
    "t5_padding": TEXT,
    "tokenizer_max_length": TEXT,
    "qwen_text_encoder_model_name_or_path": TEXT,
    "max_grounding_entities": TEXT,
    "control": CONTROL,
    "controlnet_custom_config": CONTROL,
    "controlnet_model_name_or_path": CONTROL,
    "enable_nsfw_check": Missing("images are not judged"),
    "framerate": Missing("images have one frame"),
    "i_know_what_i_am_doing": Unneeded("nothing asks for it"),
    "deepspeed_config": Missing("lightning import-deepspeed reads its file"),
    "disable_assistant_lora": Unneeded("few-step bases train with training_adapter alone"),
    "sageattention_usage": Unneeded("attention is torch's own"),
    "dataloader_prefetch_qlen": Unneeded("data.init_args.num_workers"),
    "tread_config": OBJECTIVE,
    "sla_config": OBJECTIVE,
    "snr_weight": OBJECTIVE,
    "soft_min_snr_sigma_data": OBJECTIVE,
    "huber_schedule": OBJECTIVE,
    "noise_offset_probability": OBJECTIVE,
    "prodigy_steps": Missing("Prodigy finds its rate in every step"),
    "allow_dataset_oversubscription": Unneeded("num_repeats repeats images"),
    "seed_for_each_device": Unneeded("each rank has its own noise"),
    "set_grads_to_none": Unneeded("always so"),
    "torch_num_threads": Unneeded("--threads says it"),
    "quantization_config": Missing("base_quantization packs the base"),
    "lora_format": Unneeded("lightning export LORA --to kohya or diffusers converts it"),
    "save_text_encoder": Unneeded("a LoRA holds what was trained"),
    "learning_rate": Take("model.learning_rate", float),
    "text_encoder_lr": Take("model.text_encoder_lr", float),
    "train_text_encoder": Take("model.train_text_encoder", as_bool),
    "train_batch_size": Take("data.train_batch_size", as_int),
    "gradient_accumulation_steps": Take("trainer.accumulate_grad_batches", as_int),
    "max_grad_norm": Take("trainer.gradient_clip_val", float),
    "lora_dropout": Take("model.lora_dropout", float),
    "use_dora": Take("model.use_dora", as_bool),
    "use_ema": Take("model.use_ema", as_bool),
    "ema_decay": Take("model.ema_decay", float),
    "snr_gamma": Take("model.snr_gamma", float),
    "rescale_betas_zero_snr": Take("model.zero_terminal_snr", as_bool),
    "huber_c": Take("model.huber_c", float),
    "caption_dropout_probability": Take("data.caption_dropout_rate", float),
    "checkpoint_step_interval": Take("model.checkpointing_steps", as_int),
    "checkpointing_steps": Take("model.checkpointing_steps", as_int),
    "checkpoints_total_limit": Take("model.checkpoints_total_limit", as_int),
    "validation_step_interval": Take("model.validation_steps", as_int),
    "validation_steps": Take("model.validation_steps", as_int),
    "validation_guidance": Take("model.guidance_scale", float),
    "validation_num_inference_steps": Take("model.num_inference_steps", as_int),
    "num_validation_images": Take("model.num_validation_images", as_int),
    "validation_seed": Take("model.validation_seed", as_int),
    "seed": Take("seed_everything", as_int),
    "revision": Take("model.revision"),
    "variant": Take("model.variant"),
    "instance_prompt": Take("data.trigger_word"),
    "flow_schedule_auto_shift": Missing("flow_shift: auto is as far as sampling shifts"),
    "flow_sigmoid_scale": Take("model.logit_std", float),
    "resume_from_checkpoint": Unneeded("lightning fit --resume continues a run"),
    "resolution_type": Unneeded("resolution is that of a square of the same area"),
    "aspect_bucket_rounding": Unneeded("buckets are made by sides of 64 pixels"),
    "minimum_image_size": Missing("small images are named by the dry run"),
    "disable_bucket_pruning": Unneeded("every image is in a bucket"),
    "data_backend_sampling": Unneeded("each image is shown once an epoch, times its repeats"),
    "grad_clip_method": Unneeded("gradients are clipped by their norm"),
    "quantize_via": Unneeded("the base is packed while it is loaded"),
    "quantize_activations": Missing("activations keep their precision"),
    "base_model_default_dtype": Unneeded("base_dtype: auto follows the precision"),
    "fuse_qkv_projections": Unneeded("attention is torch's own"),
    "attention_mechanism": Unneeded("attention is torch's own"),
    "allow_tf32": Unneeded("precision says it"),
    "disable_tf32": Unneeded("precision says it"),
    "gradient_precision": Unneeded("gradients are float32"),
    "num_train_epochs": Take("trainer.max_epochs", as_int),
    "strict_epoch_limit": Unneeded("max_epochs ends the run"),
    "vae_batch_size": CACHE,
    "compress_disk_cache": CACHE,
    "cache_dir": CACHE,
    "cache_dir_text": CACHE,
    "cache_dir_vae": CACHE,
    "vae_cache_ondemand": CACHE,
    "write_batch_size": CACHE,
    "read_batch_size": CACHE,
    "skip_file_discovery": CACHE,
    "preserve_data_backend_cache": CACHE,
    "text_cache_disable": CACHE,
    "vae_dtype": Unneeded("the autoencoder is computed in float32"),
    "vae_enable_tiling": MEMORY,
    "vae_enable_slicing": MEMORY,
    "offload_during_startup": MEMORY,
    "enable_group_offload": MEMORY,
    "ramtorch": MEMORY,
    "fuse_optimizer": MEMORY,
    "musubi_blocks_to_swap": MEMORY,
    "gradient_checkpointing_interval": MEMORY,
    "dataloader_prefetch": Unneeded("data.init_args.num_workers"),
    "push_to_hub": HUB,
    "push_checkpoints_to_hub": HUB,
    "hub_model_id": HUB,
    "model_card_private": HUB,
    "model_card_note": HUB,
    "model_card_safe_for_work": HUB,
    "report_to": LOGGER,
    "tracker_project_name": LOGGER,
    "tracker_run_name": LOGGER,
    "logging_dir": LOGGER,
    "disable_benchmark": Unneeded("the report compares with the base's own images"),
    "validation_on_startup": Unneeded("images of step 0 are always drawn"),
    "validation_prompt_library": Missing("validation_prompts lists the prompts"),
    "user_prompt_library": Missing("validation_prompts lists the prompts"),
    "validation_disable": Missing("the guard and the report draw; remove them from trainer.callbacks"),
    "validation_negative_prompt": Missing("lightning sample --negative_prompt has one"),
    "validation_torch_compile": Missing("torch.compile is not used"),
    "num_eval_images": Missing("data.init_args.validation_split holds images out for val_loss"),
    "lora_init_type": Missing("a LoRA begins at zero"),
    "init_lora": Missing("all weights are trained"),
    "lycoris_config": Unneeded("lora_type is not lycoris"),
    "flux_lora_target": common.LAYERS,
    "peft_lora_target_modules": common.LAYERS,
    "controlnet": Missing("configs/controlnet_canny.yaml trains one"),
    "noise_offset": Take("model.noise_offset", float),
    "offset_noise": Unneeded("noise_offset says it"),
    "input_perturbation": OBJECTIVE,
    "use_soft_min_snr": OBJECTIVE,
    "webhook_config": LOGGER,
    "trust_remote_code": Missing("no code of a model is run"),
}
PREFIXES: dict[str, Rule] = {
    "gradient_checkpointing_": MEMORY,
    "musubi_": MEMORY,
    "offload_": MEMORY,
    "vae_": CACHE,
    "text_": CACHE,
    "metadata_": CACHE,
    "image_processing_": CACHE,
    "optimizer_": Missing("the optimizer steps where the weights are"),
    "nsfw_": Missing("images are not judged"),
    "delete_": Missing("nothing of yours is deleted"),
    "post_": Missing("no scripts are run"),
    "parquet_": Missing("captions are read from metadata.jsonl or files"),
    "assistant_lora_": Unneeded("training_adapter holds the whole adapter"),
    "layersync_": OBJECTIVE,
    "nextlat_": OBJECTIVE,
    "xm_": OBJECTIVE,
    "mixflow_": OBJECTIVE,
    "internal_guidance_": OBJECTIVE,
    "diff2flow_": OBJECTIVE,
    "twinflow_": OBJECTIVE,
    "distillation_": OBJECTIVE,
    "refiner_training": OBJECTIVE,
    "input_perturbation": OBJECTIVE,
    "freeze_encoder_": OBJECTIVE,
    "audio_": Missing("images have no sound"),
    "disk_low_": Unneeded("a full disk ends the run with a snapshot before it"),
    "debug_": LOGGER,
    "print_": LOGGER,
    "tracker_": LOGGER,
    "webhook_": LOGGER,
    "main_process_": DEVICE,
    "machine_": DEVICE,
    "num_machines": DEVICE,
    "accelerate_": DEVICE,
    "context_parallel_": DEVICE,
    "validation_": SAMPLES,
    "aspect_bucket_": Unneeded("buckets are made by sides of 64 pixels"),
    "ema_": Missing("the average is a plain one"),
    "lr_": Missing("set model.lr_scheduler to a class for its own arguments"),
    "checkpoint": Missing("checkpointing_steps says when"),
    "crepa_": OBJECTIVE,
    "urepa_": OBJECTIVE,
    "irepa_": OBJECTIVE,
    "timestep_bias_": OBJECTIVE,
    "scheduled_sampling_": OBJECTIVE,
    "flow_": OBJECTIVE,
    "flux_": OBJECTIVE,
    "group_offload_": MEMORY,
    "ramtorch_": MEMORY,
    "fsdp_": Missing("strategy zero_3 shards the weights"),
    "dynamo_": Missing("torch.compile is not used"),
    "sdnq_": Unneeded("base_quantization packs the base"),
    "pretrained_": Missing("the base's own parts are loaded"),
    "eval_": Missing("validation_split gives val_loss"),
    "num_process": DEVICE,
}
"""Rules of keys that begin so, where a key has none of its own."""
SCHEDULED = Missing("images are shown from the first epoch to the last")
BACKEND: dict[str, Rule] = {
    "id": Unneeded("a name for people"),
    "default": Unneeded("captions need no place of their own"),
    "disabled": Unneeded("this backend is trained"),
    "disable": Unneeded("this backend is trained"),
    "dataset_type": Unneeded("images are read"),
    "dataset_name": Take("data.dataset_name"),
    "split": Take("data.dataset_split"),
    "image_column": Take("data.image_column"),
    "caption_column": Take("data.caption_column"),
    "streaming": Unneeded("data.init_args.dataset_name is read whole"),
    "auth_token": HUB,
    "resolution": Take("data.resolution", as_int),
    "resolution_type": Unneeded("resolution is that of a square of the same area"),
    "minimum_image_size": Missing("small images are named by the dry run"),
    "maximum_image_size": IMAGES,
    "target_downsample_size": IMAGES,
    "max_upscale_threshold": IMAGES,
    "minimum_aspect_ratio": IMAGES,
    "maximum_aspect_ratio": IMAGES,
    "crop_aspect_buckets": IMAGES,
    "crop": Unneeded("images are cut to their buckets; enable_bucket: false cuts them to squares"),
    "crop_aspect": Unneeded("enable_bucket says it"),
    "max_num_samples": Missing("all images are trained"),
    "train_batch_size": Take("data.train_batch_size", as_int),
    "probability": Missing("each image is shown once an epoch, times its repeats"),
    "timestep_sampling_offset": OBJECTIVE,
    "slider_strength": OBJECTIVE,
    "start_epoch": SCHEDULED,
    "start_step": SCHEDULED,
    "end_epoch": SCHEDULED,
    "end_step": SCHEDULED,
    "instance_prompt": Unneeded(
        "prepend_instance_prompt and only_instance_prompt, which are off, put it into captions"
    ),
    "prepend_instance_prompt": Unneeded("trigger_word is put into captions that lack it"),
    "only_instance_prompt": Missing("captions are read where there are some; move them away"),
    "caption_shuffle": Missing("data.init_args.shuffle_caption shuffles the parts of captions"),
    "caption_filter_list": Missing("captions stay as they are"),
    "disable_multiline_split": Unneeded("a caption file is one caption"),
    "conditioning": CONTROL,
    "conditioning_config": CONTROL,
    "conditioning_data": CONTROL,
    "conditioning_type": CONTROL,
    "source_dataset_id": CONTROL,
    "parquet": Missing("captions are read from metadata.jsonl or files"),
    "metadata_backend": CACHE,
    "metadata_update_interval": CACHE,
    "hash_filenames": CACHE,
    "shorten_filenames": CACHE,
    "skip_file_discovery": CACHE,
    "preserve_data_backend_cache": CACHE,
    "compress_cache": CACHE,
    "write_batch_size": CACHE,
    "text_encoder_batch_size": CACHE,
    "text_embeds": CACHE,
    "image_embeds": CACHE,
    "conditioning_image_embeds": CACHE,
    "delete_nsfw_images": Missing("nothing of yours is deleted"),
    "delete_unwanted_images": Missing("nothing of yours is deleted"),
    "delete_problematic_images": Missing("nothing of yours is deleted"),
    "disable_validation": Unneeded("validation_split is 0"),
    "huggingface": Unneeded("its dataset_name and columns are read"),
    "is_i2v": Missing("images have one frame"),
}
"""Keys of one data backend."""
BACKEND_PREFIXES: dict[str, Rule] = {
    "cache_": CACHE,
    "vae_": CACHE,
    "text_cache_": CACHE,
    "aws_": Missing("copy the images here, or stream shards (docs/data.md)"),
    "csv_": Missing("captions are read from captions.csv, and images from files"),
    "webshart": Missing("lightning encode writes shards (docs/data.md)"),
    "video": Missing("images have one frame"),
    "audio": Missing("images have no sound"),
}
TEXTS = (
    "revision",
    "variant",
    "model_flavour",
    "model_type",
    "instance_prompt",
    "validation_prompt",
    "output_dir",
    "data_backend_config",
    "pretrained_model_name_or_path",
    "resume_from_checkpoint",
)
"""Keys whose values stay texts, also where they look like a number."""
FEW_STEPS = {
    ("flux", "schnell"): ("black-forest-labs/FLUX.1-schnell", common.ADAPTER_FILE),
    ("z-image", "turbo"): ("Tongyi-MAI/Z-Image-Turbo", "zimage_turbo_training_adapter_v1.safetensors"),
    ("z-image", "turbo-ostris-v2"): ("Tongyi-MAI/Z-Image-Turbo", "zimage_turbo_training_adapter_v2.safetensors"),
}
"""Base of a few-step flavour, and its adapter's file, by family and flavour."""


def read(given: dict[str, Any], found: Imported) -> None:
    """Take all keys of the file, and those of the data backend file that it names where that is there."""
    names = {str(key).removeprefix("--"): value for key, value in given.items()}
    keys = {key: value if key in TEXTS else _value(value) for key, value in names.items()}
    _take_base(keys, found)
    answered = _take_kind(keys, found)
    common.take_optimizer(found, "optimizer", keys.get("optimizer"), _optimizer_options(keys), "adamw_bf16")
    common.take_schedule(found, "lr_scheduler", keys.get("lr_scheduler"), "constant_with_warmup")
    common.take_precision(found, "mixed_precision", keys.get("mixed_precision"), "bf16")
    if keys.get("max_train_steps"):
        found.take("max_train_steps", "model.max_train_steps", as_int(keys["max_train_steps"]))
    elif not keys.get("num_train_epochs"):
        found.default("trainer.max_epochs", 1)
    if keys.get("lr_warmup_steps"):
        common.take_warmup(found, "lr_warmup_steps", keys["lr_warmup_steps"])
    kind = common.quantization_of(str(keys.get("base_model_precision") or ""))
    if kind is not None:
        found.take("base_model_precision", "model.base_quantization", kind, str(keys["base_model_precision"]))
    common.take_checkpointing(found, "gradient_checkpointing", keys.get("gradient_checkpointing"), True)
    _take_objective(keys, found)
    output = str(keys.get("output_dir") or "output/models")
    folder, _, last = output.rstrip("/\\").replace("\\", "/").rpartition("/")
    common.take_name(found, "output_dir", last or found.path.stem, folder or None)
    if keys.get("validation_prompt"):
        common.take_prompts(found, "validation_prompt", [keys["validation_prompt"]], None)
    if keys.get("validation_resolution"):
        side = float(str(keys["validation_resolution"]).partition(",")[0].casefold().partition("x")[0])
        common.take_side(found, "validation_resolution", side, place="model.sample_resolution")
    if keys.get("resolution"):
        common.take_side(found, "resolution", _side(keys["resolution"], str(keys.get("resolution_type") or "")))
    if keys.get("text_encoder_lr") == 0:
        common.take_text_encoder_rate(found, "text_encoder_lr", 0.0)
        answered |= {"text_encoder_lr", "train_text_encoder"}
    if keys.get("num_train_epochs") == 0:
        keys.pop("num_train_epochs")
        found.lines.append("num_train_epochs: off: max_train_steps ends the run")
    done = {
        "model_family",
        "model_flavour",
        "pretrained_model_name_or_path",
        "model_type",
        "lora_type",
        "lora_rank",
        "lora_alpha",
        "optimizer",
        "optimizer_config",
        "lr_scheduler",
        "mixed_precision",
        "max_train_steps",
        "lr_warmup_steps",
        "base_model_precision",
        "gradient_checkpointing",
        "flow_schedule_shift",
        "flow_use_uniform_schedule",
        "flow_schedule_auto_shift",
        "output_dir",
        "validation_prompt",
        "resolution",
        "validation_resolution",
        "data_backend_config",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "adam_weight_decay",
        "optimizer_beta1",
        "optimizer_beta2",
        "prediction_type",
        "loss_type",
        "assistant_lora_path",
        *answered,
    }
    prefixed = {
        key: next(rule for start, rule in PREFIXES.items() if key.startswith(start))
        for key in keys
        if any(key.startswith(start) for start in PREFIXES)
    }
    found.answer(keys, prefixed | RULES, done)
    _take_backend(keys.get("data_backend_config"), found)
    for place, value in {
        "model.learning_rate": 4e-7,
        "data.train_batch_size": 4,
        "trainer.gradient_clip_val": 2.0,
        "data.resolution": 1024,
    }.items():
        found.default(place, value)


def _take_base(keys: dict[str, Any], found: Imported) -> None:
    """Take the base, which a few-step flavour with an adapter has of its own."""
    family = str(keys["model_family"]) if keys.get("model_family") else None
    flavour = str(keys.get("model_flavour") or "")
    base, path = keys.get("pretrained_model_name_or_path"), keys.get("assistant_lora_path")
    is_few_steps = flavour.startswith("turbo") or flavour.endswith("schnell")
    adapter = None
    if path and str(keys.get("model_type") or "full") != "full" and not keys.get("disable_assistant_lora"):
        flavours_base, file = FEW_STEPS.get((family or "", flavour), (None, None))
        name = str(keys.get("assistant_lora_weight_name") or file or "")
        is_repository = str(path).count("/") == 1 and not str(path).endswith(".safetensors")
        adapter = ("assistant_lora_path", f"{path}/{name}" if is_repository and name else str(path))
        base = base or flavours_base
    elif path:
        found.unneeded("assistant_lora_path", "disable_assistant_lora is set, or all weights are trained")
    elif is_few_steps:
        found.missing("model_flavour", f"{flavour} is distilled; its base is trained instead")
    common.take_base(found, "pretrained_model_name_or_path", base, family, adapter)


def _value(value: Any) -> Any:
    """A value that the file may write as text: true, 0.1, 1e-4."""
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", value, flags=re.IGNORECASE):
        number = float(value)
        return int(number) if number == int(number) and re.fullmatch(r"\s*[-+]?\d+\s*", value) else number
    return {"true": True, "false": False}.get(value.casefold(), value)


def _side(value: Any, kind: str) -> int:
    """The side in pixels of a resolution, which `resolution_type: area` gives in megapixels."""
    number = float(value)
    return round(number**0.5 * 1000 / 64) * 64 if kind == "area" or number < 16 else as_int(number)


def _take_kind(keys: dict[str, Any], found: Imported) -> set[str]:
    """Take the adapter's kind and sizes, and the file to begin with; returns the keys that it used."""
    kind = str(keys.get("model_type") or "full")
    found.is_full = kind == "full"
    if found.is_full:
        return set()
    answered: set[str] = set()
    if keys.get("init_lora"):
        common.take_lora_file(found, "init_lora", str(keys["init_lora"]))
        answered.add("init_lora")
    found.values["model.lora_targets"] = (["attention"], "the layers that SimpleTuner adapts")
    if str(keys.get("lora_type") or "standard") == "lycoris":
        if _take_lycoris(keys, found):
            for key in ("lora_rank", "lora_alpha"):
                if key in keys:
                    found.unneeded(key, "lycoris_config has the sizes")
            return answered | {"lycoris_config"}
        answered.add("lycoris_config")
    elif str(keys.get("lora_type") or "standard") != "standard":
        found.missing("lora_type", f"{keys['lora_type']} is no plain LoRA; a LoRA is trained instead")
    if keys.get("lora_rank"):
        found.take("lora_rank", "model.rank", as_int(keys["lora_rank"]))
    found.default("model.rank", 16)
    if keys.get("lora_alpha"):
        found.take("lora_alpha", "model.lora_alpha", float(keys["lora_alpha"]))
    return answered


def _take_lycoris(keys: dict[str, Any], found: Imported) -> bool:
    """Take the sizes of LyCORIS' LoKr, or of its LoRA, from the file that lycoris_config names; False for no file."""
    name = str(keys.get("lycoris_config") or "")
    file = common.named_file(found, name) if name else None
    if file is None:
        found.missing("lycoris_config", f"{name or 'its file'} is not there; a LoRA is trained instead, or copy it")
        return False
    given = common.read_json(file)
    algorithm, dim = str(given.get("algo") or "lora").casefold(), as_int(given.get("linear_dim") or 16)
    preset = given.get("apply_preset")
    modules = " ".join(map(str, preset.get("target_module") or [])) if isinstance(preset, dict) else ""
    kinds = {"Attention": "attention", "FeedForward": "feed_forward", "Transformer": "feed_forward"}
    targets = list(dict.fromkeys(ours for mark, ours in kinds.items() if mark in modules))
    targets = targets if "Transformer" not in modules else ["attention", "feed_forward"]
    targets = targets or ["attention", "feed_forward", "convolutions"]
    found.take("lycoris_config.apply_preset", "model.lora_targets", targets)
    if isinstance(preset, dict) and preset.get("module_algo_map"):
        found.missing("lycoris_config.module_algo_map", "factor and sizes are those of all layers")
    is_full = as_bool(given.get("full_matrix") or False)
    if algorithm == "lokr":
        common.take_lokr(found, "lycoris_config.algo", ("lycoris_config.factor", given.get("factor")))
        reason = common.reason_of_whole("full_matrix", is_full=is_full, rank_key="linear_dim", rank=dim)
        if reason is not None:
            sizes = [f"lycoris_config.{key}" for key in ("linear_dim", "linear_alpha") if key in given]
            common.take_whole_lokr(found, sizes, reason)
            return True
    elif algorithm not in ("lora", "locon"):
        found.missing("lycoris_config.algo", f"{algorithm} is neither lora nor lokr; a LoRA is trained instead")
        dim = 16 if dim >= common.WHOLE_RANK else dim
    found.take("lycoris_config.linear_dim", "model.rank", dim)
    if given.get("linear_alpha") is not None:
        found.take("lycoris_config.linear_alpha", "model.lora_alpha", float(given["linear_alpha"]))
    return True


def _optimizer_options(keys: dict[str, Any]) -> dict[str, Any]:
    given = keys.get("optimizer_config")
    texts = given.split(",") if isinstance(given, str) else []
    options = dict(given) if isinstance(given, dict) else common.parsed_options(texts)
    names = {
        "adam_weight_decay": "weight_decay",
        "adam_epsilon": "eps",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
        "optimizer_beta1": "beta1",
        "optimizer_beta2": "beta2",
    }
    return options | {name: float(keys[key]) for key, name in names.items() if keys.get(key) is not None}


def _take_objective(keys: dict[str, Any], found: Imported) -> None:
    if keys.get("flow_schedule_auto_shift"):
        found.take("flow_schedule_auto_shift", "model.flow_shift", "auto")
    elif keys.get("flow_schedule_shift"):
        found.take("flow_schedule_shift", "model.flow_shift", float(keys["flow_schedule_shift"]))
    if keys.get("flow_use_uniform_schedule"):
        found.take("flow_use_uniform_schedule", "model.timestep_sampling", "uniform")
    if keys.get("prediction_type") in ("epsilon", "v_prediction", "sample"):
        found.take("prediction_type", "model.prediction_type", keys["prediction_type"])
    if keys.get("loss_type") in ("l2", "huber", "smooth_l1"):
        found.take("loss_type", "model.loss_type", keys["loss_type"])


def _take_backend(name: Any, found: Imported) -> None:
    """Take the images' folders of the data backend file."""
    if not name:
        return
    file = common.named_file(found, str(name))
    if file is None:
        found.missing("data_backend_config", f"{name} is not there; set data.init_args.train_data_dir, or copy it")
        return
    backends = common.read_json(file)
    images = [
        each
        for each in backends
        if isinstance(each, dict) and each.get("dataset_type", "image") == "image" and not each.get("disabled")
    ]
    classes = [each for each in images if _is_class(each)]
    own = [each for each in images if not _is_class(each)]
    local = [each for each in own if each.get("instance_data_dir")]
    repeats = [as_int(each.get("repeats") or 0) + 1 for each in local]  # SimpleTuner counts what comes on top
    folders = [(str(each["instance_data_dir"]), count) for each, count in zip(local, repeats, strict=True)]
    common.take_folders(found, "instance_data_dir", folders, "data_backend.repeats")
    if classes:
        remark = f"the first of {len(classes)}" if len(classes) > 1 else ""
        place = classes[0].get("instance_data_dir")
        if place:
            found.take("data_backend.is_regularisation_data", "data.class_data_dir", str(place), remark)
        else:
            found.missing("data_backend.is_regularisation_data", "data.init_args.class_data_dir is a folder; copy them")
        if as_int(classes[0].get("repeats") or 0):
            found.missing(
                f"data_backend[{backends.index(classes[0])}].repeats",
                "data.init_args.prior_ratio is the number of class images for each of yours",
            )
    for each in own[:1]:
        _take_options(each, found)


def _is_class(backend: dict[str, Any]) -> bool:
    """Whether a backend has images that hold what the base does; the key is spelt in two ways."""
    spellings = ("is_regularisation_data", "is_regularization_data")
    return any(as_bool(backend.get(key) or False) for key in spellings)


def _take_options(backend: dict[str, Any], found: Imported) -> None:
    """Take the options of the backend whose images are trained, with a line for each."""
    if backend.get("resolution"):
        side = _side(backend["resolution"], str(backend.get("resolution_type") or ""))
        common.take_side(found, "data_backend.resolution", side)
    puts_prompt = [key for key in ("only_instance_prompt", "prepend_instance_prompt") if backend.get(key)]
    if backend.get("instance_prompt") and (puts_prompt or backend.get("caption_strategy") == "instanceprompt"):
        found.take("data_backend.instance_prompt", "data.trigger_word", backend["instance_prompt"])
    strategy = backend.get("caption_strategy")
    if strategy in ("filename", "instanceprompt"):
        how = "filename" if strategy == "filename" else "trigger"
        if how == "filename" or found.value("data.trigger_word"):
            found.take("data_backend.caption_strategy", "data.missing_captions", how)
    elif strategy == "textfile":
        found.unneeded("data_backend.caption_strategy", "a caption is the text file next to its image")
    elif strategy is not None:
        found.missing(
            "data_backend.caption_strategy", f"{strategy}: captions are metadata.jsonl, captions.csv or files"
        )
    if backend.get("crop"):
        if backend.get("crop_aspect", "square") == "square":
            found.take("data_backend.crop_aspect", "data.enable_bucket", False)
        if backend.get("crop_style") == "random":
            common.take_random_crop(found, "data_backend.crop_style", True)
        elif backend.get("crop_style") not in (None, "center"):
            found.missing("data_backend.crop_style", f"{backend['crop_style']}: images are cut in the middle")
    block = backend.get("huggingface")
    options = {f"data_backend.{key}": value for key, value in backend.items()}
    if isinstance(block, dict):
        names = ("dataset_name", "split", "image_column", "caption_column")
        options |= {f"data_backend.{key}": block[key] for key in names if block.get(key)}
    if options.get("data_backend.dataset_name") and found.value("data.train_data_dir") is None:
        found.values["data.train_data_dir"] = (None, "dataset_name names the images")
    if backend.get("type") in (None, "local", "huggingface"):
        options.pop("data_backend.type", None)
    else:
        found.missing(
            "data_backend.type", f"{backend['type']}: copy the images here, or set data.init_args.dataset_name"
        )
    rules = {f"data_backend.{key}": rule for key, rule in BACKEND.items()}
    for key in options:
        of_start = (rule for start, rule in BACKEND_PREFIXES.items() if key.startswith(f"data_backend.{start}"))
        if key not in rules and (rule := next(of_start, None)) is not None:
            rules[key] = rule
    if float(backend.get("probability") or 1) == 1:
        rules["data_backend.probability"] = Unneeded("1 shows each image once an epoch, times its repeats")
    done = {key for key in options if any(line.startswith(f"{key}:") for line in found.lines)}
    unsaid = ("instance_data_dir", "repeats", "type", "crop_style", "caption_strategy", "is_regularisation_data")
    found.answer(options, rules, done | {f"data_backend.{key}" for key in (*unsaid, "is_regularization_data")})
