"""A module whose calls are recorded as graphs and replayed: the denoiser or the ControlNet of a model."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_aigc._lightning import LightningModule, rank_zero_info
from lightning_aigc.precision.context import current
from lightning_aigc.precision.graph.captured_call import (
    CapturedCall,
    GradientBuffer,
    Key,
    key_of,
    note_gradient_strides,
)
from lightning_aigc.precision.graph.device_graphs import Graphs
from lightning_aigc.precision.memory.recompute import BlockState
from lightning_aigc.precision.memory.saved_tensors import tensors_in
from lightning_aigc.sharding.local_parts import original_class

EAGER_CALLS = 2
"""Calls with one key that run eagerly first: a budget counts in the first, and its plan runs in the second."""
MOST_GRAPHS = 8
"""Graphs of one module; beyond them the least recently used is freed."""
MOST_CAPTURES = 2
"""Captures of one key, after which new keys run eagerly: the shapes come in turn too often."""
MOST_KEYS = 256
DIFFUSERS = "diffusers.models."


@dataclass
class _Entry:
    """Calls with one key."""

    calls: int = 0
    captures: int = 0
    captured: CapturedCall | None = None
    refused: bool = False
    gradient_strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Strides of the gradients that the last eager call's outputs got."""


@dataclass
class GraphedRoot:
    """Runs a module's forward and backward as graphs, one pair for each kind of call.

    The first calls of a kind run eagerly, and so do calls without gradients, calls while another forward of the module
    waits for its backward, and all that cannot be recorded, which one log line names.
    """

    root: nn.Module
    graphs: Graphs
    entries: OrderedDict[Key, _Entry] = field(default_factory=OrderedDict)
    reason: str | None = None
    """Reason why the module runs eagerly."""

    def __post_init__(self) -> None:
        self.name = original_class(self.root).__name__
        self._state: ModuleState | None = None
        self._buffer: GradientBuffer | None = None
        self._is_full = False
        self._pool: Any = None
        self._pool_bytes = 0
        self.replays = 0
        graphed = self

        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return graphed.call(args, kwargs)

        forward.__wrapped_by_graph__ = True  # type: ignore[attr-defined]
        self.reason = reason_against(self.root)
        if self.reason is not None:
            rank_zero_info(f"graph: {self.name} runs eagerly: {self.reason}")
            return
        self.root.__dict__["forward"] = types.MethodType(forward, self.root)

    def remove(self) -> None:
        """Restore the module's forward and free the graphs. Idempotent."""
        installed = self.root.__dict__.get("forward")
        if hasattr(installed, "__wrapped_by_graph__"):
            self.root.__dict__.pop("forward")
        self._drop_all()

    def call(self, args: Any, kwargs: Any) -> Any:
        """The module's result."""
        if torch.compiler.is_compiling():
            return self._own_forward(*args, **kwargs)
        entry = self._entry(args, kwargs)
        if entry is None:
            return self._own_forward(*args, **kwargs)
        if not self._serve(entry, args, kwargs):
            result = self._own_forward(*args, **kwargs)
            if not entry.refused:
                note_gradient_strides(result, entry.gradient_strides)
            return result
        assert entry.captured is not None
        self.replays += 1
        return entry.captured(args, kwargs)

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.root).forward(self.root, *args, **kwargs)

    def _entry(self, args: Any, kwargs: Any) -> _Entry | None:
        """The calls of this kind; None for a call that runs eagerly in any case."""
        if self.reason is not None or current.runs_eagerly:
            return None
        if not torch.is_grad_enabled():
            self._make_room()
            return None
        try:
            key = key_of(self.root, args, kwargs)
        except TypeError:
            return None
        entry = self.entries.setdefault(key, _Entry())
        self.entries.move_to_end(key)
        while len(self.entries) > MOST_KEYS:
            self._drop(self.entries.popitem(last=False)[1])
        entry.calls += 1
        return entry

    def _make_room(self) -> None:
        """Give the graphs' memory back to a call without gradients, such as sampling, where little is free."""
        if self._pool_bytes == 0 or self._is_waiting() or self.graphs.free_bytes() >= self._pool_bytes:
            return
        rank_zero_info(
            f"graph: {self.name}: {self._pool_bytes / 2**30:.2f} GiB of graphs are freed for samples, and recorded"
            " again after them"
        )
        self._drop_all()
        for entry in self.entries.values():
            entry.captures = 0

    def _serve(self, entry: _Entry, args: Any, kwargs: Any) -> bool:
        """Whether a graph serves this call, recorded now if need be."""
        if entry.refused or entry.calls <= EAGER_CALLS or self._is_waiting():
            return False
        if self._state is None or not self._state.is_unchanged():  # a strategy may have sharded the weights since
            self._drop_all()
            self.reason = reason_against(self.root)
            if self.reason is not None:
                rank_zero_info(f"graph: {self.name} runs eagerly from now on: {self.reason}")
                return False
        if entry.captured is None:
            self._capture(entry, args, kwargs)
        return entry.captured is not None

    def _capture(self, entry: _Entry, args: Any, kwargs: Any) -> None:
        if entry.captures >= MOST_CAPTURES and not self._is_full:
            self._is_full = True
            rank_zero_info(
                f"graph: {self.name} is called with more than {MOST_GRAPHS} kinds of shapes in turn; the others run"
                " eagerly; larger data.init_args.bucket_reso_steps give fewer"
            )
        if self._is_full and len(self._captured()) >= MOST_GRAPHS:
            return
        tensors = tensors_in((args, kwargs))
        shapes = str([*tensors[0].shape])
        if any(tensor.device.type == "cpu" for tensor in tensors) and self._is_on_accelerator():
            self._refuse(entry, shapes, "an input is in host memory")
            return
        if self._buffer is None:
            self._buffer = GradientBuffer([p for p in self.root.parameters() if p.requires_grad])
        if self._state is None:
            self._state = ModuleState(self.root)
        if self._pool is None:
            self._pool = self.graphs.pool()
        start, before = perf_counter(), self.graphs.reserved_bytes()
        try:
            entry.captured = CapturedCall(
                self.root,
                self._own_forward,
                args,
                kwargs,
                self._buffer,
                self.graphs,
                self._pool,
                entry.gradient_strides,
            )
        except Exception as error:  # what a device, a library or somebody's module raises in a capture
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._refuse(entry, shapes, f"{first} (trainer.plugins.init_args.graph: false is without this attempt)")
            return
        entry.captures += 1
        self._pool_bytes += max(0, self.graphs.reserved_bytes() - before)
        rank_zero_info(f"graph: {self.name} for {shapes} recorded in {perf_counter() - start:.1f} s")
        captured = self._captured()
        if len(captured) > MOST_GRAPHS:
            self._drop(next(e for e in captured if e is not entry))

    def _refuse(self, entry: _Entry, shapes: str, why: str) -> None:
        entry.refused = True
        rank_zero_info(f"graph: {self.name} for {shapes} runs eagerly: {why}")

    def _captured(self) -> list[_Entry]:
        """The kinds of call with a graph, least recently used first."""
        return [entry for entry in self.entries.values() if entry.captured is not None]

    def _is_waiting(self) -> bool:
        return any(entry.captured is not None and entry.captured.is_waiting for entry in self.entries.values())

    def _is_on_accelerator(self) -> bool:
        return any(parameter.device.type != "cpu" for parameter in self.root.parameters())

    def _drop(self, entry: _Entry) -> None:
        if entry.captured is not None:
            entry.captured.reset()
            entry.captured = None

    def _drop_all(self) -> None:
        for entry in self.entries.values():
            self._drop(entry)
        self._state = self._buffer = self._pool = None
        self._pool_bytes = 0


def graph_roots(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the networks of diffusers that code outside calls; a plain model is its own."""
    if not isinstance(model, (LightningModule, nn.ModuleList, nn.ModuleDict)):
        if original_class(model).__module__.startswith(DIFFUSERS):
            yield model
        return
    for child in model.children():
        yield from graph_roots(child)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleState:
    """The state of a module that decides what a graph of it does, to see whether the graph still holds.

    Lists are made once, so that a comparison is a few thousand reads of dictionaries: well below a millisecond.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules: list[Any] = list(root.modules())
        self._tensors = [tensor for tensor in (*root.parameters(), *root.buffers()) for tensor in _plain(tensor)]
        self._parameters = list(root.parameters())
        # A root's own hooks run outside of its graph.
        self._hooks = [getattr(module, name) for module in self._modules[1:] for name in HOOKS]
        self._scales = [m.scaling for m in self._modules if isinstance(getattr(m, "scaling", None), dict)]
        self._adapted = [m for m in self._modules if "_active_adapter" in m.__dict__]
        self._recorded = self._read()

    def is_unchanged(self) -> bool:
        """Whether the module computes what it computed when this object was made, but for the tensors' values."""
        return self._recorded == self._read()

    def _read(self) -> list[Any]:
        modules = self._modules
        return [
            [tensor.data_ptr() for tensor in self._tensors],
            [parameter.requires_grad for parameter in self._parameters],
            [module.training for module in modules],
            [len(module._modules) for module in modules],
            [module.__dict__.get("forward") for module in modules[1:]],
            [len(hooks) for hooks in self._hooks],
            [tuple(scales.items()) for scales in self._scales],
            [(str(m._active_adapter), m.__dict__.get("_disable_adapters"), len(m.merged_adapters))
             for m in self._adapted],
        ]  # fmt: skip


def _plain(tensor: Tensor) -> list[Tensor]:
    """A tensor, or those inside a packed one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in _plain(getattr(tensor, name))]


def reason_against(root: nn.Module) -> str | None:
    """The reason why no graph of this module can be right, with what to do; None if there is none."""
    if "forward" in root.__dict__ and not hasattr(root.__dict__["forward"], "__wrapped_by_graph__"):
        return "its forward was replaced"
    if BlockState(root).has_active_dropout:
        return "a dropout draws random numbers in it; set lora_dropout: 0"
    if any(vars(module).get("_compiled_call_impl") for module in root.modules() if module is not root):
        return "a part of it is compiled, or its blocks wait in host memory"
    if any(getattr(module, "gradient_checkpointing", False) for module in root.modules()):
        return "gradient_checkpointing reads random states; use memory: max in its place"
    for parameter in root.parameters():
        if isinstance(parameter, DTensor):
            return "its weights are sharded, and move at each step; use a strategy that does not shard"
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            return "optimizer_in_backward steps while backward runs; set optimizer_in_backward: false"
    return None
