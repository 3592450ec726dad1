"""Triton's interpreter on CPU tensors under TRITON_INTERPRET=1, else the first GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nan_filled_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.empty` holds NaN, so an element that a kernel did not write cannot hide."""

    def filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = allocate(*args, **kwargs)
            return out.fill_(math.nan) if out.is_floating_point() else out

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, filled(getattr(owner, name)))
        yield
