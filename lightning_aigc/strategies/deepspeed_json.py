"""Read JSON as DeepSpeed's Hjson does where people use it: comments and commas before a closing bracket."""

from __future__ import annotations

import json
import re
from typing import Any

_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/|,(?=(?:\s|//[^\n]*|#[^\n]*|/\*.*?\*/)*[}\]])', re.DOTALL
)


def read_json(text: str) -> Any:
    """The value that a text holds.

    Raises: ValueError for what is no JSON, and for a key that stands twice in one object, as DeepSpeed does.

    >>> read_json('{"stage": 3, # sharded\\n "path": "a//b",}')
    {'stage': 3, 'path': 'a//b'}
    """
    plain = _TOKEN.sub(lambda found: found[0] if found[0].startswith('"') else " ", text)
    return json.loads(plain, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the key {twice} stands twice; keep one")
    return dict(pairs)
