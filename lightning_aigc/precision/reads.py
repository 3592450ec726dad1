"""Which results of a block's operators backward reads: from each result to what autograd saves, storage by storage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_aigc.precision.saved_tensors import storage_of

VALUES_SHOW = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
"""Tags of operators whose shapes or numbers Python sees."""
OPAQUE = 0
"""The address of all tensors that wrap others, such as packed weights."""


class Reads:
    """Follows results through a block's run.

    A storage stands for all that was written into it, so a result may be said to be read that is not, and never the
    other way round. With `follows=False` it counts what autograd saves, and no more.
    """

    def __init__(self, follows: bool = True) -> None:
        self.follows, self.count = follows, 0
        self.read = 0
        """Results that backward reads, one bit for each."""
        self.saved_bytes = 0
        """Of the storages that autograd saves, without parameters'."""
        self._saved: set[int] = set()
        """Addresses of the storages that were counted; a storage that nothing holds leaves its address to another."""
        self._made_of: dict[int, int] = {}
        """Storages of the run, by address, with the results that went into each."""

    def is_read(self, result: int) -> bool:
        return bool(self.read >> result & 1)

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any, result: int | None) -> None:
        """Note an operator's call; `result` is its number among the results that are followed, None for another."""
        inputs, sources = set(), 0 if result is None else 1 << result
        for tensor in _tensors(args, kwargs.values() if kwargs else ()):
            address = _address(tensor)
            inputs.add(address)
            sources |= self._made_of.get(address, 0)
        outputs = [_address(tensor) for tensor in _tensors((output,), ())]
        for address in outputs:
            if address == OPAQUE or (address in inputs and address in self._made_of):
                self._made_of[address] = self._made_of.get(address, 0) | sources
            elif address not in inputs:
                self._made_of[address] = sources
                self._saved.discard(address)
            else:  # in a storage from outside, where anything may read it
                self.read |= sources
        if not outputs or _shows_values(func):
            self.read |= sources

    def note_saved(self, tensor: Tensor) -> None:
        """Note that autograd saves a tensor."""
        address = _address(tensor)
        self.read |= self._made_of.get(address, 0)
        is_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if address != OPAQUE and address not in self._saved and not is_parameter:
            self._saved.add(address)
            self.saved_bytes += tensor.untyped_storage().nbytes()

    def hooks(self) -> saved_tensors_hooks:
        """Hooks that note what autograd saves, and leave the rest to the hooks that are in force."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, unpack = outer or (_same, _same)

        @functools.wraps(pack)
        def noting(tensor: Tensor) -> Any:
            self.count += 1
            if self.follows:
                self.note_saved(tensor)
            return pack(tensor)

        return saved_tensors_hooks(noting, unpack)


def _tensors(args: Any, more: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or outputs, which are nested one list deep at most."""
    for given in (args, more):
        for value in given:
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                for inner in value:
                    if isinstance(inner, Tensor):
                        yield inner


def _address(tensor: Tensor) -> int:
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return int(tensor.untyped_storage()._cdata)
    found = storage_of(tensor)
    return OPAQUE if found is None else found[0]


@functools.cache
def _shows_values(func: Callable[..., Any]) -> bool:
    return any(tag in func.tags for tag in VALUES_SHOW)  # type: ignore[attr-defined]  # an operator


def _same(tensor: Tensor) -> Tensor:
    return tensor
