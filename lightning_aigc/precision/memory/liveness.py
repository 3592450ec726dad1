"""Backward liveness of a block's results: follow each result to the tensors that autograd saves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_aigc.precision.memory.saved_tensors import storage_of

VALUE_DEPENDENT = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
"""Tags of operators whose output shapes or numbers Python reads."""
OPAQUE = 0
"""Address used for all tensors that wrap others, such as packed weights."""


class BackwardReads:
    """Finds the results of a block's run that backward reads.

    Results are tracked per storage: one can be reported as read although backward does not read it, but no read is
    missed. With `follows=False`, only the tensors that autograd saves are counted.
    """

    def __init__(self, follows: bool = True) -> None:
        self.follows, self.count = follows, 0
        self.read = 0
        """Results that backward reads, one bit for each."""
        self.saved_bytes = 0
        """Bytes of the storages that autograd saves, without parameters."""
        self._saved: set[int] = set()
        """Addresses of counted storages; an address is removed when another storage takes it."""
        self._sources: dict[int, int] = {}
        """Results that each storage of the run was computed from, by address."""

    def is_read(self, result: int) -> bool:
        """Whether backward reads this result."""
        return bool(self.read >> result & 1)

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any, result: int | None) -> None:
        """Note an operator's call; `result` is its number among the followed results, None for any other operator."""
        inputs, sources = set(), 0 if result is None else 1 << result
        for tensor in _tensors(args, kwargs.values() if kwargs else ()):
            address = _address(tensor)
            inputs.add(address)
            sources |= self._sources.get(address, 0)
        outputs = [_address(tensor) for tensor in _tensors((output,), ())]
        for address in outputs:
            if address == OPAQUE or (address in inputs and address in self._sources):
                self._sources[address] = self._sources.get(address, 0) | sources
            elif address not in inputs:
                self._sources[address] = sources
                self._saved.discard(address)
            else:  # in a storage from outside, where anything may read it
                self.read |= sources
        if not outputs or _is_value_dependent(func):
            self.read |= sources

    def note_saved(self, tensor: Tensor) -> None:
        """Note that autograd saves a tensor."""
        address = _address(tensor)
        self.read |= self._sources.get(address, 0)
        is_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if address != OPAQUE and address not in self._saved and not is_parameter:
            self._saved.add(address)
            self.saved_bytes += tensor.untyped_storage().nbytes()

    def hooks(self) -> saved_tensors_hooks:
        """Return hooks that note each saved tensor and then call the hooks that were active before."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, unpack = outer or (torch.Tensor.detach, _same)  # a result as it is would keep its operator alive

        @functools.wraps(pack)
        def noting(tensor: Tensor) -> Any:
            self.count += 1
            if self.follows:
                self.note_saved(tensor)
            return pack(tensor)

        return saved_tensors_hooks(noting, unpack)


def _tensors(args: Any, more: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or outputs, which are nested in lists at most once."""
    for values in (args, more):
        for value in values:
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                for inner in value:
                    if isinstance(inner, Tensor):
                        yield inner


def _address(tensor: Tensor) -> int:
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return int(tensor.untyped_storage()._cdata)
    storage = storage_of(tensor)
    return OPAQUE if storage is None else storage[0]


@functools.cache
def _is_value_dependent(func: Callable[..., Any]) -> bool:
    return any(tag in func.tags for tag in VALUE_DEPENDENT)  # type: ignore[attr-defined]  # an operator


def _same(tensor: Tensor) -> Tensor:
    return tensor
