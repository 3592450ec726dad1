"""The attention kernels of CUDA take our arguments and give our shapes: their contract, on tensors without memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_aigc_kernels.dispatch import FallbackWarning, warn_once
from lightning_aigc_kernels.lora_attention import core
from lightning_aigc_kernels.lora_attention.core import attend, attend_backward


@pytest.fixture(autouse=True)
def no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a card before Hopper, whatever this machine has."""
    monkeypatch.setattr(core, "cudnn_features", lambda index: 0)


@pytest.mark.parametrize(
    ("dtype", "features"),
    [(torch.bfloat16, 40), (torch.float16, 160), (torch.float32, 64)],
    ids=["bf16", "fp16", "fp32"],
)
def test_forward_and_backward_agree_on_shapes(dtype: torch.dtype, features: int) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 64, 8, features, device="cuda", dtype=dtype).transpose(1, 2)
        k = torch.empty(2, 77, 8, features, device="cuda", dtype=dtype).transpose(1, 2)
        o, logsumexp, rest = attend(q, k, k)
        assert (o.shape, o.dtype) == (q.shape, dtype)
        assert (logsumexp.shape, logsumexp.dtype) == ((2, 8, 64), torch.float32)
        grads = attend_backward(torch.empty_like(o), q, k, k, o, logsumexp, rest)
        assert [(grad.shape, grad.dtype) for grad in grads] == [(t.shape, dtype) for t in (q, k, k)]


class Biases(TorchDispatchMode):
    """Notes the bias that each attention kernel is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "attention" in func.name():
            names = [argument.name for argument in func._schema.arguments]
            self.given[func.name()] = args[names.index("attn_bias")]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_bias_takes_the_memory_efficient_kernel_in_the_form_that_it_wants(dtype: torch.dtype, rows: int) -> None:
    """The query's dtype, a row of keys for all queries and heads, each row at a multiple of 16 numbers."""
    with FakeTensorMode():
        q = torch.empty(2, 64, 8, 40, device="cuda", dtype=dtype).transpose(1, 2)
        k = torch.empty(2, 77, 8, 40, device="cuda", dtype=dtype).transpose(1, 2)
        bias = torch.empty(rows, 77, device="cuda")
        with Biases() as biases:
            made = attend(q, k, k, bias)
            grads = attend_backward(torch.empty_like(made[0]), q, k, k, *made, bias)
        assert [(grad.shape, grad.dtype) for grad in grads] == [(t.shape, dtype) for t in (q, k, k)]
    name = "aten::_scaled_dot_product_efficient_attention"
    assert biases.given.keys() == {name, f"{name}_backward"}
    for given in biases.given.values():
        assert (given.dtype, given.shape) == (dtype, (2, 8, 64, 77))
        assert given.stride() == (80 if rows == 2 else 0, 0, 0, 1)


@pytest.mark.parametrize("flash", [True, False], ids=["ampere", "older"])
def test_cards_before_ampere_take_the_kernel_that_they_have(flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "has_flash_attention", lambda index: flash)
    with FakeTensorMode():
        q = torch.empty(2, 8, 64, 40, device="cuda", dtype=torch.float16)
        assert core._kernel(q, q, q) == ("cuda_flash" if flash else "cuda_efficient")
        assert core._kernel(q.float(), q.float(), q.float()) == "cuda_efficient"


@pytest.fixture
def hopper(no_cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "cudnn_features", lambda index: 256)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)  # a torch for CPUs says False


@pytest.mark.usefixtures("hopper")
def test_a_card_with_cudnns_attention_runs_it_where_it_can() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 8, 64, 160, device="cuda", dtype=torch.float16)
        assert core._kernel(q, q, q) == "cudnn"
        one = torch.empty(2, 8, 1, 160, device="cuda", dtype=torch.float16)
        assert core._kernel(q, one, one) == "cuda_flash", "it takes no single key"
        assert core._kernel(q, q, q, biased=True) == "cuda_efficient"
        assert core._kernel(q.float(), q.float(), q.float()) == "cuda_efficient"


@pytest.mark.usefixtures("hopper")
def test_torchs_switches_keep_cudnns_attention_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 8, 64, 40, device="cuda", dtype=torch.bfloat16)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
            assert core._kernel(q, q, q) == "cuda_flash"
        monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
        assert core._kernel(q, q, q) == "cuda_flash"


@pytest.mark.usefixtures("hopper")
def test_cudnns_attention_agrees_on_shapes() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 64, 8, 40, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        k = torch.empty(2, 77, 8, 40, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        o, logsumexp, rest = attend(q, k, k)
        assert (o.shape, o.stride()) == (q.shape, q.stride())
        grads = attend_backward(torch.empty_like(o), q, k, k, o, logsumexp, rest)
        assert [(grad.shape, grad.dtype) for grad in grads] == [(t.shape, q.dtype) for t in (q, k, k)]


def test_cudnn_gets_tensors_of_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a backward by the strides of q, k and v, and would read other gradients with the first one's."""
    strides: list[tuple[int, ...]] = []

    def note(*given: object) -> tuple[torch.Tensor, ...]:
        heads_first = [x for x in given if isinstance(x, torch.Tensor) and x.dim() == 4]
        strides.extend(x.stride() for x in heads_first)
        return tuple(torch.empty_like(x) for x in heads_first[:3])

    monkeypatch.setattr(core, "_kernel", lambda *_: "cudnn")
    monkeypatch.setattr(core.aten, "_scaled_dot_product_cudnn_attention", note)
    monkeypatch.setattr(core.aten, "_scaled_dot_product_cudnn_attention_backward", note)
    dense = torch.empty(2, 8, 64, 40)
    sliced = torch.empty(2, 64, 8, 80)[..., :40].transpose(1, 2)
    o, logsumexp, rest = attend(dense, sliced, sliced)
    attend_backward(sliced, dense, sliced, sliced, o, logsumexp[..., 0], rest)
    assert strides == [(64 * 8 * 40, 40, 8 * 40, 1)] * 8


@pytest.mark.filterwarnings("error")
def test_attention_that_no_fused_kernel_takes_says_so_once() -> None:
    warn_once.cache_clear()
    with FakeTensorMode():
        q = torch.empty(2, 8, 64, 44, device="cuda", dtype=torch.float16)
        with pytest.warns(FallbackWarning, match="no fused attention takes torch.float16 with 44 features a head"):
            assert core._kernel(q, q, q) == "math"
        assert core._kernel(q, q, q) == "math"
