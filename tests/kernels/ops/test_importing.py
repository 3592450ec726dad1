"""The package works with torch alone: no Triton, no Numba, no Lightning, no diffusers, no peft."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import lightning_aigc_kernels
from fakes.processes.programs import WITHOUT_COLLECTIONS

PACKAGE = Path(lightning_aigc_kernels.__file__).parent
OPS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "ascend")
CHILD = """
import importlib
import sys

BLOCKED = ("triton", "numba", "lightning", "lightning_aigc", "pytorch_lightning", "diffusers", "peft", "transformers")


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked")


sys.meta_path.insert(0, Blocker())
import torch

for name in sys.argv[1:]:
    importlib.import_module(name)
x = torch.randn(2, 6, 4, 4, requires_grad=True)
from lightning_aigc_kernels.group_norm_silu_conv2d import group_norm_silu_conv2d

group_norm_silu_conv2d(x, None, None, 3, 1e-5, torch.randn(4, 6, 3, 3), None).sum().backward()
assert x.grad is not None and x.grad.isfinite().all()
assert not [name for name in sys.modules if name.split(".")[0] in BLOCKED]
"""


def test_every_op_imports_and_works_with_torch_alone() -> None:
    names = ["lightning_aigc_kernels", *(f"lightning_aigc_kernels.{op}" for op in OPS)]
    names += [f"lightning_aigc_kernels.{path.stem}" for path in PACKAGE.glob("*.py") if path.stem not in NEED_MORE]
    assert "lightning_aigc_kernels.lora_attention" in names and "lightning_aigc_kernels.protection" in names
    command = [sys.executable, "-W", "error", "-c", WITHOUT_COLLECTIONS + CHILD, *names]
    environment = {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr


NEED_MORE = {"__init__", "kth_magnitude", "numba_cache"}


def test_the_package_exports_each_op_and_not_the_folder_of_its_name() -> None:
    exported = {name: getattr(lightning_aigc_kernels, name) for name in lightning_aigc_kernels.__all__}
    assert not [name for name, what in exported.items() if isinstance(what, ModuleType)]
    assert set(OPS) - {"packed_weight"} <= exported.keys()  # that one exports PackedWeight
    assert "PackedWeight" in exported
