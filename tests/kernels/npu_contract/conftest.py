"""torch_npu on stub libraries, imported before any test of this folder. Nothing here computes a number."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.npu import stub_cann

with tempfile.TemporaryDirectory() as folder:
    stub_cann.load(stub_cann.build(Path(folder)))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that ASCEND_HOME_PATH is not set
    import torch_npu  # noqa: F401
    from torch_npu.op_plugin.meta import _meta_registrations

from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(autouse=True)
def fake_tensors_of_a_910b(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor is a shape on npu:0; 220 is Ascend910B1, and to ask the chip itself would initialise it."""
    monkeypatch.setattr(_meta_registrations, "get_soc_version", lambda: 220)
    with FakeTensorMode():
        yield
