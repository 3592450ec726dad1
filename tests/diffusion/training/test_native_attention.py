"""Models whose gradients torch's cuDNN attention misreads get another attention outside fused blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fakes.models import tiny_transformers as tiny
from lightning_aigc.diffusion.training import native_attention
from lightning_aigc.diffusion.training.native_attention import avoid_misread_gradients, misreads_gradients

CARD = torch.device("cuda")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """torch's order of attention kernels before the test, which is put back after it."""
    before = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(native_attention, "misreads_gradients", lambda device: True)
    yield before
    torch._C._set_sdp_priority_order(before)


@pytest.mark.parametrize("make", [tiny.flux, tiny.flux2], ids=["FLUX.1", "FLUX.2"])
def test_a_model_whose_blocks_join_attention_with_a_feed_forward(
    make: object, order: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = make()  # type: ignore[operator]
    with caplog.at_level("INFO"):
        avoid_misread_gradients(model, CARD)
    now = torch._C._get_sdp_priority_order()
    cudnn, flash = (getattr(torch.nn.attention.SDPBackend, f"{name}_ATTENTION").value for name in ("CUDNN", "FLASH"))
    assert now.index(flash) == 0 and now.index(cudnn) > 0 and sorted(now) == sorted(order)
    assert "outside fused blocks runs as flash attention" in caplog.text


def test_other_models_and_devices_keep_torchs_order(order: list[int]) -> None:
    model, _ = tiny.sd3()
    avoid_misread_gradients(model, CARD)
    avoid_misread_gradients(nn.Linear(1, 1), CARD)
    avoid_misread_gradients(tiny.flux()[0], torch.device("cpu"))
    assert torch._C._get_sdp_priority_order() == order


def test_a_device_without_cudnns_attention_misreads_nothing() -> None:
    assert not misreads_gradients(torch.device("cpu"))
