"""The contract of every op, checked on one call against its plain torch equivalent."""

from __future__ import annotations

import contextlib
import gc
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Forward = Callable[..., Tensor]
Outcome = dict[str, Tensor]
"""The output under "y", and the gradient of each trained tensor under its name."""


@dataclass(frozen=True)
class Case:
    """One call: `fused` and `eager` take the tensors by name, an absent one is None."""

    fused: Forward
    eager: Forward
    tensors: dict[str, Tensor | None]
    """In float64."""
    trained: Sequence[str]
    """Tensors that want a gradient."""


def outcome(
    case: Case, forward: Forward, dtype: torch.dtype = torch.float64, autocast: torch.dtype | None = None
) -> Outcome:
    """`forward` on the case's tensors in `dtype`, and its gradients for one and the same random dy."""
    leaves = {name: None if t is None else t.detach().to(dtype) for name, t in case.tensors.items()}
    return outcome_of(forward, leaves, case.trained, autocast)


def outcome_of(
    forward: Forward, leaves: dict[str, Tensor | None], trained: Sequence[str], autocast: torch.dtype | None = None
) -> Outcome:
    """The same on these very tensors, strides and all."""
    wanted = {name: leaves[name] for name in trained if leaves[name] is not None}
    for tensor in wanted.values():
        assert tensor is not None
        tensor.requires_grad_()
    with torch.autocast(torch.get_default_device().type, autocast) if autocast else contextlib.nullcontext():
        y = forward(**leaves)
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(y.dtype)
    gradients = torch.autograd.grad(y, list(wanted.values()), dy)
    for tensor in wanted.values():
        assert tensor is not None
        tensor.requires_grad_(False)
    return {"y": y.detach()} | dict(zip(wanted, gradients, strict=True))


def assert_same(ours: Outcome, theirs: Outcome, eps: float = 1e-10) -> None:
    """Equal in float64: names, shapes, dtypes, and numbers up to `eps` of the largest."""
    assert ours.keys() == theirs.keys()
    for name, exact in theirs.items():
        assert ours[name].shape == exact.shape and ours[name].dtype == exact.dtype, name
        near = eps * max(exact.abs().amax().item(), 1.0) if exact.numel() else 0.0
        torch.testing.assert_close(ours[name], exact, rtol=0, atol=near, msg=lambda m, name=name: f"{name}: {m}")


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """Equal to the bit on a CPU; on a card, whose kernels add up in any order, within a few roundings."""
    if ours.is_cuda:
        eps = 8 * torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=eps, atol=eps * max(theirs.abs().max().item(), 1.0))
    else:
        assert torch.equal(ours, theirs)


RATIO_ON_A_CARD = 2.5
"""Two sound summation orders on a card: on an H100 at most 2.2, for a key's bias, whose gradient is rounding alone."""


def ratio_here(ratio: float) -> float:
    """The largest ratio of errors on this device, for one on a CPU."""
    return ratio if torch.get_default_device().type == "cpu" else max(ratio, RATIO_ON_A_CARD)


def assert_equals_autograd(case: Case) -> None:
    """The output and every gradient are plain autograd's in float64."""
    assert_same(outcome(case, case.fused), outcome(case, case.eager))


def assert_passes_gradcheck(case: Case) -> None:
    """Finite differences agree, in float64."""
    leaves = [case.tensors[name] for name in case.trained]
    assert all(leaf is not None for leaf in leaves)

    def call(*given: Tensor) -> Tensor:
        return case.fused(**(case.tensors | dict(zip(case.trained, given, strict=True))))

    inputs = tuple(leaf.clone().requires_grad_() for leaf in leaves if leaf is not None)
    # Convolutions' backward adds up in any order on a card.
    scatter = 0.0 if torch.get_default_device().type == "cpu" else 1e-10
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True, nondet_tol=scatter)


def assert_no_worse_than_eager(
    make: Callable[[], Case], dtype: torch.dtype, ratio: float, autocast: torch.dtype | None = None, seeds: int = 9
) -> None:
    """Output and each gradient lie at most `ratio` times as far from float64 as eager's, in the median over seeds.

    Far is the L2 norm of the error, and eager is granted a quarter of one rounding of its dtype. One seed says little:
    two sound summation orders differ by up to five times where a gradient is nearly zero.
    """
    ratios: dict[str, list[float]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        case = make()
        rounded = {name: None if t is None else t.to(dtype).double() for name, t in case.tensors.items()}
        truth = outcome(Case(case.fused, case.eager, rounded, case.trained), case.eager)
        ours, eager = (outcome(case, forward, dtype, autocast) for forward in (case.fused, case.eager))
        for name, exact in truth.items():
            assert ours[name].dtype == (autocast or dtype if name == "y" else dtype), name
            theirs = (eager[name].to(ours[name].dtype).double() - exact).norm().item()
            granted = torch.finfo(ours[name].dtype).eps / 4 * exact.norm().item()
            error = (ours[name].double() - exact).norm().item()
            ratios.setdefault(name, []).append(error / max(theirs, granted))
    worst, name = max((statistics.median(values), name) for name, values in ratios.items())
    most = ratio_here(ratio)
    assert worst <= most, f"{name} is {worst:.2f} times as far from float64 as eager's, at most {most} wanted"


class _Storages(TorchDispatchMode):
    """Every storage that an operator made, without keeping it alive."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result


def kept_numbers(case: Case, forward: Forward, dtype: torch.dtype, autocast: torch.dtype | None = None) -> float:
    """Number of `dtype` numbers that stay in memory for backward, besides the tensors given and the output."""
    leaves = {name: None if t is None else t.detach().to(dtype) for name, t in case.tensors.items()}
    for name in case.trained:
        tensor = leaves[name]
        assert tensor is not None
        tensor.requires_grad_()
    with _Storages({t.untyped_storage()._cdata for t in leaves.values() if t is not None}) as storages:
        with torch.autocast(torch.get_default_device().type, autocast) if autocast else contextlib.nullcontext():
            y = forward(**leaves)
        gc.collect()
        alive = {cdata: nbytes for cdata, (reference, nbytes) in storages.made.items() if not reference.expired()}
    alive.pop(y.untyped_storage()._cdata, None)
    return sum(alive.values()) / dtype.itemsize


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "lightning_aigc":
            self.calls[func] = args
        return func(*args, **(kwargs or {}))


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
DYNAMIC = "test_aot_dispatch_dynamic"
"""Traces forward and backward with symbolic shapes: a second a call, where the other checks take a hundredth."""


def assert_honours_the_op_contract(case: Case, ops: Sequence[str], dynamic: bool = True) -> None:
    """torch.library.opcheck passes on the custom ops that the call and its backward pass made, which are `ops`.

    Args: dynamic: with the check of symbolic shapes.
    """
    leaves = {name: None if t is None else t.detach().clone() for name, t in case.tensors.items()}
    with _Recorder() as recorder:
        outcome_of(case.fused, leaves, case.trained)
    assert [func.name() for func in recorder.calls] == [f"lightning_aigc::{name}" for name in ops]
    trained = {leaves[name].data_ptr() for name in case.trained}  # type: ignore[union-attr]
    for position, (func, args) in enumerate(recorder.calls.items()):

        def fresh(value: object, forward: bool = position == 0) -> object:
            if not isinstance(value, Tensor):
                return value
            copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value.detach())
            return copy.requires_grad_(forward and value.data_ptr() in trained)

        torch.library.opcheck(func, tree_map(fresh, args), test_utils=(*CHECKS, DYNAMIC) if dynamic else CHECKS)


def assert_compiles(case: Case) -> None:
    """torch.compile takes the call whole and gives the same numbers."""
    torch._dynamo.reset()
    compiled = torch.compile(case.fused, fullgraph=True, backend="aot_eager")
    assert_same(outcome(case, compiled), outcome(case, case.fused))


def scattered(tensor: Tensor) -> Tensor:
    """The same numbers in reversed dimension order, every second one of a row."""
    wide = tensor.new_empty((*reversed(tensor.shape), 2))
    view = wide[..., 0].permute(*reversed(range(tensor.dim())))
    return view.copy_(tensor)


def as_one_picture(tensor: Tensor) -> Tensor:
    """The same numbers as a picture [H, W, C] lies in memory, for a batch [1, C, H, W] of one; another as it is."""
    if tensor.dim() != 4 or tensor.shape[0] != 1:
        return tensor.clone()
    return tensor[0].permute(1, 2, 0).contiguous().permute(2, 0, 1)[None]


def assert_takes_any_strides(case: Case) -> None:
    """Scattered tensors, and a batch made of one picture, give what contiguous ones give."""
    expected = outcome(case, case.fused)
    for lay in (scattered, as_one_picture):
        leaves = {name: None if t is None else lay(t) for name, t in case.tensors.items()}
        assert_same(outcome_of(case.fused, leaves, case.trained), expected)


def assert_can_be_changed_in_place(case: Case) -> None:
    """The op's output is a tensor of its own: code that changes it gets the gradients that it would natively."""

    def changed(forward: Forward) -> Forward:
        return lambda **tensors: forward(**tensors).mul_(3).add_(1)

    assert_same(outcome(case, changed(case.fused)), outcome(case, changed(case.eager)))


def assert_right_without_gradients(case: Case) -> None:
    """no_grad and inference_mode give the same output, and no graph."""
    expected = outcome(case, case.fused)["y"]
    tensors = {name: None if t is None else t.detach().clone() for name, t in case.tensors.items()}
    for name in case.trained:
        tensors[name].requires_grad_()  # type: ignore[union-attr]
    with torch.no_grad():
        y = case.fused(**tensors)
    assert torch.equal(y, expected) and not y.requires_grad
    with torch.inference_mode():
        y = case.fused(**tensors)
    assert torch.equal(y, expected) and y.is_inference()


def assert_refuses_what_it_has_no_rules_for(case: Case, op: str, x: str = "x") -> None:
    """torch.func, forward-mode autograd and a second derivative: an error with the op's name and the reason."""

    def call(given: Tensor) -> Tensor:
        return case.fused(**(case.tensors | {x: given}))

    tensor = case.tensors[x]
    assert tensor is not None
    no_rules = f"lightning_aigc::{op} has no torch.func rules"
    with pytest.raises(RuntimeError, match=no_rules):
        torch.func.grad(lambda given: call(given).sum())(tensor)
    with pytest.raises(RuntimeError, match=no_rules):
        torch.func.vmap(call)(tensor[None])
    with warnings.catch_warnings(), torch.autograd.forward_ad.dual_level():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # torch 2.13's own use of it
        dual = torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(tensor))
        with pytest.raises(RuntimeError, match=no_rules):
            call(dual)
    leaf = tensor.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=f"lightning_aigc::{op} has no second derivative, .* use memory: off"):
        gradient.square().sum().backward()


def assert_shows_nan(case: Case, name: str, index: tuple[int, ...]) -> Outcome:
    """Assert that the op gives NaN wherever plain torch does for a NaN in this place; returns the op's outcome."""
    poisoned = case.tensors[name]
    assert poisoned is not None
    poisoned = poisoned.clone()
    poisoned[index] = torch.nan
    case = Case(case.fused, case.eager, case.tensors | {name: poisoned}, case.trained)
    ours, theirs = outcome(case, case.fused), outcome(case, case.eager)
    for key, expected in theirs.items():
        hidden = expected.isnan() & ~ours[key].isnan()
        assert not hidden.any(), f"{hidden.sum()} NaN hidden in {key}"
    assert ours["y"].isnan().any() and any(ours[key].isnan().any() for key in case.trained)
    return ours
