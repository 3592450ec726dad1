"""Import hooks: call a function once a module has been imported, to register names with Lightning lazily.

Importing Lightning takes seconds, and `import lightning_aigc` must be fast. For the same reason this is stdlib only.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[], None]
_waiting: dict[str, list[Action]] = {}


def when_imported(module_name: str, action: Action) -> None:
    """Call `action` once: now if the module is already imported, else at the end of its import.

    The module is then complete, so the action may import from it. An exception in an action becomes a warning, and the
    import continues. After a failed import the actions wait for the next attempt.
    """
    if sys.modules.get(module_name) is not None:
        importlib.import_module(module_name)  # waits if another thread is importing it
        _run(module_name, [action])
        return
    _waiting.setdefault(module_name, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(MetaPathFinder):
    """Delegates to the other finders, and extends the loader to run the actions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                _act_after(spec)
                return spec
        return None


_finder = _Finder()


def _act_after(spec: ModuleSpec) -> None:
    """Extend the loader in place; a wrapper would hide its other methods from inspect and importlib.resources."""
    loader, name = spec.loader, spec.name
    if loader is None:
        return
    execute = loader.exec_module

    def execute_and_act(module: ModuleType) -> None:
        execute(module)
        if module.__name__ == name:  # the loader of a zip file serves every module in it
            loader.exec_module = execute  # type: ignore[method-assign]
            actions = _waiting.pop(name, [])
            if not _waiting and _finder in sys.meta_path:
                sys.meta_path.remove(_finder)
            _run(name, actions)

    loader.exec_module = execute_and_act  # type: ignore[method-assign]


def _run(module_name: str, actions: Sequence[Action]) -> None:
    for action in actions:
        try:
            action()
        except Exception as error:
            warnings.warn(
                f"{module_name} was imported, but {action.__module__}.{action.__qualname__} failed after it: "
                f"{type(error).__name__}: {error}; what it registers cannot be used",
                stacklevel=2,
            )
