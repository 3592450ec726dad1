"""Every kernel becomes machine code for NVIDIA chips, without one: upstream Triton brings its own assembler."""

from __future__ import annotations

import importlib

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_aigc_kernels.launch import KernelCase, LaunchConfig
from tools.ascend.gate import OPS

CASES = [
    (op, case) for op in OPS for case in importlib.import_module(f"lightning_aigc_kernels.{op}.kernel").cases("cuda")
]
SHARED_MEMORY_BYTES = 48 * 1024  # what every chip has without asking


def compiled(case: KernelCase, capability: int, **ones: int) -> triton.compiler.CompiledKernel:
    constants = {**case.constants, **ones}
    types = {
        name: "constexpr" if name in constants else case.signature[name]
        for name in case.function.arg_names  # type: ignore[attr-defined]
    }
    source = ASTSource(case.function, types, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=LaunchConfig(1, 1, 8).options)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}-{case.name}" for op, case in CASES])
def test_every_kernel_compiles(op: str, case: KernelCase, capability: int) -> None:
    kernel = compiled(case, capability)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}-{case.name}" for op, case in CASES])
def test_every_kernel_compiles_when_triton_makes_constants_of_ones(op: str, case: KernelCase) -> None:
    numbers = [name for name, kind in case.signature.items() if kind == "i32"]
    assert compiled(case, 80, **dict.fromkeys(numbers, 1)).asm["cubin"]
