"""The linalg that Ascend's front end made of each kernel, run on the CPU, against float64 autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes.accuracy import (
    assert_as_exact_as_eager,
    geglu_and_gradient,
    group_norm_silu_and_gradients,
    largest_by_sorting,
    modulated_norm_and_gradients,
    qk_norm_rope_and_gradients,
    silu_mul_and_gradients,
)
from fakes.models.hard_blocks import bits_of, hard_blocks
from lightning_aigc_kernels.launch import KernelCase
from lightning_aigc_kernels.packed_weight import Format
from lightning_aigc_kernels.packed_weight import reference as weight_reference
from lightning_aigc_kernels.packed_weight.reference import BLOCK
from lightning_aigc_kernels.quantize_blocks import packed_bytes, reference
from tools.ascend import CPUExecutionError, kernel_cases, lower
from tools.ascend.cpu_execution import CPUKernel
from tools.ascend.gate import OPS

EPS = 1e-5
# Here a tile's numbers are added one after the other, where torch and a vector core add in a tree: the worst float32
# error seen is 7.1 times eager's, for a sum over 2500 pixels. Half precision results stay within one rounding.
RATIOS = {torch.float32: 10.0, torch.float16: 1.0, torch.bfloat16: 1.0}
DTYPES = {"*fp16": torch.float16, "*bf16": torch.bfloat16, "*fp32": torch.float32}
# The two front ends: A2 and A3 share the first.
TARGETS = ["Ascend910B1", "Ascend950PR_9589"]
CASES = {op: [case for its_op, case in kernel_cases() if its_op == op] for op in OPS}


def run(case: KernelCase, target: str, **arguments: Tensor | float) -> None:
    """Lower the kernel, and run it with fewer programs than it has work for; outputs are written in place."""
    lowered = lower(case.function, case.signature, case.constants, target)
    values = [arguments[name] for name in case.function.arg_names if name in case.signature]  # type: ignore[attr-defined]
    CPUKernel(lowered.linalg)(3, *(as_numpy(value) if isinstance(value, Tensor) else value for value in values))


def as_numpy(tensor: Tensor) -> Any:
    """A view of the tensor's memory; bfloat16 travels as its bits."""
    assert tensor.is_contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def assert_exact(ours: Tensor, eager: Tensor, truth: Tensor) -> None:
    assert_as_exact_as_eager(ours, eager.to(ours.dtype), truth, RATIOS[ours.dtype])


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """NaN, so that an element nobody writes cannot hide."""
    return torch.full(shape, math.nan, dtype=dtype)


def sizes(constants: Mapping[str, int | bool]) -> tuple[int, int]:
    """Channels of a group and pixels that need several tiles of a case and do not fill the last ones."""
    return int(constants["BLOCK_K"]) * 2 + 1, int(constants["BLOCK_P"]) + (452 if constants["BLOCK_P"] == 2048 else -7)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case", [c for c in CASES["group_norm_silu"] if not c.name.startswith("sums")], ids=lambda case: case.name
)
def test_group_norm_silu(case: KernelCase, target: str) -> None:
    dtype, silu = DTYPES[case.signature["x_ptr"]], bool(case.constants["SILU"])
    channels, pixels = sizes(case.constants)
    samples, groups = 2, 2
    shape = (samples, groups * channels, pixels)
    x, dy = (torch.randn(shape) * 2 + 5).to(dtype), torch.randn(shape).to(dtype)
    affine, factors = DTYPES[case.signature["weight_ptr"]], DTYPES[case.signature["scale_ptr"]]
    weight, bias = torch.randn(shape[1]).to(affine), torch.randn(shape[1]).to(affine)
    scale, shift = torch.randn(shape[:2]).to(factors), torch.randn(shape[:2]).to(factors)
    modulation = (scale, shift) if case.constants["MODULATED"] else ()
    arguments: list[Any] = [EPS, x, weight, bias, modulation, dy, groups, silu]
    truth = group_norm_silu_and_gradients(torch.float64, *arguments)
    eager = group_norm_silu_and_gradients(torch.float32, *arguments)
    numbers = {"slabs": samples * groups, "groups": groups, "channels": channels, "pixels": pixels}
    numbers |= {"scale_stride": groups * channels, "shift_stride": groups * channels}
    inputs = {"x_ptr": x, "weight_ptr": weight, "bias_ptr": bias, "scale_ptr": scale, "shift_ptr": shift}
    if case.name.startswith("forward"):
        y, mean, rstd = unwritten(*shape, dtype=dtype), unwritten(samples, groups), unwritten(samples, groups)
        run(case, target, **inputs, y_ptr=y, mean_ptr=mean, rstd_ptr=rstd, **numbers, eps=EPS)
        assert_exact(y, eager[0], truth[0])
        torch.testing.assert_close(mean, x.float().view(samples, groups, -1).mean(2))
        variance = x.double().view(samples, groups, -1).var(2, correction=0)
        torch.testing.assert_close(rstd, (variance + EPS).rsqrt().float())
        return
    slabs = x.double().view(samples, groups, -1)
    inputs |= {"dy_ptr": dy, "mean_ptr": slabs.mean(2).float()}
    inputs |= {"rstd_ptr": (slabs.var(2, correction=0) + EPS).rsqrt().float()}
    dx = unwritten(*shape, dtype=dtype)
    of_samples = [unwritten(*shape[:2]), unwritten(*shape[:2])]
    of_modulation = [unwritten(*shape[:2], dtype=DTYPES[case.signature["scale_grad_ptr"]]) for _ in range(2)]
    outputs = {"dx_ptr": dx, "weight_grad_ptr": of_samples[0], "bias_grad_ptr": of_samples[1]}
    outputs |= {"scale_grad_ptr": of_modulation[0], "shift_grad_ptr": of_modulation[1]}
    keep = math.ceil(0.3 * channels * pixels)
    run(case, target, **inputs, **outputs, **numbers, keep=keep)
    if case.constants["NEED_AFFINE"]:
        sums = [each.sum(0) for each in of_samples] + (of_modulation if modulation else [])
        for ours, theirs, exact in zip(sums, eager[2:], truth[2:], strict=True):
            assert_exact(ours, theirs, exact)
    else:
        assert all(tensor.isnan().all() for tensor in (*of_samples, *of_modulation))
    if case.constants["SPARSE"]:
        kept = dx.view(samples * groups, -1)
        assert ((kept != 0).sum(1) >= keep).all() and ((kept != 0).sum(1) < keep * 1.1).all()  # the rest are ties
        dense = torch.where(dx != 0, truth[1], 0)
        # Dropped values are no larger than kept ones, up to one rounding.
        dropped = torch.where(dx == 0, truth[1], 0).view_as(kept).abs().amax(1)
        smallest = torch.where(kept != 0, kept.abs().double(), math.inf).amin(1)
        assert (dropped <= smallest * (1 + 4 * torch.finfo(dtype).eps)).all()
        assert_exact(dx, torch.where(dx != 0, eager[1], 0), dense)
    else:
        assert_exact(dx, eager[1], truth[1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case", [c for c in CASES["group_norm_silu"] if c.name.startswith("sums")], ids=lambda case: case.name
)
def test_sums_of_samples(case: KernelCase, target: str) -> None:
    samples, channels = 5, 2 * int(case.constants["BLOCK"]) + 9
    of_samples = torch.randn(2, samples, channels)
    sums = [unwritten(channels, dtype=DTYPES[case.signature["weight_grad_ptr"]]) for _ in range(2)]
    arguments = {"weight_grads_ptr": of_samples[0].contiguous(), "bias_grads_ptr": of_samples[1].contiguous()}
    arguments |= {"weight_grad_ptr": sums[0], "bias_grad_ptr": sums[1]}
    run(case, target, **arguments, samples=samples, channels=channels)
    for ours, given in zip(sums, of_samples, strict=True):
        assert_exact(ours, given.sum(0), given.double().sum(0))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES["geglu"], ids=lambda case: case.name)
def test_geglu(case: KernelCase, target: str) -> None:
    dtype, activation = DTYPES[case.signature["projected_ptr"]], "gelu" if case.constants["GELU"] else "silu"
    rows = int(case.constants["BLOCK_R"]) * 2 + 3
    features = int(case.constants["BLOCK_D"]) + (452 if case.constants["BLOCK_D"] >= 2048 else -7)
    projected, dproduct = (torch.randn(rows, 2 * features) * 3).to(dtype), torch.randn(rows, features).to(dtype)
    truth = geglu_and_gradient(torch.float64, projected, dproduct, activation)
    eager = geglu_and_gradient(torch.float32, projected, dproduct, activation)
    product, dprojected = unwritten(rows, features, dtype=dtype), unwritten(rows, 2 * features, dtype=dtype)
    arguments = {"projected_ptr": projected, "product_ptr": product, "rows": rows, "features": features}
    if case.name.startswith("forward"):
        run(case, target, **arguments)
    else:
        run(case, target, **arguments, dproduct_ptr=dproduct, dprojected_ptr=dprojected)
        assert_exact(dprojected, eager[1], truth[1])
    if case.constants.get("NEED_PRODUCT", True):
        assert_exact(product, eager[0], truth[0])
    else:
        assert product.isnan().all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case", [c for c in CASES["modulated_norm"] if "LAYER" in c.constants], ids=lambda case: case.name
)
def test_modulated_norm(case: KernelCase, target: str) -> None:
    dtype, constants = DTYPES[case.signature["x_ptr"]], case.constants
    samples, tokens = 2, int(constants["BLOCK_T"]) + 3
    channels = int(constants["BLOCK_C"]) + (452 if constants["BLOCK_C"] >= 1024 else -7)
    shape = samples, tokens, channels
    norm = ("layer" if constants["LAYER"] else "rms") if constants["NORMED"] else "none"
    factor = "scale" if constants["ONE_PLUS"] else "gate"
    sizes = {factor: (samples, channels), "shift": (samples, channels), "weight": (channels,), "bias": (channels,)}
    switches = {factor: "SCALED", "shift": "SHIFTED", "weight": "WEIGHTED", "bias": "BIASED"}
    given = {"x": (torch.randn(shape) * 2 + 3).to(dtype)}
    given |= {name: torch.randn(sizes[name]).to(dtype) for name, flag in switches.items() if constants.get(flag)}
    if constants.get("RESIDUAL"):
        given["residual"] = torch.randn(shape).to(dtype)
    dy = torch.randn(shape).to(dtype)
    truth, eager = (modulated_norm_and_gradients(of, norm, EPS, given, dy) for of in (torch.float64, torch.float32))
    inputs = {f"{name}_ptr": given.get(name, given["x"]) for name in ("x", "residual", "shift", "weight", "bias")}
    inputs |= {"scale_ptr": given.get(factor, given["x"]), "dy_ptr": dy}
    numbers = {"samples": samples, "tokens": tokens, "channels": channels, "eps": EPS}
    numbers |= dict.fromkeys(("x_sample", "residual_sample", "dy_sample"), tokens * channels)
    numbers |= dict.fromkeys(("x_token", "residual_token", "dy_token", "scale_stride", "shift_stride"), channels)
    if case.name.startswith("forward"):
        y = unwritten(*shape, dtype=dtype)
        run(case, target, **inputs, **numbers, y_ptr=y)
        assert_exact(y, eager["y"], truth["y"])
        return
    dx, statistics = unwritten(*shape, dtype=dtype), DTYPES[case.signature["mean_ptr"]]
    mean, rstd = unwritten(*shape[:2], dtype=statistics), unwritten(*shape[:2], dtype=statistics)
    run(case, target, **inputs, **numbers, dx_ptr=dx, mean_ptr=mean, rstd_ptr=rstd)
    if constants["NEED_X"]:
        assert_exact(dx, eager["x"], truth["x"])
    else:
        assert dx.isnan().all()
    if constants["NEED_STATISTICS"]:
        x = given["x"].double()
        exact = x.mean(2) if norm == "layer" else torch.zeros(shape[:2], dtype=torch.float64)
        torch.testing.assert_close(mean, exact.float())
        torch.testing.assert_close(rstd, ((x - exact[..., None]).square().mean(2) + EPS).rsqrt().float())
    else:
        assert mean.isnan().all() and rstd.isnan().all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case", [c for c in CASES["modulated_norm"] if c.name.startswith("sums")], ids=lambda case: case.name
)
def test_sums_of_tokens(case: KernelCase, target: str) -> None:
    dtype, constants = DTYPES[case.signature["x_ptr"]], case.constants
    samples, splits, a_split = 2, 2, 2 * int(constants["BLOCK_T"])
    tokens, channels = splits * a_split - 5, 2 * int(constants["BLOCK_C"]) + 9
    x, dy = (torch.randn(samples, tokens, channels) + 3).to(dtype), torch.randn(samples, tokens, channels).to(dtype)
    mean, rstd = torch.randn(samples, tokens), torch.rand(samples, tokens) + 0.5

    def sums(of: torch.dtype) -> list[Tensor]:
        xhat = (x.to(of) - mean[..., None].to(of)) * rstd[..., None].to(of) if constants["NORMED"] else x.to(of)
        needed = [dy.to(of) * xhat] * bool(constants["NEED_SLOPE"]) + [dy.to(of)] * bool(constants["NEED_OFFSET"])
        return [each.sum(1) for each in needed]

    rows = int(constants["NEED_SLOPE"]) + int(constants["NEED_OFFSET"])
    ours = unwritten(rows, samples, splits, channels)
    numbers = {"samples": samples, "splits": splits, "tokens_a_split": a_split, "tokens": tokens, "channels": channels}
    numbers |= dict.fromkeys(("dy_sample", "x_sample"), tokens * channels)
    numbers |= dict.fromkeys(("dy_token", "x_token"), channels)
    run(case, target, dy_ptr=dy, x_ptr=x, mean_ptr=mean, rstd_ptr=rstd, sums_ptr=ours, **numbers)
    for got, eager, truth in zip(ours.sum(2), sums(torch.float32), sums(torch.float64), strict=True):
        assert_exact(got, eager, truth)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case", [c for c in CASES["modulated_norm"] if c.name.startswith("gradients")], ids=lambda case: case.name
)
def test_gradients_of_sums(case: KernelCase, target: str) -> None:
    dtype, constants = DTYPES[case.signature["scale_ptr"]], case.constants
    samples, splits, channels = 3, 4, 2 * int(constants["BLOCK"]) + 9
    rows = int(constants["NEED_SLOPE"]) + int(constants["NEED_OFFSET"])
    sums, scale = torch.randn(rows, samples, splits, channels), torch.randn(samples, channels).to(dtype)
    weight, bias = torch.randn(channels).to(dtype), torch.randn(channels).to(dtype)

    def gradients(of: torch.dtype) -> dict[str, Tensor]:
        slope, offset = sums[0].to(of).sum(1), sums[-1].to(of).sum(1)
        factor = scale.to(of) + float(constants["ONE_PLUS"])
        dscale = slope * weight.to(of) if constants["WEIGHTED"] else slope
        dscale = dscale + offset * bias.to(of) if constants["BIASED"] else dscale
        sums_of_samples = (slope * factor).sum(0), (offset * factor).sum(0)
        return dict(zip(("scale", "shift", "weight", "bias"), (dscale, offset, *sums_of_samples), strict=True))

    eager, truth = gradients(torch.float32), gradients(torch.float64)
    ours = {name: unwritten(*exact.shape, dtype=dtype) for name, exact in truth.items()}
    pointers = {"sums_ptr": sums, "scale_ptr": scale, "weight_ptr": weight, "bias_ptr": bias}
    pointers |= {f"d{name}_ptr": tensor for name, tensor in ours.items()}
    run(case, target, **pointers, samples=samples, splits=splits, channels=channels, scale_stride=channels)
    for name, tensor in ours.items():
        if constants[f"NEED_{name.upper()}"]:
            assert_exact(tensor, eager[name], truth[name])
        else:
            assert tensor.isnan().all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES["silu_mul"], ids=lambda case: case.name)
def test_silu_mul(case: KernelCase, target: str) -> None:
    dtype = DTYPES[case.signature["gate_ptr"]]
    outers, rows = 2, int(case.constants["BLOCK_R"]) * 2 + 3
    features = int(case.constants["BLOCK_D"]) + (452 if case.constants["BLOCK_D"] >= 2048 else -7)
    shape = outers, rows, features
    # Gate and up are halves of one projection, as in FLUX.2.
    projection, dproduct = (torch.randn(outers, rows, 2 * features) * 3).to(dtype), torch.randn(shape).to(dtype)
    gate, up = projection.chunk(2, dim=-1)
    truth, eager = (silu_mul_and_gradients(of, gate, up, dproduct) for of in (torch.float64, torch.float32))
    numbers = {"outers": outers, "rows": rows, "features": features}
    numbers |= dict.fromkeys(("gate_outer", "up_outer"), 2 * rows * features)
    numbers |= dict.fromkeys(("gate_row", "up_row"), 2 * features)
    numbers |= {"dproduct_outer": rows * features, "dproduct_row": features}
    pointers = {"gate_ptr": projection.view(-1), "up_ptr": projection.view(-1)[features:], "dproduct_ptr": dproduct}
    names = ("product_ptr", "dgate_ptr", "dup_ptr")
    outputs = {name: unwritten(*shape, dtype=dtype) for name in names}
    run(case, target, **pointers, **numbers, **outputs)
    forward = case.name.startswith("forward")
    written = forward, case.constants.get("NEED_GATE", False), case.constants.get("NEED_UP", False)
    for name, is_written, theirs, exact in zip(names, written, eager, truth, strict=True):
        if is_written:
            assert_exact(outputs[name], theirs, exact)
        else:
            assert outputs[name].isnan().all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES["qk_norm_rope"], ids=lambda case: case.name)
def test_qk_norm_rope(case: KernelCase, target: str) -> None:
    dtype, constants = DTYPES[case.signature["x_ptr"]], case.constants
    samples, tokens = 2, 5
    heads, features = int(constants["BLOCK_H"]) + 3, int(constants["BLOCK_D"]) - 6
    # A part of a wider projection, as FLUX.2's single blocks give it; heads first, as attention gives gradients.
    wide = (torch.randn(samples, tokens, 3 * heads * features) * 2).to(dtype)
    x = wide[..., heads * features : 2 * heads * features].unflatten(-1, (heads, features))
    dy = torch.randn(samples, heads, tokens, features).to(dtype).transpose(1, 2)
    weight = torch.randn(features).to(dtype) if constants["WEIGHTED"] else None
    angles = torch.randn(tokens, features // 2) * 3 if constants["ROTATED"] else None
    arguments: list[Any] = [x, weight, angles, dy, EPS, constants["NORM"]]
    truth, eager = (qk_norm_rope_and_gradients(of, *arguments) for of in (torch.float64, torch.float32))
    unused = torch.randn(1)
    pointers = {"x_ptr": wide.view(-1)[heads * features :], "dy_ptr": dy.transpose(1, 2)}
    pointers |= {"weight_ptr": x.new_empty(1) if weight is None else weight}
    pointers |= {f"{of}_ptr": unused if angles is None else getattr(angles, of)() for of in ("cos", "sin")}
    numbers = {"tokens": samples * tokens, "length": tokens, "heads": heads, "features": features, "angle_stride_n": 0}
    for name, tensor in {"x": x, "dy": dy, "y": torch.empty(x.shape)}.items():
        numbers |= dict(zip((f"{name}_stride_{of}" for of in "nth"), tensor.stride(), strict=False))
    if case.name.startswith("forward"):
        y = unwritten(*x.shape, dtype=dtype)
        run(case, target, **pointers, **numbers, y_ptr=y, eps=EPS)
        assert_exact(y, eager[0], truth[0])
        return
    dx, sums = unwritten(*x.shape, dtype=dtype), unwritten(3, features)
    run(case, target, **pointers, **numbers, dx_ptr=dx, weight_grad_ptr=sums, eps=EPS)
    assert_exact(dx, eager[1], truth[1])
    if constants["NEED_WEIGHT"]:
        assert_exact(sums.sum(0), eager[2], truth[2])
    else:
        assert sums.isnan().all()


@pytest.mark.parametrize("target", TARGETS)
def test_angles_of_each_sample_are_its_own(target: str) -> None:
    case = next(case for case in CASES["qk_norm_rope"] if case.name.startswith("forward fp32 8x128 norm=0"))
    x, angles = torch.randn(2, 3, 9, 20), torch.randn(2, 3, 10)
    y = unwritten(*x.shape)
    numbers = {"tokens": 6, "length": 3, "heads": 9, "features": 20, "angle_stride_n": 3}
    for name in ("x", "y"):
        numbers |= dict(zip((f"{name}_stride_{of}" for of in "nth"), x.stride(), strict=False))
    pointers = {"x_ptr": x, "weight_ptr": x, "cos_ptr": angles.cos(), "sin_ptr": angles.sin(), "y_ptr": y}
    run(case, target, **pointers, **numbers, eps=EPS)
    eager, truth = (
        qk_norm_rope_and_gradients(of, x, None, angles, x, EPS, False)[0] for of in (torch.float32, torch.float64)
    )
    assert_exact(y, eager, truth)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES["keep_largest"], ids=lambda case: case.name)
def test_keep_largest(case: KernelCase, target: str) -> None:
    dtype = DTYPES[case.signature["rows_ptr"]]
    rows_RL = torch.randn(5, 4999).to(dtype)
    rows_RL[1, 17], rows_RL[2, 4998], rows_RL[2, 0] = math.nan, math.inf, -math.inf
    rows_RL[3] = rows_RL[3].round()  # ties
    rows_RL[4, 1:] = 0
    for density in (1e-9, 0.2, 0.8):
        kept_RL = unwritten(5, 4999, dtype=dtype)
        keep = math.ceil(density * 4999)
        run(case, target, rows_ptr=rows_RL, kept_ptr=kept_RL, rows=5, length=4999, keep=keep)
        torch.testing.assert_close(kept_RL, largest_by_sorting(rows_RL, density), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES["quantize_blocks"], ids=lambda case: case.name)
def test_quantize_blocks(case: KernelCase, target: str) -> None:
    bits = int(case.constants["BITS"])
    values_RN = torch.cat([hard_blocks(seed).view(1, -1) for seed in (1, 2)])
    left_RN, rows, length = values_RN.clone(), *values_RN.shape
    packed_RB = torch.zeros(rows, packed_bytes(length, bits), dtype=torch.uint8)
    reference.quantize_blocks(left_RN, packed_RB, bits)
    name = case.name.partition(" ")[0]
    ours_RB = torch.full_like(packed_RB, 255) if name == "quantize" else packed_RB
    before = {"quantize": values_RN, "dequantize": unwritten(rows, length), "add_rows": torch.linspace(-1, 1, length)}
    ours = before[name]
    theirs = left_RN if name == "quantize" else ours.clone()
    if name == "dequantize":
        reference.dequantize_blocks(packed_RB, theirs, bits)
    elif name == "add_rows":
        reference.add_quantized_rows(packed_RB, theirs, bits)
    scales = ours_RB.view(torch.bfloat16)
    run(case, target, values_ptr=ours, scales_ptr=scales, codes_ptr=ours_RB, rows=rows, groups=length // 256)
    assert torch.equal(ours_RB, packed_RB)
    assert torch.equal(bits_of(ours), bits_of(theirs))


def test_a_nan_comes_out_of_the_forward() -> None:
    case = next(case for case in CASES["group_norm_silu"] if case.name == "forward fp16 8x256")
    x = torch.randn(1, 4, 300).half()
    x[0, 3, 299] = math.nan
    y, mean, rstd = unwritten(1, 4, 300, dtype=torch.float16), unwritten(1, 2), unwritten(1, 2)
    affine = torch.ones(4)
    numbers = {"slabs": 2, "groups": 2, "channels": 2, "pixels": 300, "scale_stride": 0, "shift_stride": 0, "eps": EPS}
    pointers = dict.fromkeys(("weight_ptr", "bias_ptr", "scale_ptr", "shift_ptr"), affine)
    pointers |= {"x_ptr": x, "y_ptr": y, "mean_ptr": mean, "rstd_ptr": rstd}
    run(case, "Ascend910B1", **pointers, **numbers)
    assert y[0, 2:].isnan().all() and not y[0, :2].isnan().any()


def test_wrong_arguments_are_refused_before_memory_is_touched() -> None:
    case = CASES["keep_largest"][0]
    kernel = CPUKernel(lower(case.function, case.signature, case.constants).linalg)
    half = np.zeros(8, np.float16)
    with pytest.raises(CPUExecutionError, match=r"takes 5 arguments \(float16, float16, i32, i32, i32\), got 2"):
        kernel(1, half, half)
    with pytest.raises(CPUExecutionError, match=r"argument 1 must be a contiguous float16 array, got float32 \(4,\)"):
        kernel(1, half, half.astype(np.float32), 1, 8, 4)
    with pytest.raises(CPUExecutionError, match="argument 0 must be a contiguous float16 array, got float16"):
        kernel(1, half[::2], half, 1, 4, 2)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES["packed_weight"], ids=lambda case: case.name)
def test_packed_weight(case: KernelCase, target: str) -> None:
    kind: Format = "nf4" if case.name.startswith("nf4") else "int8"
    dtype = DTYPES[case.signature["values_ptr"]]
    blocks = int(case.constants["TILE"]) * 4 + 3
    packed, scales = weight_reference.pack(torch.randn(blocks * BLOCK), kind)
    values = unwritten(blocks * BLOCK, dtype=dtype)
    # Every entry of the signature is an address or a number: signed bytes travel as their bits.
    run(case, target, packed_ptr=packed.view(torch.uint8), scales_ptr=scales, values_ptr=values, blocks=blocks)
    assert torch.equal(values, weight_reference.unpack(packed, scales, kind, dtype))
