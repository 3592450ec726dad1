"""Questions that need torch, answered in a subprocess of doctor: `python -P doctor_probe.py`.

torch_npu without CANN breaks `import torch`, and a driver can hang or kill the calling process. So doctor runs this
file with TORCH_DEVICE_BACKEND_AUTOLOAD=0 and reads the lines it printed: `name JSON`, {"value": ...} or
{"error": "..."}. It imports the stdlib only; each question imports what it needs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any


def torch_build() -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda}


def torch_npu_version() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return None
    import torch_npu

    return str(torch_npu.__version__)


def cards(kind: str) -> list[str]:
    import torch

    module: Any = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return []
    return [str(module.get_device_name(i)) for i in range(module.device_count())]


def kernels() -> dict[str, str | None]:
    """The reason why each op's kernel cannot be used, None where it can."""
    import pkgutil

    import lightning_aigc_kernels
    from lightning_aigc_kernels.dispatch import why_no_kernel

    ops = [module.name for module in pkgutil.iter_modules(lightning_aigc_kernels.__path__) if module.ispkg]
    return {op: why_no_kernel(op) for op in ops if op != "ascend"}


def sync_mode() -> str:
    from lightning_aigc.gradient_sync.options import SyncOptions

    return str(SyncOptions().mode)


QUESTIONS: dict[str, Callable[[], Any]] = {
    "torch": torch_build,
    "torch_npu": torch_npu_version,
    "npu": lambda: cards("npu"),
    "cuda": lambda: cards("cuda"),
    "sync_mode": sync_mode,
    "kernels": kernels,
}


def main() -> None:
    for name, question in QUESTIONS.items():
        try:
            answer = {"value": question()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(name, json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
