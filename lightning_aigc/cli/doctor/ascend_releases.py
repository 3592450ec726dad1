"""Releases of torch_npu, CANN and triton-ascend that belong together, and what to install for the CANN that is here.

torch is the version with the same first three numbers as torch_npu.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

Verdict = tuple[str, str]
"""A mark (ok, note, warn or problem) and a sentence."""
SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class Release(NamedTuple):
    """A torch_npu, and the CANN that it was released for."""

    torch_npu: str
    cann: str

    @property
    def torch(self) -> str:
        return ".".join(map(str, numbers(self.torch_npu)[:3]))


RELEASES = (
    Release("2.14.0", "9.1.0"),
    Release("2.12.0", "9.1.0"),
    Release("2.11.0", "9.1.0"),
    Release("2.10.0.post4", "9.1.0"),
    Release("2.9.0.post6", "9.1.0"),
    Release("2.7.1.post8", "9.1.0"),
    Release("2.10.0", "9.0.0"),
    Release("2.9.0.post2", "9.0.0"),
    Release("2.8.0.post4", "9.0.0"),
    Release("2.7.1.post4", "9.0.0"),
    Release("2.9.0", "8.5.0"),
    Release("2.8.0.post2", "8.5.0"),
    Release("2.7.1.post2", "8.5.0"),
    Release("2.6.0.post5", "8.5.0"),
    Release("2.8.0", "8.3.RC1"),
    Release("2.7.1", "8.3.RC1"),
    Release("2.6.0.post3", "8.3.RC1"),
    Release("2.6.0", "8.2.RC1"),
)
"""From the oldest supported torch on, the newest CANN first. Sources, read on 2026-11-26: COMPATIBILITY.en.md of
Ascend/pytorch 9e73e70 (2026-08-21); 2.10.0 from its installation guide; 2.14.0 from the README in its wheel."""
TRITON_ASCEND_OF_CANN = {"9.0.0": "3.2.1", "8.5.0": "3.2.0", "8.3.RC2": "3.2.0rc4", "8.3.RC1": "3.2.0rc4"}
"""Sources: README.md of triton-lang/triton-ascend a84b1eb (2026-04-27); 3.2.1 from Ascend/pytorch's installation guide
for TorchNPU 26.0.0. The package index has none after 3.2.0; 3.2.1 lies among the releases of Ascend/triton-ascend."""
ABORTS_BESIDE_CUDA = (2, 14)
"""torch_npu from here on ends the process at its import where torch is a CUDA build."""


def judge_torch_npu(torch: str | None, torch_npu: str) -> Verdict:
    """Compare versions: torch_npu is built against one torch, with the same first three numbers."""
    wanted = Release(torch_npu, "").torch
    if torch is not None and numbers(torch)[:3] != numbers(wanted):
        got = f"torch_npu {torch_npu} is built for torch {wanted}, got torch {torch}"
        return "problem", f"{got}; install torch=={wanted}"
    if torch is not None and has_cuda_build():
        got = f"torch_npu {torch_npu} wants a CPU build of torch, got a CUDA build"
        ends = " and aborts the process at its import" if numbers(torch_npu) >= ABORTS_BESIDE_CUDA else ""
        return "problem" if ends else "warn", f"{got}{ends}; pip install torch=={wanted} --index-url {CPU_INDEX}"
    return "ok", f"torch_npu {torch_npu}"


def judge_cann(torch_npu: str, cann: str | None) -> Verdict:
    """Compare CANN with the one that torch_npu was released for; say what to install for the one that is here."""
    wanted = next((release.cann for release in RELEASES if release.torch_npu == torch_npu), None)
    if cann is None:
        named = f"CANN {wanted}" if wanted else "the CANN that its README names"
        return "problem", f"CANN was not found, and torch_npu {torch_npu} needs it: install {named}, then `{SET_ENV}`"
    if wanted is not None and is_version(cann, wanted):
        return "ok", f"CANN {cann}, which torch_npu {torch_npu} was released for"
    if wanted is None:
        return "note", f"CANN {cann}; torch_npu {torch_npu} is in no published table{_advice(cann)}"
    got = f"CANN {cann}, and torch_npu {torch_npu} was released for CANN {wanted}"
    return "warn", f"{got}; others may work; install CANN {wanted}{_advice(cann, ', or')}"


def judge_triton_ascend(triton_ascend: str | None, cann: str | None) -> Verdict:
    """Compare triton-ascend with CANN."""
    wanted = None if cann is None else next((t for c, t in TRITON_ASCEND_OF_CANN.items() if is_version(cann, c)), None)
    if triton_ascend is None:
        remedy = f"; for CANN {cann} install triton-ascend=={wanted}" if wanted else ""
        return "note", f"triton-ascend is not installed: ops run on torch_npu's and torch's operators{remedy}"
    made_for = next((c for c, t in TRITON_ASCEND_OF_CANN.items() if t == triton_ascend), None)
    if cann is None or wanted == triton_ascend:
        return "ok", f"triton-ascend {triton_ascend}"
    if wanted is not None:
        return "warn", f"triton-ascend {triton_ascend}, and {wanted} was released for CANN {cann}; install that"
    released = f"was released for CANN {made_for}" if made_for else "is in no published table"
    return "warn", (
        f"triton-ascend {triton_ascend} {released}, got CANN {cann}, for which none is published; if a kernel fails,"
        " pip uninstall triton-ascend: ops then run on torch_npu's and torch's operators"
    )


def for_cann(cann: str) -> str | None:
    """The command that installs what was released for this CANN, newest torch first; None for an unknown CANN."""
    release = next((release for release in RELEASES if is_version(cann, release.cann)), None)
    if release is None:
        return None
    triton_ascend = TRITON_ASCEND_OF_CANN.get(release.cann)
    kernels = f" triton-ascend=={triton_ascend}" if triton_ascend else ""
    return f"pip install torch=={release.torch} torch_npu=={release.torch_npu}{kernels}"


def _advice(cann: str, before: str = ";") -> str:
    command = for_cann(cann)
    return f"{before} for CANN {cann}: {command}" if command else ""


def is_version(cann: str, release: str) -> bool:
    """Whether a CANN is this release, also with more numbers behind, as in 8.5.0.1."""
    return re.match(rf"{re.escape(release)}(?![\w])", cann, re.IGNORECASE) is not None


def has_cuda_build() -> bool:
    """Whether torch here is a CUDA build, found without importing it."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "lib/libc10_cuda.so").exists()


def numbers(version: str) -> tuple[int, ...]:
    """2.7.1.post2 -> (2, 7, 1)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
