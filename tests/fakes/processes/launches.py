"""Count the operators that launch kernels and the host's synchronisations in a piece of code."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Counts what makes the host wait for a value."""

    WAITING = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy", "nonzero"})

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.WAITING
        return func(*args, **(kwargs or {}))
