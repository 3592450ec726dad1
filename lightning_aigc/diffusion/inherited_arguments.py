"""The signature of a class with the arguments that it passes on to its bases."""

from __future__ import annotations

import inspect


def merged_signature(cls: type, root: type) -> inspect.Signature:
    """The signature of a class with the arguments of its bases up to `root`, passed on by **kwargs, as keywords."""
    merged: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__[: cls.__mro__.index(root) + 1]:
        if "__init__" in vars(base):
            for p in list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]:
                kind = p.KEYWORD_ONLY if merged and base is not cls else p.kind
                if p.kind is not p.VAR_KEYWORD:
                    merged.setdefault(p.name, p.replace(kind=kind))
    return inspect.Signature(list(merged.values()))
