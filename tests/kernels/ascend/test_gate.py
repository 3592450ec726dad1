"""Every kernel lowers for every chip with room to spare, and the gate can fail."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import triton
import triton.language as tl

from lightning_aigc_kernels.group_norm_silu.kernel import KERNELS
from lightning_aigc_kernels.launch import KernelCase
from tools.ascend import (
    GATE_TARGETS,
    AscendLowerError,
    Lowered,
    UBOverflow,
    chip,
    complaints,
    kernel_cases,
    lower,
)
from tools.ascend.__main__ import main
from tools.ascend.gate import OPS

CASES = list(kernel_cases())


@triton.jit
def silu_tile(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    tl.store(y + offsets, values * tl.sigmoid(values), mask=offsets < n)


@triton.jit
def gather(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    index = tl.load(y + offsets).to(tl.int32)
    tl.store(y + offsets, tl.load(x + index, mask=index < n, other=0.0).to(tl.float32))


@triton.jit
def doubled_precision(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y, tl.sum(tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float64), 0).to(tl.float32))


SIGNATURE = {"x": "*fp16", "y": "*fp32", "n": "i32"}


@functools.cache
def small(target: str) -> Lowered:
    return lower(silu_tile, SIGNATURE, {"BLOCK": 1024}, target)


@pytest.mark.parametrize("target", GATE_TARGETS)
@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}-{case.name}" for op, case in CASES])
def test_every_kernel_passes_on_every_chip(op: str, case: KernelCase, target: str) -> None:
    lowered = lower(case.function, case.signature, case.constants, target)
    assert complaints(lowered) == []
    assert 0 < lowered.ub_peak_bytes < lowered.ub_limit_bytes


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}-{case.name}" for op, case in CASES])
def test_every_kernel_lowers_when_triton_makes_constants_of_ones(op: str, case: KernelCase) -> None:
    ones = dict.fromkeys((name for name, kind in case.signature.items() if kind == "i32"), 1)
    lowered = lower(case.function, case.signature, {**case.constants, **ones})
    assert lowered.notes == []


@pytest.mark.parametrize("target", GATE_TARGETS)
def test_the_sparse_backward_waits_for_its_own_stores_before_it_reads_them(target: str) -> None:
    barriers = []
    for name in ("backward fp16 1x2048 need_affine=1 sparse=0", "backward fp16 1x1024 need_affine=1 sparse=1"):
        case = next(case for case in KERNELS if case.name == name)
        lowered = lower(case.function, case.signature, case.constants, target)
        barriers.append(lowered.hivm.count("hivm.hir.pipe_barrier[<PIPE_ALL>]"))
    assert barriers[1] == barriers[0] + 1


def test_every_op_is_in_the_gate() -> None:
    assert {op for op, _ in CASES} == set(OPS)
    names = [f"{op} {case.name}" for op, case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("target", "limit"), [("Ascend910B1", 196_608), ("Ascend950PR_9589", 253_952)])
def test_a_block_too_big_for_the_chip_is_named_with_the_bytes(target: str, limit: int) -> None:
    message = rf"the kernel needs \d+ bytes, {target} has {limit}; use a smaller BLOCK"
    with pytest.raises(UBOverflow, match=message) as hit:
        lower(silu_tile, SIGNATURE, {"BLOCK": 65_536}, target)
    assert hit.value.available_bytes == limit == chip(target).unified_buffer_bytes
    assert hit.value.required_bytes > limit


@pytest.mark.parametrize("target", GATE_TARGETS)
def test_a_gather_is_reported_as_a_scalar_loop(target: str) -> None:
    lowered = lower(gather, SIGNATURE, {"BLOCK": 1024}, target)
    assert any("memref.load" in line for line in lowered.scalar_loops)
    assert any("run one element at a time" in complaint for complaint in complaints(lowered))


def test_a_compiler_that_gives_up_double_buffering_is_reported() -> None:
    case = next(case for case in KERNELS if case.name == "backward fp16 1x1024 need_affine=1 sparse=1")
    lowered = lower(case.function, case.signature, {**case.constants, "BLOCK": 8192, "BLOCK_P": 8192})
    assert any("enable-auto-multi-buffer to false" in note for note in lowered.notes)
    assert any(complaint.startswith("the compiler dropped an optimization") for complaint in complaints(lowered))


def test_a_crowded_buffer_is_reported() -> None:
    lowered = dataclasses.replace(small("Ascend910B1"), ub_peak_bytes=170_000)
    assert complaints(lowered) == [
        "170000 of 196608 bytes of the unified buffer are used, more than 85%; use a smaller tile"
    ]


def test_the_memory_plan_and_the_hivm_text_tell_the_same_peak() -> None:
    from tools.ascend.hivm import planned_bytes

    lowered = small("Ascend910B1")
    assert lowered.ub_peak_bytes == planned_bytes(lowered.hivm) == 10_240
    assert sum(buffer.size_bytes for buffer in lowered.ub_buffers) >= 10_240


def test_a_type_the_chip_has_not_is_refused_by_its_stage() -> None:
    with pytest.raises(AscendLowerError, match=r"^\[hivm\] ") as hit:
        lower(doubled_precision, SIGNATURE, {"BLOCK": 1024})
    assert hit.value.stage == "hivm" and hit.value.log


def test_a_kernel_that_triton_refuses_names_the_stage() -> None:
    with pytest.raises(AscendLowerError, match=r"^\[ttir\] "):
        lower(silu_tile, {**SIGNATURE, "x": "*i1"}, {"BLOCK": 0})


def test_wrong_arguments_are_refused_before_any_compiler_runs() -> None:
    with pytest.raises(ValueError, match="arguments without a type or a value: n, BLOCK"):
        lower(silu_tile, {"x": "*fp16", "y": "*fp32"})
    with pytest.raises(ValueError, match="unknown Ascend target 'Ascend310P3'; use one like Ascend910B1"):
        lower(silu_tile, SIGNATURE, {"BLOCK": 1024}, "Ascend310P3")


def test_the_command_prints_a_row_a_kernel_and_fails_with_the_gate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--target", "Ascend910B1", "--kernel", "keep_largest"]
    assert main(arguments) == 0
    *rows, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "all pass" and len(rows) == 4 and all(row.endswith("ok") for row in rows[1:])
    monkeypatch.setattr("tools.ascend.gate.UB_SHARE_LIMIT", 0.01)
    assert main(arguments) == 1
    assert "3 failed" in capsys.readouterr().out
