"""Seeded inputs: a bound that holds once holds always. `--device cuda` runs every op test on that device."""

import sys
from collections.abc import Iterator

import pytest
import torch

from lightning_aigc_kernels import dispatch


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
