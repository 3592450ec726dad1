"""Pipelines that the tests of a room share; they only read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fakes.models.edit_pipelines import MAKE_EDIT
from fakes.models.pipelines import make_pipeline
from fakes.models.short_texts import shorten_texts
from fakes.models.transformer_pipelines import MAKE
from lightning_aigc.callbacks import RunReport


@pytest.fixture(scope="module")
def without_report_page() -> Iterator[None]:
    """Runs end without the page that nobody here reads: drawing its charts takes a third of a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunReport, "on_train_end", lambda *_: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def short_texts() -> Iterator[None]:
    """Captions of 64 tokens instead of 512; test_golden.py and `make test-pairs` have the whole length."""
    with pytest.MonkeyPatch.context() as patch:
        shorten_texts(patch)
        yield


@pytest.fixture(scope="session")
def sd(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sd")))


@pytest.fixture(scope="session")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sdxl"), sdxl=True))


@pytest.fixture(scope="session")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a family's tiny pipeline, made when it is first asked for."""
    made: dict[str, str] = {}

    def folder(family: str) -> str:
        if family not in made:
            made[family] = str((MAKE | MAKE_EDIT)[family](tmp_path_factory.mktemp(family)))
        return made[family]

    return folder
