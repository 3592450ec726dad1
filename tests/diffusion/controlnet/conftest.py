"""Fixtures for each family of transformers with a ControlNet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fakes.models.transformer_controlnets import SCRIPTS


@pytest.fixture(params=list(SCRIPTS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(family: str, transformers: Callable[[str], str]) -> str:
    """The folder of the family's tiny pipeline."""
    return transformers(family)
