"""State of a module that a graph keeps as it was, and reasons against a graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
    for module in root.modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            return "a dropout draws random numbers in it; set lora_dropout: 0"
        if getattr(module, "gradient_checkpointing", False):
            return "gradient_checkpointing reads random states; use memory: max in its place"
    for parameter in root.parameters():
        if isinstance(parameter, DTensor):
            return "its weights are sharded, and move at each step; use a strategy that does not shard"
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            return "optimizer_in_backward steps while backward runs; set optimizer_in_backward: false"
    return None
