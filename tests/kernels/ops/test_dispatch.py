"""Dispatch: which implementation computes, in which dtype, and which calls are refused."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_aigc_kernels import dispatch, geglu
from lightning_aigc_kernels.custom_op import no_second_derivative
from lightning_aigc_kernels.dispatch import (
    FallbackWarning,
    backward_dtype,
    check_density,
    compute_dtype,
    kernel_for,
    refuse_functorch,
    why_no_kernel,
    without_autocast,
    without_values,
)


def tensor_on(device: str, dtype: torch.dtype = torch.float32) -> Any:
    """All that kernel_for asks of a tensor, for devices that this machine may lack."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype)


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    dispatch.warn_once.cache_clear()
    yield
    dispatch.warn_once.cache_clear()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands in for group_norm_silu/kernel.py, which needs Triton."""
    module = ModuleType("kernel")
    monkeypatch.setattr(dispatch, "_kernel_module", lambda op: module)
    monkeypatch.setattr(dispatch, "why_no_kernel", why_no_kernel.__wrapped__)
    return module


def test_a_cpu_has_the_reference_without_a_word(kernel: ModuleType) -> None:
    assert kernel_for("group_norm_silu", torch.randn(2)) is None
    assert kernel_for("group_norm_silu", torch.randn(2, dtype=torch.float64)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_gpu_has_the_kernel(kernel: ModuleType, dtype: torch.dtype) -> None:
    assert kernel_for("group_norm_silu", tensor_on("cuda", dtype)) is kernel


def test_float64_falls_back_and_says_so_once(kernel: ModuleType) -> None:
    expected = (
        "lightning_aigc::group_norm_silu runs its plain torch reference on cuda; .* float32 and got torch.float64"
    )
    with pytest.warns(FallbackWarning, match=expected):
        assert kernel_for("group_norm_silu", tensor_on("cuda", torch.float64)) is None
    with warnings.catch_warnings(record=True) as again:
        assert kernel_for("group_norm_silu", tensor_on("cuda", torch.float64)) is None
    assert not again
    with pytest.warns(FallbackWarning, match="lightning_aigc::geglu"):  # each op speaks for itself
        kernel_for("geglu", tensor_on("cuda", torch.float64))


def test_a_triton_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(op: str) -> ModuleType:
        raise ImportError("no module named triton")

    monkeypatch.setattr(dispatch, "_kernel_module", broken)
    monkeypatch.setattr(dispatch, "why_no_kernel", why_no_kernel.__wrapped__)
    with pytest.warns(FallbackWarning, match=r"Triton cannot be imported \(ImportError: no module named triton\)"):
        assert kernel_for("group_norm_silu", tensor_on("cuda")) is None


def test_a_triton_without_a_driver_for_the_card_is_named(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case of a torch with the Triton of another vendor's cards."""

    class Driver:
        @property
        def active(self) -> Any:
            raise RuntimeError("0 active drivers")

    runtime = ModuleType("triton.runtime")
    vars(runtime)["driver"] = Driver()
    for name, module in (("triton", ModuleType("triton")), ("triton.runtime", runtime)):
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.warns(FallbackWarning, match=r"no driver for this machine's cards \(RuntimeError: 0 active drivers\)"):
        assert kernel_for("group_norm_silu", tensor_on("cuda")) is None


def test_an_op_without_a_kernel_is_named(kernel: ModuleType) -> None:
    with pytest.warns(FallbackWarning, match="lightning_aigc::joint_attention runs its plain torch .*: it has none"):
        assert kernel_for("joint_attention", tensor_on("cuda")) is None


def test_torch_func_and_forward_mode_are_refused_and_nothing_else() -> None:
    refuse_functorch("some_op")
    with torch.no_grad():
        refuse_functorch("some_op")

    def call(x: torch.Tensor) -> torch.Tensor:
        refuse_functorch("some_op")
        return x.sum()

    for transform in (torch.func.grad(call), torch.func.vmap(call), torch.func.jacrev(call)):
        with pytest.raises(RuntimeError, match=r"lightning_aigc::some_op has no torch\.func rules"):
            transform(torch.randn(2))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"no torch\.func rules"):
        call(torch.randn(2))
    refuse_functorch("some_op")


def test_a_second_derivative_is_refused_with_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"lightning_aigc::some_op has no second derivative.*create_graph=True"):
        no_second_derivative("some_op")(None, torch.ones(1))


def test_products_run_in_autocasts_dtype_but_for_float64() -> None:
    single, double = torch.randn(2), torch.randn(2, dtype=torch.float64)
    assert compute_dtype(single) == torch.float32
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert compute_dtype(single) == torch.bfloat16
        assert compute_dtype(double) == torch.float64
        with without_autocast(single):
            assert compute_dtype(single) == torch.float32
        assert compute_dtype(single) == torch.bfloat16


def test_a_result_without_values_has_a_shape_and_no_memory() -> None:
    nothing = without_values(torch.randn(1), (300, 400), torch.bfloat16)
    assert nothing.shape == (300, 400) and nothing.dtype == torch.bfloat16
    assert nothing.untyped_storage().nbytes() == 2


def test_a_density_is_a_share() -> None:
    check_density(1, "density")
    check_density(1e-9, "density")
    for density in (0, -1, 1.01, float("nan")):
        with pytest.raises(ValueError, match=r"some_density must be in \(0, 1\], got"):
            check_density(density, "some_density")


@pytest.mark.parametrize(
    ("asked", "forward", "expected"),
    [
        (torch.float16, torch.bfloat16, torch.float16),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float32),
        (None, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_half_precision_backward_is_for_half_precision_forwards(
    asked: torch.dtype | None, forward: torch.dtype, expected: torch.dtype
) -> None:
    assert backward_dtype(asked, forward) == expected


def test_errors_of_autograd_name_the_op() -> None:
    y = geglu(torch.randn(2, 8, requires_grad=True))
    assert "geglu" in repr(y.grad_fn)
