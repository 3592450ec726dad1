"""OneTrainer's JSON: a preset, or a config with its concepts and samples.

Source: Nerogar/OneTrainer, modules/util/config/TrainConfig.py and optimizer_util.py, for keys and defaults.
"""

from __future__ import annotations

import re
from typing import Any

from lightning_aigc.cli.import_config import common
from lightning_aigc.cli.import_config.imported import (
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
    flat,
)
from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.errors import ConfigError

NAME = "OneTrainer"
MODELS = {
    "STABLE_DIFFUSION_15": "sd",
    "STABLE_DIFFUSION_20": "sd",
    "STABLE_DIFFUSION_20_BASE": "sd",
    "STABLE_DIFFUSION_21": "sd",
    "STABLE_DIFFUSION_21_BASE": "sd",
    "STABLE_DIFFUSION_XL_10_BASE": "sdxl",
    "STABLE_DIFFUSION_3": "sd3",
    "STABLE_DIFFUSION_35": "sd3",
    "FLUX_DEV_1": "flux",
    "FLUX_2": "flux2",
    "QWEN": "qwen_image",
    "CHROMA_1": "chroma",
    "KREA_2": "krea2",
    "Z_IMAGE": "z_image",
}
WINDOW = Unneeded("belongs to the program's window")
DEVICE = Unneeded("trainer.accelerator, devices and strategy choose it")
PART = Missing("the parts of a model are chosen by its family")
OTHER_METHOD = Unneeded("belongs to another method than LoRA")
UNTIL_THE_END = Unneeded("text encoders that are trained are trained until the end")
RULES: dict[str, Rule] = {
    "learning_rate": Take("model.learning_rate", float),
    "batch_size": Take("data.train_batch_size", as_int),
    "gradient_accumulation_steps": Take("trainer.accumulate_grad_batches", as_int),
    "epochs": Take("trainer.max_epochs", as_int),
    "clip_grad_norm": Take("trainer.gradient_clip_val", float),
    "ema_decay": Take("model.ema_decay", float),
    "ema_update_step_interval": Unneeded("the average is taken at each step"),
    "offset_noise_weight": Take("model.noise_offset", float),
    "huber_delta": Take("model.huber_c", float),
    "dropout_probability": Take("model.lora_dropout", float),
    "lora_rank": Take("model.rank", as_int),
    "lora_alpha": Take("model.lora_alpha", float),
    "lora_decompose": Take("model.use_dora", as_bool),
    "aspect_ratio_bucketing": Take("data.enable_bucket", as_bool),
    "latent_caching": Take("data.cache_latents", as_bool),
    "dataloader_threads": Take("data.num_workers", as_int),
    "rescale_noise_scheduler_to_zero_terminal_snr": Take("model.zero_terminal_snr", as_bool),
    "train_device": DEVICE,
    "temp_device": DEVICE,
    "multi_gpu": DEVICE,
    "device_indexes": DEVICE,
    "gradient_reduce_precision": DEVICE,
    "fused_gradient_reduce": DEVICE,
    "async_gradient_reduce": DEVICE,
    "async_gradient_reduce_buffer": DEVICE,
    "workspace_dir": Unneeded("trainer.default_root_dir is the run's folder"),
    "cache_dir": Unneeded("data.init_args.cache_dir holds the caches"),
    "only_cache": WINDOW,
    "clear_cache_before_training": Unneeded("a cache is that of its images, captions and model"),
    "debug_mode": WINDOW,
    "debug_dir": WINDOW,
    "offline_mode": Unneeded("HF_HUB_OFFLINE=1 forbids the hub"),
    "huggingface_cache_dir": Unneeded("HF_HOME says it"),
    "tensorboard": LOGGER,
    "tensorboard_expose": LOGGER,
    "tensorboard_always_on": LOGGER,
    "tensorboard_port": LOGGER,
    "samples_to_tensorboard": LOGGER,
    "validation": Missing("no concept is for it; data.init_args.validation_split holds images out for val_loss"),
    "validate_after": Unneeded("validation_steps says when"),
    "validate_after_unit": Unneeded("validation_steps says when"),
    "continue_last_backup": Unneeded("lightning fit --resume continues a run"),
    "prevent_overwrites": Unneeded("an earlier run is never overwritten without --overwrite"),
    "include_train_config": Unneeded("each run writes config.yaml"),
    "output_dtype": Unneeded("a LoRA is written in float16"),
    "async_offloading": MEMORY,
    "enable_async_offloading": MEMORY,
    "enable_activation_offloading": MEMORY,
    "layer_offload_fraction": MEMORY,
    "compile": Missing("torch.compile is not used"),
    "force_circular_padding": Missing("images are no tiles"),
    "attention_mechanism": Unneeded("attention is torch's own"),
    "enable_autocast_cache": Unneeded("autocast is torch's own"),
    "fallback_train_dtype": Unneeded("precision says it"),
    "lora_weight_dtype": Unneeded("trained weights are float32"),
    "embedding_weight_dtype": OTHER_METHOD,
    "weight_dtype": Unneeded("base_dtype: auto follows the precision"),
    "frames": Unneeded("images have one frame"),
    "learning_rate_cycles": Missing("cosine_with_restarts has one cycle; set model.lr_scheduler to a class"),
    "learning_rate_min_factor": Missing("schedules end at zero; set model.lr_scheduler to a class"),
    "custom_learning_rate_scheduler": Missing("set model.lr_scheduler to its class"),
    "scheduler_params": Missing("set model.lr_scheduler to a class for its own arguments"),
    "learning_rate_scaler": Missing("learning_rate is taken as it is"),
    "loss_scaler": Missing("the loss is a mean over the batch"),
    "loss_weight_strength": Unneeded("snr_gamma says it"),
    "mse_strength": Unneeded("loss_type says it"),
    "mae_strength": OBJECTIVE,
    "log_cosh_strength": OBJECTIVE,
    "huber_strength": Unneeded("loss_type says it"),
    "vb_loss_strength": Unneeded("images' models have no variational part"),
    "generalized_offset_noise": OBJECTIVE,
    "perturbation_noise_weight": OBJECTIVE,
    "min_noising_strength": OBJECTIVE,
    "max_noising_strength": OBJECTIVE,
    "timestep_shift": Unneeded("flow_shift says it"),
    "masked_training": Missing("set data.init_args.mask_dir to the folder of the masks"),
    "unmasked_probability": Missing("a mask says what is learned"),
    "unmasked_weight": Missing("grey in a mask is its weight"),
    "normalize_masked_area_loss": OBJECTIVE,
    "masked_prior_preservation_weight": Missing("preserve: own does it, with masks in data.init_args.mask_dir"),
    "custom_conditioning_image": Missing("conditions belong to DiffusionControlNet"),
    "layer_filter": common.LAYERS,
    "layer_filter_regex": Unneeded("belongs to layer_filter"),
    "embedding_learning_rate": OTHER_METHOD,
    "preserve_embedding_norm": OTHER_METHOD,
    "embedding.*": OTHER_METHOD,
    "additional_embeddings": Missing("embeddings are not trained"),
    "bundle_additional_embeddings": OTHER_METHOD,
    "cloud.*": Unneeded("containers/ has a SkyPilot task"),
    "secrets.*": Unneeded("tokens are read from the environment"),
    "optimizer_defaults.*": WINDOW,
    "lora_model_name": Missing("all weights are trained"),
    "lora_decompose_norm_epsilon": Unneeded("belongs to use_dora"),
    "lora_decompose_output_axis": Unneeded("belongs to use_dora"),
    "peft_type": Missing("it is no LoRA; a LoRA is trained instead"),
    "sample_definition_file_name": Missing("validation_prompts lists the prompts"),
    "concept_file_name": Missing("set data.init_args.train_data_dir to the folder of the images"),
    "sample_after": Unneeded("validation_steps says when"),
    "sample_after_unit": Unneeded("validation_steps says when"),
    "sample_skip_first": Unneeded("the images of step 0 are what the report compares with"),
    "sample_image_format": Unneeded("sample grids are PNG"),
    "sample_video_format": WINDOW,
    "sample_audio_format": WINDOW,
    "non_ema_sampling": Unneeded("samples use the average where there is one"),
    "backup_after": SNAPSHOT,
    "backup_after_unit": SNAPSHOT,
    "rolling_backup": SNAPSHOT,
    "rolling_backup_count": SNAPSHOT,
    "backup_before_save": SNAPSHOT,
    "save_every": Unneeded("checkpointing_steps says when"),
    "save_every_unit": Unneeded("checkpointing_steps says when"),
    "save_skip_first": SNAPSHOT,
    "save_filename_prefix": WINDOW,
    "text_encoder_layer_skip": Missing("the last layer is read, as the base was trained"),
    "text_encoder_2_layer_skip": Missing("the last layer is read, as the base was trained"),
    "text_encoder_3_layer_skip": Missing("the last layer is read, as the base was trained"),
    "text_encoder_4_layer_skip": Missing("the last layer is read, as the base was trained"),
    "text_encoder_sequence_length": Unneeded("the family's own length"),
    "text_encoder_2_sequence_length": Unneeded("the family's own length"),
    "unet.*": PART,
    "transformer.*": PART,
    "prior.*": PART,
    "text_encoder.stop_training_after": UNTIL_THE_END,
    "text_encoder.stop_training_after_unit": UNTIL_THE_END,
    "text_encoder_2.stop_training_after": UNTIL_THE_END,
    "text_encoder_2.stop_training_after_unit": UNTIL_THE_END,
    "text_encoder.*": PART,
    "text_encoder_2.*": PART,
    "text_encoder_3.*": PART,
    "text_encoder_4.*": PART,
    "vae.*": Unneeded("the autoencoder is computed in float32"),
    "effnet_encoder.*": PART,
    "decoder.*": PART,
    "decoder_text_encoder.*": PART,
    "decoder_vqgan.*": PART,
    "unconditional_transformer.*": PART,
    "quantization.*": Unneeded("base_quantization packs every large layer"),
    "__version": WINDOW,
}
for _name in (
    "oft_block_size",
    "oft_block_share",
    "oft_scaled",
    "lokr_dim",
    "lokr_decompose_both",
    "lokr_use_tucker",
    "lokr_decompose_factor",
    "lokr_weight_decompose",
    "lokr_dora_on_output",
    "lokr_full_matrix",
    "lokr_vec_trick",
):
    RULES[_name] = OTHER_METHOD
IMAGES = Missing("images are cropped and mirrored only")
TAGS = Missing("captions are shuffled and dropped as a whole")
CONCEPT: dict[str, Rule] = {
    "name": Unneeded("a name for people"),
    "path": Take("data.train_data_dir"),
    "seed": Unneeded("data.init_args.seed is that of all images"),
    "enabled": Unneeded("this concept is trained"),
    "include_subdirectories": Unneeded("folders below are read always"),
    "image_variations": Missing("a cached image has one crop"),
    "text_variations": Unneeded("captions are drawn anew each time"),
    "loss_weight": Missing("images have one weight; prior_loss_weight is that of class images"),
    "concept_stats": Unneeded("the data report counts"),
    "concept_stats.*": Unneeded("the data report counts"),
    "image.enable_resolution_override": Missing("one size is trained"),
    "image.resolution_override": Unneeded("belongs to enable_resolution_override"),
    "image.random_rotate_max_angle": Unneeded("belongs to enable_random_rotate"),
    "image.random_brightness_max_strength": Unneeded("belongs to enable_random_brightness"),
    "image.random_contrast_max_strength": Unneeded("belongs to enable_random_contrast"),
    "image.random_saturation_max_strength": Unneeded("belongs to enable_random_saturation"),
    "image.random_hue_max_strength": Unneeded("belongs to enable_random_hue"),
    "image.*": IMAGES,
    "text.prompt_path": Unneeded("belongs to prompt_source: concept"),
    "text.tag_delimiter": Take("data.caption_separator"),
    "text.keep_tags_count": Unneeded("belongs to enable_tag_shuffling"),
    "text.tag_dropout_enable": TAGS,
    "text.tag_dropout_mode": Unneeded("belongs to tag_dropout_enable"),
    "text.tag_dropout_probability": Unneeded("belongs to tag_dropout_enable"),
    "text.tag_dropout_special_tags_mode": Unneeded("belongs to tag_dropout_enable"),
    "text.tag_dropout_special_tags": Unneeded("belongs to tag_dropout_enable"),
    "text.tag_dropout_special_tags_regex": Unneeded("belongs to tag_dropout_enable"),
    "text.caps_randomize_enable": Missing("letters stay as they are"),
    "text.caps_randomize_mode": Unneeded("belongs to caps_randomize_enable"),
    "text.caps_randomize_probability": Unneeded("belongs to caps_randomize_enable"),
    "text.caps_randomize_lowercase": Unneeded("belongs to caps_randomize_enable"),
}
"""Keys of one concept."""
TYPES = {"STANDARD": None, "PRIOR_PREDICTION": "data.class_data_dir", "VALIDATION": "data.validation_data_dir"}
"""Our key of the folder by a concept's type; STANDARD images may have several folders."""
WHOLE_KEYS = ("lokr_dim", "lora_alpha")
LAYERS = {"attn-only": ["attention"], "attn-mlp": ["attention", "feed_forward"]}
DISTRIBUTIONS = {"UNIFORM": "uniform", "LOGIT_NORMAL": "logit_normal", "SIGMOID": "logit_normal", "COS_MAP": "mode"}


def read(given: dict[str, Any], found: Imported) -> None:
    """Take all keys of the file. Raises: ConfigError for a model or a method that does not train here."""
    keys = flat(given)
    kind = str(keys.get("model_type") or "STABLE_DIFFUSION_15")
    method = str(keys.get("training_method") or "FINE_TUNE")
    if kind not in MODELS:
        raise ConfigError(
            f"{found.path} trains {kind}, which does not train here; known are {', '.join(dict.fromkeys(MODELS))}"
        )
    if method not in ("LORA", "FINE_TUNE"):
        raise ConfigError(f"{found.path} trains by {method}; here are LORA and FINE_TUNE")
    found.is_full = method == "FINE_TUNE"
    common.take_base(found, "base_model_name", keys.get("base_model_name"), MODELS[kind])
    if "v_prediction" in kind.casefold() or kind == "STABLE_DIFFUSION_21":
        found.default("model.prediction_type", None, "the base's own")
    _take_training(keys, found)
    _take_network(keys, found)
    answered = _take_kind(keys, found) | _take_rates(keys, found) | _take_data(given, keys, found)
    destination = str(keys.get("output_model_destination") or found.path.stem)
    common.take_name(found, "output_model_destination", destination, None)
    done = {
        "model_type",
        "training_method",
        "base_model_name",
        "optimizer",
        "learning_rate_scheduler",
        "train_dtype",
        "learning_rate_warmup_steps",
        "ema",
        "loss_weight_fn",
        "timestep_distribution",
        "noising_weight",
        "noising_bias",
        "dynamic_timestep_shifting",
        "layer_filter_preset",
        "resolution",
        "concepts",
        "samples",
        "output_model_destination",
        "output_model_format",
        "gradient_checkpointing",
        "force_v_prediction",
        "force_epsilon_prediction",
        "unet.weight_dtype",
        "transformer.weight_dtype",
        "text_encoder.train",
        "text_encoder.learning_rate",
        "text_encoder_2.train",
        "text_encoder_2.learning_rate",
        "unet.train",
        "transformer.train",
        *answered,
    } | {key for key in keys if key.startswith(("optimizer.", "concepts.", "samples."))}
    if found.is_full or keys.get("peft_type") in (None, "LORA", "LOKR"):
        done.add("peft_type")
    if not found.is_full and keys.get("lora_model_name"):
        common.take_lora_file(found, "lora_model_name", str(keys["lora_model_name"]))
        done.add("lora_model_name")
    if found.is_full:
        done |= {key for key in keys if key.startswith("lora_")} | {"dropout_probability"}
    found.answer(keys, RULES, done)
    defaults = {
        "model.learning_rate": 3e-6,
        "trainer.max_epochs": 100,
        "data.train_batch_size": 1,
        "trainer.gradient_clip_val": 1.0,
        "model.lr_warmup_steps": 200,
        "data.resolution": 512,
    } | ({} if found.is_full else {"model.rank": 16, "model.lora_alpha": 1.0})
    for place, value in defaults.items():
        found.default(place, value)


def _take_training(keys: dict[str, Any], found: Imported) -> None:
    given = keys.get("optimizer.optimizer") or keys.get("optimizer")
    name = str(given or "ADAMW")
    options = {key.removeprefix("optimizer."): value for key, value in keys.items() if key.startswith("optimizer.")}
    options.pop("optimizer", None)
    kept = {
        key: value
        for key, value in options.items()
        if key in ("beta1", "beta2", "eps", "weight_decay", "momentum")
        or (key in ("d_coef", "decouple", "use_bias_correction", "safeguard_warmup") and "PRODIGY" in name)
        or (
            key in ("scale_parameter", "relative_step", "warmup_init", "clip_threshold", "decay_rate")
            and name == "ADAFACTOR"
        )
    }
    if name == "ADAFACTOR" and "eps" in kept:
        kept["eps"] = [kept["eps"], options.get("eps2") or 1e-3]
    common.take_optimizer(found, "optimizer", given and name, kept, "ADAMW")
    common.take_schedule(found, "learning_rate_scheduler", keys.get("learning_rate_scheduler"), "constant")
    if keys.get("learning_rate_warmup_steps") is not None:
        _take_warmup(
            float(keys["learning_rate_warmup_steps"]), as_int(keys.get("gradient_accumulation_steps") or 1), found
        )
    common.take_precision(found, "train_dtype", keys.get("train_dtype"), "fp16")
    if str(keys.get("ema") or "OFF") != "OFF":
        found.take("ema", "model.use_ema", True)
    common.take_checkpointing(found, "gradient_checkpointing", keys.get("gradient_checkpointing"), True)
    weight = str(keys.get("loss_weight_fn") or "CONSTANT")
    if weight == "MIN_SNR_GAMMA":
        found.take("loss_weight_fn", "model.snr_gamma", float(keys.get("loss_weight_strength") or 5.0))
    elif weight == "DEBIASED_ESTIMATION":
        found.take("loss_weight_fn", "model.debiased_estimation", True)
    elif weight != "CONSTANT":
        found.missing("loss_weight_fn", f"{weight} is neither MIN_SNR_GAMMA nor DEBIASED_ESTIMATION")
    if keys.get("force_v_prediction"):
        found.take("force_v_prediction", "model.prediction_type", "v_prediction")
    elif keys.get("force_epsilon_prediction"):
        found.take("force_epsilon_prediction", "model.prediction_type", "epsilon")
    if float(keys.get("huber_strength") or 0) > float(keys.get("mse_strength", 1.0) or 0):
        found.take("huber_strength", "model.loss_type", "huber")
    _take_timesteps(keys, found)


def _take_warmup(number: float, batches: int, found: Imported) -> None:
    """Take the warm-up, in batches, or up to 1 as a share of the steps; `batches` make one step."""
    key = "learning_rate_warmup_steps"
    if 0 < number <= 1:
        common.leave_out_warmup(found, key, number)
    else:
        remark = f"{number:g} batches, {batches} a step" if batches > 1 and number > 0 else ""
        found.take(key, "model.lr_warmup_steps", int(max(number, 0) / batches), remark)


def _take_timesteps(keys: dict[str, Any], found: Imported) -> None:
    kind = str(keys.get("timestep_distribution") or "UNIFORM")
    if "timestep_distribution" not in keys:
        found.default("model.timestep_sampling", "uniform")
    elif kind in DISTRIBUTIONS:
        found.take("timestep_distribution", "model.timestep_sampling", DISTRIBUTIONS[kind])
    else:
        found.missing("timestep_distribution", f"{kind} is none of uniform, logit_normal and mode")
    if kind == "LOGIT_NORMAL" and (keys.get("noising_weight") or keys.get("noising_bias")):
        found.take("noising_bias", "model.logit_mean", float(keys.get("noising_bias") or 0.0))
        found.take("noising_weight", "model.logit_std", float(keys.get("noising_weight") or 0.0) + 1.0)
    if keys.get("dynamic_timestep_shifting"):
        found.take("dynamic_timestep_shifting", "model.flow_shift", "auto")
    else:
        found.values["model.flow_shift"] = (float(keys.get("timestep_shift") or 1.0), "timestep_shift")


def _take_network(keys: dict[str, Any], found: Imported) -> None:
    part = "transformer" if keys.get("transformer.weight_dtype") is not None else "unet"
    kind = common.quantization_of(str(keys.get(f"{part}.weight_dtype") or ""))
    if kind is not None:
        found.take(f"{part}.weight_dtype", "model.base_quantization", kind, str(keys[f"{part}.weight_dtype"]))
    elif keys.get(f"{part}.weight_dtype") is not None:
        found.unneeded(f"{part}.weight_dtype", "base_dtype: auto follows the precision")
    for name in ("unet", "transformer"):
        if f"{name}.train" in keys and (as_bool(keys[f"{name}.train"]) or name != _denoiser(found)):
            found.unneeded(f"{name}.train", "the denoiser is trained always")
        elif f"{name}.train" in keys:
            found.missing(f"{name}.train", "the denoiser is trained always")
    if found.is_full:
        return
    preset = str(keys.get("layer_filter_preset") or "full")
    everything = [*LAYERS["attn-mlp"], "convolutions"]
    targets = LAYERS.get(preset, everything if preset == "full" else LAYERS["attn-mlp"])
    if "layer_filter_preset" in keys:
        found.take("layer_filter_preset", "model.lora_targets", targets, "" if preset in (*LAYERS, "full") else preset)
    else:
        found.default("model.lora_targets", targets)


def _denoiser(found: Imported) -> str:
    """OneTrainer's name of the part that is the denoiser."""
    return "transformer" if FAMILIES[str(found.family)].is_flow else "unet"


def _take_rates(keys: dict[str, Any], found: Imported) -> set[str]:
    """Take the rates, of which a part's own takes precedence, and the text encoders that have one; returns their keys.

    A part whose rate is 0 is not trained there.
    """
    part, shared = f"{_denoiser(found)}.learning_rate", keys.get("learning_rate")
    own = keys.get(part)
    encoders = _trained_encoders(keys, found)
    rates = {name: keys.get(f"{name}.learning_rate") for name in encoders}
    for name in ("text_encoder", "text_encoder_2"):
        if f"{name}.train" in keys and name not in encoders:
            found.lines.append(f"{name}.train: off, as here")
    if encoders and found.value("model.lora_type") == "lokr":
        common.leave_out_text_encoders(
            found, next((f"{name}.train" for name in encoders if f"{name}.train" in keys), None)
        )
        encoders = []
    if encoders:
        key = f"{encoders[0]}.train"
        if key in keys:
            found.take(key, "model.train_text_encoder", True, "all text encoders are trained")
        else:
            found.default("model.train_text_encoder", True)
        given = next((name for name, rate in rates.items() if rate is not None), None)
        if given is not None:
            others = [name for name in encoders if name != given and rates[name] not in (None, rates[given])]
            remark = f"the rate of all text encoders; that of {others[0]} is left out" if others else ""
            common.take_text_encoder_rate(
                found, f"{given}.learning_rate", float(keys[f"{given}.learning_rate"]), remark
            )
        elif own and shared is not None:
            remark = f"that of the denoiser is {part}"
            common.take_text_encoder_rate(found, "learning_rate", float(shared), remark)
        elif own:
            found.default("model.text_encoder_lr", 3e-6)
    if not own:
        if own is not None:
            found.missing(part, "0 trains the other parts alone, and here the denoiser is trained always")
        return {part} if own is not None else set()
    found.take(part, "model.learning_rate", float(own))
    if shared is not None and not any(line.startswith("learning_rate:") for line in found.lines):
        found.unneeded("learning_rate", f"{part} takes precedence")
    return {part, "learning_rate"}


def _trained_encoders(keys: dict[str, Any], found: Imported) -> list[str]:
    """Names of the text encoders that are trained with a LoRA; U-Nets' are, unless the file says otherwise."""
    if found.is_full:
        return []
    family = FAMILIES[str(found.family)]
    names = ["text_encoder", "text_encoder_2"] if found.family != "sd" else ["text_encoder"]
    return [
        name
        for name in names
        if as_bool(keys.get(f"{name}.train", family.trains_text_encoders))
        and (keys.get(f"{name}.learning_rate") is None or float(keys[f"{name}.learning_rate"]) > 0)
    ]


def _take_kind(keys: dict[str, Any], found: Imported) -> set[str]:
    """Take a LoKr's sizes; returns the keys that it used."""
    if found.is_full or keys.get("peft_type") != "LOKR":
        return set()
    common.take_lokr(found, "peft_type", ("lokr_decompose_factor", keys.get("lokr_decompose_factor")))
    used = {"lora_rank", "lokr_decompose_factor", "lokr_full_matrix", "lokr_weight_decompose"} & keys.keys()
    if as_bool(keys.get("lokr_weight_decompose") or False):
        found.take("lokr_weight_decompose", "model.use_dora", True)
    dim = as_int(keys.get("lokr_dim") or 16)
    is_full = as_bool(keys.get("lokr_full_matrix") or False)
    reason = common.reason_of_whole("lokr_full_matrix", is_full=is_full, rank_key="lokr_dim", rank=dim)
    if "lora_rank" in keys:
        found.unneeded("lora_rank", "lokr_dim is that of a LoKr")
    if reason is not None:
        sizes = [key for key in WHOLE_KEYS if key in keys]
        common.take_whole_lokr(found, sizes, reason)
        return used | set(sizes)
    if "lokr_dim" in keys:
        found.take("lokr_dim", "model.rank", dim)
        return used | {"lokr_dim"}
    found.default("model.rank", dim)
    return used


def _take_data(given: dict[str, Any], keys: dict[str, Any], found: Imported) -> set[str]:
    """Take resolution, concepts and samples; returns the keys that named a file that was read."""
    if keys.get("resolution"):
        sides: list[float] = [int(number) for number in re.findall(r"\d+", str(keys["resolution"]))]
        if "x" in str(keys["resolution"]) and len(sides) == 2:
            sides = [(sides[0] * sides[1]) ** 0.5]
        remark = f"the largest of {keys['resolution']}" if len(sides) > 1 else ""
        common.take_side(found, "resolution", max(sides), remark)
    answered: set[str] = set()
    concepts, samples = (
        _entries(given, found, key, file, answered)
        for key, file in (("concepts", "concept_file_name"), ("samples", "sample_definition_file_name"))
    )
    _take_concepts(concepts, keys, found, answered)
    prompts = [str(each.get("prompt")) for each in samples if each.get("enabled", True) and each.get("prompt")]
    if prompts:
        common.take_prompts(found, "samples.prompt", prompts, None)
        first = samples[0]
        for key, place, convert in (
            ("diffusion_steps", "num_inference_steps", as_int),
            ("cfg_scale", "guidance_scale", float),
        ):
            if first.get(key) is not None:
                found.take(f"samples.{key}", f"model.{place}", convert(first[key]))
    return answered


def _take_concepts(concepts: list[dict[str, Any]], keys: dict[str, Any], found: Imported, answered: set[str]) -> None:
    """Take the folders of the concepts by their type, and the options of the first that is trained."""
    enabled = [each for each in concepts if each.get("enabled", True)]
    if len(enabled) < len(concepts):
        found.lines.append(f"concepts.enabled: {len(concepts) - len(enabled)} of {len(concepts)} are off, as here")
    by_type = {kind: [each for each in enabled if str(each.get("type") or "STANDARD") == kind] for kind in TYPES}
    images = by_type["STANDARD"]
    folders = [(str(each.get("path")), _repeats(each, found)) for each in images]
    common.take_folders(found, "concepts.path", folders, "concepts.balancing")
    for kind, place in TYPES.items():
        if place is None or not by_type[kind]:
            continue
        first = by_type[kind][0]
        if kind == "VALIDATION" and not as_bool(keys.get("validation") or False):
            found.unneeded("concepts.type", "VALIDATION images are not read, because validation is off")
            continue
        remark = f"the first of {len(by_type[kind])}" if len(by_type[kind]) > 1 else ""
        found.take("concepts.type", place, str(first.get("path")), f"{kind}{'; ' * bool(remark)}{remark}")
        weight = float(first.get("loss_weight", 1.0))
        if kind == "PRIOR_PREDICTION" and weight != 1:
            found.take(f"concepts[{concepts.index(first)}].loss_weight", "model.prior_loss_weight", weight)
        if kind == "VALIDATION":
            found.unneeded("validation", "data.init_args.validation_data_dir has the images of val_loss")
            answered.add("validation")
    if images:
        _take_concept(images[0], keys, found)


def _repeats(concept: dict[str, Any], found: Imported) -> int:
    """Repeats of a concept's images in an epoch."""
    balancing = float(concept.get("balancing") or 1.0)
    if str(concept.get("balancing_strategy") or "REPEATS") != "REPEATS":
        found.missing("concepts.balancing", f"{balancing:g} images an epoch; data.init_args.num_repeats repeats all")
        return 1
    if balancing != int(balancing):
        found.missing("concepts.balancing", f"{balancing:g} is no whole number; data.init_args.num_repeats is one")
    return max(1, round(balancing))


def _take_concept(concept: dict[str, Any], keys: dict[str, Any], found: Imported) -> None:
    image, text = concept.get("image") or {}, concept.get("text") or {}
    if image.get("enable_random_flip"):
        found.take("concepts.image.enable_random_flip", "data.random_flip", True)
    if image.get("enable_crop_jitter"):
        is_cached = as_bool(keys.get("latent_caching", True))
        common.take_random_crop(found, "concepts.image.enable_crop_jitter", is_cached)
    if text.get("enable_tag_shuffling"):
        found.take("concepts.text.enable_tag_shuffling", "data.shuffle_caption", True)
        found.take("concepts.text.keep_tags_count", "data.keep_tokens", as_int(text.get("keep_tags_count", 1) or 0))
    source = str(text.get("prompt_source") or "sample")
    if source == "filename":
        found.take("concepts.text.prompt_source", "data.missing_captions", "filename")
    elif source == "sample" and "prompt_source" in text:
        found.unneeded("concepts.text.prompt_source", "a caption is the text file next to its image")
    elif source != "sample":
        found.missing(
            "concepts.text.prompt_source",
            f"{source}: write the lines of {text.get('prompt_path') or 'the prompt file'} into text files next to the"
            " images",
        )
    given = {f"concepts.{key}": value for key, value in flat(concept).items()}
    if float(concept.get("loss_weight", 1.0)) == 1:
        given.pop("concepts.loss_weight", None)
        if "loss_weight" in concept:
            found.unneeded("concepts.loss_weight", "1 is the weight of all images")
    rules = {f"concepts.{key}": rule for key, rule in CONCEPT.items()}
    done = {key for key in given if any(line.startswith(f"{key}:") for line in found.lines)}
    found.answer(given, rules, done | {f"concepts.{key}" for key in ("type", "balancing", "balancing_strategy")})


def _entries(
    given: dict[str, Any], found: Imported, key: str, file_key: str, answered: set[str]
) -> list[dict[str, Any]]:
    """The entries of a list in the file, or of the JSON file that it names where that is there."""
    listed = given.get(key)
    name = given.get(file_key)
    if listed is not None and name:
        found.unneeded(file_key, f"{key} lists them")
        answered.add(file_key)
    elif name:
        file = common.named_file(found, str(name))
        if file is not None:
            listed = common.read_json(file)
            answered.add(file_key)
    return [each for each in listed or [] if isinstance(each, dict)]
