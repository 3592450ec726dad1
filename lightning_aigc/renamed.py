"""Names that moved: the old one still imports, and warns once where to find it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of `module` for names that live elsewhere now.

    Args: names: the old name -> the new dotted address, `package.module.Name`.
    """
    told: set[str] = set()

    def __getattr__(name: str) -> Any:  # noqa: N807  it becomes the module's
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = names[name].rpartition(".")
        if name not in told:
            told.add(name)
            warnings.warn(f"{module}.{name} is now {names[name]}", FutureWarning, stacklevel=2)
        return getattr(importlib.import_module(home), new)

    return __getattr__
