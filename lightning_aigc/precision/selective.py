"""Save the results of chosen products and attentions of a block that otherwise runs again in backward.

As torch's `create_selective_checkpoint_contexts`, with a limit in bytes in place of a list of operators, without saving
products that no later gradient reads, and counted by `SavedBytes`.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, shape_wrapper

from lightning_aigc.precision import saved_tensors
from lightning_aigc.precision.reads import Reads
from lightning_aigc.precision.saved_tensors import tensors_in
from lightning_aigc_kernels import Stream
from lightning_aigc_kernels.packing import unpack

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear")
ADDING = ("aten::addmm", "aten::baddbmm")
JOINT = "lightning_aigc::joint_attention"
ATTENTIONS = ("aten::_scaled_dot_product", "npu::npu_fusion_attention", JOINT)
ALL = float("inf")


@dataclass(frozen=True)
class Saves:
    """What a block that runs again saves beside its inputs: the results that cost most for their bytes come first."""

    nbytes: float = 0.0
    """At most so many bytes of results."""
    least_inner: int = 0
    """Inner dimension from which a product is worth saving: LoRA's second one costs as much memory as its layer's and
    almost no time."""
    share: float = ALL
    """Of the bytes that native autograd saves, how many the block keeps at most, with its inputs."""


@functools.cache
def kind_of(operator: Any) -> Literal["product", "attention"] | None:
    name = operator._schema.name
    if name in PRODUCTS:
        return "product"
    return "attention" if name.startswith(ATTENTIONS) and "backward" not in name else None


def inner_of(operator: Any, args: Sequence[Any]) -> int:
    """Multiplications for each number of the result: a product's inner dimension, twice the keys of an attention."""
    if operator._schema.name == JOINT:
        keys = unpack(*args[:2])[Stream._fields.index("key") :: len(Stream._fields)]
        return 2 * sum(int(key.shape[1]) for key in keys)
    if kind_of(operator) == "attention":
        return 2 * int(args[1].shape[-2])
    first = args[1] if operator._schema.name in ADDING else args[0]
    return int(first.shape[-1])


class Result(NamedTuple):
    """A product or an attention of a block."""

    kind: Literal["product", "attention"]
    inner: int
    nbytes: int
    operations: float = 0.0
    """Counted for a plan."""
    is_read: bool = True
    """Whether backward reads it, or what is made of it."""


@dataclass
class Known:
    """What a block's last run with arguments of these shapes made; nothing before the first."""

    results: Sequence[Result] = ()
    native_bytes: int = 0
    """Bytes that native autograd saves of it, with its inputs."""
    saved_tensors: int = 0
    """How many tensors autograd saves."""

    def is_as(self, made: Sequence[Result], saved_tensors: int) -> bool:
        """Whether another run made the same results and saved as many tensors."""
        pairs = zip(made, self.results, strict=False)
        alike = all((a.kind, a.inner, a.nbytes) == (b.kind, b.inner, b.nbytes) for a, b in pairs)
        return saved_tensors == self.saved_tensors and len(made) == len(self.results) and alike


def in_order_of_worth(results: Sequence[Result], least_inner: int) -> list[int]:
    """The results worth saving: those that cost the most operations for each number first, then in order."""
    found = [i for i, r in enumerate(results) if r.is_read and r.inner >= least_inner]
    return sorted(found, key=lambda i: -results[i].inner)


def chosen(saves: Saves, known: Known, input_bytes: int) -> frozenset[int]:
    """The results that are saved; none in a block's first run, when nothing is known."""
    left = saves.nbytes
    if saves.share < ALL:
        left = min(left, saves.share * known.native_bytes - input_bytes)
    found = set()
    for i in in_order_of_worth(known.results, saves.least_inner):
        if known.results[i].nbytes <= left:
            found.add(i)
            left -= known.results[i].nbytes
    return frozenset(found)


class _Following(TorchDispatchMode):
    """Notes a block's products and attentions in the order of their calls, and which of them backward will read."""

    follows = True

    def __enter__(self) -> Self:
        self.reads, self.made = Reads(self.follows), list[Result]()
        self.hooks = self.reads.hooks()
        self.hooks.__enter__()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.hooks.__exit__(*error)
        if self.follows:
            self.made = [result._replace(is_read=self.reads.is_read(i)) for i, result in enumerate(self.made)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if self.follows:
            self.reads.follow(func, args, kwargs, output, None if kind is None else len(self.made))
        if kind is not None:
            self.made.append(Result(kind, inner_of(func, args), _nbytes(output)))
            self.note(func, args, kwargs or {}, output)
        return output

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Called with each product and attention, the last of `made`."""
        raise NotImplementedError


@dataclass
class _Run:
    """The products and attentions of a block's run in the order of their calls."""

    saves: Saves
    known: Known
    input_bytes: int
    results: list[Any] = field(default_factory=list)
    """What was saved, None for what was not."""
    versions: list[Sequence[int]] = field(default_factory=list)
    layouts: list[dict[str, Any]] = field(default_factory=list)
    """What `empty_strided` wants for a product's result."""
    is_read: list[bool] = field(default_factory=list)


class Saving(_Following):
    """Keeps results while a block runs. Follows what backward reads in the first run, and after one that differed."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __enter__(self) -> Self:
        run = self.run
        run.results, run.versions, run.layouts = [], [], []
        self.chosen = chosen(run.saves, run.known, run.input_bytes)
        self.follows = not run.known.results
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        known, reads = self.run.known, self.reads
        if self.follows:
            known.results, known.native_bytes, known.saved_tensors = self.made, reads.saved_bytes, reads.count
        elif not known.is_as(self.made, reads.count):
            known.results = ()
        self.run.is_read = [result.is_read for result in known.results or self.made]  # unless known, each may be read

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        kept = _detached(output) if len(self.made) - 1 in self.chosen else None
        self.run.results.append(kept)
        self.run.versions.append([tensor._version for tensor in tensors_in(kept)])
        self.run.layouts.append(_layout(output) if self.made[-1].kind == "product" else {})
        saved_tensors.note(kept)


class Reading(TorchDispatchMode):
    """While the block runs again gives back what `Saving` kept, and leaves out products that nothing reads."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __enter__(self) -> Reading:
        self.position = 0
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        position, self.position = self.position, self.position + 1
        kept, versions = self.run.results[position], self.run.versions[position]
        # A result that was changed in place since cannot be given back.
        if kept is not None and [tensor._version for tensor in tensors_in(kept)] == list(versions):
            return _detached(kept)
        if kind == "product" and not self.run.is_read[position]:
            return torch.empty_strided(**self.run.layouts[position])
        return func(*args, **(kwargs or {}))


def saving_and_reading(saves: Saves, known: Known, input_bytes: int = 0) -> tuple[Saving, Reading]:
    """Contexts of a block's run and of its recomputation; `input_bytes` are those that it keeps in any case."""
    run = _Run(saves, known, input_bytes)
    return Saving(run), Reading(run)


def _layout(output: Tensor) -> dict[str, Any]:
    return {"size": output.shape, "stride": output.stride(), "dtype": output.dtype, "device": output.device}


def _nbytes(output: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(output))


def _detached(output: Any) -> Any:
    """The same storages, and their counts of changes, in tensors of their own."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


class _Counting(_Following):
    """Counts the operations of each product and attention."""

    def __init__(self, mapping: dict[Any, Callable[..., int]]) -> None:
        super().__init__()
        self.counters = {**flop_registry, **{packet: shape_wrapper(count) for packet, count in mapping.items()}}

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        counter = self.counters.get(func._overloadpacket)
        if counter is not None:
            operations = float(counter(*args, **kwargs, out_val=output))
            self.made[-1] = self.made[-1]._replace(operations=operations)


def counted(run: Callable[[], Any], mapping: dict[Any, Callable[..., int]]) -> list[Result]:
    """Each product and attention of `run`; `mapping` counts operations of operators that torch's table lacks."""
    with _Counting(mapping) as counting:
        run()
    return counting.made
