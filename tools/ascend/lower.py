"""Lower a @triton.jit kernel for an Ascend chip on a machine without one.

triton-ascend produces TTIR and linalg, ascendnpu-ir HIVM with its on-chip memory plan. The last step, HIVM to binary,
is the vendor's closed `hivmc`; an empty script in its place on PATH lets the compiler finish and save the HIVM.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.ascend.chips import Chip, chip
from tools.ascend.errors import AscendLowerError, UBOverflow
from tools.ascend.hivm import planned_bytes, scalar_loops
from tools.ascend.toolchain import bishengir_binary, require_toolchain

COMPILE_TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True)
class UBBuffer:
    """One buffer planned in the unified buffer."""

    size_bytes: int
    offset_bytes: int
    ir: str


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A kernel lowered by the Ascend compilers, with its resources."""

    target: str
    ttir: str
    linalg: str
    hivm: str
    ub_peak_bytes: int
    ub_limit_bytes: int
    ub_buffers: list[UBBuffer]
    """Empty for a 950, whose compiler prints only the total."""
    scalar_loops: list[str]
    """HIVM lines that access one element at a time."""
    notes: list[str]
    """Optimizations that the compiler dropped to make the kernel fit, such as double buffering."""
    seconds: dict[str, float]

    @property
    def ub_share(self) -> float:
        """The share of the unified buffer in use."""
        return self.ub_peak_bytes / self.ub_limit_bytes


def lower(
    fn: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int | bool] | None = None,
    target: str = "Ascend910B1",
    options: Mapping[str, object] | None = None,
) -> Lowered:
    """Run every open stage of the Ascend compilers on a kernel.

    Args: signature holds Triton's type of each argument that is not in `constants`; options are triton-ascend's.
    Raises: AscendToolchainError without the compilers; UBOverflow if the buffers do not fit; AscendLowerError with the
        compiler's reason; ValueError for an unknown target or an argument in neither mapping.
    """
    its_chip = chip(target)
    constants = dict(constants or {})
    missing = [name for name in fn.arg_names if name not in signature and name not in constants]
    if missing:
        raise ValueError(f"arguments without a type or a value: {', '.join(missing)}")
    require_toolchain()
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    ttir, linalg, stripped, flags = _front_end(fn, signature, constants, its_chip, dict(options or {}))
    seconds["linalg"] = time.perf_counter() - start
    start = time.perf_counter()
    hivm, buffers, log = _back_end(stripped, its_chip, flags)
    seconds["hivm"] = time.perf_counter() - start
    printed = re.findall(r"Allocated UB size = (\d+) bits", log)
    planned = max((buffer.size_bytes + buffer.offset_bytes for buffer in buffers), default=planned_bytes(hivm))
    return Lowered(
        target=target,
        ttir=ttir,
        linalg=linalg,
        hivm=hivm,
        ub_peak_bytes=int(printed[-1]) // 8 if printed else planned,
        ub_limit_bytes=its_chip.unified_buffer_bytes,
        ub_buffers=buffers,
        scalar_loops=scalar_loops(hivm),
        notes=notes_of(log),
        seconds=seconds,
    )


def notes_of(log: str) -> list[str]:
    """The compiler's [NOTE] lines, the only trace of a retry without an optimization after an overflow."""
    return [line.split("[NOTE]", 1)[1].strip() for line in log.splitlines() if "[NOTE]" in line]


def _front_end(
    fn: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int | bool],
    its_chip: Chip,
    options: dict[str, object],
) -> tuple[str, str, str, list[str]]:
    """TTIR, linalg, linalg in the back end's form, and the back end's flags.

    `triton.compile` cannot be used, because its last stage needs CANN and a driver.
    """
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend = ascend.AscendBackend(GPUTarget("npu", its_chip.target, 0))
    options = {"compile_on_910_95": its_chip.is_950, **options}
    parsed = backend.parse_options(options)
    types = {name: "constexpr" if name in constants else signature[name] for name in fn.arg_names}
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"target": GPUTarget("npu", its_chip.target, 0), **dataclasses.asdict(parsed)}
    try:
        source = ASTSource(fn=fn, signature=types, constants=dict(constants))
        module = source.make_ir(parsed, backend.get_codegen_implementation(), backend.get_module_map(), context)
        module = ascend.make_ttir(module, metadata, parsed)
    except Exception as error:  # Triton raises many types; each message names the line of the kernel
        raise AscendLowerError("ttir", f"{type(error).__name__}: {error}", str(error)) from error
    ttir = str(module)
    try:
        linalg = ascend.ttir_to_linalg(module, metadata, parsed, named_ops=True)
    except subprocess.CalledProcessError as error:
        log = (error.stderr or b"").decode(errors="replace")
        raise AscendLowerError("linalg", reason_of(log), log) from error
    stripped, _ = ascend._parse_linalg_metadata(linalg, metadata)
    flags = [
        f"--enable-auto-multi-buffer={parsed.multibuffer}",
        f"--enable-auto-bind-sub-block={parsed.enable_auto_bind_sub_block}",
    ]
    return ttir, linalg, stripped, flags


def _back_end(linalg: str, its_chip: Chip, flags: list[str]) -> tuple[str, list[UBBuffer], str]:
    """HIVM after memory planning, the planned buffers, and the compiler's output."""
    compiler = bishengir_binary(its_chip.compiler)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for closed in ("hivmc", "hivmc-a5"):
            script = folder / "bin" / closed
            script.parent.mkdir(exist_ok=True)
            script.write_text("#!/bin/sh\nexit 0\n")
            script.chmod(0o755)
        (folder / "kernel.mlir").write_text(linalg)
        command = [
            str(compiler),
            str(folder / "kernel.mlir"),
            f"--target={its_chip.target}",
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true",
            *flags,
            "--enable-memory-display",
            *(["--enable-print-memory-allocated-size"] if its_chip.is_950 else []),
            f"--save-temps={folder / 'stages'}",
            "-o",
            str(folder / "kernel.o"),
        ]
        path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "PATH": path},
            cwd=folder,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        log = result.stdout + result.stderr
        hivm = folder / "stages" / "module.hivm.opt.mlir"
        if not hivm.exists():
            raise overflow_in(log, its_chip.target) or AscendLowerError("hivm", reason_of(log), log)
        return hivm.read_text(), _buffers(folder), log


def _buffers(folder: Path) -> list[UBBuffer]:
    """Read the memory plan of the A2 and A3 compilers, with extents in bits and offsets in bytes."""
    return [
        UBBuffer(buffer["extent"] // 8, offset, buffer["buffer"])
        for path in folder.glob("memory_info*.json")
        for record in json.loads(path.read_text())["Record"]
        for buffer in record["memory_info_array"]
        if "address_space<ub>" in buffer["buffer"]
        for offset in buffer["offset"]
    ]


def overflow_in(log: str, target: str) -> UBOverflow | None:
    """The overflow reported in a compiler log, or None."""
    match = re.search(r"(ub|cbuf|l0[abc]) overflow, requires (\d+) bits while (\d+) bits available", log)
    return match and UBOverflow(match[1].upper(), target, int(match[2]) // 8, int(match[3]) // 8, log)


def reason_of(log: str) -> str:
    """The error lines of a compiler log, or its last line."""
    wanted = ("error:", "LLVM ERROR", "Assertion")
    errors = [line.split("error: ", 1)[-1] for line in log.splitlines() if any(word in line for word in wanted)]
    return "; ".join(dict.fromkeys(errors))[:600] or (log.strip().splitlines() or ["no output"])[-1][:600]
