"""Pipelines that the tests of a room share; they only read them."""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import pytest

from fakes.pipelines import make_pipeline


@pytest.fixture(scope="session")
def sd(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sd")))


@pytest.fixture(scope="session")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sdxl"), sdxl=True))
