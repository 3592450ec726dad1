"""Find `torch.npu` without raising; explain what is missing and how to install it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from typing import Any

import torch

_import_error: Exception | None = None


def find_npu() -> Any | None:
    """Return `torch.npu`, or None. Imports torch_npu if it is installed and torch has not loaded it.

    A failed import is not retried, because a half-imported torch_npu has already renamed torch's device.
    """
    global _import_error
    if _import_error is not None:
        return None
    if not hasattr(torch, "npu") and importlib.util.find_spec("torch_npu") is not None:
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # ImportError without CANN, any exception with the wrong version of CANN
            _import_error = error
            return None
    return getattr(torch, "npu", None)


def npu_count() -> int:
    """The number of NPUs that this process may use, 0 without torch_npu. Asks the driver and initialises no NPU."""
    npu = find_npu()
    try:
        return int(npu.device_count()) if npu is not None and npu.is_available() else 0
    except RuntimeError:  # the driver refused
        return 0


def explain_absence() -> str:
    """A message that says what is missing for an NPU, with three commands."""
    torch_version = torch.__version__.partition("+")[0]
    return (
        f"accelerator='npu' needs torch_npu, CANN and an Ascend NPU, got {_installed_state()}. To fix it:\n"
        f"  pip install 'torch_npu=={torch_version}.*'   # the version of torch here\n"
        "  source /usr/local/Ascend/ascend-toolkit/set_env.sh   # after installing the CANN toolkit (hiascend.com)\n"
        "  npu-smi info   # lists the NPUs if driver and permissions are in order\n"
        "or train without an NPU: accelerator='cpu'."
    )


def warn_of_broken_torch_npu() -> None:
    """Warn that an installed torch_npu is not used because its import failed."""
    if _import_error is not None:
        warnings.warn(f"no NPU is used: got {_installed_state()}; accelerator='npu' says how to fix it", stacklevel=2)


def warn_of_transfer_to_npu() -> None:
    """Warn about torch_npu.contrib.transfer_to_npu if it was imported."""
    if "torch_npu.contrib.transfer_to_npu" in sys.modules:
        warnings.warn(
            "torch_npu.contrib.transfer_to_npu is imported: it makes torch.cuda report the NPU, which misleads code "
            "that checks for cuda; remove that import, accelerator='npu' does not need it",
            stacklevel=2,
        )


def _installed_state() -> str:
    if importlib.util.find_spec("torch_npu") is None and find_npu() is None:
        return "no torch_npu: it is not installed"
    try:
        name = f"torch_npu {importlib.metadata.version('torch_npu')}"
    except importlib.metadata.PackageNotFoundError:
        name = "torch_npu"
    if _import_error is None:
        return f"{name}, which sees no NPU"
    library = re.search(r"\blib\w+\.so[.\d]*", str(_import_error))
    if isinstance(_import_error, ImportError) and library:
        return f"{name} without CANN: its library {library[0]} is not found"
    return f"{name}, whose import failed with {type(_import_error).__name__}: {_import_error}"
