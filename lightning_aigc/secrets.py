"""Keep keys, tokens and passwords out of every file and line that a run leaves.

A value is hidden by its name (`storage_options.*`, `*_token`, `api_key`, `password`, ...) or by its place in an address
(`s3://KEY:SECRET@bucket`, `?sig=...`). Give secrets by environment variables or fsspec's own configuration
(docs/data.md), so that no config holds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_aigc.errors import ConfigError

HIDDEN = "(hidden)"
OPTIONS = frozenset(("storage_options", "client_kwargs", "config_kwargs", "headers"))
"""Blocks of fsspec and of loggers in which any text may be a key."""
HARMLESS = frozenset(("endpoint_url", "region_name", "region", "anon", "project", "protocol", "auto_mkdir"))
SECRET = re.compile(
    r"(^|_)(secret|secrets|token|password|passwd|passphrase|credentials?|sas|connection_string|authorization|api_?key"
    r"|access_?key(_id)?|account_?key|secret_?key|private_?key|key_id|auth)$",
    re.IGNORECASE,
)
USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]*:[^/@\s'\"]+(?=@)")
SIGNATURE = re.compile(r"(?<=[?&])((?:sig|signature|token|x-amz-[a-z-]+|x-goog-[a-z-]+|key|secret)=)[^&\s'\"]+", re.I)


def redact(value: Any, key: str = "", *, is_option: bool = False) -> Any:
    """A copy of a nested config, of mappings, lists and plain values, with its secrets hidden.

    >>> redact({"storage_options": {"key": "AKIA", "anon": False}, "train_data_dir": "s3://u:p@bucket/x"})
    {'storage_options': {'key': '(hidden)', 'anon': False}, 'train_data_dir': 's3://(hidden)@bucket/x'}
    """
    is_option = (is_option or key in OPTIONS) and key not in HARMLESS
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {name: redact(each, str(name), is_option=is_option) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(each, key, is_option=is_option) for each in value]
    if value in (None, "") or isinstance(value, bool):
        return value
    if is_option or (SECRET.search(key) and isinstance(value, (str, bytes))):
        return HIDDEN
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """A text with the secrets of the addresses in it hidden."""
    return SIGNATURE.sub(rf"\1{HIDDEN}", USER_INFO.sub(HIDDEN, text))


def refuse_hidden(config: Any) -> None:
    """Raise ConfigError that names each value which a run's copy of its config does not hold."""
    found = list(_hidden(config))
    if found:
        raise ConfigError(
            f"{', '.join(found)}: this copy of a config does not hold the value, which is secret; leave the key out and"
            " set the storage's environment variables (docs/data.md), or pass it on the command line:"
            f" --{found[0]} VALUE"
        )


def _hidden(value: Any, path: str = "") -> Iterator[str]:
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _hidden(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _hidden(each, path)
    elif isinstance(value, str) and HIDDEN in value:
        yield path
