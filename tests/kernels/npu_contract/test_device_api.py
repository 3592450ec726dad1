"""Every name of torch_npu that lightning_aigc uses exists in the real one and takes our arguments."""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

import pytest
import torch

from fakes.npu.npu_api import CALLS, EVENT_CALLS, STREAM_CALLS

npu: Any = torch.npu  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CALLS)
def test_torch_npu_has_the_name_and_takes_our_arguments(name: str) -> None:
    inspect.signature(attrgetter(name)(npu)).bind(*CALLS[name])


@pytest.mark.parametrize("name", STREAM_CALLS)
def test_a_stream_takes_our_arguments(name: str) -> None:
    inspect.signature(getattr(npu.Stream, name)).bind("self", *STREAM_CALLS[name])


@pytest.mark.parametrize("name", EVENT_CALLS)
def test_an_event_takes_our_arguments(name: str) -> None:
    inspect.signature(getattr(npu.Event, name)).bind("self", *EVENT_CALLS[name])


def test_the_memory_statistics_that_we_read_are_documented() -> None:
    said = inspect.getdoc(npu.memory_stats) or ""
    for kind in ("allocated_bytes", "reserved_bytes"):
        assert f"{kind}.{{all,large_pool,small_pool}}.{{current,peak,allocated,freed}}" in said


def test_npu_is_hccls_device() -> None:
    assert torch.distributed.Backend.default_device_backend_map["npu"] == "hccl"


def test_a_gradient_scaler_is_one_of_torchs() -> None:
    assert issubclass(npu.amp.GradScaler, torch.amp.GradScaler)


def test_no_npu_is_initialised_by_asking_for_one() -> None:
    assert npu.is_available() and npu.device_count() == 8
    assert not npu.is_initialized()
