"""Parts that all trainers' files have: base model, optimizer, schedule, precision, quantization, folders, names."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from lightning_aigc.cli.import_config.imported import Imported, Missing, as_int, full_place
from lightning_aigc.errors import ConfigError, ModelError

LAYERS = Missing("lora_targets chooses layers by their kind")
PRECISIONS = {
    "bf16": "bf16-mixed",
    "bfloat16": "bf16-mixed",
    "bfloat_16": "bf16-mixed",
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "float_16": "16-mixed",
    "fp32": "32-true",
    "float32": "32-true",
    "float_32": "32-true",
    "no": "32-true",
    "float": "32-true",
    "tfloat_32": "32-true",
    "fp8": "bf16-mixed",
}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "cosine_with_hard_restarts": "cosine_with_restarts",
    "polynomial": "polynomial",
    "cosine_annealing": "cosine",
    "adafactor": "constant",
}
NEAREST_SCHEDULES = {
    "rex": "linear",
    "sine": "cosine",
    "inverse_sqrt": "polynomial",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "linear",
    "piecewise_constant": "constant",
    "step": "constant",
}
FAMILIES_BY_NAME = {
    "sd": "sd",
    "sd1": "sd",
    "sd15": "sd",
    "sd1x": "sd",
    "sd2": "sd",
    "sd2x": "sd",
    "v2": "sd",
    "stable_diffusion": "sd",
    "sdxl": "sdxl",
    "xl": "sdxl",
    "sd3": "sd3",
    "sd35": "sd3",
    "v3": "sd3",
    "flux": "flux",
    "flux1": "flux",
    "flux_kontext": "flux_kontext",
    "kontext": "flux_kontext",
    "flux2": "flux2",
    "flux2_klein": "flux2",
    "flux2_klein_4b": "flux2",
    "flux2_klein_9b": "flux2",
    "zimage": "z_image",
    "z_image": "z_image",
    "qwen_image": "qwen_image",
    "qwen": "qwen_image",
    "qwen_image_edit": "qwen_image_edit",
    "qwen_image_edit_plus": "qwen_image_edit_plus",
    "flux2_dev": "flux2_dev",
    "chroma": "chroma",
    "chroma1": "chroma",
    "krea2": "krea2",
    "krea_2": "krea2",
}
"""Families here by the names that other trainers give them, in small letters."""
FLAVOURS = {
    "flux": ("flux_kontext",),
    "flux2": ("flux2_dev",),
    "qwen_image": ("qwen_image_edit", "qwen_image_edit_plus"),
    "qwen_image_edit": ("qwen_image_edit_plus",),
}
"""Families that other trainers call flavours of one, told by the name of the base."""
EIGHT_BIT = "in 32 bits: a LoRA's states are small"
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""Name that diffusers gives a LoRA's file in a folder."""
WHOLE_RANK = 5000
"""Rank of a LoKr from which no layer's second factor is split; LyCORIS' users write 10000."""
LOKR_FACTOR = 8
"""Factor for LyCORIS' -1, which is another one in each layer."""


def take_base(
    found: Imported, key: str, name: Any, declared: str | None, adapter: tuple[str, str] | None = None
) -> None:
    """Take the base model, and its family from the declared name, else from the base's own.

    Args: adapter: key and file of a training adapter, with which a few-step base trains.

    Raises: ConfigError for a family that does not train here, or a few-step base without an adapter.
    """
    from lightning_aigc.cli.init.base import find_base
    from lightning_aigc.diffusion.families import FAMILIES
    from lightning_aigc.diffusion.pipeline.loading import check_not_distilled

    if found.other_base is not None:
        key, name, declared = "--base", found.other_base, None
    base = str(name) if name else None
    if declared is not None:
        found.family = FAMILIES_BY_NAME.get(re.sub(r"[.\-]", "", declared.casefold()).replace(" ", "_"))
        if found.family is None:
            raise ConfigError(
                f"{found.path} trains {declared}, which does not train here; families here are {', '.join(FAMILIES)}"
            )
        if base is not None and _guessed_family(base) in FLAVOURS.get(found.family, ()):
            found.family = _guessed_family(base)
    elif base is not None:
        try:
            of_base = find_base(base)
            base, found.family = of_base.denoiser_file or of_base.source, of_base.family.name
        except (ConfigError, ModelError):
            found.family = _guessed_family(base)
    else:
        found.family = "sd"
    known = FAMILIES[found.family]
    if adapter is not None:
        if found.other_base is None:
            found.take(adapter[0], "model.training_adapter", _adapter_file(found, adapter[1]))
        else:
            found.unneeded(adapter[0], "it belongs to the base of the file; set model.init_args.training_adapter")
    if base is None:
        found.default("model.pretrained_model_name_or_path", known.base, "no base model in the file")
        return
    try:
        check_not_distilled(known, base)
    except ModelError as error:
        if "model.training_adapter" not in found.values:
            raise ConfigError(f"{found.path}: {error}; for that, add --base {known.base}") from error
    if known.is_flow and base.endswith((".safetensors", ".sft")):
        found.take(key, "model.denoiser_file", base, known.title)
        found.default("model.pretrained_model_name_or_path", known.base, f"the other components that {base} needs")
    elif known.is_flow and base.endswith((".ckpt", ".gguf")):
        remark = f"instead of {base}: {known.title} trains from a diffusers folder, a hub id or a safetensors file"
        found.take(key, "model.pretrained_model_name_or_path", known.base, remark)
    else:
        found.take(key, "model.pretrained_model_name_or_path", base, known.title)


def _adapter_file(found: Imported, name: str) -> str:
    """A training adapter's file: a path, or owner/name/file of the hub, with the usual name of the file."""
    file = named_file(found, name)
    if file is not None:
        return str(file)
    is_folder = any((place / ADAPTER_FILE).is_file() for place in (Path(name).expanduser(), found.path.parent / name))
    is_repository = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.endswith(".safetensors")
    return f"{name.rstrip('/')}/{ADAPTER_FILE}" if is_folder or is_repository else name


def _guessed_family(base: str) -> str:
    """The family that a path's name tells, Stable Diffusion 1.5's where it tells none."""
    from lightning_aigc.cli.init.base import family_named
    from lightning_aigc.diffusion.families import FAMILIES

    family = family_named(base, FAMILIES)
    return "sd" if family is None else family.name


def take_optimizer(found: Imported, key: str, name: str | None, options: Mapping[str, Any], default: str) -> None:
    """Take an optimizer by its name, with those of its options that the class here has; None takes `default`.

    Raises: ConfigError for one that finds its own rate, where its package is missing.
    """
    class_path, remark = _optimizer_class(name or default, found.path)
    kept = _options_of(class_path, options)
    if class_path == "transformers.Adafactor":
        kept = {"scale_parameter": False, "relative_step": False, "warmup_init": False} | kept
    chosen = {"class_path": class_path, **({"init_args": kept} if kept else {})}
    if name is None:
        found.default("model.optimizer", chosen)
    else:
        text = ", ".join([class_path, *(f"{option} {value}" for option, value in kept.items())])
        found.take(key, "model.optimizer", chosen, remark, text)
    for option in sorted(options.keys() - kept.keys() - {"beta1", "beta2", "lr"}):
        if options[option] not in (None, False):
            found.missing(f"{key}.{option}", f"{class_path} has none")


def _optimizer_class(name: str, path: Path) -> tuple[str, str]:
    """Class path of an optimizer, and what differs."""
    short = re.sub(r"[^a-z0-9]", "", name.rpartition(".")[2].casefold() if "." in name else name.casefold())
    is_small = bool(re.search(r"8bit|4bit|fp8|paged", short))
    remark = EIGHT_BIT if is_small else ""
    plain = re.sub(r"8bit(ao)?|4bit(ao)?|fp8(ao)?|paged|bnb|optimi|bf16|torchao|quanto|adv$", "", short)
    if "schedulefree" in plain and "prodigy" not in plain:
        return _needs(
            "schedulefree.SGDScheduleFree" if "sgd" in plain else "schedulefree.AdamWScheduleFree", path
        ), remark
    if plain.startswith(("prodigy", "dadapt")):
        other = "" if plain == "prodigy" else f"instead of {name}: it finds its rate too"
        return _needs("prodigyopt.Prodigy", path), other
    if plain.startswith("adafactor"):
        return "transformers.Adafactor", remark
    if plain.startswith("lion"):
        return _needs("lion_pytorch.Lion", path), remark
    if plain == "came":
        return _needs("came_pytorch.CAME", path), remark
    known = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}
    known |= {"sgdnesterov": "SGD", "radam": "RAdam", "nadam": "NAdam", "adamax": "Adamax"}
    if plain in known:
        return f"torch.optim.{known[plain]}", remark
    return "torch.optim.AdamW", f"instead of {name}, which is not known here"


def _needs(class_path: str, path: Path) -> str:
    if importlib.util.find_spec(class_path.partition(".")[0]) is None:
        raise ConfigError(
            f"{path} trains with {class_path}, whose package is missing: its rates suit no other optimizer; pip install"
            " 'lightning_aigc[optimizers]', then give the same command"
        )
    return class_path


def _options_of(class_path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    module, _, name = class_path.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    kept = {key: value for key, value in options.items() if key in parameters and key != "lr" and value is not None}
    if "betas" in parameters and options.get("beta1") is not None and options.get("beta2") is not None:
        kept["betas"] = [options["beta1"], options["beta2"]]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}


def parsed_options(texts: Sequence[str]) -> dict[str, Any]:
    """Options written as `name=value`.

    >>> parsed_options(["weight_decay=0.01", "betas=.9,.99", "relative_step=False", "mode=x"])
    {'weight_decay': 0.01, 'betas': (0.9, 0.99), 'relative_step': False, 'mode': 'x'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = str(text).partition("=")
        try:
            found[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            found[name.strip()] = value.strip()
    return found


def take_schedule(found: Imported, key: str, name: Any, default: str) -> None:
    """Take a schedule by its name, or the nearest one; None takes `default`."""
    if name is None:
        found.default("model.lr_scheduler", default)
        return
    plain = str(name).casefold().replace("-", "_")
    if plain in SCHEDULES:
        found.take(key, "model.lr_scheduler", SCHEDULES[plain])
    else:
        found.take(key, "model.lr_scheduler", NEAREST_SCHEDULES.get(plain, "constant"), f"the nearest to {name}")


def take_precision(found: Imported, key: str, name: Any, default: str) -> None:
    """Take the precision of the training; None takes `default`. Raises: ConfigError for one that is not known."""
    if name is None:
        found.default("plugin.precision", PRECISIONS[default])
        return
    precision = PRECISIONS.get(str(name).casefold())
    if precision is None:
        raise ConfigError(f"{found.path}: {key} is {name}, which is not known here; use bf16, fp16 or fp32")
    found.take(key, "plugin.precision", precision)


def take_checkpointing(found: Imported, key: str, value: Any, default: bool) -> None:
    """Take gradient checkpointing as the memory level that recomputes the most; None takes `default`."""
    if value is None and default:
        found.default("plugin.memory", "max", f"not in the file: gradient checkpointing is on in {found.program}")
    elif value is not None and str(value).casefold() not in ("false", "off", "0"):
        found.take(key, "plugin.memory", "max")
    elif value is not None:
        found.unneeded(key, "trainer.plugins.init_args.memory chooses what is recomputed")


def quantization_of(name: str) -> str | None:
    """`base_quantization` for a kind of few bits: int8 for 8 of them, nf4 for fewer, None for whole weights."""
    text = name.casefold()
    if re.search(r"nf4|nfloat_4|int4|uint[2-7]|int[2-6]|fp4|gguf|\b[2-6]\s?bit", text):
        return "nf4"
    return "int8" if re.search(r"int8|int_8|w8a8|fp8|float_?8|float8|fp8|8\s?bit", text) else None


def take_warmup(found: Imported, key: str, value: Any) -> None:
    """Take a warm-up in steps, or as a share of the steps."""
    number = float(value)
    steps = found.value("model.max_train_steps")
    if number >= 1 or number == 0:
        found.take(key, "model.lr_warmup_steps", as_int(number))
    elif steps is not None:
        found.take(key, "model.lr_warmup_steps", round(number * steps), f"{number} of {steps} steps")
    else:
        leave_out_warmup(found, key, number)


def leave_out_warmup(found: Imported, key: str, share: float) -> None:
    """Say that a share of the steps needs their number, and begin without a warm-up."""
    found.values["model.lr_warmup_steps"] = (0, f"{key} is a share of steps whose number the file does not give")
    found.missing(
        key, f"{share:g} of the steps, whose number follows from the images; set model.init_args.lr_warmup_steps"
    )


def take_text_encoder_rate(found: Imported, key: str, rate: float, remark: str = "") -> None:
    """Take the rate of the text encoders, which at 0 are not trained."""
    if rate:
        found.take(key, "model.text_encoder_lr", rate, remark)
    else:
        found.take(key, "model.train_text_encoder", False, "a rate of 0 trains no text encoder")


def leave_out_text_encoders(found: Imported, key: str | None) -> None:
    """Say that a LoKr leaves the text encoders as they are; `key` is the one of the file that trains them."""
    reason = "a LoKr adapts the denoiser alone"
    if key is None:
        found.notes.append(f"{full_place('model.train_text_encoder')}: false: {reason}")
    else:
        found.missing(key, reason)


def take_side(found: Imported, key: str, side: float, remark: str = "", place: str = "data.resolution") -> None:
    """Take the side of the images in pixels, as the nearest multiple of what the model takes."""
    from lightning_aigc.diffusion.families import FAMILIES

    step = 16 if FAMILIES[found.family or "sd"].is_flow else 8
    rounded = max(step, round(side / step) * step)
    remarks = [remark] * bool(remark) + [f"the nearest multiple of {step} to {side:.0f}"] * (rounded != round(side))
    found.take(key, place, rounded, "; ".join(remarks))


def take_random_crop(found: Imported, key: str, is_cached: bool) -> None:
    """Take random crops; an image of a cache has one crop."""
    if is_cached:
        found.missing(
            key,
            "a cached image has one crop, here its middle; set data.init_args.center_crop and cache_latents to false",
        )
    else:
        found.take(key, "data.center_crop", False)


def take_lora_file(found: Imported, key: str, name: str) -> None:
    """Take a LoRA's file to begin with."""
    file = named_file(found, name)
    if file is None and (Path(name).expanduser() / ADAPTER_FILE).is_file():
        file = Path(name).expanduser() / ADAPTER_FILE
    remark = "ranks, scales and layers are that file's"
    missing = "there is no such file here: copy it, and write its path"
    found.take(key, "model.lora_from", str(file or name), remark if file else missing)


def take_lokr(found: Imported, key: str, factor: tuple[str, Any]) -> None:
    """Take the kind LoKr, with a factor that is the same for all layers."""
    found.take(key, "model.lora_type", "lokr")
    factor_key, value = factor
    number = as_int(value) if value is not None else -1
    if number > 1:
        found.take(factor_key, "model.lokr_factor", number)
    else:
        found.values["model.lokr_factor"] = (LOKR_FACTOR, f"{factor_key}: {number} is another factor in each layer")
        text = (
            f"{full_place('model.lokr_factor')}: {LOKR_FACTOR}: one factor of all layers, instead of each layer's own"
        )
        (found.notes if value is None else found.lines).append(text if value is None else f"{factor_key}: {text}")


def reason_of_whole(full_key: str, *, is_full: bool, rank_key: str, rank: int) -> str | None:
    """The reason for which a LoKr's second factor is whole in all layers; None where it may be split."""
    if not is_full and rank < WHOLE_RANK:
        return None
    return f"{full_key if is_full else f'a {rank_key} of {rank}'} makes the second factor whole"


def take_whole_lokr(found: Imported, keys: Sequence[str], reason: str) -> None:
    """Take a LoKr whose second factor is whole in all layers; `keys` are those of rank and alpha in the file."""
    found.values["model.rank"] = (10000, reason)
    found.values["model.lora_alpha"] = (None, "whole factors have scale 1")
    for key in keys:
        found.unneeded(key, f"model.init_args.rank: 10000, because {reason}")
    if not keys:
        found.notes.append(f"{full_place('model.rank')}: 10000: {reason}")


def take_folders(found: Imported, key: str, folders: Sequence[tuple[str, int]], repeats_key: str) -> None:
    """Take the folders of the images with their repeats: one folder, or the first of several."""
    paths = list(dict.fromkeys(path for path, _ in folders))
    if not paths:
        return
    if len(paths) == 1:
        found.take(key, "data.train_data_dir", paths[0])
        take_repeats(found, repeats_key, paths[0], folders[0][1])
        return
    remark = f"the first of {len(paths)}; put all into one folder, named {', '.join(_names_with_repeats(folders))}"
    found.take(key, "data.train_data_dir", paths[0], remark)
    if any(repeats != 1 for _, repeats in folders):
        found.unneeded(repeats_key, "the folders' names repeat them")


def _names_with_repeats(folders: Sequence[tuple[str, int]]) -> list[str]:
    """Names such as 10_zorp with which one folder holds all of these; none is there twice."""
    repeats = dict(reversed(folders))  # the first of a folder counts
    parts = {path: PureWindowsPath(path).parts for path, _ in folders}
    words = {path: _own_repeats(path)[1] for path in parts}
    for path, word in words.items():
        if list(words.values()).count(word) > 1:
            words[path] = "_".join(re.sub(r"[\\/:]", "", part) for part in parts[path][-2:])
    return [f"{repeats[path]}_{word}" for path, word in words.items()]


def _own_repeats(folder: str) -> tuple[int, str]:
    """Repeats that a folder's own name gives its images here, 1 for most, and the name without them."""
    from lightning_aigc.data.index.sources import repeats_of

    name = PureWindowsPath(folder).name  # reads / and \\
    repeats, word = repeats_of(Path(name), "image.png")
    return repeats, word or name


def take_repeats(found: Imported, key: str, folder: str, repeats: int) -> None:
    """Take the repeats of a folder's images, which a name such as 10_zorp multiplies here and not there."""
    own, word = _own_repeats(folder)
    if own == 1:
        if repeats != 1:
            found.take(key, "data.num_repeats", repeats)
    elif repeats % own == 0:
        found.take(key, "data.num_repeats", repeats // own, f"times the {own} of the folder's name")
    else:
        renamed = word if repeats == 1 else f"{repeats}_{word}"
        found.take(
            key, "data.num_repeats", 1, f"and {own}_{word} repeats {own} times here instead of {repeats}: rename it to"
            f" {renamed}, and data.init_args.train_data_dir with it",
        )  # fmt: skip


def named_file(found: Imported, name: str) -> Path | None:
    """Return the file that a config names: as it is written, from the config's folder, or by its last part there."""
    folder = found.path.parent
    places = [Path(name).expanduser(), folder / name, folder / PureWindowsPath(name).name]
    return next((place for place in places if place.is_file()), None)


def read_json(file: Path) -> Any:
    """Return what a JSON file holds. Raises: ConfigError with its first mistake."""
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}; correct it") from error


def take_name(found: Imported, key: str, name: str, folder: str | None) -> None:
    """Take the name of the result, and the run's folder below the other program's."""
    last = PureWindowsPath(name).name  # reads / and \\
    plain = re.sub(r"(\.(safetensors|ckpt|pt|pth|bin))+$", "", last, flags=re.IGNORECASE)
    plain = re.sub(r"[^\w.-]+", "_", plain).strip("._ ") or "imported"
    found.take(key, "model.output_name", plain)
    root = folder.rstrip("/\\") if folder else "runs"
    found.values["trainer.default_root_dir"] = (f"{root}/{plain}", "the result's name in the other program's folder")


def take_prompts(
    found: Imported, key: str, prompts: Sequence[str], word: str | None, options: str | None = None
) -> None:
    """Take the sample prompts, with `[trigger]` replaced, up to the mark where their options begin."""
    whole = [str(prompt).replace("[trigger]", word or "").strip() for prompt in prompts]
    texts = [text.partition(options)[0].strip() for text in whole] if options else whole
    remark = "without the options after --" if texts != whole else ""
    found.take(key, "model.validation_prompts", list(dict.fromkeys(text for text in texts if text)), remark)
