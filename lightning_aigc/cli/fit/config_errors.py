"""Reduce jsonargparse's error report, which lists every type it tried, to one sentence about the actual mistake."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from lightning_aigc.errors import ConfigError, UserError

# Argument names of other trainers, and their names here.
OTHER_DIALECTS = {
    "network_dim": "rank",
    "linear": "rank",
    "lora_rank": "rank",
    "network_alpha": "lora_alpha",
    "linear_alpha": "lora_alpha",
    "unet_lr": "learning_rate",
    "lr": "learning_rate",
    "min_snr_gamma": "snr_gamma",
    "optimizer_type": "optimizer",
    "base_model_name": "pretrained_model_name_or_path",
    "name_or_path": "pretrained_model_name_or_path",
    "mixed_precision": "trainer.precision",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "output_dir": "trainer.default_root_dir",
    "logging_dir": "trainer.default_root_dir",
    "report_to": "trainer.logger",
    "sample_every_n_steps": "validation_steps",
    "save_every_n_steps": "checkpointing_steps",
    "v_parameterization": "prediction_type: v_prediction",
    "caption_ext": "caption_extension",
    "batch_size": "train_batch_size",
    "resume_from_checkpoint": "--ckpt_path",
    "instance_prompt": "trigger_word",
    "instance_data_dir": "train_data_dir",
    "max_steps": "max_train_steps",
    "folder_path": "train_data_dir",
    "cache_latents_to_disk": "cache_latents",
}

# Classes whose keys are looked up when a key stands in the wrong block.
BLOCKS = {
    "model": "lightning_aigc.diffusion.DiffusionLoRA",
    "data": "lightning_aigc.data.ImageCaptionData",
}

NEEDS = "give one with -c my.yaml, which `lightning init photos/ -o my.yaml` writes"
_KEY = re.compile(r'^Parser key "(?P<key>[^"]+)":?(?P<rest>.*)$')
_CLASS = re.compile(r"^Problem with given class_path '(?P<cls>[^']+)':")
_UNKNOWN_OPTION = re.compile(
    r"^(?:Option|Key) '(?P<name>[^']+)' is not (?:accepted|expected)"
    r"|^(?:Group|Subcommand) '(?P<group>[^']+)' does not accept option '(?P<option>[^']+)'"
)
_UNRECOGNISED = re.compile(r"^unrecognized arguments: (?P<name>--[^\s=]+)")
_NO_CLASS = re.compile(
    r"^Expected a dot import path string: (?P<name>.+)$"
    r"|No module named '(?P<module>[^']+)'"
    r"|has no attribute '(?P<attribute>[^']+)'"
)
_NO_SUBCLASS = re.compile(r"^Import path (?P<name>\S+) does not correspond to a subclass of ")
_CALLABLE = re.compile(
    r"^Type typing\.Callable.*? expects a function or a callable class: (?P<reason>.*?)"
    r"(?:\. Got value: Namespace\(class_path='(?P<cls>[^']+)'.*)?$"
)
_CALLABLE_KEY = re.compile(r'^Type typing\.Callable.*? callable class: Parser key "(?P<key>[^"]+)":$')
_NAMESPACE = ". Got value: Namespace("
_WRONG_TYPE = re.compile(r"^Expected an? (?P<type>.+?)(?:\. Got value: (?P<value>.*))?$")
_PYTHON_ERROR = re.compile(r"unsupported operand|not supported between|NoneType|object is not|has no attribute")
_OTHER_KIND = " is a class of another kind than the one wanted here"
_NOISE = (
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value",
    "Not a valid subclass",
    "Subclass types expect",
    "a class path",
    "a dict ",
    "Expected a path but",
)


REQUIRED = "arguments are required: "


@dataclass(frozen=True)
class Leaf:
    """One innermost error: its path in the config, the class there, and `rank`, where 0 is the most specific."""

    rank: int
    path: tuple[str, ...]
    class_path: str | None
    text: str


def readable_config_error(message: str, parser: argparse.ArgumentParser) -> str:
    """One sentence with the key, the value, what is wanted, and the closest valid name."""
    if message.startswith("Unexpected config"):
        content = message.partition(":")[2].strip()[:80]
        return f"the YAML must hold blocks such as `model:` and `data:`, got {content or 'an empty file'}"
    if message.startswith("Problems parsing config"):
        return "the YAML cannot be read: " + " ".join(line.strip() for line in message.partition(":")[2].splitlines())
    first, _, missing = message.partition(REQUIRED)
    if missing and "\n" not in first:  # of the whole config, and not of a class in it
        blocks = ", ".join(each.rpartition(".")[2] for each in missing.split(", "))
        return f"the config is missing, or lacks {blocks}; {NEEDS}"
    leaves = sorted(_leaves(message, parser), key=lambda leaf: (leaf.rank, -len(leaf.path)))  # innermost first
    # A class that another alternative of the union accepts is not the mistake; the value in it is.
    accepted = {leaf.class_path.rpartition(".")[2] for leaf in leaves if leaf.class_path}
    leaves = [leaf for leaf in leaves if leaf.text.removesuffix(_OTHER_KIND) not in accepted]
    if not leaves:
        return message.strip()
    leaf = leaves[0]
    where = ".".join(leaf.path)
    text = leaf.text
    if leaf.rank == 2:  # every alternative of a union refused the type: list them all, and the value once
        alike = [each.text.partition("\0") for each in leaves if each.rank == 2 and each.path == leaf.path]
        wanted = " or ".join(dict.fromkeys(kind for kind, _, _ in alike if kind))
        given = next((value for _, _, value in alike if value), None) or _given_value(message)
        text = f"wanted {wanted}" + (f", got {given}" if given else "")
        near = get_close_matches(str(given).strip("'\""), re.findall(r"'([^']+)'", wanted), n=1)
        text += f"; did you mean {near[0]}?" if near else ""
    elif _PYTHON_ERROR.search(text):  # the value raised inside a parser
        given = _given_value(message)
        text = "this value cannot be read" + (f": {given}" if given else "")
    return f"{where}: {text}" if where else text


def user_error_within(error: BaseException) -> UserError:
    """The UserError inside an error from building the config's classes; jsonargparse wraps what `__init__` raises."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return cause
        cause, innermost = cause.__cause__ or cause.__context__, cause
    # In the errors of a union only the class's own message is plain text; jsonargparse keeps no exception object.
    for line in str(error).splitlines():
        text = line.strip().removeprefix("- ")
        if line.lstrip().startswith("- ") and not text.startswith((*_NOISE, "Expected", "Import path")):
            return ConfigError(text)
    return ConfigError(first_sentence(str(innermost)) or type(innermost).__name__)


def refuse_nulls(block: Any, key: str) -> None:
    """Raise ConfigError for a null where the class accepts none; jsonargparse accepts it for any type."""
    class_path, given = getattr(block, "class_path", None), getattr(block, "init_args", None)
    if not isinstance(class_path, str) or given is None:
        return
    module, _, name = class_path.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    for argument, value in vars(given).items():
        parameter = parameters.get(argument)
        if value is None and parameter is not None and parameter.default is not None:
            annotation = str(parameter.annotation)
            if not any(word in annotation for word in ("None", "Optional", "Any")):
                raise ConfigError(f"{key}.init_args.{argument} must not be null; leave it out for its default")


def first_sentence(text: str) -> str:
    """The first line of an error, without Lightning's pointers to its documentation."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line.partition(" Find a complete list")[0]


def _given_value(message: str) -> str | None:
    found = re.search(r"Given value: (.{1,80})", message)
    nested = re.search(r"NestedArg\(key='[^']*', val='?([^')]*)'?\)", message)
    return nested.group(1) if nested else found.group(1) if found else None


def _leaves(message: str, parser: argparse.ArgumentParser) -> Iterable[Leaf]:
    stack: list[tuple[int, str, str | None]] = []  # indent, path element, class path
    for raw in message.splitlines():
        body = raw.strip()
        indent = len(raw) - len(raw.lstrip())
        if body.startswith("- "):
            body, indent = body[2:], indent + 1
        if not body:
            continue
        while stack and stack[-1][0] >= indent:
            stack.pop()
        if body.startswith(_NOISE):
            continue
        if found := _CLASS.match(body):
            stack.append((indent, "init_args", found["cls"]))
            continue
        if found := _CALLABLE_KEY.match(body):  # of an optimizer or a schedule; the next line has the reason
            stack += [(indent, "init_args", None), (indent, found["key"], None)]
            continue
        if found := _KEY.match(body):
            stack.append((indent, found["key"], None))
            body = found["rest"].strip()
            if not body:
                continue
        path = tuple(element for _, element, _ in stack)
        class_path = next((cls for _, _, cls in reversed(stack) if cls), None)
        yield _describe(body, path, class_path, parser)


def _describe(body: str, path: tuple[str, ...], class_path: str | None, parser: argparse.ArgumentParser) -> Leaf:
    if found := _CALLABLE.match(body):  # an optimizer or a schedule
        return _describe(found["reason"], path, found["cls"] or class_path, parser)
    if class_path and (missing := body.partition(REQUIRED)[2]):
        of = f" of {class_path.rpartition('.')[2]}" if path[-1:] == ("init_args",) else ""
        return Leaf(0, path, class_path, f"{missing}{of} is missing; add it")
    if found := _UNKNOWN_OPTION.match(body):
        name, group = found["name"] or found["option"], found["group"]
        if group and body.startswith("Group"):
            path = (*path, group)
        return Leaf(0, path, class_path, unknown_key(name, class_path, ".".join(path), parser))
    if found := _UNRECOGNISED.match(body):
        name = found["name"].lstrip("-")
        return Leaf(0, (), None, unknown_key(name, None, "", parser))
    if found := _NO_CLASS.search(body):
        name = found["name"] or found["module"] or found["attribute"]
        near = get_close_matches(name.split(".")[-1], sorted(known_classes()), n=1)
        if near == [name]:
            return Leaf(1, path, class_path, f"{name}{_OTHER_KIND}")
        return Leaf(1, path, class_path, f"there is no class {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    if found := _NO_SUBCLASS.match(body):
        return Leaf(1, path, class_path, f"{found['name'].rpartition('.')[2]}{_OTHER_KIND}")
    if found := _WRONG_TYPE.match(body.partition(_NAMESPACE)[0]):
        wanted = _type_name(found["type"])
        rank = 3 if wanted == "null" else 2
        return Leaf(rank, path, class_path, f"{wanted}\0{found['value'] or ''}")
    return Leaf(1 if path else 4, path, class_path, body)


def unknown_key(name: str, class_path: str | None, where: str, parser: argparse.ArgumentParser) -> str:
    """The sentence that the class, or the block `where`, has no such key, with the closest valid key."""
    last = name.split(".")[-1]
    owner = class_path.rpartition(".")[2] if class_path else where or "the config"
    known = _init_args(class_path) if class_path else option_names(parser, where)
    if owner in ("LightningModule", "LightningDataModule"):  # the base class, where no config names one
        return f"the config is missing, or its block has no class_path, so {name!r} belongs to no class; {NEEDS}"
    if last in OTHER_DIALECTS and (OTHER_DIALECTS[last] in known or not _looks_local(OTHER_DIALECTS[last])):
        return f"{owner} has no key {name!r}; it is called {OTHER_DIALECTS[last]} here"
    for block, owner_class in BLOCKS.items():
        if class_path is not None and _room(class_path) != _room(owner_class) and last in _init_args(owner_class):
            return f"{owner} has no key {name!r}; it is {block}.init_args.{last}"
    siblings = [sibling for sibling in _siblings(class_path) if last in _init_args(sibling)]
    if siblings:
        have = "has" if len(siblings) == 1 else "have"
        names = " and ".join(sibling.rpartition(".")[2] for sibling in siblings)
        return f"{owner} has no key {name!r}, which {names} {have}; leave it out, or train with that class"
    first, dot, _ = name.partition(".")
    if not class_path and dot and first not in known:
        name = first  # `modle.init_args.rank`: the block's name is wrong, not the key's
    pool = known if class_path else [*known, *(k.rpartition(".")[2] for k in known)]
    near = get_close_matches(name, pool, n=1, cutoff=0.5) or get_close_matches(last, pool, n=1, cutoff=0.5)
    if near:
        return f"{owner} has no key {name!r}; did you mean {near[0]}?"
    if last in OTHER_DIALECTS:
        return f"{owner} has no key {name!r}; it is called {OTHER_DIALECTS[last]} here"
    return f"{owner} has no key {name!r}; it has {', '.join(sorted(known)[:40])}"


def _looks_local(name: str) -> bool:
    return "." not in name and not name.startswith("-")


def _init_args(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
        return [p for p in inspect.signature(cls).parameters if p not in ("self", "args", "kwargs")]
    except (ImportError, AttributeError, ValueError, TypeError):
        return []


def _room(class_path: str) -> str:
    """The package of this project that a class is in, such as lightning_aigc.diffusion."""
    return ".".join(class_path.split(".")[:2])


def _siblings(class_path: str | None) -> list[str]:
    """The public classes of the same room and Lightning base, without second names; empty for other projects."""
    if class_path is None or not class_path.startswith("lightning_aigc."):
        return []
    room = importlib.import_module(_room(class_path))
    own = getattr(room, class_path.rpartition(".")[2], None)
    bases = [base for base in getattr(own, "__mro__", ()) if base.__module__.startswith("lightning.")]
    public = {name: getattr(room, name) for name in getattr(room, "__all__", ())}
    return [
        f"{room.__name__}.{name}"
        for name, cls in public.items()
        if inspect.isclass(cls) and bases and issubclass(cls, bases[0]) and "__init__" in vars(cls)
    ]


def option_names(parser: argparse.ArgumentParser, group: str) -> list[str]:
    """Dotted option names of a parser and its sub-parsers; with `group`, those below it."""
    names: set[str] = set()
    parsers = [parser, *getattr(parser, "_subcommand_parsers", {}).values()]
    for action in parser._actions:
        choices = getattr(action, "choices", None)
        if isinstance(choices, dict):
            parsers += [p for p in choices.values() if isinstance(p, argparse.ArgumentParser)]
    for each in parsers:
        names |= {a.dest for a in each._actions if a.dest not in ("help", "==SUPPRESS==")}
    if group:
        return [n.removeprefix(f"{group}.") for n in names if n.startswith(f"{group}.")]
    return [*names, *{n.split(".")[0] for n in names}]


def known_classes() -> dict[str, type]:
    """All classes that YAML can name without a path, by name."""
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightning_aigc._lightning import Callback, LightningDataModule, LightningModule, Logger, Precision

    found: dict[str, type] = {}
    queue: list[Any] = [Callback, LightningDataModule, LightningModule, Logger, Optimizer, LRScheduler, Precision]
    while queue:
        for cls in queue.pop().__subclasses__():
            if cls.__name__ not in found and not cls.__name__.startswith("_"):
                found[cls.__name__] = cls
                queue.append(cls)
    return found


def _type_name(text: str) -> str:
    plain = text.removeprefix("<class '").removesuffix("'>")
    plain = plain.replace("typing.Literal", "one of ").replace("collections.abc.", "").replace("typing.", "")
    if plain.startswith(("Sequence", "List", "list", "tuple")):
        return "a list"
    words = {"NoneType": "null", "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
    return words.get(plain, plain)
