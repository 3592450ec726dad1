"""RMSNorm and rotation of queries and keys as one op: exact, as near as eager, its input alone kept, its refusals."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from fakes import op_contract as contract
from fakes.op_contract import Case, kept_numbers, outcome
from lightning_aigc_kernels import qk_norm_rope, rotary_from_complex, rotary_from_repeated
from lightning_aigc_kernels.qk_norm_rope import op as module
from lightning_aigc_kernels.qk_norm_rope import reference

OPS = ["qk_norm_rope", "qk_norm_rope_backward"]
SHAPE = (2, 5, 3, 6)
KINDS: dict[str, dict[str, bool]] = {
    "norm and rotation": {},
    "norm alone": {"rotate": False},
    "norm without weight": {"weighted": False, "rotate": False},
    "rotation alone": {"weighted": False, "norm": False},
    "rotation a sample": {"per_sample": True},
    "nothing": {"weighted": False, "norm": False, "rotate": False},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def case(kind: str = "norm and rotation", shape: tuple[int, ...] = SHAPE) -> Case:
    """Float32 cos and sin whatever the dtype, as the models' are."""
    options = KINDS[kind]
    samples, tokens, _, features = shape
    norm, weight, cos, sin = options.get("norm", True), None, None, None
    if options.get("weighted", True):
        weight = torch.randn(features, dtype=torch.float64)
    if options.get("rotate", True):
        lead = (samples, tokens) if options.get("per_sample") else (tokens,)
        angles = torch.randn(*lead, features // 2) * 3
        cos, sin = angles.cos(), angles.sin()
    call = {"cos": cos, "sin": sin, "norm": norm, "eps": 1e-5}
    tensors = {"x": torch.randn(shape, dtype=torch.float64) * 2, "weight": weight}
    trained = ("x",) if weight is None else ("x", "weight")
    return Case(partial(qk_norm_rope, **call), partial(reference.qk_norm_rope, **call), tensors, trained)


@kinds
@pytest.mark.parametrize("shape", [SHAPE, (1, 7, 1, 10), (3, 1, 2, 2)], ids=str)
def test_output_and_gradients_equal_autograd(kind: str, shape: tuple[int, ...]) -> None:
    contract.assert_equals_autograd(case(kind, shape))


@pytest.mark.parametrize("trained", [("x",), ("weight",)], ids=str)
def test_each_gradient_alone_equals_autograd(trained: tuple[str, ...]) -> None:
    given = case()
    contract.assert_equals_autograd(Case(given.fused, given.eager, given.tensors, trained))


def test_an_odd_head_is_normalised_without_a_rotation() -> None:
    contract.assert_equals_autograd(case("norm alone", (2, 3, 2, 5)))


def test_the_weights_gradient_is_not_computed_where_nobody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = module.backward
    monkeypatch.setattr(module, "backward", lambda dy, x, how, need: asked.append(need) or real(dy, x, how, need))
    given = case()
    for trained in (("x",), ("x", "weight")):
        outcome(Case(given.fused, given.eager, given.tensors, trained), given.fused)
    assert asked == [False, True]


@kinds
def test_finite_differences_agree(kind: str) -> None:
    contract.assert_passes_gradcheck(case(kind))


@kinds
def test_it_honours_the_op_contract(kind: str) -> None:
    contract.assert_honours_the_op_contract(case(kind), OPS)


def test_it_honours_the_op_contract_for_a_part_of_a_wider_projection() -> None:
    given = case()
    wide = torch.randn(2, 5, 3 * 18, dtype=torch.float64)
    given.tensors["x"] = wide[..., 18:36].unflatten(-1, (3, 6))
    contract.assert_honours_the_op_contract(given, OPS)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype, kind: str) -> None:
    contract.assert_no_worse_than_eager(lambda: case(kind, (4, 33, 3, 64)), dtype, 1.05)


def test_autocast_leaves_the_dtype_alone() -> None:
    given = case()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = {name: None if t is None else t.to(dtype) for name, t in given.tensors.items()}
            assert given.fused(**tensors).dtype == dtype


def test_a_weight_may_have_another_dtype_than_the_query() -> None:
    given = case()
    x, weight = given.tensors["x"], given.tensors["weight"]
    assert x is not None and weight is not None
    x, weight = x.bfloat16().requires_grad_(), weight.float().requires_grad_()
    y = given.fused(x=x, weight=weight)
    dx, dweight = torch.autograd.grad(y.float().square().sum(), (x, weight))
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@kinds
def test_it_keeps_its_input_alone(kind: str) -> None:
    given = case(kind, (4, 16, 3, 64))
    assert kept_numbers(given, given.fused, torch.bfloat16) == 0
    # A card's RMSNorm keeps its input and one number a row.
    if kind in ("norm and rotation", "norm alone") and torch.get_default_device().type == "cpu":
        assert kept_numbers(given, given.eager, torch.bfloat16) >= 4 * 16 * 3 * 64


def test_a_rotation_alone_does_not_keep_even_its_input() -> None:
    given = case("rotation alone")
    x = given.tensors["x"]
    assert x is not None
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        given.fused(x=x.requires_grad_(), weight=None)
    assert [t.shape for t in saved] == [(5, 3), (5, 3)]


@kinds
def test_any_strides_give_the_same(kind: str) -> None:
    contract.assert_takes_any_strides(case(kind))


@kinds
@pytest.mark.parametrize("shape", [(0, 5, 3, 6), (2, 0, 3, 6), (2, 5, 0, 6)], ids=str)
def test_an_empty_input_gives_empty_results(kind: str, shape: tuple[int, ...]) -> None:
    contract.assert_equals_autograd(case(kind, shape))


def test_nan_comes_out() -> None:
    result = contract.assert_shows_nan(case(), "x", (1, 2, 1, 4))
    assert result["y"].isnan().sum() == 6


def test_a_rotation_keeps_nan_in_its_pair() -> None:
    given = case("rotation alone")
    x = given.tensors["x"]
    assert x is not None
    x[1, 2, 1, 4] = torch.nan
    assert given.fused(x=x, weight=None).isnan().nonzero().tolist() == [[1, 2, 1, 4], [1, 2, 1, 5]]


@kinds
def test_what_it_gives_can_be_changed_in_place(kind: str) -> None:
    contract.assert_can_be_changed_in_place(case(kind))


def test_it_works_without_gradients() -> None:
    contract.assert_right_without_gradients(case())


def test_it_refuses_what_it_has_no_rules_for() -> None:
    contract.assert_refuses_what_it_has_no_rules_for(case(), "qk_norm_rope")


@kinds
def test_it_compiles(kind: str) -> None:
    contract.assert_compiles(case(kind))


def test_the_forms_of_diffusers_become_real_cos_and_sin() -> None:
    angles = torch.randn(7, 3)
    twice = angles.cos().repeat_interleave(2, 1), angles.sin().repeat_interleave(2, 1)
    assert all(map(torch.equal, rotary_from_repeated(*twice), (angles.cos(), angles.sin())))
    freqs_cis = torch.polar(torch.ones_like(angles), angles)
    for given, sign in ((freqs_cis, 1), (freqs_cis.conj(), -1)):
        cos, sin = rotary_from_complex(given)
        assert torch.equal(cos, freqs_cis.real) and torch.equal(sin, sign * freqs_cis.imag)
        assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
    x = torch.randn(2, 7, 2, 6, dtype=torch.float64)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs_cis.to(torch.complex128)[:, None]
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(qk_norm_rope(x, None, *rotary_from_complex(freqs_cis), norm=False), expected)


def test_what_does_not_fit_is_named() -> None:
    x, cos = torch.randn(2, 5, 3, 6), torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"qk_norm_rope wants x \[N, T, H, D\], got \(2, 5, 18\)"):
        qk_norm_rope(x.flatten(2))
    with pytest.raises(ValueError, match=r"wants a weight \(6,\) for 6 features a head, got \(18,\)"):
        qk_norm_rope(x, torch.ones(18))
    with pytest.raises(ValueError, match="a weight with norm=False, which would not be used"):
        qk_norm_rope(x, torch.ones(6), norm=False)
    with pytest.raises(ValueError, match="wants both cos and sin, or neither, got only cos"):
        qk_norm_rope(x, None, cos)
    wanted = r"wants cos and sin \(5, 3\) or \(2, 5, 3\), got "
    with pytest.raises(ValueError, match=wanted + r"\(5, 6\) and \(5, 6\) for 6 features a head"):
        qk_norm_rope(x, None, torch.randn(5, 6), torch.randn(5, 6))
    with pytest.raises(ValueError, match=r"got \(5, 2\) and \(5, 2\) for 5 features a head"):
        qk_norm_rope(x[..., :5], None, cos[:, :2], cos[:, :2])
    with pytest.raises(ValueError, match="gives cos and sin no gradient"):
        qk_norm_rope(x, None, cos.clone().requires_grad_(), cos)
    with pytest.raises(ValueError, match=r"wants real cos and sin, got torch.complex64; use rotary_from_complex"):
        qk_norm_rope(x, None, cos + 0j, cos + 0j)
    with pytest.raises(ValueError, match=r"cos and sin must be \[..., D\] with an even D, got \(5, 3\)"):
        rotary_from_repeated(cos, cos)
    with pytest.raises(ValueError, match=r"freqs_cis must be complex, got torch.float32; use rotary_from_repeated"):
        rotary_from_complex(cos)
