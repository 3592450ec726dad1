"""Seeded inputs: a bound that holds once holds always. `--device cuda` runs every op test on that device."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_aigc_kernels import dispatch

OF_A_CPU = ("test_dispatch.py", "test_importing.py", "test_npu_kernels.py", "test_quantize_blocks.py")
"""Modules on a CPU's kernels and on fake devices in its memory, which --device does not change."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name in OF_A_CPU and config.getoption("--device", default="cpu") != "cpu" else None


@pytest.fixture(autouse=True)
def on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    device = request.config.getoption("--device", default="cpu")
    torch.manual_seed(0)
    with torch.device(device):
        yield


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("quantize_blocks.cpu_kernel", "packed_weight.cpu_kernel", "numba_cache"):
        monkeypatch.delitem(sys.modules, f"lightning_aigc_kernels.{name}", raising=False)
    for cached in (dispatch.cpu_kernel_for, dispatch.warn_once):
        cached.cache_clear()
    yield
    for cached in (dispatch.cpu_kernel_for, dispatch.warn_once):
        cached.cache_clear()
