"""JSON like DeepSpeed's: comments, commas before a closing bracket, and switches and numbers as text."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/|,(?=(?:\s|//[^\n]*|#[^\n]*|/\*.*?\*/)*[}\]])', re.DOTALL
)

_WORDS = {"true": True, "false": False, "none": None, "null": None, "": None, "auto": "auto"}


def read_json(text: str) -> Any:
    """Parse a text.

    Raises: ValueError for a text that is not JSON, and for a key that stands twice in one object, like DeepSpeed.

    >>> read_json('{"stage": 3, # sharded\\n "path": "a//b",}')
    {'stage': 3, 'path': 'a//b'}
    """
    plain = _TOKEN.sub(lambda found: found[0] if found[0].startswith('"') else " ", text)
    return json.loads(plain, object_pairs_hook=_once, parse_constant=_refuse_constant)


def plain_values(value: Any) -> Any:
    """Return a nested value with texts converted like pydantic does for DeepSpeed: switches, numbers and none.

    >>> plain_values({"enabled": "False", "lr": "2e-5", "betas": ["0.9", 0.95], "device": "none", "type": "AdamW"})
    {'enabled': False, 'lr': 2e-05, 'betas': [0.9, 0.95], 'device': None, 'type': 'AdamW'}
    """
    if isinstance(value, dict):
        return {str(key): plain_values(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain_values(each) for each in value]
    if not isinstance(value, str):
        return value
    if (word := value.strip().lower()) in _WORDS:
        return _WORDS[word]
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        return number if math.isfinite(number) else value
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number to train with")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the key {twice} stands twice; keep one")
    return dict(pairs)
