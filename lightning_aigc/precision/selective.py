"""Save the results of chosen products and attentions of a block that otherwise runs again in backward.

As torch's `create_selective_checkpoint_contexts`, with a limit in bytes in place of a list of operators, without saving
products that no later gradient reads, and counted by `SavedBytes`.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, shape_wrapper

from lightning_aigc.precision import saved_tensors
from lightning_aigc.precision.saved_tensors import tensors_in

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear")
ADDING = ("aten::addmm", "aten::baddbmm")
ATTENTIONS = ("aten::_scaled_dot_product", "npu::npu_fusion_attention")
ALL = float("inf")


@dataclass(frozen=True)
class Saves:
    """What a block that runs again saves beside its inputs."""

    attention: bool = False
    """Whether attentions' outputs with their softmax statistics."""
    product_bytes: float = 0.0
    """Bytes of matrix products' results, the first of them."""
    least_inner: int = 0
    """Inner dimension from which a product is worth saving: LoRA's second one costs as much memory as its layer's and
    almost no time."""


@functools.cache
def kind_of(operator: Any) -> Literal["product", "attention"] | None:
    name = operator._schema.name
    if name in PRODUCTS:
        return "product"
    return "attention" if name.startswith(ATTENTIONS) and "backward" not in name else None


def inner_of(operator: Any, args: Sequence[Any]) -> int:
    """The inner dimension of a product, or an attention's features of a head."""
    first = args[1] if operator._schema.name in ADDING else args[0]
    return int(first.shape[-1])


@dataclass
class Reached:
    """How many of a block's products and attentions a recomputation came to before all that is read was there."""

    count: int | None = None


@dataclass
class _Results:
    """The results of a block's products and attentions in the order of their calls; None for one that is not saved."""

    saves: Saves
    reached: Reached
    results: list[Any] = field(default_factory=list)
    versions: list[Sequence[int]] = field(default_factory=list)


class Saving(TorchDispatchMode):
    """Keeps results while a block runs."""

    def __init__(self, found: _Results) -> None:
        super().__init__()
        self.found = found

    def __enter__(self) -> Saving:
        self.found.results.clear()
        self.found.versions.clear()
        self.left = self.found.saves.product_bytes
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if kind is not None:
            kept = _detached(output) if self._is_saved(kind, inner_of(func, args), output) else None
            self.found.results.append(kept)
            self.found.versions.append([tensor._version for tensor in tensors_in(kept)])
            saved_tensors.note(kept)
        return output

    def _is_saved(self, kind: str, inner: int, output: Any) -> bool:
        reached = self.found.reached.count
        if reached is not None and len(self.found.results) >= reached:
            return False
        if kind == "attention":
            return self.found.saves.attention
        nbytes = output.nbytes
        is_saved = nbytes <= self.left and inner >= self.found.saves.least_inner
        self.left -= nbytes if is_saved else 0
        return is_saved


class Reading(TorchDispatchMode):
    """Gives back what `Saving` kept while the block runs again."""

    def __init__(self, found: _Results) -> None:
        super().__init__()
        self.found = found

    def __enter__(self) -> Reading:
        self.position = 0
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.found.reached.count = max(self.position, self.found.reached.count or 0)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind_of(func) is None:
            return func(*args, **(kwargs or {}))
        kept, versions = self.found.results[self.position], self.found.versions[self.position]
        self.position += 1
        # A result that was changed in place since cannot be given back.
        if kept is None or [tensor._version for tensor in tensors_in(kept)] != list(versions):
            return func(*args, **(kwargs or {}))
        return _detached(kept)


def saving_and_reading(saves: Saves, reached: Reached) -> tuple[Saving, Reading]:
    """Contexts of a block's run and of its recomputation."""
    found = _Results(saves, reached)
    return Saving(found), Reading(found)


def _nbytes(output: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(output))


def _detached(output: Any) -> Any:
    """The same storages, and their counts of changes, in tensors of their own."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


class Result(NamedTuple):
    """What a product or an attention costs."""

    kind: Literal["product", "attention"]
    inner: int
    nbytes: int
    operations: float


class Counting(TorchDispatchMode):
    """Counts each product and attention, in the order of their calls."""

    def __init__(self, mapping: dict[Any, Callable[..., int]]) -> None:
        super().__init__()
        self.counters = {**flop_registry, **{packet: shape_wrapper(count) for packet, count in mapping.items()}}
        self.found: list[Result] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        kind = kind_of(func)
        if kind is not None:
            counter = self.counters.get(func._overloadpacket)
            operations = 0.0 if counter is None else float(counter(*args, **kwargs, out_val=output))
            self.found.append(Result(kind, inner_of(func, args), _nbytes(output), operations))
        return output


@torch.no_grad()
def counted(run: Callable[[], Any], mapping: dict[Any, Callable[..., int]]) -> list[Result]:
    """Each product and attention of `run`; `mapping` counts operations of operators that torch's table lacks."""
    counting = Counting(mapping)
    with counting:
        run()
    return counting.found
