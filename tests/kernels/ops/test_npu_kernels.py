"""Ops on the fake npu: torch_npu's fused operators compute them, as exactly as eager torch, within their limits.

The fake's operators have torch_npu's schemas, dtypes of statistics and documented limits; no Ascend computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fakes import accuracy
from fakes.processes.ranks import run_ranks
from lightning_aigc_kernels import group_norm_silu, joint_attention, qk_norm_rope
from lightning_aigc_kernels.joint_attention.stream import AttentionStream
from lightning_aigc_kernels.qk_norm_rope import reference as rope_reference
from lightning_aigc_kernels.silu_mul import npu_kernel as silu_mul_on_npu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Formula = Callable[..., Tensor]
TOKENS, HEADS, FEATURES = 9, 3, 16


def swish(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 4, weight, bias, 1e-5))


def rotary() -> tuple[Tensor, Tensor]:
    angles = torch.randn(TOKENS, FEATURES // 2, generator=torch.Generator().manual_seed(1))
    return angles.cos(), angles.sin()


def tables(x: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (table.to(x.device) for table in rotary())
    return cos, sin


SHAPE = (2, TOKENS, HEADS, FEATURES)
CASES: dict[str, tuple[Formula, Formula, list[tuple[int, ...]], list[str]]] = {
    "group_norm_silu": (
        lambda x, weight, bias: group_norm_silu(x, weight, bias, 4),
        swish,
        [(2, 8, 5, 7), (8,), (8,)],
        ["npu_group_norm_swish", "npu_group_norm_swish_grad"],
    ),
    "group_norm_silu of rows": (
        lambda x, weight, bias: group_norm_silu(x, weight, bias, 4),
        swish,
        [(3, 8), (8,), (8,)],
        ["npu_group_norm_swish", "npu_group_norm_swish_grad"],
    ),
    "norm": (
        lambda x, weight: qk_norm_rope(x, weight),
        lambda x, weight: rope_reference.qk_norm_rope(x, weight),
        [SHAPE, (FEATURES,)],
        ["npu_rms_norm", "npu_rms_norm_backward"],
    ),
    "norm and rotation": (
        lambda x, weight: qk_norm_rope(x, weight, *tables(x)),
        lambda x, weight: rope_reference.qk_norm_rope(x, weight, *tables(x)),
        [SHAPE, (FEATURES,)],
        ["npu_rms_norm", "npu_rotary_mul", "npu_rms_norm_backward"],
    ),
    "norm without a weight": (
        lambda x: qk_norm_rope(x, None, *tables(x)),
        lambda x: rope_reference.qk_norm_rope(x, None, *tables(x)),
        [SHAPE],
        ["npu_rms_norm", "npu_rotary_mul", "npu_rms_norm_backward"],
    ),
    "rotation": (
        lambda x: qk_norm_rope(x, None, *tables(x), norm=False),
        lambda x: rope_reference.qk_norm_rope(x, None, *tables(x), norm=False),
        [SHAPE],
        ["npu_rotary_mul"],
    ),
}
RATIO = {"group_norm_silu": 1.2, "group_norm_silu of rows": 1.6}
"""Bound of our largest error by eager's, 1.01 without an entry. Measured: 1.11 in float32, and 1.47 in float16, where
the operator's statistics are rounded; at most 1.0 in the other cases, which round once where eager rounds twice."""


def errors_and_calls(rank: int) -> dict[str, Any]:
    """Run every case in every dtype on a fake npu: the error's ratio to eager's, and the operators that ran."""
    from fakes.npu import fake_npu

    fake_npu.install()
    called: list[str] = []
    run = fake_npu.run_on_cpu

    def recorded(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if op.name().startswith("npu::"):
            called.append(op.name().removeprefix("npu::"))
        return run(op, args, kwargs)

    fake_npu.run_on_cpu = recorded
    rows: dict[str, Any] = {}
    for name, (ours, eager, shapes, _) in CASES.items():
        for dtype in DTYPES:
            torch.manual_seed(0)
            tensors = [torch.randn(shape) + (len(shape) == 1) for shape in shapes]
            dy = torch.randn(shapes[0]).to(dtype)
            called.clear()
            got = with_gradients(ours, tensors, dy, dtype, "npu")
            truth = with_gradients(eager, [t.to(dtype) for t in tensors], dy.double(), torch.float64, "cpu")
            plain = with_gradients(eager, tensors, dy, dtype, "cpu")
            rows[f"{name} {dtype}"] = largest_ratio(got, plain, truth), list(dict.fromkeys(called))
    rows |= {f"refused: {name}": kernels_of(make, called) for name, make in ELSEWHERE.items()}
    rows["swiglu"] = swiglu_ratio()
    rows["attention"] = attention_ratio(called)
    return rows


def with_gradients(call: Formula, tensors: list[Tensor], dy: Tensor, dtype: torch.dtype, device: str) -> list[Tensor]:
    leaves = [tensor.to(dtype).to(device).requires_grad_() for tensor in tensors]
    out = call(*leaves)
    gradients = torch.autograd.grad(out, leaves, dy.to(device))
    return [out.detach().cpu(), *(gradient.cpu() for gradient in gradients)]


def largest_ratio(ours: list[Tensor], eager: list[Tensor], truth: list[Tensor]) -> float:
    """Ratio of our largest error to eager's, which counts as one rounding of the largest number at least."""
    ratios = []
    for mine, plain, exact in zip(ours, eager, truth, strict=True):
        assert mine.dtype == plain.dtype and mine.isfinite().all()
        rounding = torch.finfo(mine.dtype).eps * exact.abs().amax().item()
        error, of_eager = ((tensor.double() - exact).abs().amax().item() for tensor in (mine, plain))
        ratios.append(error / max(of_eager, rounding))
    return max(ratios)


ELSEWHERE: dict[str, Callable[[], Tensor]] = {
    "a timestep's scale": lambda: norm_of((2, 8, 5, 7), scale=torch.randn(2, 8).to("npu")),
    "no SiLU": lambda: norm_of((2, 8, 5, 7), silu=False),
    "no affine": lambda: group_norm_silu(leaf(2, 8, 5, 7), None, None, 4),
    "more than 4000 channels a group": lambda: norm_of((1, 4002, 2), groups=1),
    "a sparse gradient": lambda: norm_of((2, 8, 5, 7), input_grad_density=0.5),
    "a table for each sample": lambda: qk_norm_rope(
        leaf(*SHAPE), None, *(table.expand(2, -1, -1).contiguous().to("npu") for table in rotary())
    ),
    "a batch of 1000 heads": lambda: qk_norm_rope(leaf(500, 1, 2, 4), None, *(torch.ones(1, 2).to("npu"),) * 2),
}
"""Calls outside the limits of torch_npu's operators."""


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).to("npu").requires_grad_()


def norm_of(shape: tuple[int, ...], groups: int = 4, **options: Any) -> Tensor:
    return group_norm_silu(leaf(*shape), leaf(shape[1]), leaf(shape[1]), groups, **options)


def kernels_of(make: Callable[[], Tensor], called: list[str]) -> list[str]:
    """The operators of torch_npu in forward and backward of a call that must not fail."""
    called.clear()
    make().sum().backward()
    return list(dict.fromkeys(called))


def swiglu_ratio() -> float:
    """The halves of a projection. A tensor of the fake npu has no storage to share, so the op does not see them."""
    torch.manual_seed(0)
    projection, dproduct = torch.randn(5, 24).bfloat16(), torch.randn(5, 12).bfloat16()
    on_npu = projection.to("npu")
    dgate, dup = silu_mul_on_npu.backward(dproduct.to("npu"), on_npu, True, True)
    assert dgate is not None and dup is not None
    ours = [silu_mul_on_npu.forward(on_npu).cpu(), dgate.cpu(), dup.cpu()]
    truth = list(accuracy.silu_mul_and_gradients(torch.float64, *projection.chunk(2, dim=-1), dproduct))
    eager = list(accuracy.silu_mul_and_gradients(torch.bfloat16, *projection.chunk(2, dim=-1), dproduct))
    return largest_ratio(ours, eager, truth)


def attention_ratio(called: list[str]) -> tuple[float, list[str]]:
    """Two streams, one with a padded token, against torch's attention under a mask."""
    torch.manual_seed(0)
    widths, dtype = (5, 4), torch.bfloat16
    tensors = [torch.randn(2, tokens, HEADS * FEATURES).to(dtype) for tokens in widths for _ in range(3)]
    bias = torch.zeros(2, widths[0])
    bias[1, 3:] = -torch.inf
    dy = torch.randn(2, sum(widths), HEADS * FEATURES)

    def fused(*parts: Tensor) -> Tensor:
        streams = [
            AttentionStream(*parts[:3], key_bias=bias.to(parts[0].device)),
            AttentionStream(*parts[3:]),
        ]
        return torch.cat(joint_attention(streams, HEADS, norm=False)[0], dim=1)

    def plain(*parts: Tensor) -> Tensor:
        q, k, v = (
            torch.cat((parts[i], parts[3 + i]), 1).unflatten(-1, (HEADS, FEATURES)).transpose(1, 2) for i in range(3)
        )
        mask = torch.cat((bias, torch.zeros(2, widths[1])), 1)[:, None, None].to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)

    called.clear()
    ours = with_gradients(fused, tensors, dy.to(dtype), dtype, "npu")
    names = list(dict.fromkeys(called))
    truth = with_gradients(plain, tensors, dy.to(dtype).double(), torch.float64, "cpu")
    eager = with_gradients(plain, tensors, dy.to(dtype), dtype, "cpu")
    return largest_ratio(ours, eager, truth), names


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (made,) = run_ranks(errors_and_calls, 1, tmp_path_factory.mktemp("npu"), gloo=False)
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_torch_npus_operators_are_called_and_as_exact_as_eager(
    name: str, dtype: torch.dtype, rows: dict[str, Any]
) -> None:
    ratio, called = rows[f"{name} {dtype}"]
    assert called == CASES[name][3]
    assert ratio <= RATIO.get(name, 1.01)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_call_outside_the_limits_runs_without_the_operator(name: str, rows: dict[str, Any]) -> None:
    called = rows[f"refused: {name}"]
    assert not {"npu_group_norm_swish_grad", "npu_rotary_mul"} & set(called)


def test_swiglu_and_its_gradient_are_as_exact_as_eager(rows: dict[str, Any]) -> None:
    assert rows["swiglu"] <= 1.0


def test_attention_with_padding_is_as_exact_as_eager(rows: dict[str, Any]) -> None:
    ratio, called = rows["attention"]
    assert called == ["npu_fusion_attention", "npu_fusion_attention_grad"]
    assert ratio <= 1.0
