"""Make `import torchvision` work beside a torch build without CUDA.

The registry's torchvision for x86 is a CUDA build. Beside a CPU build of torch (an Ascend host has
the same pair) its compiled part does not load, and its Python part then dies on the missing
operator `torchvision::nms`, taking transformers, diffusers and open_clip along. Declaring the two
operator schemas is enough: nothing here ever calls them. Drop this when torchvision guards its
own fake registrations.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_library: torch.library.Library | None = None  # torch forgets the schemas when the library is collected


def is_cuda_build_of_torchvision() -> bool:
    """Whether the installed torchvision was built for CUDA; read from its version file, without importing it."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    return version_file.is_file() and bool(re.search(r"\+cu\d|^\s*cuda = '\d", version_file.read_text(), re.MULTILINE))


def declare_missing_operators() -> None:
    """Declare `torchvision::nms` and `torchvision::qnms` where torchvision cannot do so itself."""
    global _library
    import torch

    if _library is not None or torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    if is_cuda_build_of_torchvision():
        _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
