"""Installed versions: torch and Lightning with this package, one Triton, and the CANN that is here."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lightning_aigc.cli.doctor.ascend_releases import Verdict, numbers

MALICIOUS_LIGHTNING = ("2.6.2", "2.6.3")  # GHSA-w37p-236h-pfx3
LIGHTNING_FROM, LIGHTNING_BELOW = (2, 6, 6), (2, 7)
TORCH_FROM = (2, 6)
CANN_ROOTS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", "/usr/local/Ascend/latest")
CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


def installed(distribution: str) -> str | None:
    """An installed distribution's version, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_lightning(version: str | None) -> Verdict:
    wanted = "wanted lightning>=2.6.6,<2.7"
    if version is None:
        return "problem", f"lightning is not installed; {wanted}"
    if version in MALICIOUS_LIGHTNING:
        return "problem", (
            f"lightning {version} is a malicious upload that steals credentials on import (GHSA-w37p-236h-pfx3);"
            " uninstall it, change every secret that this machine has seen, then install lightning>=2.6.6,<2.7"
        )
    if not LIGHTNING_FROM <= numbers(version) < LIGHTNING_BELOW:
        return "problem", f"lightning {version} is not supported; {wanted} (2.6.5 runs code from checkpoints)"
    return "ok", f"lightning {version}"


def judge_torch(version: str | None) -> Verdict:
    if version is None:
        return "problem", "torch is not installed; wanted torch>=2.6"
    if numbers(version) < TORCH_FROM:
        return "problem", f"torch {version} is too old; wanted torch>=2.6"
    return "ok", f"torch {version}"


def judge_tritons(installed_names: Iterable[str]) -> Verdict | None:
    """Report triton next to triton-ascend: both install the folder `triton`, so the later one replaced the other."""
    if {"triton", "triton-ascend"} <= set(installed_names):
        return "problem", (
            "triton and triton-ascend are both installed, and share the folder triton/: the later one broke the other."
            " Uninstall both, then install the one this machine's card needs; keep a venv for each"
        )
    return None


def cann_version(environ: Mapping[str, str], roots: Iterable[str] = CANN_ROOTS) -> str | None:
    """The version of the CANN toolkit that the environment names, or that is installed in a usual place."""
    named = [environ[variable] for variable in CANN_VARIABLES if environ.get(variable)]
    for root in map(Path, (*named, *roots)):
        files = [*root.glob("version.cfg"), *root.glob("*/ascend_toolkit_install.info"), *root.glob("*/version.info")]
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            match = re.search(r"CANN-([\w.]+)", text) or re.search(r"(?im)^version=\s*\[?([\w.]+)", text)
            if match:
                return match[1]
    return None
