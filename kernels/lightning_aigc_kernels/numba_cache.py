"""Numba with a compiled code that all processes of a machine share: the first one compiles, the others load.

Compiled code lies in a folder of this CPU's own: hosts that share a home directory may have different ones.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba import config
from numba.misc.appdirs import user_cache_dir

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
"""Without the GIL, and with a division by zero that is infinite and no branch."""


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for this signature now, or load it; without a folder to write to, compile it."""

    def decorate(function: Callable[..., Any]) -> Any:
        with contextlib.suppress(OSError, RuntimeError), _own_folder():
            return numba.njit(signature, cache=True, **OPTIONS)(function)
        return numba.njit(signature, **OPTIONS)(function)

    return decorate


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function as a part of those that call it.

    Raises: ValueError for a closure without a name of its own. Compiled code calls a function by its qualified name and
        a number, which each process counts from 1: of two functions with the same name and number, compiled by two
        processes and read from the cache, one would compute for both.
    """
    if "<locals>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is a closure, which a cache can confuse; use closure_helper(name)")
    return numba.njit(**OPTIONS)(function)


def closure_helper(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a closure as `helper`, under a name that tells it from all others in its file."""

    def decorate(function: Callable[..., Any]) -> Any:
        function.__qualname__ = name
        return helper(function)

    return decorate


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Let Numba cache in this CPU's folder, below the one that the user gave it, if any."""
    given = config.CACHE_DIR
    features = binding.get_host_cpu_features().flatten()
    cpu = f"{binding.get_host_cpu_name()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
    config.CACHE_DIR = str((Path(given) if given else user_folder()) / cpu)
    try:
        yield
    finally:
        config.CACHE_DIR = given


def user_folder() -> Path:
    """Return the folder in which this user's caches of the package lie."""
    return Path(user_cache_dir("lightning_aigc_kernels")) / "numba"
