"""Find misspelt empty blocks in a YAML file, such as `modle: {}`, which jsonargparse drops unchecked."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from lightning_aigc.cli.fit.config_errors import known_classes, option_names, unknown_key

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")


def unknown_empty_blocks(config: Any, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a sentence for each empty block with an unknown name, with the closest known name."""
    commands = getattr(getattr(parser, "_subcommands_action", None), "choices", {})
    for key, value in config.items() if isinstance(config, dict) else ():
        if key in commands:
            yield from unknown_empty_blocks(value, commands[key])
        elif _is_empty(value) and key not in option_names(parser, ""):
            yield unknown_key(key, None, "", parser)
        else:
            yield from _unknown_in_block(value, key, parser)


def _unknown_in_block(block: Any, where: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    if isinstance(block, list):
        for at, item in enumerate(block):
            yield from _unknown_in_block(item, f"{where}[{at}]", parser)
    if not isinstance(block, dict):
        return
    if "class_path" in block:
        path = _full_path(str(block["class_path"]))
        for key, value in block.items():
            near = get_close_matches(str(key), CLASS_KEYS, n=1)
            if key not in CLASS_KEYS and (near or _is_empty(value)):
                yield f"{where} has no key {key!r}; did you mean {near[0] if near else ' or '.join(CLASS_KEYS)}?"
        arguments = block.get("init_args")
        known = _arguments_of(path)
        for key, value in arguments.items() if isinstance(arguments, dict) else ():
            if known is not None and _is_empty(value) and key not in known:
                yield f"{where}.init_args: {unknown_key(key, path, f'{where}.init_args', parser)}"
            else:
                yield from _unknown_in_block(value, f"{where}.init_args.{key}", parser)
        return
    # Empty if another file or a default names the class: then nothing can be checked here.
    names = {name.partition(".")[0] for name in option_names(parser, where)} - {"help", *CLASS_KEYS}
    for key, value in block.items() if names else ():
        if _is_empty(value) and key not in names:
            yield unknown_key(key, None, where, parser)
        else:
            yield from _unknown_in_block(value, f"{where}.{key}", parser)


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_empty, value.values()))


def _full_path(name: str) -> str:
    found = None if "." in name else known_classes().get(name)
    return name if found is None else f"{found.__module__}.{found.__qualname__}"


def _arguments_of(class_path: str) -> list[str] | None:
    """The argument names of a class; None if unknown, as with `**kwargs`."""
    module, _, name = class_path.rpartition(".")
    try:
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    except Exception:  # a user's module may raise anything; jsonargparse reports it
        return None
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if is_open else list(parameters)
