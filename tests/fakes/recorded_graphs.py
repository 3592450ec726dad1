"""Graphs on a CPU: each operator of a function is recorded with its storages, and replayed in the same buffers.

A replay runs no Python: what Python decided, counted or read stays as it was. `findings` lists what a card refuses or
would freeze. Memory is not reused, so hazards of a pool do not show.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from lightning_aigc_kernels import custom_op
from lightning_aigc_kernels.packed_weight import op as packed_op

T = TypeVar("T")


class Finding(NamedTuple):
    """An operator that a graph cannot hold."""

    kind: str
    """sync: reads a number of the device; shape: a size that depends on numbers; random: draws; host: numbers of the
    host are copied to the device; frozen: a number of the host becomes a constant of the graph."""
    operator: str
    place: str
    """file:line of the first frame outside torch."""


class Recorded(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor | None]
    """Results with storages of their own, which a replay writes; None for views and what is changed in place."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """The operator with the shapes and dtypes of its arguments; equal in two records of the same call."""
        leaves = tree_leaves((self.args, self.kwargs))
        return self.func, *((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else str(x) for x in leaves)


class Recorder(TorchDispatchMode):
    """Runs operators and keeps them. Packed weights and the project's own ops are taken apart first."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Recorded] = []
        self.findings: list[Finding] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if any(map(is_traceable_wrapper_subclass, given)):
            return NotImplemented
        if func.namespace == "lightning_aigc":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        result = func(*args, **kwargs)
        self.findings += [Finding(kind, str(func), _place()) for kind in _kinds_of(func, given, _tensors(result))]
        addresses = {x.untyped_storage()._cdata for x in given}
        made = [None if x.untyped_storage()._cdata in addresses else x.detach() for x in _tensors(result)]
        if func._schema.is_mutable or any(x is not None for x in made):
            args, kwargs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
            self.operators.append(Recorded(func, args, kwargs, made))
        return result


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def _kinds_of(func: Any, given: Sequence[Tensor], results: Sequence[Tensor]) -> Iterator[str]:
    if torch.Tag.data_dependent_output in func.tags:
        yield "sync"
    by_numbers = "index" not in str(func) or any(x.dtype == torch.bool for x in given[1:])
    if torch.Tag.dynamic_output_shape in func.tags and by_numbers:
        yield "shape"
    if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in str(func):
        yield "random"
    on_host = [x for x in given if x.device.type == "cpu"]
    if "lift_fresh" in str(func):  # torch.tensor([...]), torch.as_tensor
        yield "host"
    elif on_host and any(x.device.type != "cpu" for x in (*given, *results)):
        yield "host" if any(x.dim() for x in on_host) or "copy" in str(func) else "frozen"


def _place() -> str:
    frame = sys._getframe(2)
    while frame.f_back and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record as a card does: the ops do not see this mode, and packed weights are unpacked by torch's operators."""
    seen: Any = lambda: torch._C._len_torch_dispatch_stack() > 1  # noqa: E731 - another mode beside the recorder
    unpacking = mock.patch.multiple(packed_op, is_traced=seen, cpu_kernel_for=lambda op: None)
    with mock.patch.object(custom_op, "is_traced", seen), unpacking, Recorder() as recorder:
        yield recorder


class RecordedGraph:
    """Operators to run again; see `lightning_aigc.precision.graph.device_graphs.Graph`."""

    def __init__(self, recorder: Recorder) -> None:
        self.operators, self.findings = recorder.operators, recorder.findings

    def replay(self) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, made in self.operators:
                for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                    if old is not None and old.numel() and 0 not in old.stride():  # else it has no values of its own
                        old.copy_(new)

    def reset(self) -> None:
        self.operators = []


class RecordedGraphs:
    """`Graphs` whose functions a CPU can run; `graphs` has all that were recorded."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.pools = 0
        self.free = 2**40

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    def warm_up(self, function: Callable[[], object]) -> None:
        with recording():  # a packed weight's table is made by the operators that a card runs
            function()

    def record(self, function: Callable[[], T], pool: int) -> tuple[RecordedGraph, T]:
        with recording() as recorder:
            results = function()
        self.graphs.append(RecordedGraph(recorder))
        return self.graphs[-1], results

    def reserved_bytes(self) -> int:
        return len(self.graphs)

    def free_bytes(self) -> int:
        return self.free

    @property
    def findings(self) -> list[Finding]:
        return [finding for graph in self.graphs for finding in graph.findings]
