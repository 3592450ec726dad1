"""Parse the HIVM text of a lowered kernel for planned buffers and scalar loops."""

from __future__ import annotations

import re

_ITEM_BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
_OFFSET = re.compile(r"(%[\w-]+) = arith\.constant (-?\d+) : i64")
_POINTER_CAST = re.compile(
    r"hivm\.hir\.pointer_cast\(([^)]*)\)[^:\n]*: memref<([^,>]*), #hivm\.address_space<(\w+)>>",
)
_CONSTANT = re.compile(r"(%[\w-]+) = (?:arith|llvm\.mlir)\.constant\b")
_ELEMENT = re.compile(
    r"memref\.(load|store) (?:%[\w#-]+, )?(%[\w#-]+)\[([^\]]*)\](?: \{[^}]*\})? : memref<([\dx?]+)x[a-z]",
)


def planned_bytes(hivm: str, space: str = "ub") -> int:
    """Peak bytes of the buffers planned in an on-chip memory ("ub", or "cbuf" for matrix kernels)."""
    offsets = {name: int(value) for name, value in _OFFSET.findall(hivm)}
    peak = 0
    for names, shape, its_space in _POINTER_CAST.findall(hivm):
        if its_space != space or "?" in shape:  # a dynamic view aliases a static buffer, which is counted
            continue
        *dimensions, item = shape.split("x")
        size = _ITEM_BYTES.get(item, 4)
        for dimension in dimensions:
            size *= int(dimension)
        starts = [offsets[name] for name in (n.strip().split(" ")[0] for n in names.split(",")) if name in offsets]
        peak = max([peak, *(start + size for start in starts)])
    return peak


def scalar_loops(hivm: str) -> list[str]:
    """Lines that access single elements at a variable index, in a loop that the vector core cannot run.

    On A2 and A3 a gather, `tl.cumsum` and Philox compile to such loops. The masked end of a row does not, nor do
    scalars in a buffer of one element.
    """
    found = []
    for function in re.split(r"(?=^ *func\.func )", hivm, flags=re.MULTILINE):
        if "hivm.vector_function" in function.split("\n", 1)[0]:
            continue  # its loops step by whole vectors
        constants = set(_CONSTANT.findall(function))
        for line in function.splitlines():
            match = _ELEMENT.search(line)
            if match is None or set(match[4].split("x")) == {"1"}:
                continue
            indices = [index.strip() for index in match[3].split(",") if index.strip()]
            if not all(index in constants for index in indices):
                found.append(line.strip())
    return found
