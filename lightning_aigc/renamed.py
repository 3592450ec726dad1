"""Deprecated aliases of renamed names, which warn once with the new name."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a `__getattr__` for `module` that serves renamed names.

    Args: names: old name -> new dotted path, `package.module.Name`.
    """
    warned: set[str] = set()

    def __getattr__(name: str) -> Any:  # noqa: N807  becomes the module's __getattr__
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = names[name].rpartition(".")
        if name not in warned:
            warned.add(name)
            warnings.warn(f"{module}.{name} is now {names[name]}", FutureWarning, stacklevel=2)
        return getattr(importlib.import_module(home), new)

    return __getattr__
