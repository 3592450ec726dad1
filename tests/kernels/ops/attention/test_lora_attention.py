"""LayerNorm, q, k, v, attention and output as one op: exact, as near as eager, what is kept, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import op_contract as contract
from fakes.op_contract import Case, kept_numbers, outcome
from lightning_aigc_kernels import LoRAProjection, NormParameters, lora_attention
from lightning_aigc_kernels.lora_attention import passes
from lightning_aigc_kernels.lora_attention.op import lora_attention_reference

HEADS, EPS, RANK, FEATURES = 2, 1e-5, 3, 8
SCALES = {"q": 0.5, "k": 1.5, "v": 2.0, "out": 1.0}
OPS = ["lora_attention", "lora_attention_backward"]
NORM = ("norm_weight", "norm_bias")
LORA = tuple(f"{kind}_{layer}" for layer in SCALES for kind in ("down", "up"))
BIASES = tuple(f"bias_{layer}" for layer in SCALES)
WEIGHTS = tuple(f"weight_{layer}" for layer in SCALES)
TRAINED = {
    "all": ("x", "context", *NORM, *WEIGHTS, *BIASES, *LORA),
    "frozen": ("x",),
    "lora": ("x", *LORA),
    "lora alone": LORA,
    "context": ("context", "up_k"),
    "one of a pair": ("x", "up_q", "down_v", "weight_k", "bias_out", "norm_weight"),
}


def sizes(context_features: int | None) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = dict.fromkeys(NORM, (FEATURES,))
    for layer in SCALES:
        inputs = FEATURES if context_features is None or layer in ("q", "out") else context_features
        outputs = FEATURES + 3 if layer == "out" else FEATURES
        found |= {f"weight_{layer}": (outputs, inputs), f"bias_{layer}": (outputs,)}
        found |= {f"down_{layer}": (RANK, inputs), f"up_{layer}": (outputs, RANK)}
    return found


def layers_of(given: dict[str, Tensor | None]) -> list[LoRAProjection]:
    return [
        LoRAProjection(*(given.get(f"{kind}_{layer}") for kind in ("weight", "bias", "down", "up")), scale)  # type: ignore[arg-type]
        for layer, scale in SCALES.items()
    ]


def split(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors among keyword arguments, and the rest."""
    names = sizes(None)
    return {n: v for n, v in given.items() if n in names}, {n: v for n, v in given.items() if n not in names}


def fused(x: Tensor, context: Tensor | None = None, normed: bool = True, **given: Any) -> Tensor:
    tensors, options = split(given)
    norm = NormParameters(tensors.get("norm_weight"), tensors.get("norm_bias"), EPS, normed)
    return lora_attention(x, context, norm, *layers_of(tensors), HEADS, **options)[0]


def eager(x: Tensor, context: Tensor | None = None, normed: bool = True, **given: Any) -> Tensor:
    norm = NormParameters(given.get("norm_weight"), given.get("norm_bias"), EPS, normed)
    return lora_attention_reference(x, context, norm, *layers_of(given), HEADS)


def case(
    trained: str = "all",
    cross: bool = False,
    absent: tuple[str, ...] = (),
    samples: int = 2,
    tokens: int = 5,
    op_only: dict[str, Any] | None = None,
    **how: Any,
) -> Case:
    """`op_only` goes to the op alone; the context has other features and another length than x."""
    tensors: dict[str, Tensor | None] = {"x": torch.randn(samples, tokens, FEATURES, dtype=torch.float64)}
    if cross:
        tensors["context"] = torch.randn(samples, 3, 6, dtype=torch.float64)
    for name, size in sizes(6 if cross else None).items():
        if name not in absent:
            tensors[name] = torch.randn(size, dtype=torch.float64) / size[-1] ** 0.5
    chosen = tuple(name for name in TRAINED[trained] if name in tensors)
    return Case(partial(fused, **how, **(op_only or {})), partial(eager, **how), tensors, chosen)


kinds = pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
kept = pytest.mark.parametrize("keeps", range(4), ids=["nothing kept", "output kept", "v kept", "v and k kept"])


def call_with_known(given: Case) -> tuple[Any, Any]:
    """The op on a case's tensors, and the attention that it made of them."""
    tensors, _ = split(given.tensors)
    norm = NormParameters(tensors["norm_weight"], tensors["norm_bias"], EPS)
    call = partial(lora_attention, given.tensors["x"], given.tensors.get("context"), norm, *layers_of(tensors), HEADS)
    return call, call()[1]


@kinds
@kept
@pytest.mark.parametrize("trained", TRAINED)
def test_output_and_gradients_equal_autograd(trained: str, keeps: int, cross: bool) -> None:
    if trained == "context" and not cross:
        trained = "lora alone"
    contract.assert_equals_autograd(case(trained, cross, op_only={"keeps": keeps}))


@kinds
@pytest.mark.parametrize("trained", ["all", "frozen"])
@pytest.mark.parametrize(
    "absent",
    [LORA, LORA[:2], LORA[2:4], BIASES, BIASES[:3], NORM, NORM[1:]],
    ids=["no LoRA", "none on q", "none on k", "no bias", "bias of out", "no affine", "no norm bias"],
)
def test_absent_parameters_are_left_out(absent: tuple[str, ...], trained: str, cross: bool) -> None:
    contract.assert_equals_autograd(case(trained, cross, absent))


@kinds
def test_an_attention_without_norm_takes_its_input_as_it_is(cross: bool) -> None:
    contract.assert_equals_autograd(case("all", cross, NORM, normed=False))


@kinds
def test_finite_differences_agree(cross: bool) -> None:
    contract.assert_passes_gradcheck(case("all", cross))


@kinds
@kept
def test_it_honours_the_op_contract(keeps: int, cross: bool) -> None:
    contract.assert_honours_the_op_contract(case("lora", cross, op_only={"keeps": keeps}), OPS, dynamic=False)


@kinds
@pytest.mark.parametrize(
    "keeps", [0, *(pytest.param(k, marks=pytest.mark.long) for k in (1, 2, 3))], ids=[f"{k} kept" for k in range(4)]
)
def test_it_honours_the_op_contract_with_symbolic_shapes(keeps: int, cross: bool) -> None:
    contract.assert_honours_the_op_contract(case("lora", cross, op_only={"keeps": keeps}), OPS)


RATIO = 1.5  # measured: 1.23


@kinds
@kept
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype, keeps: int, cross: bool) -> None:
    contract.assert_no_worse_than_eager(
        lambda: case("all", cross, samples=4, tokens=33, op_only={"keeps": keeps}), dtype, RATIO
    )


@kinds
def test_under_autocast_it_is_no_worse_than_eager(cross: bool) -> None:
    contract.assert_no_worse_than_eager(
        lambda: case("all", cross, samples=4, tokens=33), torch.float32, RATIO, torch.bfloat16
    )


def test_it_keeps_its_input_and_the_attention_output() -> None:
    given = case("lora", samples=2, tokens=64)
    block, lse = 2 * 64 * FEATURES, 2 * 64 * HEADS
    count = partial(kept_numbers, given, dtype=torch.float32)
    assert count(given.fused) == block + lse
    assert [count(partial(given.fused, keeps=keeps)) for keeps in range(4)] == [
        0, block + lse, 2 * block + lse, 3 * block + lse,
    ]  # fmt: skip
    assert count(given.eager) >= 5 * block
    # Under autocast in its dtype, float32 softmax sums beside; and no copy of a weight.
    assert count(given.fused, autocast=torch.bfloat16) == block / 2 + lse


def test_backward_may_run_in_another_dtype() -> None:
    """Its products do; the output's bits and every dtype stay."""
    given = case()
    same, narrow = outcome(given, given.fused), outcome(given, partial(given.fused, grad_dtype=torch.float32))
    assert torch.equal(narrow["y"], same["y"])
    for name in ("up_out", "down_q", "weight_v", "x"):
        assert narrow[name].dtype == torch.float64
        error = (narrow[name] - same[name]).norm() / same[name].norm()
        assert 1e-10 < error < 1e-5, name


@kinds
@kept
def test_a_known_attention_is_not_computed_again(keeps: int, cross: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case("all", cross, op_only={"keeps": keeps})
    whole = outcome(given, given.fused)
    call, known = call_with_known(given)
    assert known is not None
    assert not any(t.requires_grad for t in known)
    assert call(keeps=0)[1] is None

    def attend(*_: Tensor) -> None:
        raise AssertionError("the attention was computed again")

    monkeypatch.setattr(passes, "attend", attend)
    assert call(known=known)[1] is known
    again = outcome(given, partial(given.fused, known=known))
    assert all(torch.equal(again[name], expected) for name, expected in whole.items())


@kinds
def test_any_strides_give_the_same(cross: bool) -> None:
    contract.assert_takes_any_strides(case("all", cross))


@kinds
@kept
@pytest.mark.parametrize(("samples", "tokens"), [(0, 5), (2, 0)], ids=["no samples", "no tokens"])
def test_an_empty_batch_gives_empty_results(samples: int, tokens: int, keeps: int, cross: bool) -> None:
    contract.assert_equals_autograd(case("all", cross, samples=samples, tokens=tokens, op_only={"keeps": keeps}))


def test_a_context_without_tokens_gives_what_torch_gives() -> None:
    given = case("all", True)
    given.tensors["context"] = torch.randn(2, 0, 6, dtype=torch.float64)
    contract.assert_equals_autograd(given)


@kinds
@pytest.mark.parametrize("density", [1.0, 0.3])
def test_nan_comes_out(density: float, cross: bool) -> None:
    given = case("lora", cross, op_only={"gradient_density": density})
    contract.assert_shows_nan(given, "x", (1, 2, 3))
    contract.assert_shows_nan(given, "up_q", (1, 1))
    if cross:
        contract.assert_shows_nan(given, "context", (0, 1, 1))


@kinds
def test_below_density_1_the_gradients_of_q_k_and_v_are_thinned_and_nothing_else(cross: bool) -> None:
    given = case("all", cross)
    dense, sparse = outcome(given, given.fused), outcome(given, partial(given.fused, gradient_density=0.3))
    behind = ("y", "weight_out", "bias_out", "down_out", "up_out")
    assert all(torch.equal(sparse[name], dense[name]) for name in behind)
    assert not any(torch.equal(sparse[name], dense[name]) for name in ("x", "weight_q", "weight_k", "weight_v"))


@kinds
@kept
def test_what_it_gives_can_be_changed_in_place(keeps: int, cross: bool) -> None:
    given = case("all", cross, op_only={"keeps": keeps})
    contract.assert_can_be_changed_in_place(given)
    if keeps:
        *_, known = call_with_known(given)
        contract.assert_can_be_changed_in_place(
            Case(partial(given.fused, known=known), given.eager, given.tensors, given.trained)
        )


def test_it_works_without_gradients() -> None:
    contract.assert_right_without_gradients(case())


@kinds
def test_it_refuses_what_it_has_no_rules_for(cross: bool) -> None:
    contract.assert_refuses_what_it_has_no_rules_for(case("all", cross), "lora_attention")


@kinds
def test_it_compiles(cross: bool) -> None:
    contract.assert_compiles(case("lora", cross))


def test_what_does_not_fit_is_named() -> None:
    x, none = torch.randn(2, 5, 8), NormParameters(on=False)
    layer, narrow = LoRAProjection(torch.randn(8, 8)), LoRAProjection(torch.randn(6, 8))
    with pytest.raises(ValueError, match="heads must divide the query's and the value's features: got 3 heads for"):
        lora_attention(x, None, none, layer, layer, layer, layer, 3)
    with pytest.raises(ValueError, match="query and key must have equally many features, got 8 and 6"):
        lora_attention(x, None, none, layer, narrow, layer, layer, 2)
    wanted = r"lora_attention wants x \[N, T, C\] and context \[N, S, C'\] or None, got "
    with pytest.raises(ValueError, match=wanted + r"\(5, 8\)"):
        lora_attention(x[0], None, none, layer, layer, layer, layer, 2)
    with pytest.raises(ValueError, match=wanted + r"\(2, 5, 8\) and \(1, 10, 8\)"):
        lora_attention(x, torch.randn(1, 10, 8), none, layer, layer, layer, layer, 2)
    with pytest.raises(ValueError, match=r"gradient_density must be in \(0, 1\], got 0"):
        lora_attention(x, None, none, layer, layer, layer, layer, 2, gradient_density=0)
    with pytest.raises(ValueError, match=r"keeps must be 0, 1, 2 or 3 \(output, value, key\), got 4"):
        lora_attention(x, None, none, layer, layer, layer, layer, 2, keeps=4)


def test_values_may_be_wider_than_queries() -> None:
    given = case("frozen", absent=LORA)
    for name, size in {"weight_v": (12, 8), "bias_v": (12,), "weight_out": (11, 12)}.items():
        given.tensors[name] = torch.randn(size, dtype=torch.float64)
    contract.assert_equals_autograd(given)
