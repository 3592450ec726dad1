"""Keep keys, tokens and passwords out of every file and line that a run leaves.

A value is hidden by its name (`storage_options.*`, `*_token`, `api_key`, `password`, ...) or by its place in an address
(`s3://KEY:SECRET@bucket`, `?sig=...`). Give secrets by environment variables or fsspec's own configuration
(docs/data.md), so that no config holds them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_aigc.errors import ConfigError

HIDDEN = "(hidden)"
OPTIONS = re.compile(
    r"(^|_)(storage|target|remote|fs|filesystem)_(options|kwargs)$|^(client|config)_kwargs$|(^|_)(headers|cookies)$"
)
"""Names of blocks of fsspec and of loggers in which any text may be a key."""
HARMLESS = frozenset(("endpoint_url", "region_name", "region", "anon", "project", "protocol", "auto_mkdir"))
_STRONG = (
    r"secrets?|password|passwords|passwd|passphrase|pwd|credentials?|sas|connection_string|authorization|bearer|cookies?"
    r"|api_?keys?|(access|account|secret|private|wandb|signing|master)_?keys?|(access_?|aws)_?key(_?id)?|key_id|auth"
)
WORDS = (
    "pad|eos|bos|unk|cls|sep|mask|class|image|text|prompt|placeholder|initializer|trigger|instance|special|start|end"
    "|stop|new|keep|max|min|num"
)
"""Before `token`: a word of a text and no secret."""
SECRET = re.compile(rf"(^|_)({_STRONG}|tokens?)$")
_PLAIN_TOKEN = re.compile(rf"(^|_)({WORDS})_?(\d+_?)?tokens?$")
USER_INFO = re.compile(
    r"(?<=://)[^/\s'\"]*:[^/\s'\"]+(?=@)"  # up to the last @ before a slash
    r"|(?<=://)[^/@:\s'\"]+:(?!\d+/)[^\s'\"@]+(?=@)"  # S3's secrets have slashes; a port has none
    r"|(?<=https://)[^/@:\s'\"]+(?=@)|(?<=http://)[^/@:\s'\"]+(?=@)"
)
QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^&\s'\"]+)")
_OF_QUERIES = re.compile(r"^(sig|signature|key|x_(amz|goog)_\w+)$")
ASSIGNED = re.compile(r"""(?<![?&\w.])([\w.-]+)(?:=|['"]\s*[:=]\s*)['"]?([^\s'",;})\]]+)""")
"""`name=value` and `'name': 'value'` in a printed line."""
IN_BRACES = re.compile(
    r"((?:storage|target|remote|fs)_(?:options|kwargs)|(?:client|config)_kwargs|headers)(['\"]?\s*[:=]?\s*)\{[^{}]*\}"
)
KNOWN_FORMS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|A[KS]IA[0-9A-Z]{16}|gh[opsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|xox[abps]-[\w-]{10,}"
    r"|glpat-[\w-]{15,}|AIza[\w-]{35}|sk-[A-Za-z0-9_-]{20,})|(?<=Bearer )[\w.~+/-]{8,}=*"
)
"""Keys of Hugging Face, AWS, GitHub, Slack, GitLab, Google and OpenAI, wherever they stand."""


def is_secret(name: str) -> bool:
    """Whether a value of this name is a secret.

    >>> [is_secret(name) for name in ("apiKey", "X-Api-Key", "hf_token", "placeholder_token", "max_tokens", "key")]
    [True, True, True, False, False, False]
    """
    plain = _plain(name)
    return SECRET.search(plain) is not None and _PLAIN_TOKEN.search(plain) is None


def _plain(name: str) -> str:
    """A name in small letters with underscores, from one with hyphens or capitals inside."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def redact(value: Any, key: str = "", *, is_option: bool = False) -> Any:
    """A copy of a nested config, of mappings, lists and plain values, with its secrets hidden.

    >>> redact({"storage_options": {"key": "AKIA", "anon": False}, "train_data_dir": "s3://u:p@bucket/x"})
    {'storage_options': {'key': '(hidden)', 'anon': False}, 'train_data_dir': 's3://(hidden)@bucket/x'}
    """
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    is_nested = isinstance(value, (Mapping, list, tuple))
    is_option = (is_option or OPTIONS.search(_plain(key)) is not None or (is_nested and is_secret(key))) and (
        key not in HARMLESS
    )
    if isinstance(value, Mapping):
        return {name: redact(each, str(name), is_option=is_option) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(each, key, is_option=is_option) for each in value]
    if value in (None, "") or isinstance(value, bool):
        return value
    is_text = isinstance(value, (str, bytes))
    if is_option or (is_secret(key) and (is_text or not _plain(key).endswith(("token", "tokens")))):
        return HIDDEN
    return _redact_addresses(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """A printed line with the secrets of the addresses, options and assignments in it hidden."""
    return ASSIGNED.sub(_assigned, IN_BRACES.sub(rf"\1\2{HIDDEN}", _redact_addresses(text)))


def _redact_addresses(text: str) -> str:
    return QUERY.sub(_assigned, KNOWN_FORMS.sub(HIDDEN, USER_INFO.sub(HIDDEN, text)))


def _assigned(found: re.Match[str]) -> str:
    *names, name = found[1].lstrip("-").split(".")
    is_of_query = found.re is QUERY and _OF_QUERIES.search(_plain(name)) is not None
    if HIDDEN[:-1] in found[2] or not (is_of_query or is_secret(name) or any(OPTIONS.search(each) for each in names)):
        return found[0]
    return found[0].removesuffix(found[2]) + HIDDEN


PATH_START = re.compile(r"(file://)?(/|~|[A-Za-z]:[\\/]|\\\\)")
"""Begin of a path that tells of the machine; a relative one such as `runs/my` does not."""
PATH_IN_TEXT = re.compile(
    r"(?<![\w:/.\\~])(?:file://)?(?:~|[A-Za-z]:)?[\\/]+(?:[^\s'\"`,;:()|<>\\/]+[\\/]+)+([^\s'\"`,;:()|<>\\/]*)"
)


def without_local_paths(value: Any) -> Any:
    """A copy of a nested value in which each absolute local path is its last name.

    >>> without_local_paths({"data": "/home/anna/photos", "run": "runs/my", "note": "see /srv/a/b.png, 3 images"})
    {'data': 'photos', 'run': 'runs/my', 'note': 'see b.png, 3 images'}
    """
    if isinstance(value, Mapping):
        return {without_local_paths(str(name)): without_local_paths(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_local_paths(each) for each in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            found = json.loads(value)
            kept = without_local_paths(found)
            return value if kept == found else json.dumps(kept, ensure_ascii=False)
    if "\n" not in value and PATH_START.match(value):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return PATH_IN_TEXT.sub(lambda found: found[1], value)


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
