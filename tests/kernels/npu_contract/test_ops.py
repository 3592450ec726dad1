"""The ops of torch_npu that could serve on an Ascend: they exist, take our arguments, and give gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.npu.npu_ops import OPS as FAKE_OPS
from lightning_aigc_kernels import AttentionStream
from lightning_aigc_kernels.group_norm_silu import npu_kernel as group_norm_silu_on_npu
from lightning_aigc_kernels.group_norm_silu import op as group_norm_silu
from lightning_aigc_kernels.group_norm_silu.affine import NormSiLU
from lightning_aigc_kernels.joint_attention import op as joint_attention
from lightning_aigc_kernels.lora_attention import core
from lightning_aigc_kernels.lora_attention.core import attend, attend_backward
from lightning_aigc_kernels.packing import pack
from lightning_aigc_kernels.qk_norm_rope import op as qk_norm_rope
from lightning_aigc_kernels.qk_norm_rope.norm_rope import NormRope
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
    "npu_rotary_mul": (
        lambda x, cos, sin: npu.npu_rotary_mul(x, cos, sin, "interleave"),
        [(B, S, H, E), (1, S, 1, E), (1, S, 1, E)],
        (B, S, H, E),
    ),
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


@pytest.mark.parametrize("name", FAKE_OPS)
def test_the_fake_npus_operators_have_torch_npus_schemas(name: str) -> None:
    real = getattr(npu, name).default._schema
    assert str(torch._C.parse_schema(f"npu::{name}{FAKE_OPS[name][0]}")) == str(real)


@pytest.mark.parametrize("name", [*FUSED, "npu_group_norm_swish"])
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


def test_group_norm_silu_takes_npu_group_norm_swish_forward_and_backward(swish_gradients_shape: None) -> None:
    """In float32 with Triton too; its statistics, which our op keeps for backward, are float32 then."""
    x, weight, bias = (torch.empty(*shape, device="npu:0") for shape in ((B, C, 9, 7), (C,), (C,)))
    norm = NormSiLU(weight, bias, None, None, G, 1e-5, True)
    with Recorder() as calls:
        y, mean, rstd = group_norm_silu.forward(x, norm)
        dx, dweight, dbias, *_ = group_norm_silu.backward(torch.empty_like(y), x, mean, rstd, norm, True, 1.0)
    assert [name for name in calls.names if name.startswith("npu::")] == [
        "npu::npu_group_norm_swish",
        "npu::npu_group_norm_swish_grad",
    ]
    assert (y.shape, mean.shape, rstd.shape, mean.dtype) == (x.shape, (B, G), (B, G), torch.float32)
    assert dweight is not None and dbias is not None
    assert (dx.shape, dweight.shape, dbias.shape) == (x.shape, (C,), (C,))


@pytest.mark.parametrize("triton", [True, False])
def test_npu_group_norm_swish_serves_half_precision_where_no_triton_kernel_runs(
    triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_norm_silu_on_npu, "why_no_kernel", lambda op: None if triton else "no Triton")
    norm = NormSiLU(torch.empty(C, device="npu:0"), torch.empty(C, device="npu:0"), None, None, G, 1e-5, True)
    assert group_norm_silu_on_npu.serves(half(B, C, 9, 7), norm) is not triton
    assert group_norm_silu_on_npu.serves(half(B, C, 9, 7).float(), norm)
    assert not group_norm_silu_on_npu.serves(half(B, C, 9, 7).double(), norm)
    statistics = group_norm_silu.forward(half(B, C, 9, 7).detach(), norm)[1:] if not triton else ()
    assert all(tensor.dtype == torch.float16 for tensor in statistics)


@pytest.fixture
def swish_gradients_shape() -> Iterator[None]:
    """torch_npu has no shape function of this gradient; its arguments are checked all the same."""
    library = torch.library.Library("npu", "IMPL")

    def shapes(grad, x, groups, weight, bias, *_):  # type: ignore[no-untyped-def]
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)

    library.impl("npu_group_norm_swish_grad", shapes, "Meta")
    yield
    library._destroy()


def test_qk_norm_rope_takes_npu_rms_norm_and_npu_rotary_mul_in_float32() -> None:
    x, weight = half(B, S, H, E).detach(), half(E).detach()
    table = torch.empty(S, E // 2, device="npu:0")
    how = NormRope(weight, table, table)
    with Recorder() as calls:
        y = qk_norm_rope.forward(x, how, torch.empty_like(x))
        dx, dweight = qk_norm_rope.backward(torch.empty_like(x), x, how, need_weight=True)
    assert [name.removeprefix("npu::") for name in calls.names if name.startswith("npu::")] == [
        *("npu_rms_norm", "npu_rotary_mul"),
        *("npu_rotary_mul", "npu_rms_norm", "npu_rms_norm_backward"),
    ]
    given = calls.given["npu::npu_rotary_mul"]
    assert (given["r1"].shape, given["input"].dtype) == ((1, S, 1, E), torch.float32)
    assert dweight is not None
    assert (y.shape, dx.shape, dweight.shape) == (x.shape, x.shape, (E,))


def test_silu_mul_takes_the_gradient_of_npu_swiglu() -> None:
    gate, up = half(B, S, 2 * E).detach().chunk(2, dim=-1)
    with Recorder() as calls:
        dgate, dup = silu_mul._backward_op._init_fn(half(B, S, E).detach(), gate, up, [True, True])
    assert "npu::npu_swiglu_backward" in calls.names
    assert dgate.shape == dup.shape == (B, S, E) and dgate.is_contiguous() and dup.is_contiguous()


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


class Recorder(TorchDispatchMode):
    """The names of the operators that were called, and the arguments by name of the last call of each."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.given: dict[str, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.name())
        names = [argument.name for argument in func._schema.arguments]
        self.given[func.name()] = dict(zip(names, args, strict=False)) | (kwargs or {})
        return func(*args, **(kwargs or {}))


def test_silu_mul_takes_npu_swiglu_for_the_halves_of_a_projection() -> None:
    gate, up = half(B, S, 2 * E).detach().chunk(2, dim=-1)
    with Recorder() as calls:
        product = silu_mul._op._init_fn(gate, up)
    assert "npu::npu_swiglu" in calls.names
    assert (product.shape, product.dtype, product.device.type) == ((B, S, E), torch.float16, "npu")


@pytest.mark.parametrize("rows", [1, B])
def test_a_bias_of_the_keys_is_the_pse_of_the_fused_op(rows: int) -> None:
    """In the query's dtype and [B, H, 1, keys], the form that torch_npu documents for one row for all queries."""
    q, k, bias = half(B, H, S, E).detach(), half(B, H, T, E).detach(), torch.empty(rows, T, device="npu:0")
    with Recorder() as calls:
        made = attend(q, k, k, bias)
        grads = attend_backward(torch.empty_like(made[0]), q, k, k, *made, bias)
    assert [grad.shape for grad in grads] == [(B, H, S, E), (B, H, T, E), (B, H, T, E)]
    for name in ("npu::npu_fusion_attention", "npu::npu_fusion_attention_grad"):
        pse = calls.given[name]["pse"]
        assert (pse.shape, pse.dtype, pse.is_contiguous()) == ((B, H, 1, T), torch.float16, True)


def test_the_pse_is_added_before_the_scale_and_stays_finite() -> None:
    """By torch_npu's formula softmax(scale * (pse + q k^T)); -inf is too low for any logit to matter beside it."""
    with unset_fake_temporarily():
        bias = torch.tensor([[0.0, -torch.inf, 1.0986]])
        pse = core._bias_for("npu", bias, torch.empty(2, 3, 5, 64, dtype=torch.float16))
        assert pse is not None and pse.isfinite().all()
        logits = (64**-0.5 * pse.float()).expand(2, 3, 5, 3)
        weights = logits.softmax(-1)
        torch.testing.assert_close(weights[0, 0, 0], torch.tensor([1.0, 0, 3]) / 4, rtol=1e-3, atol=0)


def test_joint_attention_takes_the_fused_op_forward_and_backward_and_no_complex_number() -> None:
    angles = torch.empty(S, E // 2, device="npu:0")
    bias = torch.empty(B, T, device="npu:0")
    text = AttentionStream(
        *(half(B, T, H * E).detach() for _ in range(3)), half(E).detach(), half(E).detach(), key_bias=bias
    )  # fmt: skip
    picture = AttentionStream(*(half(B, S, H * E).detach() for _ in range(3)), half(E).detach(), None, angles, angles)
    tensors, given = pack((*text, *picture))
    options = H, 1e-6, True, torch.float16
    with Recorder() as calls:
        made = joint_attention._op._init_fn(tensors, given, [], *options)
        needs = [tensor is not angles and tensor is not bias for tensor in tensors]
        gradients = joint_attention._backward_op._init_fn(made[:2], [True, True], tensors, given, made, needs, *options)
    assert [tensor.shape for tensor in made[:2]] == [(B, T, H * E), (B, S, H * E)]
    wanted = [tensor.shape for tensor, need in zip(tensors, needs, strict=True) if need]
    assert [gradient.shape for gradient in gradients] == wanted
    assert {"npu::npu_fusion_attention", "npu::npu_fusion_attention_grad"} <= set(calls.names)
    assert not [name for name in calls.names if "complex" in name]
