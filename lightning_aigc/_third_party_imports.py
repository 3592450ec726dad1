"""Two imports of other packages, fixed: torchvision with a torch without CUDA, and torchmetrics in the command.

PyPI's torchvision for x86 is a CUDA build. With a CPU build of torch (as on Ascend hosts) its compiled part
does not load, and its Python part then fails on the missing operator `torchvision::nms`, and with it
transformers, diffusers and open_clip. Declaring the two operator schemas is enough, as nothing here calls
them. Drop this when torchvision guards its fake registrations.

Lightning imports torchmetrics for `Metric` and `MetricCollection` alone, but `import torchmetrics` brings every metric,
and with them torchvision, torch._dynamo and scipy.signal: 2 of the 4.7 seconds of a start of `lightning fit`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

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


_importing = threading.RLock()


class _WholeOnDemand(ModuleType):
    """A package whose `__init__` is executed when somebody asks for a name that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system and inspect ask for these
            raise AttributeError(name)
        with _importing:
            if type(self) is _WholeOnDemand:
                self.__class__ = ModuleType  # type: ignore[assignment]
                spec = self.__spec__
                assert spec is not None and spec.loader is not None
                spec.loader.exec_module(self)
        return getattr(self, name)


def delay_torchmetrics() -> None:
    """Import `Metric` and `MetricCollection` now, and the other metrics when a name of theirs is asked for.

    Call it before Lightning is imported. A release of torchmetrics that needs its other metrics for these two is
    imported as a whole.
    """
    spec = None if "torchmetrics" in sys.modules else importlib.util.find_spec("torchmetrics")
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__dict__["_logger"] = logging.getLogger("torchmetrics")
    package.__class__ = _WholeOnDemand
    sys.modules["torchmetrics"] = package
    try:
        importlib.import_module("torchmetrics.utilities")  # it and torchmetrics.metric import one another
        light = {"__version__": "__about__", "Metric": "metric", "MetricCollection": "collections"}
        for name, submodule in light.items():
            package.__dict__[name] = getattr(importlib.import_module(f"torchmetrics.{submodule}"), name)
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchmetrics"]:
            del sys.modules[name]
