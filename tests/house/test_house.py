"""Structure of the package: no import circles, no long folders, short class ladders, typed settings."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

import lightning_aigc

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_aigc"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MOST_MODULES, MOST_OWN_BASES = 20, 2
DIFFUSION_UPWARDS = ("objectives", "families", "pipeline", "training", "lora", "controlnet", "samplers")
"""Folders of diffusion/; each imports from earlier ones only, and lora and controlnet not from one another."""


def imported(path: Path) -> set[str]:
    """The package's modules that a file imports, for typing and inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & MODULES.keys()


@cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports, read when a test first asks: every worker imports this file."""
    return {name: imported(path) - {name} for name, path in MODULES.items()}


def reachable(start: str) -> set[str]:
    """The modules that a module imports, directly or not."""
    seen: set[str] = set()
    waiting = [*graph()[start]]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph()[name]
    return seen


def test_no_module_imports_itself_through_others() -> None:
    assert [name for name in graph() if name in reachable(name)] == []


SOURCES = [
    path
    for root in ("lightning_aigc", "kernels", "benchmarks", "tools", "tests")
    for path in (ROOT / root).rglob("*.py")
]


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES}), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_folder_has_at_most_twenty_modules(folder: Path) -> None:
    beside = {"__init__.py", "__main__.py", "conftest.py"}
    assert len([path for path in folder.glob("*.py") if path.name not in beside]) <= MOST_MODULES


def test_a_folder_of_many_files_has_a_readme() -> None:
    for room in sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()):
        if len(list(room.rglob("*.py"))) > 15:
            assert (room / "README.md").is_file(), room.name


def test_no_class_has_more_than_two_own_classes_above_it() -> None:
    long = []
    for found in pkgutil.walk_packages(lightning_aigc.__path__, "lightning_aigc."):
        if found.name == "lightning_aigc.__main__":
            continue
        for kind in vars(importlib.import_module(found.name)).values():
            if inspect.isclass(kind) and kind.__module__ == found.name:
                own = [base.__name__ for base in kind.__mro__[1:] if base.__module__.startswith("lightning_aigc")]
                long += [(found.name, kind.__name__, own)] if len(own) > MOST_OWN_BASES else []
    assert long == []


def test_settings_are_typed() -> None:
    """`*args: Any` is what Lightning's hooks pass on; an `args: Any` would hide misspelt settings from mypy."""
    files = (PACKAGE / "diffusion").rglob("*.py")
    assert [p.name for p in files if re.search(r"(?<!\*)\bargs: Any|self\.args\b", p.read_text(encoding="utf-8"))] == []


def test_folders_of_diffusion_import_from_earlier_ones_only() -> None:
    wrong = []
    for name, targets in graph().items():
        parts = name.split(".")
        if parts[1:2] != ["diffusion"] or parts[2:3] == [] or parts[2] not in DIFFUSION_UPWARDS:
            continue
        here = DIFFUSION_UPWARDS.index(parts[2])
        for target in targets:
            there = target.split(".")[1:3]
            if there[0] == "diffusion" and there[-1] in DIFFUSION_UPWARDS[here + 1 :]:
                wrong.append((name, target))
    assert wrong == []
