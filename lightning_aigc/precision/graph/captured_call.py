"""One call of a module with given shapes: its forward and backward as two graphs behind one autograd node."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_aigc.precision.graph.device_graphs import Graph, Graphs
from lightning_aigc.precision.memory.saved_tensors import tensors_in

Key = tuple[Any, ...]


def key_of(module: nn.Module, args: Any, kwargs: Any) -> Key:
    """All that decides which operators a call runs, apart from the module's own state.

    Raises: TypeError for an argument that cannot be compared.
    """
    leaves, structure = tree_flatten((args, kwargs))
    device = next((tensor.device.type for tensor in tensors_in(leaves)), "cpu")
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    key = (structure, module.training, autocast, *map(_described, leaves))
    hash(key)
    return key


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf


class GradientBuffer:
    """Memory for the gradients of a module's trained parameters, shared by all its graphs; one tensor a dtype."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        self.trained = trained
        dtypes = dict.fromkeys(parameter.dtype for parameter in trained)
        self._numbers = {dtype: [i for i, p in enumerate(trained) if p.dtype is dtype] for dtype in dtypes}
        self._flat = {
            dtype: trained[numbers[0]].new_zeros(sum(trained[i].numel() for i in numbers))
            for dtype, numbers in self._numbers.items()
        }
        self.views = self._views_of(self._flat)

    def copies(self) -> list[Tensor]:
        """The gradients, safe from the next replay."""
        return self._views_of({dtype: flat.clone() for dtype, flat in self._flat.items()})

    def _views_of(self, flat: dict[torch.dtype, Tensor]) -> list[Tensor]:
        views: list[Any] = [None] * len(self.trained)
        for dtype, numbers in self._numbers.items():
            parameters = [self.trained[i] for i in numbers]
            for i, view in zip(numbers, _unflatten(flat[dtype], parameters), strict=True):
                views[i] = view
        return views


class _Waiting:
    """Lives while a forward waits for its backward."""


class CapturedCall:
    """The graphs of a module's calls with one key.

    Args:
        root: The module.
        forward: The module's own forward.
        args, kwargs: Of the call that is recorded.
        buffer: For the gradients of the trained parameters.
        gradient_strides: Of the gradients that backward gets, by the number of the output, where known.

    Raises: what the device raises if the forward or the backward cannot be recorded.
    """

    def __init__(
        self,
        root: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        buffer: GradientBuffer,
        graphs: Graphs,
        pool: Any,
        gradient_strides: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        leaves, structure = tree_flatten((args, kwargs))
        given = tensors_in(leaves)
        self._held = [_memory_like(x) for x in given]
        self.inputs = [
            held.expand(x.shape).requires_grad_(x.requires_grad) for held, x in zip(self._held, given, strict=True)
        ]
        self.copy_inputs(given)
        self.buffer = buffer
        self._gradient_strides = gradient_strides
        with _aliased(root, buffer.trained) as trained:
            self.forward, self.backward = self._record(forward, leaves, structure, trained, graphs, pool)
        self.waiting: weakref.ref[_Waiting] | None = None

    def _record(
        self,
        forward: Callable[..., Any],
        leaves: list[Any],
        structure: TreeSpec,
        trained: list[nn.Parameter],
        graphs: Graphs,
        pool: Any,
    ) -> tuple[Graph, Graph]:
        static = iter(self.inputs)
        merged = [next(static) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        static_args, static_kwargs = tree_unflatten(merged, structure)
        device = self.inputs[0].device.type
        wanted = [x for x in self.inputs if x.requires_grad] + list[Tensor](trained)

        def run() -> Any:
            with _without_autocast_cache():
                return forward(*static_args, **static_kwargs)

        def backward_of(outputs: list[Tensor], gradients: list[Tensor]) -> list[Tensor | None]:
            found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
            count = len(wanted) - len(trained)
            of_trained = list(found[count:])
            self.is_used = [gradient is not None for gradient in of_trained]
            pairs = [(view, g) for view, g in zip(self.buffer.views, of_trained, strict=True) if g is not None]
            if pairs:
                torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
            return list(found[:count])

        def warm_up() -> None:
            outputs = _differentiable(run())
            with torch.autocast(device, enabled=False):
                torch.autograd.grad(outputs, wanted, [torch.zeros_like(y) for y in outputs], allow_unused=True)

        graphs.warm_up(warm_up)
        forward_graph, result = graphs.record(run, pool)
        self.outputs = _differentiable(result)
        self.output_gradients = [
            torch.empty_strided(y.shape, self._gradient_strides.get(i, y.stride()), dtype=y.dtype, device=y.device)
            for i, y in enumerate(self.outputs)
        ]
        # As a Trainer's backward runs: under autocast, recomputed products would be cast once more.
        with torch.autocast(device, enabled=False):
            backward_graph, self.input_gradients = graphs.record(
                lambda: backward_of(self.outputs, self.output_gradients), pool
            )
        self.outputs = [y.detach() for y in self.outputs]
        made, self.result_structure = tree_flatten(result)
        self.is_output = [isinstance(x, Tensor) and x.requires_grad for x in made]
        self.result_leaves = [x.detach() if isinstance(x, Tensor) else x for x in made]
        return forward_graph, backward_graph

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The module's result for other tensors of the same shapes."""
        tensors = tensors_in((args, kwargs))
        outputs = iter(_replay(self, len(tensors), *tensors, *self.buffer.trained))
        leaves = [
            next(outputs) if is_output else leaf.clone() if isinstance(leaf, Tensor) else leaf
            for leaf, is_output in zip(self.result_leaves, self.is_output, strict=True)
        ]
        return tree_unflatten(leaves, self.result_structure)

    def copy_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Write a call's tensors where the graph reads them."""
        with torch.no_grad():
            torch._foreach_copy_(self._held, [_distinct(x) for x in tensors])

    @property
    def is_waiting(self) -> bool:
        """Whether a forward's backward, which reads the graph's memory, is still to come."""
        return self.waiting is not None and self.waiting() is not None

    def reset(self) -> None:
        """Give the graphs' memory back."""
        self.forward.reset()
        self.backward.reset()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CapturedCall, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        call.copy_inputs(tensors[:count])
        call.forward.replay()
        ctx.call, ctx.waiting = call, _Waiting()
        call.waiting = weakref.ref(ctx.waiting)
        ctx.set_materialize_grads(False)
        return tuple(y.clone() for y in call.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: CapturedCall = ctx.call
        if ctx.waiting is None or call.waiting is None or call.waiting() is not ctx.waiting:
            raise RuntimeError(
                "a graph's backward runs once, got a second one (retain_graph=True); set graph: false for this loss"
            )
        for static, gradient in zip(call.output_gradients, gradients, strict=True):
            static.zero_() if gradient is None else static.copy_(gradient)
        call.backward.replay()
        of_inputs = iter(call.input_gradients)
        inputs = [_copy(next(of_inputs)) if x.requires_grad else None for x in call.inputs]
        copies = call.buffer.copies()
        ctx.waiting = None
        trained = [copy if is_used else None for copy, is_used in zip(copies, call.is_used, strict=True)]
        return None, None, *inputs, *trained


@contextlib.contextmanager
def _aliased(root: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Give the module other parameters in the same memory as its trained ones, and yield them.

    A parameter's hooks would run in the capture, and its node in autograd's graph, which DDP keeps, belongs to another
    stream, which a captured backward must not wait for.
    """
    aliases = {id(parameter): nn.Parameter(parameter.detach()) for parameter in trained}
    held = [
        (module, name, parameter)
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in aliases
    ]
    for module, name, parameter in held:
        module._parameters[name] = aliases[id(parameter)]
    try:
        yield list(aliases.values())
    finally:
        for module, name, parameter in held:
            module._parameters[name] = parameter


def _distinct(x: Tensor) -> Tensor:
    """One of each number of a tensor that repeats them, with a stride of 0."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _memory_like(x: Tensor) -> Tensor:
    """Memory with x's strides: other strides would choose other kernels, with other bits."""
    x = _distinct(x)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


_replay: Any = _Replay.apply
_unflatten: Any = torch._utils._unflatten_dense_tensors


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def note_gradient_strides(result: Any, strides: dict[int, tuple[int, ...]]) -> None:
    """Write the strides of the gradients that backward will bring to an eager call's outputs, by their number.

    A ControlNet's residuals get gradients with the U-Net's strides, and sums over them have those strides' bits.
    """

    def note(number: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if 0 not in gradient.stride():  # one number for many places would take later gradients' numbers
                strides[number] = gradient.stride()

        return hook

    for number, output in enumerate(_differentiable(result)):
        output.register_hook(note(number))  # type: ignore[no-untyped-call]


def _differentiable(result: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(result) if tensor.requires_grad]


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Cast weights anew: a cached cast of an earlier call would be a constant of the graph."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
