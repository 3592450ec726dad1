"""Quantized blocks: every implementation gives the same bits, and the wire is what its layout says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from torch import Tensor

import lightning_aigc_kernels
from fakes.models.hard_blocks import bits_of, hard_blocks
from fakes.processes.programs import WITHOUT_COLLECTIONS
from lightning_aigc_kernels import add_quantized_rows, dequantize_blocks, numba_cache, quantize_blocks
from lightning_aigc_kernels.dispatch import FallbackWarning, cpu_kernel_for
from lightning_aigc_kernels.quantize_blocks import BLOCK, GROUP, packed_bytes, part_kernel, reference

BITS = (3, 4, 8)


@pytest.fixture
def compiled() -> Any:
    kernel = cpu_kernel_for("quantize_blocks")
    assert kernel is not None, "Numba is not installed, or cannot compile"
    return kernel


def rows(count: int) -> Tensor:
    return torch.cat([hard_blocks(seed).view(1, -1) for seed in range(count)])


def results(of: Any, values_RN: Tensor, bits: int) -> list[Tensor]:
    """All that an implementation writes, as bits, into memory that held something else."""
    left_RN = values_RN.clone()
    packed_RB = torch.full((len(values_RN), packed_bytes(values_RN.shape[1], bits)), 255, dtype=torch.uint8)
    of.quantize_blocks(left_RN, packed_RB, bits)
    read_RN = torch.full_like(values_RN, torch.nan)
    check = of.dequantize_blocks(packed_RB, read_RN, bits)
    added_N = torch.linspace(-1, 1, values_RN.shape[1])
    of.add_quantized_rows(packed_RB, added_N, bits)
    return [packed_RB, *(bits_of(each) for each in (left_RN, read_RN, added_N, check.view(1)))]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("bits", BITS)
def test_numba_gives_the_reference_s_bits(bits: int, count: int, compiled: Any) -> None:
    values_RN = rows(count)
    for ours, theirs in zip(results(compiled, values_RN, bits), results(reference, values_RN, bits), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bits", BITS)
def test_the_reference_gives_the_same_bits_in_any_chunks(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = results(reference, rows(5), bits)
    for chunk in (GROUP, 3 * GROUP, 70 * GROUP):
        monkeypatch.setattr(reference, "CPU_CHUNK", chunk)
        assert all(torch.equal(a, b) for a, b in zip(whole, results(reference, rows(5), bits), strict=True))


@pytest.mark.parametrize("bits", BITS)
def test_the_bytes_lie_where_the_layout_says(bits: int) -> None:
    """One value after the other, as `layout.py` describes them."""
    half, groups = 2 ** (bits - 1), 3
    values_N = torch.randn(groups * GROUP, generator=torch.Generator().manual_seed(bits))
    packed_1B = torch.zeros(1, packed_bytes(len(values_N), bits), dtype=torch.uint8)
    quantize_blocks(values_N.clone().view(1, -1), packed_1B, bits)
    scales_KG = packed_1B[0, : groups * 16].view(torch.bfloat16).view(8, groups).float()
    codes_GPL = packed_1B[0, groups * 16 :].view(groups, bits, BLOCK).tolist()
    for group in range(groups):
        for lane in range(BLOCK):
            word = sum(codes_GPL[group][byte][lane] << 8 * byte for byte in range(bits))
            for block in range(8):
                scale = scales_KG[block, group].item()
                value = values_N[group * GROUP + block * BLOCK + lane].item()
                integer = (word >> bits * block & 2**bits - 1) - half
                assert abs(integer - value / scale) <= 0.501 or integer == half - 1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [GROUP, 3 * GROUP + 77])
def test_a_part_of_a_row_is_packed_and_read_as_the_whole_would_be(bits: int, length: int, compiled: Any) -> None:
    groups, first, share, scale = 7, 2, 0.25, 4.0
    generator = torch.Generator().manual_seed(length)
    padded = -(-length // GROUP) * GROUP
    gradient_N, residual_N = torch.randn(length, generator=generator), torch.randn(padded, generator=generator)
    received_RB = torch.empty(3, packed_bytes(groups * GROUP, bits), dtype=torch.uint8)
    quantize_blocks(torch.randn(3, groups * GROUP, generator=generator), received_RB, bits)
    whole_N = torch.zeros(groups * GROUP)
    part = whole_N[first * GROUP : first * GROUP + padded]
    part.copy_(residual_N)[:length] += share * gradient_N
    for row in (0, 2):
        add_quantized_rows(received_RB[row : row + 1], others_N := torch.zeros(groups * GROUP), bits)
        part += others_N[first * GROUP : first * GROUP + padded]
    packed_B, wanted_B = (torch.zeros(packed_bytes(groups * GROUP, bits), dtype=torch.uint8) for _ in range(2))
    reference.quantize_blocks(whole_N.view(1, -1), wanted_B.view(1, -1), bits)

    error_N = torch.full_like(residual_N, torch.nan)
    received, codes = received_RB.view(-1).numpy(), packed_B.numpy()
    compiled.quantize_part(
        gradient_N.numpy(), share, residual_N.numpy(), error_N.numpy(), received, received.view("u2"), 3, 1,
        codes, codes.view("u2"), groups, first, bits, BLOCK,
    )  # fmt: skip
    assert torch.equal(bits_of(error_N), bits_of(part))
    out_N, read_N = torch.full((length,), torch.nan), torch.empty(1, groups * GROUP)
    compiled.dequantize_part(codes, codes.view("u2"), groups, first, bits, scale, out_N.numpy())
    reference.dequantize_blocks(wanted_B.view(1, -1), read_N, bits)
    assert torch.equal(out_N, read_N[0, first * GROUP : first * GROUP + length] * scale)


def test_what_does_not_fit_is_named() -> None:
    values, packed = torch.zeros(2, GROUP), torch.zeros(2, packed_bytes(GROUP, 3), dtype=torch.uint8)
    for bits, given, bytes_, said in [
        (5, values, packed, "bits must be one of 3, 4, 8; got 5"),
        (3, values.double(), packed, "values must be float32 and packed uint8, got torch.float64"),
        (3, values[:, :100].contiguous(), packed, r"divides by 256, got \(2, 100\); pad them with zeros"),
        (3, values, packed[:1], r"values \(2, 256\) pack to \(2, 112\) at 3 bits, got \(1, 112\)"),
        (3, torch.zeros(GROUP, 2).T, packed, "both must be contiguous"),
    ]:
        with pytest.raises(ValueError, match=said):
            quantize_blocks(given, bytes_, bits)
        with pytest.raises(ValueError, match=said):
            dequantize_blocks(bytes_, given, bits)


def test_without_numba_torch_computes_the_same_and_a_warning_says_so(without_numba: None) -> None:
    values_RN = rows(2)
    packed_RB = torch.zeros(2, packed_bytes(values_RN.shape[1], 3), dtype=torch.uint8)
    with pytest.warns(FallbackWarning, match="pip install numba"):
        quantize_blocks(values_RN.clone(), packed_RB, 3)
    assert torch.equal(packed_RB, results(reference, values_RN, 3)[0])
    assert part_kernel(torch.device("cpu")) is None


def test_a_closure_without_a_name_of_its_own_is_not_compiled() -> None:
    with pytest.raises(ValueError, match=r"<locals>.<lambda> is a closure.*; use closure_helper\(name\)"):
        numba_cache.helper(lambda value: value)


CHILD = """
import os
import torch
from lightning_aigc_kernels import add_quantized_rows, dequantize_blocks
from lightning_aigc_kernels.quantize_blocks import packed_bytes, part_kernel, quantize_blocks
values = torch.randn(1, 2560, generator=torch.Generator().manual_seed(0))
packed = torch.zeros(1, packed_bytes(2560, 3), dtype=torch.uint8)
quantize_blocks(values, packed, 3)
pid = os.fork()  # what was compiled runs in a forked process too
again = torch.zeros_like(packed)
quantize_blocks(torch.randn(1, 2560, generator=torch.Generator().manual_seed(0)), again, 3)
equal = torch.equal(packed, again)
if pid == 0:
    os._exit(0 if equal else 1)
assert equal and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
read, added, part = torch.zeros(1, 2560), torch.ones(2560), torch.zeros(600)
dequantize_blocks(packed, read, 3)
add_quantized_rows(packed, added, 3)
codes = packed.view(-1).numpy()
part_kernel(torch.device("cpu")).dequantize_part(codes, codes.view("u2"), 10, 1, 3, 1.0, part.numpy())
assert torch.equal(added, read[0] + 1) and torch.equal(part, read[0, 256:856]), "one function ran for another"
print(packed.sum().item(), read.double().sum().item())
"""


def run_children(count: int, cache: Path, home: Path) -> set[str]:
    """Output of `count` processes that compile at once, or read the others' results."""
    environment = {
        "PYTHONPATH": str(Path(lightning_aigc_kernels.__file__).parents[1]), "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(cache), "HOME": str(home), "PATH": "/usr/bin:/bin",
    }  # fmt: skip
    command = [sys.executable, "-W", "error", "-c", WITHOUT_COLLECTIONS + CHILD]
    children = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    ends = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * count, ends
    return {out for out, _ in ends}


def test_processes_that_fill_a_cache_together_all_come_to_the_same(compiled: Any, tmp_path: Path) -> None:
    cache, given = tmp_path / "numba", numba.config.CACHE_DIR
    ours = Path(given) if given else numba_cache.user_folder()
    for folder in ours.glob("*/quantize_blocks_*"):  # what this process compiled or read
        shutil.copytree(folder, cache / folder.relative_to(ours))
    # Numba counts each process's functions from 1, and once took one function of the same number and name for another:
    # two processes compile these at once, and read the rest, which a third one compiled.
    for name in ("dequantize_rows", "add_rows"):
        for file in cache.rglob(f"cpu_kernel.{name}-*"):
            file.unlink()
    values = torch.randn(1, 2560, generator=torch.Generator().manual_seed(0))
    packed, read = torch.zeros(1, packed_bytes(2560, 3), dtype=torch.uint8), torch.zeros(1, 2560)
    reference.quantize_blocks(values, packed, 3)
    reference.dequantize_blocks(packed, read, 3)
    assert run_children(2, cache, tmp_path) == {f"{packed.sum().item()} {read.double().sum().item()}\n"}
    assert {path.name.split("-")[0] for path in cache.rglob("cpu_kernel.*.nbc")} >= KERNELS


KERNELS = {f"cpu_kernel.{name}" for name in ("quantize_rows", "dequantize_rows", "add_rows", "quantize_part")}


def test_without_a_folder_to_write_to_a_function_is_compiled_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "/proc/nothing")
    monkeypatch.setenv("HOME", "/proc/nothing")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    names: dict[str, Any] = {}
    exec(compile("def twice(value): return 2 * value", "/proc/nothing/twice.py", "exec"), names)
    twice = numba_cache.compiled("f8(f8)")(names["twice"])
    assert twice(1.5) == 3 and len(twice.overloads) == 1
    assert type(twice._cache).__name__ == "NullCache"
