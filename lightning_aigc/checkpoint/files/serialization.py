"""Serialization of a nested state as named tensors and a plain JSON skeleton.

A dict becomes a JSON object if all its keys are plain strings. What JSON cannot express becomes an object with one key
that starts with a dollar: {"$tensor": name}, {"$tuple": [...]}, {"$items": [[key, value], ...]}, {"$int": hex},
{"$float": its 8 bytes}.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.checkpoint.files.safetensors_file import DTYPES
from lightning_aigc.errors import SnapshotError

EXACT_IN_JSON = 2**53
"""Beyond it some readers round an integer, and Python refuses to print one of more than 4300 digits."""
HELD = "None, bool, int, float, str, list, tuple, dict with str or int keys, and dense tensors"


def pack(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a nested state into its tensors, by dotted path, and its skeleton; nothing is copied.

    A parameter comes back as a plain tensor and an OrderedDict as a dict; other subclasses of the types held are
    refused, because they would lose what they add.

    Raises: SnapshotError with the dotted path and the type of what cannot be held.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(state, "", tensors)


def unpack(tensors: dict[str, Tensor], skeleton: Any) -> Any:
    """Rebuild the state that `pack` split.

    Raises: SnapshotError if the two do not belong together.
    """
    try:
        return _unpack(tensors, skeleton)
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise SnapshotError(f"the tree does not fit its tensors: {type(error).__name__}: {error}") from error


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if kind is Tensor or isinstance(value, Tensor):  # the first is many times faster
        return _pack_tensor(value, path, tensors)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -EXACT_IN_JSON <= value <= EXACT_IN_JSON else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is list:
        return [_pack(item, _below(path, index), tensors) for index, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_pack(item, _below(path, index), tensors) for index, item in enumerate(value)]}
    if kind is dict or kind is OrderedDict:
        return _pack_dict(value, path, tensors)
    raise SnapshotError(f"{path or 'the state'} is a {kind.__module__}.{kind.__qualname__}; a snapshot holds {HELD}")


def _pack_dict(value: dict[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    plain = True
    for key in value:
        if type(key) is int:
            plain = False
        elif type(key) is not str:
            raise SnapshotError(
                f"{path or 'the state'} has the key {key!r} of type {type(key).__qualname__}; a snapshot holds {HELD}"
            )
        elif key.startswith("$"):
            plain = False
    packed = {key: _pack(item, _below(path, key), tensors) for key, item in value.items()}
    return packed if plain else {"$items": [[_pack(key, path, tensors), item] for key, item in packed.items()]}


def _pack_tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> Any:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.dtype not in DTYPES:
        raise SnapshotError(
            f"{path or 'the state'} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}; a snapshot "
            f"holds dense ones with values, of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    stem = name = path.encode(errors="backslashreplace").decode() or "state"
    while name in tensors or name == "__metadata__":  # {"a.b": 1} and {"a": {"b": 2}}
        name = f"{stem}#{len(tensors)}"
    tensors[name] = tensor
    if tensor.is_contiguous():
        return {"$tensor": name}
    # channels_last and transposed tensors keep their strides; of an expanded tensor each element is written
    return {"$tensor": name, "stride": list(torch.empty_like(tensor, device="meta").stride())}


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _unpack(tensors: dict[str, Tensor], skeleton: Any) -> Any:
    if isinstance(skeleton, list):
        return [_unpack(tensors, item) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    mark = next(iter(skeleton), "")
    if not mark.startswith("$"):
        return {key: _unpack(tensors, item) for key, item in skeleton.items()}
    content = skeleton[mark]
    match mark:
        case "$tensor":
            return _with_stride(tensors[content], skeleton.get("stride"))
        case "$tuple":
            return tuple(_unpack(tensors, item) for item in content)
        case "$items":
            return {_unpack(tensors, key): _unpack(tensors, item) for key, item in content}
        case "$int":
            return int(content, 16)
        case "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
    raise ValueError(f"unknown mark {mark}")


def _with_stride(tensor: Tensor, stride: list[int] | None) -> Tensor:
    return tensor if stride is None else torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
