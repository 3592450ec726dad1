"""Make `import torchvision` work with a torch build without CUDA.

PyPI's torchvision for x86 is a CUDA build. With a CPU build of torch (as on Ascend hosts) its compiled part
does not load, and its Python part then fails on the missing operator `torchvision::nms`, and with it
transformers, diffusers and open_clip. Declaring the two operator schemas is enough, as nothing here calls
them. Drop this when torchvision guards its fake registrations.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_library: torch.library.Library | None = None  # torch drops the schemas when the library is garbage-collected


def is_cuda_build_of_torchvision() -> bool:
    """Whether the installed torchvision was built for CUDA, read from its version file without importing it."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    return version_file.is_file() and bool(re.search(r"\+cu\d|^\s*cuda = '\d", version_file.read_text(), re.MULTILINE))


def declare_missing_operators() -> None:
    """Declare `torchvision::nms` and `torchvision::qnms` if torchvision cannot."""
    global _library
    import torch

    if _library is not None or torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    if is_cuda_build_of_torchvision():
        _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
