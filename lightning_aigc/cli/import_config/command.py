"""`lightning import-config`: recognise another trainer's config, and write ours with its keys as reasons."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_aigc.errors import ConfigError, UserError

if TYPE_CHECKING:
    from lightning_aigc.cli.import_config.imported import Imported

PROGRAMS = {
    "ai_toolkit": "ai-toolkit",
    "kohya": "sd-scripts",
    "one_trainer": "OneTrainer",
    "simple_tuner": "SimpleTuner",
}
"""Modules of this folder, and the programs whose files they read."""
OF_KOHYA = (
    "network_module",
    "network_dim",
    "network_alpha",
    "pretrained_model_name_or_path",
    "train_data_dir",
    "output_name",
    "optimizer_type",
    "mixed_precision",
    "max_train_steps",
    "max_train_epochs",
    "dataset_config",
    "enable_bucket",
    "min_snr_gamma",
    "caption_extension",
    "save_every_n_epochs",
    "unet_lr",
)
OF_SIMPLE_TUNER = ("model_family", "data_backend_config", "checkpoint_step_interval", "validation_step_interval")
LEAST_KEYS = 2
BASELINE = {
    "model.snr_gamma": None,
    "model.noise_offset": 0.0,
    "model.use_ema": False,
    "model.lr_scheduler": "constant",
    "model.lr_warmup_steps": 0,
    "model.base_quantization": None,
    "model.lora_alpha": None,
    "trainer.accumulate_grad_batches": 1,
    "data.caption_dropout_rate": 0.0,
    "data.random_flip": False,
    "data.trigger_word": None,
}
"""Values of keys that the file does not have, where the shipped config has others."""
OF_LORA = (
    "rank",
    "lora_alpha",
    "lora_targets",
    "lora_type",
    "lokr_factor",
    "lora_from",
    "training_adapter",
    "preserve",
    "class_word",
    "preserve_weight",
)
NOT_OF_LOKR = ("lora_dropout", "use_dora", "use_rslora", "train_text_encoder", "text_encoder_lr")
"""Options of a plain LoRA."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = (
        "Write a config for `lightning fit` from one of ai-toolkit (YAML), sd-scripts (TOML, and its dataset TOML),"
        " OneTrainer (JSON) or SimpleTuner (JSON), and say in a line what each key became."
    )
    parser.add_argument("file", type=Path, help="the other program's config")
    parser.add_argument("-o", "--output", type=Path, help="the YAML to write (default: print it)")
    parser.add_argument("--base", help="another base model than the file names: a hub id, a folder or a checkpoint")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def run(args: argparse.Namespace) -> int:
    """Write or print the YAML, and the lines to stderr; returns the exit status.

    Raises: ConfigError for a file that cannot be taken.
    """
    if args.output is not None and args.output.exists() and not args.force:
        raise ConfigError(f"{args.output} exists already; name another with -o, or add --force to overwrite it")
    given = read_file(args.file)
    program = recognised(given)
    if program is None:
        raise ConfigError(f"{args.file} {_what_else(given)}")

    from lightning_aigc.data.index.filenames import print_anywhere, printable
    from lightning_aigc.secrets import redact_text

    found = import_given(given, args.file, program, args.base)
    text = as_yaml(found)
    for line in (*found.lines, *found.notes):
        print(printable(redact_text(line)), file=sys.stderr)
    if args.output is None:
        print_anywhere(text)
        return 0

    from lightning_aigc.atomic_file import write_text

    try:
        write_text(args.output, text)
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror or error}; name another with -o") from error
    print(f"wrote {args.output}; next: lightning fit -c {args.output} --dry_run")
    return 0


def read_file(path: Path) -> Any:
    """The content of a YAML, TOML or JSON file. Raises: ConfigError for a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{path} cannot be read ({reason}); give the other program's config file") from error
    try:
        if path.suffix.lower() == ".toml":
            return tomllib.loads(text)
        if path.suffix.lower() == ".json":
            return json.loads(text)
        import yaml

        return yaml.safe_load(text)
    except Exception as error:  # yaml's errors have no common base that is imported here
        kind = path.suffix.lstrip(".").upper() or "YAML"
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"{path} is no {kind}: {first}; correct it, or give another file") from error


def recognised(given: Any) -> str | None:
    """The module of the program whose config this is, None for none of them."""
    if not isinstance(given, dict):
        return None
    keys = {str(key).removeprefix("--") for key in given}
    inner = {str(key) for value in given.values() if isinstance(value, dict) for key in value}
    if "job" in keys and isinstance(given.get("config"), dict):
        return "ai_toolkit"
    if "training_method" in keys or ("base_model_name" in keys and "model_type" in keys):
        return "one_trainer"
    if len(keys & set(OF_SIMPLE_TUNER)) >= 1 and keys & {"model_type", "model_family", "pretrained_model_name_or_path"}:
        return "simple_tuner"
    datasets = given.get("datasets")
    if isinstance(datasets, list) and any(isinstance(each, dict) and "subsets" in each for each in datasets):
        return "kohya"
    if _is_ours(given):
        return None
    return "kohya" if len((keys | inner) & set(OF_KOHYA)) >= LEAST_KEYS else None


def _is_ours(given: dict[str, Any]) -> bool:
    """Whether a file has our blocks; sd-scripts' files may have a section [model] too."""
    blocks = [given.get(name) for name in ("model", "data")]
    return "trainer" in given or any(
        isinstance(each, dict) and {"class_path", "init_args"} & each.keys() for each in blocks
    )


def _what_else(given: Any) -> str:
    """The end of a sentence on a file that is none of the programs'."""
    if isinstance(given, dict) and _is_ours(given):
        return "is a config of lightning fit already; give it to lightning fit -c"
    if isinstance(given, dict) and {"zero_optimization", "deepspeed_config", "compute_environment"} & given.keys():
        return "is DeepSpeed's or accelerate's; give it to lightning import-deepspeed"
    return f"is no config of {', '.join(PROGRAMS.values())}; give the file that the training was started with"


def foreign_program(path: Path) -> str | None:
    """The program whose config a file is, for an error of `lightning fit -c`; None for our own or an unreadable one."""
    try:
        module = recognised(read_file(path))
    except ConfigError:
        return None
    return None if module is None else PROGRAMS[module]


def import_given(given: dict[str, Any], path: Path, module: str, base: str | None = None) -> Imported:
    """Take all keys of a file's content. Raises: ConfigError for what does not train here."""
    import importlib

    from lightning_aigc.cli.import_config.imported import Imported

    found = Imported(PROGRAMS[module], path, other_base=base)
    try:
        importlib.import_module(f"lightning_aigc.cli.import_config.{module}").read(given, found)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise ConfigError(f"{path} has a value of another kind than its key takes: {error}; correct it") from error
    found.close()
    return found


def as_yaml(found: Imported) -> str:
    """The shipped config of the base's family with the values that were taken, each with its key as a comment."""
    from lightning_aigc.cli.import_config.imported import full_place, shown
    from lightning_aigc.cli.init.config import Choice, read_shipped, render
    from lightning_aigc.diffusion.families import FAMILIES

    assert found.family is not None
    family = FAMILIES[found.family]
    _take_baseline(found)
    _leave_out_what_the_family_lacks(found)
    full = "sd3_full.yaml" if family.is_flow else "sd_full.yaml"
    template = full if found.is_full else family.shipped_config
    config = read_shipped(template)
    callbacks = config["trainer"]["callbacks"]
    config["trainer"]["callbacks"] = [each for each in callbacks if each["class_path"] != "AdaptiveLR"]
    _set_dependent_values(found)
    guard = "trainer.callbacks.CLIPConvergenceGuard.stop"
    choices = [Choice(full_place(place), value, str(reason)) for place, (value, reason) in found.values.items()]
    choices.append(Choice(guard, False, "the other program does not stop early; true stops at the best images"))
    head = [
        f"Written by `lightning import-config` from {found.path.name} of {found.program}, on {template}.",
        "A comment names the other program's key. AdaptiveLR, which searches a rate, is left out: the file's stays.",
        *(f"Without a counterpart: {line.partition(':')[0]}" for line in found.lines if "has no counterpart" in line),
    ]
    return render(config, choices, "\n".join(shown(line) if len(line) > 150 else line for line in head))


def _take_baseline(found: Imported) -> None:
    for place, value in BASELINE.items():
        found.values.setdefault(place, (value, "not in the file"))


def _leave_out_what_the_family_lacks(found: Imported) -> None:
    """Drop options of the other objective, and of U-Nets for a transformer, and say so."""
    from lightning_aigc.diffusion.families import FAMILIES
    from lightning_aigc.diffusion.objectives.settings import DDPM_ONLY, FLOW_ONLY

    family = FAMILIES[str(found.family)]
    lacking = dict.fromkeys(
        DDPM_ONLY if family.is_flow else FLOW_ONLY,
        f"{family.title} trains by {'flow matching' if family.is_flow else 'DDPM'}",
    )
    if not family.trains_text_encoders:
        for name in ("train_text_encoder", "text_encoder_lr", "use_dora"):
            lacking[name] = f"it is for U-Nets, and this is {family.title}"
    if found.value("model.lora_type") == "lokr":
        lacking |= dict.fromkeys(NOT_OF_LOKR, "it is an option of LoRA, and this is a LoKr")
    if found.value("model.lora_from") is not None:
        lacking["use_dora"] = "a file to begin with is a plain LoRA or a LoKr"
    if family.needs_sources:
        lacking |= dict.fromkeys(("preserve", "class_word", "preserve_weight"), "it is for images from text alone")
    if found.is_full:
        lacking |= dict.fromkeys((*OF_LORA, *NOT_OF_LOKR, "base_quantization"), "all weights are trained")
    for name, reason in lacking.items():
        place = f"model.{name}"
        if place not in found.values:
            continue
        value, key = found.values.pop(place)
        count = len(found.lines)
        found.lines = [line for line in found.lines if not line.startswith(f"{key}: model.init_args.{name}:")]
        found.notes = [line for line in found.notes if not line.startswith(f"model.init_args.{name}:")]
        if value not in (None, False, 0.0, "auto", 1.0, "uniform") and not key.startswith("not in the file"):
            found.missing(key, reason)
        elif len(found.lines) < count:
            found.unneeded(key, reason)
    targets, reason = found.values.get("model.lora_targets", (None, ""))
    if targets is not None and family.is_flow and "convolutions" in targets:
        found.values["model.lora_targets"] = ([each for each in targets if each != "convolutions"], reason)


def _set_dependent_values(found: Imported) -> None:
    """Set what other values decide: prompts, the end of the run, caches."""
    from lightning_aigc.diffusion.families import FAMILIES

    word = found.value("data.trigger_word")
    if not found.value("model.validation_prompts"):
        prompt = f"a photo of {word}" if word else "a photo"
        found.default("model.validation_prompts", [prompt], "no sample prompts in the file; name what your images show")
    if found.value("trainer.max_epochs") is not None and "model.max_train_steps" not in found.values:
        found.values["model.max_train_steps"] = (None, "trainer.max_epochs ends the run")
    if found.value("data.shuffle_caption") or found.value("model.train_text_encoder"):
        reason = "captions are shuffled" if found.value("data.shuffle_caption") else "the text encoders are trained"
        found.values["data.cache_text_embeddings"] = (False, reason)
    if found.value("data.center_crop") is False:
        found.values["data.cache_latents"] = (False, "crops are random")
        if FAMILIES[str(found.family)].needs_sources:
            found.values["data.cache_text_embeddings"] = (False, "the text encoder sees the random crops")
    if found.value("model.preserve") == "blank" and found.value("data.caption_dropout_rate"):
        found.values["data.caption_dropout_rate"] = (0.0, "preserve: blank holds the empty caption")
        found.notes.append("data.init_args.caption_dropout_rate: 0: preserve: blank holds the empty caption")
    if found.value("model.snr_gamma") is not None and found.value("model.debiased_estimation"):
        found.values["model.snr_gamma"] = (None, "debiased_estimation takes precedence")
    resolution = found.value("data.resolution")
    if resolution is not None and "data.max_bucket_reso" not in found.values:
        found.values["data.max_bucket_reso"] = (max(1024, resolution * 3 // 2 // 64 * 64), "1.5 times the resolution")
