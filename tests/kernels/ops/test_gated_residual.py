"""gated_residual on plain torch: exact, no worse than eager, at most y kept, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fakes import op_contract as contract
from fakes.op_contract import Case, kept_numbers
from lightning_aigc_kernels import gated_residual
from lightning_aigc_kernels.modulated_norm import reference

OPS = ["gated_residual", "gated_residual_backward"]
KINDS = {
    "gate": ("gate",),  # SD 3, FLUX, FLUX.2, Qwen-Image
    "gate norm_weight": ("gate", "norm_weight"),  # Z-Image
    "norm_weight": ("norm_weight",),  # Z-Image without modulation
    "gate rms": ("gate",),
    "plain": (),
}
kinds = pytest.mark.parametrize("kind", KINDS)
modelled = pytest.mark.parametrize("kind", ["gate", "gate norm_weight"])


def on_branch(
    op: Callable[..., Tensor],
    rms: bool,
    x: Tensor,
    gate: Tensor | None,
    branch: Tensor,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """The call with y under another name, for "y" is a case's output."""
    return op(x, gate, branch, norm_weight=norm_weight, eps=1e-5, rms=rms)


def case(kind: str = "gate", shape: tuple[int, int, int] = (3, 5, 12), trained: tuple[str, ...] | None = None) -> Case:
    sizes = {"gate": (shape[0], shape[2]), "norm_weight": (shape[2],)}
    tensors: dict[str, Tensor | None] = {"x": torch.randn(shape, dtype=torch.float64), "gate": None}
    tensors["branch"] = torch.randn(shape, dtype=torch.float64) * 3
    tensors |= {name: torch.randn(sizes[name], dtype=torch.float64) for name in KINDS[kind]}
    fused, eager = (functools.partial(on_branch, f, "rms" in kind) for f in (gated_residual, reference.gated_residual))
    return Case(fused, eager, tensors, ("x", "branch", *KINDS[kind]) if trained is None else trained)


@kinds
@pytest.mark.parametrize("shape", [(3, 5, 12), (1, 1, 1), (1, 7, 3), (2, 1, 8)], ids=str)
def test_output_and_gradients_equal_autograd(kind: str, shape: tuple[int, int, int]) -> None:
    contract.assert_equals_autograd(case(kind, shape))


@pytest.mark.parametrize("trained", [("x",), ("branch",), ("gate",), ("norm_weight",), ("x", "branch")], ids=str)
def test_each_gradient_alone_equals_autograd(trained: tuple[str, ...]) -> None:
    contract.assert_equals_autograd(case("gate norm_weight", trained=trained))


@modelled
def test_a_gate_with_a_token_axis_and_one_for_all_samples_are_taken(kind: str) -> None:
    for rows in (3, 1):
        given = case(kind)
        gate = given.tensors["gate"]
        assert gate is not None
        given.tensors["gate"] = gate[:rows, None]
        contract.assert_equals_autograd(given)


@kinds
def test_finite_differences_agree(kind: str) -> None:
    contract.assert_passes_gradcheck(case(kind))


@kinds
def test_it_honours_the_op_contract(kind: str) -> None:
    contract.assert_honours_the_op_contract(case(kind), OPS)


@modelled
def test_it_honours_the_op_contract_with_a_frozen_gate(kind: str) -> None:
    contract.assert_honours_the_op_contract(case(kind, trained=("x", "branch")), OPS)


RATIO = 1.05


@modelled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype, kind: str) -> None:
    contract.assert_no_worse_than_eager(lambda: case(kind, (2, 65, 192)), dtype, RATIO)


def test_autocast_leaves_the_dtype_alone() -> None:
    x, gate = torch.randn(2, 3, 8), torch.randn(2, 8, dtype=torch.bfloat16)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        for y in (x, x.bfloat16()):
            assert gated_residual(x, gate, y).dtype == reference.gated_residual(x, gate, y).dtype == torch.float32
            assert gated_residual(x.bfloat16(), gate, x.bfloat16()).dtype == torch.bfloat16


def test_mixed_dtypes_are_rounded_once_and_each_gradient_has_its_tensors_dtype() -> None:
    x, gate = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    y = torch.randn(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    out = gated_residual(x, gate, y)
    torch.testing.assert_close(out, reference.gated_residual(x, gate, y))
    gradients = torch.autograd.grad(out.sum(), [x, gate, y])
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float32, torch.bfloat16]


def test_the_gradient_of_x_is_the_incoming_one_itself() -> None:
    given = case()
    x, gate, y = (given.tensors[name] for name in ("x", "gate", "branch"))
    assert x is not None and gate is not None and y is not None
    out = gated_residual(x.requires_grad_(), gate, y.requires_grad_())
    incoming = torch.randn_like(out)
    dx, _ = torch.autograd.grad(out, [x, y], incoming)
    assert dx.data_ptr() == incoming.data_ptr()


@modelled
def test_it_keeps_nothing_of_its_own(kind: str) -> None:
    given = case(kind, (2, 16, 64))
    assert kept_numbers(given, given.fused, torch.bfloat16) == 0


@pytest.mark.parametrize(
    ("kind", "trained", "keeps"),
    [
        ("gate", ("x", "branch"), False),
        ("gate", ("gate",), True),
        ("gate norm_weight", ("x", "branch"), True),
        ("gate norm_weight", ("x",), False),
    ],
    ids=str,
)
def test_y_is_kept_only_if_it_is_read(kind: str, trained: tuple[str, ...], keeps: bool) -> None:
    given = case(kind, trained=trained)
    for name in trained:
        tensor = given.tensors[name]
        assert tensor is not None
        tensor.requires_grad_()
    out = given.fused(**given.tensors)
    assert out.grad_fn is not None
    saved = [tensor.shape for tensor in out.grad_fn.saved_tensors if tensor is not None]  # type: ignore[attr-defined]
    assert (out.shape in saved) == keeps


@kinds
def test_any_strides_give_the_same(kind: str) -> None:
    contract.assert_takes_any_strides(case(kind))


@modelled
@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6), (2, 5, 0)], ids=str)
def test_an_empty_input_gives_empty_results(kind: str, shape: tuple[int, int, int]) -> None:
    contract.assert_equals_autograd(case(kind, shape))


@modelled
@pytest.mark.parametrize(("name", "index"), [("branch", (1, 2, 3)), ("gate", (1, 3))])
def test_nan_comes_out(kind: str, name: str, index: tuple[int, ...]) -> None:
    result = contract.assert_shows_nan(case(kind), name, index)
    assert not result["y"][0].isnan().any()


def test_a_nan_of_the_residual_comes_out_in_its_place() -> None:
    x, gate = torch.randn(2, 5, 6), torch.randn(2, 6)
    x[1, 2, 3] = torch.nan
    assert gated_residual(x, gate, torch.randn(2, 5, 6)).isnan().nonzero().tolist() == [[1, 2, 3]]


@modelled
@pytest.mark.parametrize("samples", [1, 3])
def test_what_it_gives_can_be_changed_in_place(kind: str, samples: int) -> None:
    contract.assert_can_be_changed_in_place(case(kind, (samples, 5, 12)))


@modelled
def test_it_works_without_gradients(kind: str) -> None:
    contract.assert_right_without_gradients(case(kind))


def test_it_refuses_what_it_has_no_rules_for() -> None:
    contract.assert_refuses_what_it_has_no_rules_for(case(), "gated_residual", "branch")


@modelled
@pytest.mark.parametrize("trained", [("x", "branch"), ("x", "branch", "gate")], ids=len)
def test_it_compiles(kind: str, trained: tuple[str, ...]) -> None:
    contract.assert_compiles(case(kind, trained=trained))


def test_a_wrong_call_is_named() -> None:
    x = torch.randn(2, 5, 6)
    with pytest.raises(ValueError, match=r"gated_residual wants x \[N, T, C\], got \(5, 6\)"):
        gated_residual(x[0], None, x[0])
    with pytest.raises(ValueError, match=r"x and y must have one shape, got \(2, 5, 6\) and \(2, 4, 6\)"):
        gated_residual(x, None, x[:, :4])
    with pytest.raises(ValueError, match=r"gate must be \(2, 6\) or \(2, 1, 6\) for x \(2, 5, 6\), got \(2, 5, 6\)"):
        gated_residual(x, x, x)
    with pytest.raises(ValueError, match=r"norm_weight must be \(6,\) for x \(2, 5, 6\), got \(5,\)"):
        gated_residual(x, None, x, norm_weight=torch.randn(5))
