"""Write a shipped config with other values: keys, order and comments stay, each new value has its reason."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from yaml import YAMLError, safe_load

SHIPPED = Path(__file__).parents[2] / "configs"
COLUMN = 36
"""Column of the comments in the shipped configs."""


@dataclass(frozen=True)
class Choice:
    """A value for a dotted key; callbacks are named by their class: `trainer.callbacks.RunReport.clip_model`."""

    key: str
    value: Any
    reason: str


def read_shipped(name: str) -> CommentedMap:
    """A shipped config with its comments."""
    config: CommentedMap = _yaml().load((SHIPPED / name).read_text(encoding="utf-8"))
    return config


def render(config: CommentedMap, choices: Sequence[Choice], head: str) -> str:
    """The config as text with the choices in it, under another head comment."""
    for choice in choices:
        block, key = _find(config, choice.key)
        block[key] = _as_read_back(choice.value)
        _comment(block, key, choice.reason)
    config.ca.comment = None
    config.yaml_set_start_comment(head)
    text = io.StringIO()
    _yaml().dump(config, text)
    return text.getvalue()


def _find(config: Any, dotted: str) -> tuple[CommentedMap, str]:
    """The block of a dotted key, and the key's last part."""
    *path, last = dotted.split(".")
    for part in path:
        if isinstance(config, list):
            config = next(entry["init_args"] for entry in config if entry["class_path"] == part)
        else:
            config = config[part]
    return config, last


def _as_read_back(value: Any) -> Any:
    """The value with quotes where YAML 1.1, which training reads, takes the bare text for another type: off, 1e4."""
    if isinstance(value, list):
        return [_as_read_back(entry) for entry in value]
    return DoubleQuotedScalarString(value) if isinstance(value, str) and not _is_plain(value) else value


def _is_plain(text: str) -> bool:
    try:
        return bool(safe_load(text) == text)
    except YAMLError:
        return False


def _comment(block: CommentedMap, key: str, text: str) -> None:
    """Replace the comment at the end of a key's line; ruamel keeps blank lines that follow in the same token."""
    tokens = block.ca.items.pop(key, None)
    after = tokens[2].value.partition("\n")[2] if tokens and tokens[2] else ""
    block.yaml_add_eol_comment(text.replace("\n", " ") + ("\n" + after if after else ""), key, COLUMN)


class _Representer(RoundTripRepresenter):
    """Writes numbers and null so that YAML 1.1, which training reads, takes them for numbers and null."""

    def represent_null(self, _: None) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")

    def represent_number(self, value: float) -> Any:
        text = repr(value)  # 5e-05 has no dot, and would be a text
        return self.represent_scalar("tag:yaml.org,2002:float", text if "." in text else text.replace("e", ".0e"))


_Representer.add_representer(type(None), _Representer.represent_null)
_Representer.add_representer(float, _Representer.represent_number)


def _yaml() -> YAML:
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml
