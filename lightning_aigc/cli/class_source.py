"""Arguments of classes with defaults and help, read from the source: importing torch for a help page takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

REQUIRED = object()
"""Default of an argument that has none."""


@dataclass(frozen=True)
class Argument:
    """One argument of a class: the docstring's text on it, and its default."""

    text: str
    default: Any


def arguments_of(name: str) -> dict[str, Argument]:
    """The documented arguments of a class `package.module.Class`, of its constructor or its dataclass fields.

    Raises: KeyError for a class that is not in that module.
    """
    module, _, class_name = name.rpartition(".")
    found = _classes(source_of(module))[class_name]
    functions = [
        each for each in found.body if isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__new__")
    ]
    texts = _texts(ast.get_docstring(found))
    defaults = _field_defaults(found)
    for function in functions:
        texts |= _texts(ast.get_docstring(function))
        defaults |= _defaults(function.args)
    return {key: Argument(text, defaults.get(key, REQUIRED)) for key, text in texts.items()}


def class_values(name: str) -> dict[str, Any]:
    """The constants that a module's classes assign in their bodies, such as a family's name, by `Class.attribute`."""
    return {
        f"{owner}.{key}": value
        for owner, found in _classes(source_of(name)).items()
        for key, value in (_assigned(found) | _field_defaults(found)).items()
    }


def source_of(module: str) -> Path:
    """The file of a module, whose package is found and not imported."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, f"{package} is not installed"
    path = Path(spec.submodule_search_locations[0], *inner)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@lru_cache
def _classes(path: Path) -> dict[str, ast.ClassDef]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {each.name: each for each in body if isinstance(each, ast.ClassDef)}


def _texts(docstring: str | None) -> dict[str, str]:
    from docstring_parser import DocstringStyle, parse

    found = parse(docstring or "", DocstringStyle.GOOGLE).params
    return {each.arg_name: " ".join((each.description or "").split()) for each in found}


def _defaults(given: ast.arguments) -> dict[str, Any]:
    positional = given.args[len(given.args) - len(given.defaults) :]
    pairs = [*zip(positional, given.defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return {argument.arg: _constant(value) for argument, value in pairs if value is not None}


def _assigned(found: ast.ClassDef) -> dict[str, Any]:
    statements = [each for each in found.body if isinstance(each, ast.Assign)]
    pairs = [(target, each.value) for each in statements for target in each.targets]
    return {target.id: _constant(value) for target, value in pairs if isinstance(target, ast.Name)}


def _field_defaults(found: ast.ClassDef) -> dict[str, Any]:
    fields = [each for each in found.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return {each.target.id: _constant(each.value) for each in fields if each.value is not None}  # type: ignore[union-attr]


def _constant(value: ast.expr) -> Any:
    """The value of a literal; None for an expression."""
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None
