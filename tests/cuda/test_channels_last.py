"""Frozen convolutions keep their weights in channels_last on a card while fused blocks run; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.models.graphed_denoisers import sd15
from fakes.models.small_models import convolutions
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc_kernels.group_norm_silu import op
from lightning_aigc_kernels.group_norm_silu.affine import NormSiLU
from lightning_aigc_kernels.group_norm_silu.reference import is_channels_last


def gradients(model: Any, given: dict[str, Tensor], trained: list[nn.Parameter]) -> list[Tensor]:
    loss = model(**given).sample.float().square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, trained)]


@pytest.mark.parametrize("memory", ["balanced", "lean", "max", {"kept": 0.3}])
def test_weights_are_laid_out_and_put_back(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TF32, under which this model's gradients differ by up to 40 % from float32's, on a CPU too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model, given = sd15()
    model.cuda().requires_grad_(False)
    given = {name: x.cuda() for name, x in given.items()}
    trained = [p.requires_grad_() for name, p in model.named_parameters() if "to_q" in name]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted = gradients(model, given, trained)
    plugin = FusedBackwardPrecision("32-true", memory=memory)
    plugin.convert_module(model)
    assert all(is_channels_last(conv.weight) for conv in convolutions(model))
    found = gradients(model, given, trained)
    plugin.teardown()
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    assert not any(is_channels_last(conv.weight) for conv in convolutions(model))
    assert all(torch.equal(p, before[name]) and p.is_contiguous() for name, p in model.named_parameters())


def test_trained_convolutions_stay_as_they_are() -> None:
    model, _ = sd15()
    model.cuda()
    plugin = FusedBackwardPrecision("32-true", memory="lean")
    plugin.convert_module(model)
    assert not any(is_channels_last(conv.weight) for conv in convolutions(model))
    plugin.teardown()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 320, 64, 64), (4, 640, 32, 32), (2, 2560, 8, 8), (20, 320, 16, 16)], ids=str)
def test_a_group_norm_keeps_channels_last(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """At batch 20 a slab has one program."""
    torch.manual_seed(0)
    x, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    weight, bias = torch.randn(2, shape[1], device="cuda")
    norm = NormSiLU(weight, bias, None, None, 32, 1e-5, True)
    wanted, *statistics = op.forward(x, norm)
    wanted_dx = op.backward(dy, x, *statistics, norm, False, 1.0)[0]
    last, dy_last = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    y, *again = op.forward(last, norm)
    dx = op.backward(dy_last, last, *again, norm, False, 1.0)[0]
    assert is_channels_last(y) and is_channels_last(dx)
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(y, wanted, **near)
    torch.testing.assert_close(dx, wanted_dx, **near)
    torch.testing.assert_close(again, statistics, rtol=1e-4, atol=1e-5)
