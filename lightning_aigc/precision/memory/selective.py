"""Selective checkpointing: save chosen products and attentions of a block that backward otherwise recomputes.

It works as torch's `create_selective_checkpoint_contexts`, but with a limit in bytes instead of a list of operators.
Products that no later gradient reads are not saved, and the saved bytes are counted by `SavedBytes`.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, shape_wrapper

from lightning_aigc.precision.block_options import UNLIMITED, SaveLimit
from lightning_aigc.precision.context import note_saved
from lightning_aigc.precision.memory.liveness import BackwardReads
from lightning_aigc.precision.memory.profile import LastRunProfile, Result
from lightning_aigc.precision.memory.saved_tensors import tensors_in
from lightning_aigc_kernels import AttentionStream
from lightning_aigc_kernels.packing import unpack

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear")
PRODUCTS_WITH_SUM = ("aten::addmm", "aten::baddbmm")
JOINT = "lightning_aigc::joint_attention"
ELEMENTWISE = frozenset(
    f"lightning_aigc::{name}" for name in ("gated_residual", "modulated_norm", "qk_norm_rope", "silu_mul")
)
"""Ops without a product inside, which are called directly: through a dispatch mode each takes several times as long."""
ATTENTIONS = ("aten::_scaled_dot_product", "npu::npu_fusion_attention", JOINT)


@functools.cache
def kind_of(operator: Any) -> Literal["product", "attention"] | None:
    """Classify an operator as a matrix product, an attention or neither."""
    name = operator._schema.name
    if name in PRODUCTS:
        return "product"
    return "attention" if name.startswith(ATTENTIONS) and "backward" not in name else None


def inner_dim_of(operator: Any, args: Sequence[Any]) -> int:
    """Return the multiplications per result number: a product's inner dimension, or twice an attention's keys."""
    if operator._schema.name == JOINT:
        keys = unpack(*args[:2])[AttentionStream._fields.index("key") :: len(AttentionStream._fields)]
        return 2 * sum(int(key.shape[1]) for key in keys)
    if kind_of(operator) == "attention":
        return 2 * int(args[1].shape[-2])
    first = args[1] if operator._schema.name in PRODUCTS_WITH_SUM else args[0]
    return int(first.shape[-1])


def min_inner_dim(inputs: Sequence[Tensor]) -> int:
    """Return the inner dimension from which a product of a block with these inputs is worth saving."""
    return max((x.shape[-1] for x in inputs if x.dim() == 3 and x.is_floating_point()), default=0) // 2


def most_worth_saving(results: Sequence[Result], least_dim: int) -> list[int]:
    """Return the indices of results worth saving, those with most operations per number first, then in call order."""
    candidates = [i for i, r in enumerate(results) if r.is_read and r.inner_dim >= least_dim]
    return sorted(candidates, key=lambda i: -results[i].inner_dim)


def results_within(limit: SaveLimit, last_run: LastRunProfile, input_bytes: int) -> frozenset[int]:
    """Return the indices of the results to save; none in a block's first run, which has no profile."""
    left = limit.nbytes
    if limit.share < UNLIMITED:
        left = min(left, limit.share * last_run.native_bytes - input_bytes)
    chosen = set()
    for i in most_worth_saving(last_run.results, limit.min_inner_dim):
        if last_run.results[i].nbytes <= left:
            chosen.add(i)
            left -= last_run.results[i].nbytes
    return frozenset(chosen)


class _EagerMode(TorchDispatchMode):
    """A mode that torch.compile never traces, so that its calls need no guard against that."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _ResultRecorder(_EagerMode):
    """Records a block's products and attentions in call order, and which of them backward reads."""

    follows = True

    def __enter__(self) -> Self:
        self.reads, self.results = BackwardReads(self.follows), list[Result]()
        self.hooks = self.reads.hooks()
        self.hooks.__enter__()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.hooks.__exit__(*error)
        if self.follows:
            self.results = [result._replace(is_read=self.reads.is_read(i)) for i, result in enumerate(self.results)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if self.follows:
            self.reads.follow(func, args, kwargs, output, None if kind is None else len(self.results))
        if kind is not None:
            self.results.append(Result(kind, inner_dim_of(func, args), _nbytes(output)))
            self.note(func, args, kwargs or {}, output)
        return output

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Handle a product or an attention, the last of `results`."""
        raise NotImplementedError


@dataclass
class _SavedRun:
    """Saved results of a block's first run, by the number of their product or attention."""

    limit: SaveLimit
    last_run: LastRunProfile
    input_bytes: int
    outputs: list[Any] = field(default_factory=list)
    """Saved outputs; None for one that was not saved."""
    versions: list[Sequence[int]] = field(default_factory=list)
    layouts: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of `empty_strided` for a product's output."""
    is_read: list[bool] = field(default_factory=list)


class SaveResults(_ResultRecorder):
    """Saves results while a block runs; follows backward's reads in the first run and after a run that differed."""

    def __init__(self, run: _SavedRun) -> None:
        super().__init__()
        self.run = run

    def __enter__(self) -> Self:
        run = self.run
        run.outputs, run.versions, run.layouts = [], [], []
        self.chosen = results_within(run.limit, run.last_run, run.input_bytes)
        self.follows = not run.last_run.results
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        last_run, reads = self.run.last_run, self.reads
        if self.follows:
            last_run.results, last_run.native_bytes = self.results, reads.saved_bytes
            last_run.saved_tensors = reads.count
        elif not last_run.matches(self.results, reads.count):
            last_run.results = ()
        # Without a profile, each result may be read.
        self.run.is_read = [result.is_read for result in last_run.results or self.results]

    def ignores(self, name: str) -> bool:
        """Whether this mode need not see an op, for lightning_aigc_kernels."""
        return not self.follows and name in ELEMENTWISE

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        saved = _detached(output) if len(self.results) - 1 in self.chosen else None
        self.run.outputs.append(saved)
        self.run.versions.append([tensor._version for tensor in tensors_in(saved)])
        self.run.layouts.append(_layout(output) if self.results[-1].kind == "product" else {})
        note_saved(saved)


class ReuseResults(_EagerMode):
    """Returns the outputs that `SaveResults` saved while the block is recomputed, and skips unread products."""

    def __init__(self, run: _SavedRun) -> None:
        super().__init__()
        self.run = run

    def __enter__(self) -> ReuseResults:
        self.position = 0
        super().__enter__()
        return self

    def ignores(self, name: str) -> bool:
        """Whether this mode need not see an op, for lightning_aigc_kernels."""
        return name in ELEMENTWISE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        position, self.position = self.position, self.position + 1
        saved, versions = self.run.outputs[position], self.run.versions[position]
        # An output that was changed in place since then cannot be reused.
        if saved is not None and [tensor._version for tensor in tensors_in(saved)] == list(versions):
            return _detached(saved)
        if kind == "product" and not self.run.is_read[position]:
            return torch.empty_strided(**self.run.layouts[position])
        return func(*args, **(kwargs or {}))


def save_and_reuse(
    limit: SaveLimit, last_run: LastRunProfile, input_bytes: int = 0
) -> tuple[SaveResults, ReuseResults]:
    """Return the scopes of a block's first run and of its recomputation.

    Args: input_bytes: Bytes of the block's inputs, which are saved in any case.
    """
    run = _SavedRun(limit, last_run, input_bytes)
    return SaveResults(run), ReuseResults(run)


def _layout(output: Tensor) -> dict[str, Any]:
    return {"size": output.shape, "stride": output.stride(), "dtype": output.dtype, "device": output.device}


def _nbytes(output: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(output))


def _detached(output: Any) -> Any:
    """Detach tensors; they share storages and version counters with the originals."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


class _OperationCounter(_ResultRecorder):
    """Counts the operations of each product and attention."""

    def __init__(self, mapping: dict[Any, Callable[..., int]]) -> None:
        super().__init__()
        self.counters = {**flop_registry, **{packet: shape_wrapper(count) for packet, count in mapping.items()}}

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        counter = self.counters.get(func._overloadpacket)
        if counter is not None:
            operations = float(counter(*args, **kwargs, out_val=output))
            self.results[-1] = self.results[-1]._replace(operations=operations)


def count_operations(run: Callable[[], Any], mapping: dict[Any, Callable[..., int]]) -> list[Result]:
    """Return each product and attention of `run`; `mapping` counts operators that torch's table lacks."""
    with _OperationCounter(mapping) as counter:
        run()
    return counter.results
