"""`torch.npu`, found without raising; and where it cannot be had, what is missing and the commands that get it."""

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
    """`torch.npu`, or None. Imports torch_npu where it is installed and torch has not loaded it by itself.

    A failed import is not tried again, because a half-imported torch_npu has renamed torch's device already.
    """
    global _import_error
    if _import_error is not None:
        return None
    if not hasattr(torch, "npu") and importlib.util.find_spec("torch_npu") is not None:
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # ImportError without CANN, anything at all with the wrong version of it
            _import_error = error
            return None
    return getattr(torch, "npu", None)


def npu_count() -> int:
    """NPUs that this process may use, 0 without torch_npu. Asks the driver, and initialises no NPU."""
    npu = find_npu()
    try:
        return int(npu.device_count()) if npu is not None and npu.is_available() else 0
    except RuntimeError:  # the driver is there and refuses
        return 0


def explain_absence() -> str:
    """What is missing for an NPU, and three commands."""
    torch_version = torch.__version__.partition("+")[0]
    return (
        f"accelerator='npu' needs torch_npu, CANN and an Ascend NPU, got {_what_is_here()}. To mend it:\n"
        f"  pip install 'torch_npu=={torch_version}.*'   # the version of torch here\n"
        "  source /usr/local/Ascend/ascend-toolkit/set_env.sh   # after installing the CANN toolkit (hiascend.com)\n"
        "  npu-smi info   # lists the NPUs when driver and rights are in order\n"
        "or leave the NPU out: accelerator='cpu'."
    )


def warn_of_broken_torch_npu() -> None:
    """Say that an installed torch_npu stays unused because it cannot be imported."""
    if _import_error is not None:
        warnings.warn(f"no NPU is used: got {_what_is_here()}; accelerator='npu' says how to mend it", stacklevel=2)


def warn_of_transfer_to_npu() -> None:
    """Say what torch_npu.contrib.transfer_to_npu breaks, where something imported it."""
    if "torch_npu.contrib.transfer_to_npu" in sys.modules:
        warnings.warn(
            "torch_npu.contrib.transfer_to_npu is imported: it makes torch.cuda answer for the NPU, and whatever asks "
            "for cuda is misled; remove that import, accelerator='npu' needs none",
            stacklevel=2,
        )


def _what_is_here() -> str:
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
