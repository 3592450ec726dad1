"""`tools.ascend` with torch alone: it imports, and its errors name the missing tools."""

from __future__ import annotations

import re

import pytest

from tools.ascend import AscendToolchainError, CPUExecutionError, UBOverflow, chip, toolchain
from tools.ascend.__main__ import main
from tools.ascend.cpu_execution import _entry
from tools.ascend.hivm import planned_bytes, scalar_loops
from tools.ascend.lower import notes_of, overflow_in, reason_of


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(toolchain, "installed_version", lambda name: versions.get(name.replace("-", "_")))


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, "not installed: triton-ascend, ascendnpu-ir, pybind11; use a separate venv: `make test-ascend`"),
        ({"triton_ascend": "3.2.0", "pybind11": "3"}, "not installed: ascendnpu-ir;"),
        ({"triton": "3.9.0", "ascendnpu_ir": "1.2.0"}, "triton 3.9.0 is installed, which does not support Ascend; use"),
        ({"triton": "3.9.0", "triton_ascend": "3.2.0"}, "triton 3.9.0 and triton-ascend 3.2.0 are installed over each"),
    ],
    ids=["nothing", "no compiler", "the other triton", "both"],
)
def test_a_missing_or_wrong_toolchain_is_named_with_the_way_out(
    versions: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, **versions)
    with pytest.raises(AscendToolchainError, match=re.escape(message)):
        toolchain.require_toolchain()
    assert main([]) == 2
    assert message in capsys.readouterr().err


def test_a_complete_toolchain_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, triton_ascend="3.2.0", ascendnpu_ir="1.2.0", pybind11="3")
    toolchain.require_toolchain()


@pytest.mark.parametrize("target", ["Ascend910B1", "Ascend910B4-1", "Ascend910B2C", "Ascend910_9382", "Ascend910_9362"])
def test_a2_and_a3_chips_have_192_kib(target: str) -> None:
    assert chip(target).unified_buffer_bytes == 192 * 1024 and not chip(target).is_950


@pytest.mark.parametrize("target", ["Ascend950PR_9589", "Ascend950DT_9571", "Ascend910_9599", "Ascend910_950z"])
def test_950_chips_have_248_kib_and_another_compiler(target: str) -> None:
    assert chip(target).unified_buffer_bytes == 248 * 1024 and chip(target).is_950


def test_an_overflow_is_read_from_the_log_in_bytes() -> None:
    log = "error: ub overflow, requires 2097152 bits while 1572864 bits available! (possible reason: ...)"
    overflow = overflow_in(log, "Ascend910B1")
    assert isinstance(overflow, UBOverflow)
    assert str(overflow) == ("the kernel needs 262144 bytes, Ascend910B1 has 196608; use a smaller BLOCK")
    assert overflow_in("all is well", "Ascend910B1") is None


def test_the_reason_is_the_error_lines_without_repeats() -> None:
    assert reason_of("k.mlir:3:1: error: bad op\nnote: see\nk.mlir:9:1: error: bad op\n") == "bad op"
    assert reason_of("first\nlast\n") == "last"
    assert reason_of("") == "no output"


def test_notes_are_found_with_and_without_a_place() -> None:
    assert notes_of("[NOTE] one\nk.mlir:1:1: [NOTE] two\n[INFO] three") == ["one", "two"]


HIVM = """
module {
  func.func @kernel(%arg0: memref<?xf32>) {
    %c0 = arith.constant 0 : index
    %c64_i64 = arith.constant 64 : i64
    %c4096_i64 = arith.constant 4096 : i64
    %0 = hivm.hir.pointer_cast(%c64_i64) : memref<8x16xf32, #hivm.address_space<ub>>
    %1 = hivm.hir.pointer_cast(%c4096_i64) : memref<32xf16, #hivm.address_space<cbuf>>
    %2 = memref.load %0[%c0, %c0] : memref<8x16xf32, #hivm.address_space<ub>>
    %3 = memref.load %scalar[%i] : memref<1x1xf32, #hivm.address_space<ub>>
    ACCESS
  }
  func.func private @vector(%arg0: index) attributes {hivm.vector_function} {
    %4 = memref.load %5[%arg0] : memref<64xf32, #hivm.address_space<ub>>
  }
}
"""


def test_the_peak_is_the_end_of_the_last_buffer_of_a_memory() -> None:
    assert planned_bytes(HIVM) == 64 + 8 * 16 * 4
    assert planned_bytes(HIVM, "cbuf") == 4096 + 64


@pytest.mark.parametrize(
    ("access", "found"),
    [
        ("%9 = memref.load %0[%i, %c0] : memref<8x16xf32, #hivm.address_space<ub>>", True),
        ("memref.store %9, %0[%c0, %i] {DiscreteMemAccess} : memref<8x16xf32, #hivm.address_space<ub>>", True),
        ("%9 = memref.load %gm[%i] {a = 0 : i32} : memref<?xf16, strided<[1], offset: ?>>", True),
        ("memref.store %9, %0[%c0, %c0] : memref<8x16xf32, #hivm.address_space<ub>>", False),
    ],
)
def test_only_an_element_at_a_changing_place_is_a_scalar_loop(access: str, found: bool) -> None:
    assert scalar_loops(HIVM.replace("ACCESS", access)) == ([access] if found else [])


def test_a_type_that_the_cpu_does_not_take_is_named() -> None:
    text = "func.func @k(%arg0: memref<?xi8>, %arg1: memref<?xf8E4M3FN> {a = 0 : i32}, %arg2: i32) attributes {"
    with pytest.raises(CPUExecutionError, match="arguments of type f8E4M3FN are not supported"):
        _entry(text)
    assert _entry(text.replace("f8E4M3FN", "bf16")) == ("k", ["uint8", "uint16", "i32"])
