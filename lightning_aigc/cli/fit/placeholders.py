"""Find the YOUR_... words of the shipped configs that nobody has replaced yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_aigc.errors import ConfigError

TRIGGER, NAME = "YOUR_TRIGGER_WORD", "YOUR_LORA_NAME"
_PLACEHOLDER = re.compile(rf"\b({TRIGGER}|{NAME})\b")


def refuse_placeholders(blocks: Mapping[str, Any]) -> None:
    """Raise ConfigError that names every key of the config in which an example's word still stands."""
    found = {path: word for key, block in blocks.items() for path, word in _placeholders(block, key)}
    if found:
        words = " and ".join(dict.fromkeys(found.values()))
        raise ConfigError(
            f"{', '.join(found)} still {'says' if len(found) == 1 else 'say'} {words}, the example's: set your own"
            " (a rare trigger word or null, prompts that show it, the name of the file), or let"
            " `lightning init photos/ -o my.yaml` write a config for your images"
        )


def _placeholders(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _placeholders(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _placeholders(inner, path)
    elif isinstance(value, str) and (match := _PLACEHOLDER.search(value)):
        yield path, match[1]
