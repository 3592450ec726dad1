"""The ops of torch_npu that could serve on an Ascend: they exist, take our arguments, and give gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_aigc_kernels.lora_attention.core import attend, attend_backward
from lightning_aigc_kernels.silu_mul import op as silu_mul

npu = torch.ops.npu
Call = Callable[..., Tensor]


def half(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float16, device="npu:0", requires_grad=True)


def first(call: Callable[..., tuple[Tensor, ...]]) -> Call:
    return lambda *tensors: call(*tensors)[0]


B, H, S, T, E, C, G = 2, 8, 64, 77, 64, 32, 8  # batch, heads, queries, keys, head size, channels, groups
FUSED: dict[str, tuple[Call, list[tuple[int, ...]], tuple[int, ...]]] = {
    "npu_fusion_attention": (
        first(lambda q, k, v: npu.npu_fusion_attention(q, k, v, H, "BNSD", scale=0.125)),
        [(B, H, S, E), (B, H, T, E), (B, H, T, E)],
        (B, H, S, E),
    ),
    "npu_rms_norm": (first(lambda x, w: npu.npu_rms_norm(x, w)), [(B, S, E), (E,)], (B, S, E)),
    "npu_swiglu": (lambda x: npu.npu_swiglu(x), [(B, S, 2 * E)], (B, S, E)),
    "npu_silu": (lambda x: npu.npu_silu(x), [(B, S, E)], (B, S, E)),
}
NATIVE: dict[str, tuple[Call, list[tuple[int, ...]], tuple[int, ...]]] = {
    "group_norm": (lambda x, w, b: F.group_norm(x, G, w, b), [(B, C, 9, 7), (C,), (C,)], (B, C, 9, 7)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (E,), w, b), [(B, S, E), (E,), (E,)], (B, S, E)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(B, C, 9, 7), (G, C, 3, 3), (G,)], (B, G, 9, 7)),
    "scaled_dot_product_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        [(B, H, S, E), (B, H, T, E), (B, H, T, E)],
        (B, H, S, E),
    ),
}


@pytest.mark.parametrize("name", [*FUSED, *NATIVE])
def test_shapes_forward_and_backward(name: str) -> None:
    call, shapes, out_shape = (FUSED | NATIVE)[name]
    leaves = [half(*shape) for shape in shapes]
    out = call(*leaves)
    assert (out.shape, out.dtype, out.device.type) == (out_shape, torch.float16, "npu")
    out.float().sum().backward()
    assert [leaf.grad is not None and leaf.grad.shape for leaf in leaves] == shapes


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_op_that_serves_training_has_its_own_autograd_formula(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "AutogradPrivateUse1")


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_group_norm_silu_gives_no_gradient_so_nobody_may_train_with_it() -> None:
    x, weight, bias = half(B, C, 8, 8), half(C), half(C)
    out = npu.npu_group_norm_silu(x, weight, bias, G)[0]
    assert out.shape == x.shape
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("npu::npu_group_norm_silu", "AutogradPrivateUse1")
    out.float().sum().backward()
    assert x.grad is None and weight.grad is None and bias.grad is None


def test_geglu_has_a_gradient_that_only_real_tensors_can_take() -> None:
    x = half(B, S, 2 * E)
    out = npu.npu_geglu(x, -1, 1)[0]
    assert out.shape == (B, S, E) and out.requires_grad
    assert torch._C._dispatch_has_kernel_for_dispatch_key("npu::npu_geglu", "AutogradPrivateUse1")
    # torch_npu 2.13's shape function of the gradient takes other arguments than the gradient: no torch.compile.
    with pytest.raises(TypeError, match="npu_geglu_backward_meta"):
        out.float().sum().backward()


def test_the_device_is_named_npu_and_has_neighbours() -> None:
    assert torch.npu.is_available() and torch.npu.device_count() == 8  # type: ignore[attr-defined]


def test_the_attention_of_lora_attention_takes_the_fused_op_forward_and_backward() -> None:
    q, k = half(B, H, S, E).detach(), half(B, H, T, E).detach()
    o, maximum, total = attend(q, k, k)
    assert (o.shape, o.dtype) == ((B, H, S, E), torch.float16)
    assert maximum.shape == total.shape and maximum.numel() > 0  # npu_fusion_attention's softmax, not the reference's
    grads = attend_backward(torch.empty_like(o), q, k, k, o, maximum, total)
    assert [grad.shape for grad in grads] == [(B, H, S, E), (B, H, T, E), (B, H, T, E)]


def test_silu_mul_takes_npu_swiglu_for_the_halves_of_a_projection() -> None:
    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(func.name())
            return func(*args, **(kwargs or {}))

    gate, up = half(B, S, 2 * E).detach().chunk(2, dim=-1)
    with Recorder():
        product = silu_mul._op._init_fn(gate, up)
    assert "npu::npu_swiglu" in calls
    assert (product.shape, product.dtype, product.device.type) == ((B, S, E), torch.float16, "npu")
