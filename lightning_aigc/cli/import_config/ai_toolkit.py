"""ai-toolkit's YAML: `job: extension`, and one process of the type `sd_trainer`.

Source: ostris/ai-toolkit, toolkit/config_modules.py, for keys and defaults.
"""

from __future__ import annotations

from typing import Any

from lightning_aigc.cli.import_config import common
from lightning_aigc.cli.import_config.imported import (
    HUB,
    MEMORY,
    OBJECTIVE,
    Imported,
    Missing,
    Rule,
    Take,
    Unneeded,
    as_bool,
    as_int,
    flat,
)
from lightning_aigc.errors import ConfigError

NAME = "ai-toolkit"
BOTH_KINDS = ["attention", "feed_forward"]
ONE_RATE = Unneeded("ai-toolkit trains all parts at train.lr")
RULES: dict[str, Rule] = {
    "trigger_word": Take("data.trigger_word"),
    "device": Unneeded("trainer.accelerator and trainer.devices choose it"),
    "performance_log_every": Unneeded("report.html has the times"),
    "sqlite_db_path": Unneeded("runs are folders"),
    "network.conv_alpha": Missing("lora_alpha is that of all layers"),
    "network.dropout": Take("model.lora_dropout", float),
    "network.transformer_only": Unneeded("train_text_encoder says it"),
    "network.network_kwargs.*": common.LAYERS,
    "network.pretrained_lora_path": Missing("all weights are trained"),
    "network.lokr_full_rank": Unneeded("belongs to LoKr"),
    "network.lokr_factor": Unneeded("belongs to LoKr"),
    "network.old_lokr_format": Unneeded("belongs to LoKr"),
    "network.*": common.LAYERS,
    "save.save_every": Take("model.checkpointing_steps", as_int),
    "save.max_step_saves_to_keep": Take("model.step_files_total_limit", as_int),
    "save.dtype": Unneeded("a LoRA is written in float16 or its own dtype"),
    "save.save_format": Unneeded("results are .safetensors"),
    "save.*": HUB,
    "train.batch_size": Take("data.train_batch_size", as_int),
    "train.steps": Take("model.max_train_steps", as_int),
    "train.gradient_accumulation_steps": Take("trainer.accumulate_grad_batches", as_int),
    "train.gradient_accumulation": Take("trainer.accumulate_grad_batches", as_int),
    "train.max_grad_norm": Take("trainer.gradient_clip_val", float),
    "train.lr": Take("model.learning_rate", float),
    "train.unet_lr": ONE_RATE,
    "train.text_encoder_lr": ONE_RATE,
    "train.train_unet": Unneeded("the denoiser is trained always"),
    "train.train_text_encoder": Take("model.train_text_encoder", as_bool),
    "train.noise_scheduler": Unneeded("the objective is the base model's own"),
    "train.sampler": Unneeded("images are drawn with the base model's scheduler"),
    "train.noise_offset": Take("model.noise_offset", float),
    "train.min_snr_gamma": Take("model.snr_gamma", float),
    "train.snr_gamma": Take("model.snr_gamma", float),
    "train.prompt_dropout_prob": Take("data.caption_dropout_rate", float),
    "train.reg_weight": Take("model.prior_loss_weight", float),
    "train.ema_config.use_ema": Take("model.use_ema", as_bool),
    "train.ema_config.ema_decay": Take("model.ema_decay", float),
    "train.ema_config.*": Missing("the average is a plain one"),
    "train.cache_text_embeddings": Take("data.cache_text_embeddings", as_bool),
    "train.unload_text_encoder": Unneeded("cached embeddings free the text encoders"),
    "train.skip_first_sample": Unneeded("the images of step 0 are what the report compares with"),
    "train.force_first_sample": Unneeded("images of step 0 are always drawn"),
    "train.disable_sampling": Missing("the guard and the report draw; remove them from trainer.callbacks"),
    "train.xformers": Unneeded("attention is torch's own"),
    "train.sdp": Unneeded("attention is torch's own"),
    "train.attention_backend": Unneeded("attention is torch's own"),
    "train.merge_network_on_save": Missing("lightning export LORA --merge_into PIPELINE merges it afterwards"),
    "train.lr_scheduler_params.*": Missing("set model.lr_scheduler to a class for its own arguments"),
    "train.linear_timesteps": Missing("timestep_sampling has uniform, logit_normal and mode"),
    "train.linear_timesteps2": Missing("timestep_sampling has uniform, logit_normal and mode"),
    "train.content_or_style": Missing("timestep_sampling has uniform, logit_normal and mode"),
    "train.bypass_guidance_embedding": Missing("training_guidance is what the transformer is told"),
    "train.diff_output_preservation": Missing("preserve: class needs a trigger_word and a LoRA"),
    "train.diff_output_preservation_class": Unneeded("belongs to diff_output_preservation"),
    "train.diff_output_preservation_multiplier": Unneeded("belongs to diff_output_preservation"),
    "train.blank_prompt_preservation": Missing("all weights are trained"),
    "train.blank_prompt_preservation_multiplier": Unneeded("belongs to blank_prompt_preservation"),
    "train.inverted_mask_prior": Missing("preserve: own does it, with masks in data.init_args.mask_dir"),
    "train.inverted_mask_prior_multiplier": Unneeded("belongs to inverted_mask_prior"),
    "train.*": OBJECTIVE,
    "model.quantize_te": Unneeded("base_quantization packs the text encoders too"),
    "model.qtype_te": Unneeded("base_quantization packs the text encoders too"),
    "model.dtype": Unneeded("base_dtype: auto follows the precision"),
    "model.vae_dtype": Unneeded("the autoencoder is computed in float32"),
    "model.low_vram": MEMORY,
    "model.layer_offloading": MEMORY,
    "model.auto_memory": MEMORY,
    "model.split_model_over_gpus": Missing("one model is on one card; zero_3 shards full fine-tuning"),
    "model.compile": Missing("torch.compile is not used"),
    "model.assistant_lora_path": Missing("all weights are trained"),
    "model.inference_lora_path": Missing("samples are drawn by the base and the LoRA alone"),
    "model.lora_path": Missing("lightning export LORA --merge_into PIPELINE merges it into the base first"),
    "model.*": Missing("the base is loaded as its own config says"),
    "sample.sample_every": Take("model.validation_steps", as_int),
    "sample.guidance_scale": Take("model.guidance_scale", float),
    "sample.sample_steps": Take("model.num_inference_steps", as_int),
    "sample.seed": Take("model.validation_seed", as_int),
    "sample.sampler": Unneeded("images are drawn with the base model's scheduler"),
    "sample.walk_seed": Unneeded("seeds count up from validation_seed"),
    "sample.neg": Missing("lightning sample --negative_prompt has one"),
    "sample.height": Missing("samples are square; sample_resolution is their side"),
    "sample.*": Missing("samples are drawn alike in every check"),
    "logging.*": Unneeded("report.html and TensorBoard have the curves; trainer.logger adds others"),
    "datasets.*": Missing("the data module has no such option; see docs/data.md"),
}
DATASET: dict[str, Rule] = {
    "caption_dropout_rate": Take("data.caption_dropout_rate", float),
    "shuffle_tokens": Take("data.shuffle_caption", as_bool),
    "keep_tokens": Take("data.keep_tokens", as_int),
    "flip_x": Take("data.random_flip", as_bool),
    "mask_path": Take("data.mask_dir"),
    "alpha_mask": Take("data.use_alpha_mask", as_bool),
    "trigger_word": Take("data.trigger_word"),
    "cache_latents_to_disk": Take("data.cache_latents", as_bool),
    "cache_latents": Take("data.cache_latents", as_bool),
    "cache_text_embeddings": Take("data.cache_text_embeddings", as_bool),
    "buckets": Take("data.enable_bucket", as_bool),
    "default_caption": Missing("missing_captions: filename, empty or trigger says what images without one get"),
    "num_workers": Take("data.num_workers", as_int),
    "control_path": Take("data.source_data_dir"),
    "num_frames": Unneeded("images have one frame"),
}
"""Keys of one entry of `datasets`."""
ARCH = {
    "is_flux": "flux",
    "is_xl": "sdxl",
    "is_v3": "sd3",
    "is_v2": "sd2",
    "is_pixart": "PixArt",
    "is_auraflow": "AuraFlow",
}


def read(given: dict[str, Any], found: Imported) -> None:
    """Take all keys of the file. Raises: ConfigError for a process that is no training of images."""
    config = given["config"]
    processes = config.get("process") if isinstance(config, dict) else None
    if not isinstance(processes, list) or not processes or not isinstance(processes[0], dict):
        raise ConfigError(f"{found.path}: config.process must be a list of one training; give a file with one")
    process = dict(processes[0])
    kind = str(process.get("type", "sd_trainer"))
    if kind not in ("sd_trainer", "diffusion_trainer", "ui_trainer"):
        raise ConfigError(f"{found.path}: a process of type {kind} is no training of images; give one of sd_trainer")
    datasets = process.pop("datasets", None) or []
    keys = flat(process)
    common.take_name(found, "config.name", str(config.get("name") or found.path.stem), keys.get("training_folder"))
    _take_model(keys, found)
    answered = _take_network(keys, found)
    _take_training(keys, found)
    words = [process.get("trigger_word"), *(each.get("trigger_word") for each in datasets if isinstance(each, dict))]
    word = next((word for word in words if word), None)
    answered |= _take_preservation(keys, found, word, datasets)
    if keys.get("sample.prompts"):
        common.take_prompts(found, "sample.prompts", keys["sample.prompts"], word, "--")
    elif keys.get("sample.samples"):
        prompts = [each.get("prompt", "") for each in keys["sample.samples"] if isinstance(each, dict)]
        common.take_prompts(found, "sample.samples", prompts, word, "--")
    if keys.get("sample.width"):
        common.take_side(found, "sample.width", as_int(keys["sample.width"]), place="model.sample_resolution")
    done = {
        "type",
        "training_folder",
        "model.name_or_path",
        "model.arch",
        *(f"model.{flag}" for flag in ARCH),
        "model.quantize",
        "model.qtype",
        "network.type",
        "network.linear",
        "network.linear_alpha",
        "network.rank",
        "network.alpha",
        "network.conv",
        "train.optimizer",
        "train.lr_scheduler",
        "train.dtype",
        "sample.prompts",
        "sample.samples",
        "sample.width",
        "train.timestep_type",
        "train.gradient_checkpointing",
        "train.loss_type",
        *answered,
    } | {key for key in keys if key.startswith("train.optimizer_params")}
    found.answer(keys, RULES, done)
    _take_datasets(datasets, found)
    if len(processes) > 1:
        found.missing("config.process[1]", "a config is one training; import the others from files of their own")
    for place, value in (("model.rank", 4), ("model.learning_rate", 1e-6), ("model.max_train_steps", 1000)):
        found.default(place, value)
    found.default("trainer.gradient_clip_val", 1.0)


def _take_model(keys: dict[str, Any], found: Imported) -> None:
    flags = [family for flag, family in ARCH.items() if keys.get(f"model.{flag}")]
    arch = str(keys["model.arch"]).partition(":")[0] if keys.get("model.arch") else None
    path = keys.get("model.assistant_lora_path") if keys.get("network.type") else None
    adapter = ("model.assistant_lora_path", str(path)) if path else None
    declared = arch or next(iter(flags), None)
    common.take_base(found, "model.name_or_path", keys.get("model.name_or_path"), declared, adapter)
    if as_bool(keys.get("model.quantize") or False):
        kind = str(keys.get("model.qtype") or "qfloat8").partition("|")[0]
        found.take("model.quantize", "model.base_quantization", common.quantization_of(kind) or "int8", kind)


def _take_network(keys: dict[str, Any], found: Imported) -> set[str]:
    """Take the adapter's kind, layers and sizes, and the file to begin with; returns the keys that it used."""
    kind = keys.get("network.type")
    found.is_full = kind is None
    if found.is_full:
        return set()
    answered = {"model.assistant_lora_path"}
    if keys.get("network.pretrained_lora_path"):
        common.take_lora_file(found, "network.pretrained_lora_path", str(keys["network.pretrained_lora_path"]))
        answered.add("network.pretrained_lora_path")
    targets = [*BOTH_KINDS, *(["convolutions"] if keys.get("network.conv") else [])]
    if str(kind).casefold() == "lokr":
        common.take_lokr(found, "network.type", ("network.lokr_factor", keys.get("network.lokr_factor")))
        answered |= {"network.lokr_factor", "network.lokr_full_rank"}
        if as_bool(keys.get("network.lokr_full_rank", True)):
            found.values["model.lora_targets"] = ([*BOTH_KINDS, "convolutions"], "the layers that ai-toolkit adapts")
            sizes = ("linear", "rank", "linear_alpha", "alpha", "conv", "conv_alpha")
            used = [f"network.{name}" for name in sizes if f"network.{name}" in keys]
            common.take_whole_lokr(found, used, "lokr_full_rank, on by default, makes the second factor whole")
            return answered | set(used)
    elif kind not in ("lora", "dora"):
        found.missing("network.type", f"{kind} is neither a LoRA nor a LoKr; a LoRA is trained instead")
    if kind == "dora":
        found.take("network.type", "model.use_dora", True)
    found.values["model.lora_targets"] = (targets, "the layers that ai-toolkit adapts")
    for place, keys_of_it, value in (
        ("model.rank", ("network.rank", "network.linear"), 4),
        ("model.lora_alpha", ("network.linear_alpha", "network.alpha"), 1.0),
    ):
        key = next((key for key in keys_of_it if keys.get(key) is not None), None)
        if key is None:
            found.default(place, value)
        else:
            found.take(key, place, type(value)(keys[key]))
    return answered


def _take_preservation(keys: dict[str, Any], found: Imported, word: str | None, datasets: list[Any]) -> set[str]:
    """Take what holds the base's predictions: for the class, the empty prompt, or outside masks; returns the keys."""
    has_masks = any(isinstance(each, dict) and (each.get("mask_path") or each.get("alpha_mask")) for each in datasets)
    kinds = (
        ("class", "diff_output_preservation", 1.0, bool(word)),
        ("blank", "blank_prompt_preservation", 1.0, True),
        ("own", "inverted_mask_prior", 0.5, has_masks),
    )
    for kind, name, weight, is_possible in kinds:
        key = f"train.{name}"
        if found.is_full or not is_possible or not as_bool(keys.get(key) or False):
            continue
        found.take(key, "model.preserve", kind)
        if kind == "class":
            found.take(f"{key}_class", "model.class_word", str(keys.get(f"{key}_class") or ""))
        if keys.get(f"{key}_multiplier") is None:
            found.default("model.preserve_weight", weight)
        else:
            found.take(f"{key}_multiplier", "model.preserve_weight", float(keys[f"{key}_multiplier"]))
        return {key, f"{key}_class", f"{key}_multiplier"}
    return set()


def _take_training(keys: dict[str, Any], found: Imported) -> None:
    options = {
        key.removeprefix("train.optimizer_params."): value
        for key, value in keys.items()
        if key.startswith("train.optimizer_params.")
    }
    common.take_optimizer(found, "train.optimizer", keys.get("train.optimizer"), options, "adamw")
    common.take_schedule(found, "train.lr_scheduler", keys.get("train.lr_scheduler"), "constant")
    common.take_precision(found, "train.dtype", keys.get("train.dtype"), "fp32")
    common.take_checkpointing(found, "train.gradient_checkpointing", keys.get("train.gradient_checkpointing"), True)
    kind = keys.get("train.timestep_type")
    if kind is not None:
        sampling = {
            "sigmoid": "logit_normal",
            "linear": "uniform",
            "flux_shift": "logit_normal",
            "shift": "logit_normal",
        }
        remark = "" if kind in sampling else f"the nearest to {kind}"
        found.take("train.timestep_type", "model.timestep_sampling", sampling.get(str(kind), "logit_normal"), remark)
    loss = keys.get("train.loss_type")
    if loss is not None:
        name = {"mse": "l2", "mae": "smooth_l1", "pseudo_huber": "huber"}.get(str(loss))
        if name is None:
            found.missing("train.loss_type", f"{loss} is none of l2, huber and smooth_l1")
        else:
            found.take("train.loss_type", "model.loss_type", name)


def _take_datasets(datasets: list[Any], found: Imported) -> None:
    own = [each for each in datasets if isinstance(each, dict) and not each.get("is_reg")]
    classes = [each for each in datasets if isinstance(each, dict) and each.get("is_reg")]
    folders = [
        (str(each.get("folder_path") or each.get("dataset_path")), as_int(each.get("num_repeats") or 1)) for each in own
    ]
    common.take_folders(found, "datasets.folder_path", folders, "datasets.num_repeats")
    if classes:
        found.take("datasets.is_reg", "data.class_data_dir", str(classes[0].get("folder_path")))
    for each in own[:1]:
        ending = str(each.get("caption_ext") or "txt")
        found.take("datasets.caption_ext", "data.caption_extension", f".{ending.lstrip('.')}")
        sides = each.get("resolution") or 512
        sides = sides if isinstance(sides, list) else [sides]
        remark = f"the largest of {', '.join(map(str, sides))}: one size is trained" if len(sides) > 1 else ""
        common.take_side(found, "datasets.resolution", max(as_int(side) for side in sides), remark)
        if each.get("random_crop"):
            is_cached = any(as_bool(each.get(key) or False) for key in ("cache_latents", "cache_latents_to_disk"))
            common.take_random_crop(found, "datasets.random_crop", is_cached)
        rest = {f"datasets.{key}": value for key, value in each.items()}
        done = {
            f"datasets.{key}"
            for key in (
                "folder_path",
                "dataset_path",
                "caption_ext",
                "resolution",
                "is_reg",
                "num_repeats",
                "type",
                "random_crop",
            )
        }
        found.answer(rest, {f"datasets.{key}": rule for key, rule in DATASET.items()} | RULES, done)
