"""Attention over several streams as one op: exact, as near as eager, what is kept, a known one, and its refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import op_contract as contract
from fakes.op_contract import Case, kept_numbers, outcome
from lightning_aigc_kernels import AttentionStream, joint_attention
from lightning_aigc_kernels.joint_attention import passes
from lightning_aigc_kernels.joint_attention.op import joint_attention_reference

HEADS, FEATURES, EPS = 2, 6, 1e-5
WIDTH = HEADS * FEATURES
OPS = ["joint_attention", "joint_attention_backward"]
TENSORS = ("query", "key", "value", "query_weight", "key_weight")
KINDS: dict[str, dict[str, Any]] = {
    "SD 3.5": {"tokens": (7, 3), "rotated": ()},
    "SD 3": {"tokens": (7, 3), "rotated": (), "norm": False},
    "FLUX": {"tokens": (4, 9)},
    "one stream": {"tokens": (9,)},
    "one stream as it is": {"tokens": (9,), "rotated": (), "norm": False},
    "one rotated, one as it is": {"tokens": (4, 9), "rotated": (1,), "norm": False},
    "three streams": {"tokens": (2, 1, 4), "rotated": (0, 2)},
    "long": {"tokens": (20, 31)},
    "padded text": {"tokens": (6, 9), "biased": {0: "all of one text left out"}},
    "weighted text for all samples": {"tokens": (20, 31), "biased": {0: "one row"}},
    "two streams with weights": {"tokens": (20, 31), "biased": {0: "one row", 1: "a row each"}},
    "one stream with weights": {"tokens": (9,), "biased": {0: "a row each"}},
    "one of three with weights": {"tokens": (2, 5, 4), "rotated": (0, 2), "norm": False, "biased": {1: "a row each"}},
}
BIASED = [kind for kind, how in KINDS.items() if "biased" in how]
kinds = pytest.mark.parametrize("kind", KINDS)


def key_bias(kind: str, samples: int, tokens: int) -> Tensor:
    """Tokens that count once to four times, a third of them left out, but for the first."""
    rows = 1 if kind == "one row" else samples
    bias = torch.where(torch.rand(rows, tokens) < 0.3, -torch.inf, torch.randint(1, 5, (rows, tokens)).log())
    bias[:, :1] = 0
    if kind == "all of one text left out":
        bias[1:2] = -torch.inf
    return bias


def streams_of(angles: list[Any], biases: list[Any], tensors: dict[str, Any]) -> list[AttentionStream]:
    return [
        AttentionStream(*(tensors.get(f"{name}{i}") for name in TENSORS), *pair, bias)  # type: ignore[arg-type]
        for i, (pair, bias) in enumerate(zip(angles, biases, strict=True))
    ]


def call(
    op: Any, angles: list[Any], biases: list[Any], outputs: slice, norm: bool, known: Any = None, **tensors: Any
) -> Tensor:
    """The op, or its reference, on tensors by name; the chosen streams' outputs side by side."""
    streams = streams_of(angles, biases, tensors)
    if op is joint_attention:
        made = list(op(streams, HEADS, eps=EPS, norm=norm, known=known)[0])
    else:
        made = list(op(streams, HEADS, eps=EPS, norm=norm))
    return torch.cat(made[outputs], 1) if len(made[outputs]) > 1 else made[outputs][0]


def case(
    kind: str = "FLUX",
    trained: tuple[str, ...] | None = None,
    samples: int = 2,
    outputs: slice = slice(None),
    op_only: dict[str, Any] | None = None,
    **changed: Any,
) -> Case:
    how = KINDS[kind] | changed
    tokens, norm = how["tokens"], how.get("norm", True)
    tensors: dict[str, Tensor | None] = {}
    angles: list[Any] = []
    biases: list[Any] = []
    for i, length in enumerate(tokens):
        tensors |= {f"{name}{i}": torch.randn(samples, length, WIDTH, dtype=torch.float64) for name in TENSORS[:3]}
        if norm:
            tensors |= {f"{name}{i}": torch.randn(FEATURES, dtype=torch.float64) for name in TENSORS[3:]}
        turns = torch.randn(length, FEATURES // 2) * 3
        angles.append((turns.cos(), turns.sin()) if i in how.get("rotated", range(len(tokens))) else (None, None))
        bias = how.get("biased", {}).get(i)
        biases.append(None if bias is None else key_bias(bias, samples, length))
    options: dict[str, Any] = {"angles": angles, "biases": biases, "outputs": outputs, "norm": norm}
    fused = partial(call, joint_attention, **options, **(op_only or {}))
    return Case(
        fused,
        partial(call, joint_attention_reference, **options),
        tensors,
        tuple(tensors) if trained is None else trained,
    )


@kinds
def test_output_and_gradients_equal_autograd(kind: str) -> None:
    contract.assert_equals_autograd(case(kind))


@pytest.mark.parametrize(
    "trained",
    [("query0",), ("value1",), ("query0", "key1", "value0"), ("query_weight1",), ("key0", "key_weight0")],
    ids=str,
)
def test_the_gradients_that_are_wanted_alone_equal_autograd(trained: tuple[str, ...]) -> None:
    contract.assert_equals_autograd(case(trained=trained))


@pytest.mark.parametrize("used", [0, 1])
def test_a_stream_whose_output_nobody_uses_still_gets_gradients(used: int) -> None:
    """SD 3's last block: its text goes no further."""
    queries = {f"query{1 - used}", f"query_weight{1 - used}"}  # which get zeros from us and nothing from torch
    trained = tuple(name for name in case().trained if name not in queries)
    contract.assert_equals_autograd(case(trained=trained, outputs=slice(used, used + 1)))


def test_only_the_wanted_norms_are_passed_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, bool]] = []
    real = passes.qk_norm_rope.backward

    def backward(dy: Tensor, x: Tensor, how: Any, need_weight: bool) -> Any:
        calls.append((x.shape[1], need_weight))
        return real(dy, x, how, need_weight)

    monkeypatch.setattr(passes.qk_norm_rope, "backward", backward)
    given = case(trained=("query0", "value0", "key1", "key_weight1"))
    outcome(given, given.fused)
    assert calls == [(4, False), (9, True)]


@kinds
def test_finite_differences_agree(kind: str) -> None:
    contract.assert_passes_gradcheck(case(kind))


@kinds
def test_it_honours_the_op_contract(kind: str) -> None:
    contract.assert_honours_the_op_contract(case(kind), OPS, dynamic=False)


TRACED = ("FLUX", "one stream", "padded text")


@pytest.mark.parametrize("kind", [k if k in TRACED else pytest.param(k, marks=pytest.mark.long) for k in KINDS])
def test_it_honours_the_op_contract_with_symbolic_shapes(kind: str) -> None:
    contract.assert_honours_the_op_contract(case(kind), OPS)


def accuracy_case(kind: str, trained: tuple[str, ...] | None = None) -> Case:
    """With so many tokens that both sides take the same attention kernel: below 16 ours is not torch's."""
    given = case(kind, trained, tokens=tuple(8 * length for length in KINDS[kind]["tokens"]))
    activations = tuple(name for name in given.trained if "_weight" not in name)
    return Case(given.fused, given.eager, given.tensors, activations if trained is None else trained)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype, kind: str) -> None:
    contract.assert_no_worse_than_eager(lambda: accuracy_case(kind), dtype, 1.05)


@pytest.mark.parametrize("kind", ["FLUX", "one stream", "long", *BIASED])
def test_under_autocast_it_is_no_worse_than_eager(kind: str) -> None:
    contract.assert_no_worse_than_eager(lambda: accuracy_case(kind), torch.float32, 1.05, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norms_weights_gradients_are_no_worse_than_eager(dtype: torch.dtype) -> None:
    """Over seeds, streams, queries and keys together: of a weight's six numbers alone the error is mostly chance."""
    squares = [0.0, 0.0]
    for seed in range(40):
        torch.manual_seed(seed)
        given = accuracy_case("FLUX", ("query_weight0", "key_weight0", "query_weight1", "key_weight1"))
        rounded = {name: None if t is None else t.to(dtype).double() for name, t in given.tensors.items()}
        truth = outcome(Case(given.fused, given.eager, rounded, given.trained), given.eager)
        for i, forward in enumerate((given.fused, given.eager)):
            made = outcome(given, forward, dtype)
            errors = ((made[name].double() - truth[name]).norm() / truth[name].norm() for name in given.trained)
            squares[i] += sum(float(error) ** 2 for error in errors)
    assert squares[0] ** 0.5 <= contract.ratio_here(1.05) * squares[1] ** 0.5


@pytest.mark.parametrize("kind", ["FLUX", "one stream", "one stream as it is", "padded text"])
def test_it_keeps_its_output_and_the_softmax_alone(kind: str) -> None:
    """And no bias beside those given."""
    tokens = (16, 48) if kind in ("FLUX", "padded text") else (64,)
    given = case(kind, tokens=tokens)
    one, softmax = 2 * 64 * WIDTH, 2 * 64 * HEADS
    # The output is not counted; those of two streams, which backward reads, are beside the joined one that is checked.
    assert kept_numbers(given, given.fused, torch.float32) == softmax + (one if len(tokens) > 1 else 0)
    if kind != "one stream as it is":
        assert kept_numbers(given, given.eager, torch.float32) >= 5 * one


def known_of(given: Case) -> tuple[Tensor, ...]:
    how = given.fused.keywords  # type: ignore[attr-defined]
    streams = streams_of(how["angles"], how["biases"], dict(given.tensors))
    return joint_attention(streams, HEADS, eps=EPS, norm=how["norm"])[1]


@kinds
def test_a_known_attention_is_not_computed_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(kind)
    whole, known = outcome(given, given.fused), known_of(given)
    assert not any(t.requires_grad for t in known)

    def attend(*_: Tensor) -> None:
        raise AssertionError("the attention was computed again")

    monkeypatch.setattr(passes, "attend", attend)
    again = outcome(given, partial(given.fused, known=known))
    assert all(torch.equal(again[name], expected) for name, expected in whole.items())


@pytest.mark.parametrize("kind", ["FLUX", "padded text"])
def test_a_known_attention_honours_the_op_contract(kind: str) -> None:
    given = case(kind)
    known = known_of(given)
    contract.assert_honours_the_op_contract(
        Case(partial(given.fused, known=known), given.eager, given.tensors, given.trained), OPS
    )


@kinds
def test_any_strides_give_the_same(kind: str) -> None:
    contract.assert_takes_any_strides(case(kind))


def test_parts_of_one_wide_projection_are_taken_as_they_are() -> None:
    """FLUX.2's single blocks."""
    wide = torch.randn(2, 9, 3 * WIDTH + 5, dtype=torch.float64, requires_grad=True)
    given = case("one stream", trained=())

    def gradient(forward: Any) -> tuple[Tensor, Tensor]:
        q, k, v = wide[..., : 3 * WIDTH].chunk(3, -1)
        y = forward(**(given.tensors | {"query0": q, "key0": k, "value0": v}))
        return y.detach(), torch.autograd.grad(y.square().sum(), wide)[0]

    for ours, theirs in zip(gradient(given.fused), gradient(given.eager), strict=True):
        torch.testing.assert_close(ours, theirs)


@kinds
def test_no_samples_give_empty_results(kind: str) -> None:
    contract.assert_equals_autograd(case(kind, samples=0))


@pytest.mark.parametrize("tokens", [(0, 9), (9, 0), (0, 0)], ids=str)
def test_a_stream_without_tokens_is_allowed(tokens: tuple[int, int]) -> None:
    contract.assert_equals_autograd(case(tokens=tokens))


@pytest.mark.parametrize("name", ["query0", "key1", "value1"])
@pytest.mark.parametrize("kind", ["FLUX", "long", "padded text", "weighted text for all samples"])
def test_nan_comes_out(kind: str, name: str) -> None:
    contract.assert_shows_nan(case(kind), name, (1, 2, 3))


def test_what_backward_reads_cannot_be_changed_unnoticed() -> None:
    """The same as torch's own attention: its output is what backward reads, so a change in place is an error."""
    given = case("one stream")
    tensors = {name: t.clone().requires_grad_() for name, t in given.tensors.items() if t is not None}
    y = given.fused(**tensors).mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@kinds
def test_it_works_without_gradients(kind: str) -> None:
    contract.assert_right_without_gradients(case(kind))


def test_it_refuses_what_it_has_no_rules_for() -> None:
    contract.assert_refuses_what_it_has_no_rules_for(case(), "joint_attention", "query0")


@kinds
def test_it_compiles(kind: str) -> None:
    contract.assert_compiles(case(kind))


def test_what_does_not_fit_is_named() -> None:
    x = torch.randn(2, 5, 12)
    stream = AttentionStream(x, x, x)
    with pytest.raises(ValueError, match="wants at least one stream, got none"):
        joint_attention([], 2)
    with pytest.raises(ValueError, match="heads must divide the features, got 5 heads for 12 features"):
        joint_attention([stream], 5)
    wanted = r"joint_attention wants query, key and value \[N, T, H \* D\], with one N and H \* D for all streams, got "
    with pytest.raises(ValueError, match=wanted + r"\(2, 5, 12\), \(2, 4, 12\), \(2, 5, 12\) in stream 1"):
        joint_attention([stream, AttentionStream(x, x[:, :4], x)], 2)
    with pytest.raises(ValueError, match=wanted + r"\(1, 5, 12\), \(1, 5, 12\), \(1, 5, 12\) in stream 1"):
        joint_attention([stream, AttentionStream(x[:1], x[:1], x[:1])], 2)
    with pytest.raises(ValueError, match=wanted + r"\(5, 12\), "):
        joint_attention([AttentionStream(x[0], x[0], x[0])], 2)
    with pytest.raises(ValueError, match=r"joint_attention's stream 0 wants a weight \(6,\)"):
        joint_attention([stream._replace(key_weight=torch.ones(12))], 2)
    with pytest.raises(ValueError, match="known must be an output for each of 1 streams and two more, got 4"):
        joint_attention([stream], 2, known=(x,) * 4)
