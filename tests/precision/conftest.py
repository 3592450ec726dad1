"""Fixtures of the precision plugin's tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The plugin's log lines, a list that grows."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if any(word in record.getMessage() for word in ("skipped", "swapped", "loss scale")):
                said.append(record.getMessage())

    handler = Keep()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


@pytest.fixture
def float64() -> Iterator[None]:
    """Within: new tensors and layers in float64, where only rounding tells a fused block from its class's own."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
