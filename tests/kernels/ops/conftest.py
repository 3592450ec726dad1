"""Seeded inputs: a bound that holds once holds always. `--device cuda` runs every op test on that device."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    device = request.config.getoption("--device", default="cpu")
    torch.manual_seed(0)
    with torch.device(device):
        yield
