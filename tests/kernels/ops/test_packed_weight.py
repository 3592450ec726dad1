"""Packed weights: their bytes, what keeps them packed, and that layers compute with them as with the unpacked ones."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_aigc_kernels.dispatch import FallbackWarning, cpu_kernel_for
from lightning_aigc_kernels.packed_weight import Format, PackedWeight, packed_bytes, reference, set_packed_
from lightning_aigc_kernels.packed_weight.tensor import _cast

KINDS: tuple[Format, ...] = ("int8", "nf4")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def by_hand(packed: Tensor, scales: Tensor, kind: Format) -> Tensor:
    """The float32 numbers of the blocks, one byte after another."""
    numbers = []
    for row, scale in zip(packed.tolist(), scales, strict=True):
        if kind == "nf4":
            row = [reference.CODES[half] for byte in row for half in (byte >> 4, byte & 15)]
        numbers.append(torch.tensor(row, dtype=torch.float32) * scale)
    return torch.cat(numbers)


@pytest.mark.parametrize("shape", [(64,), (3, 5), (40, 30), (7, 5, 3, 3), (1,), (2, 4096 * 64 + 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_that_the_bytes_say(kind: Format, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape) * 0.02
    packed, scales = reference.pack(weight, kind)
    assert packed.nbytes + scales.nbytes == packed_bytes(weight.numel(), kind)
    if weight.numel() < 10_000:
        expected = by_hand(packed, scales, kind)[: weight.numel()].view(shape)
        for dtype in DTYPES[1:]:
            assert torch.equal(PackedWeight(packed, scales, kind, shape, (dtype,)).dequantize(), expected.to(dtype))
    step = {"int8": 0.5 / 127, "nf4": 0.153}[kind]  # half of the widest gap between two numbers
    largest = F.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64).abs().amax(1)
    error = (PackedWeight(packed, scales, kind, shape, (torch.float32,)).dequantize() - weight).abs()
    assert (F.pad(error.flatten(), (0, -weight.numel() % 64)).view(-1, 64) <= largest[:, None] * step * 1.001).all()


@pytest.mark.parametrize("magnitude", [0.02, 1e-42, 3e38], ids=["usual", "below normal numbers", "next to infinity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_of_a_cpu_unpacks_the_reference_s_bits(kind: Format, dtype: torch.dtype, magnitude: float) -> None:
    kernel = cpu_kernel_for("packed_weight")
    assert kernel is not None
    packed, scales = reference.pack((torch.rand(3000 * 64 + 7, device="cpu") * 2 - 1) * magnitude, kind)
    expected = reference.unpack(packed, scales, kind, dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for bytes_ in (packed, packed.repeat_interleave(2, 1)[:, ::2]):  # not contiguous
        unpacked = kernel.unpack(bytes_, scales, kind, dtype)
        assert unpacked.dtype == dtype and torch.equal(unpacked.view(bits), expected.view(bits))


@pytest.mark.usefixtures("without_numba")
def test_without_numba_torch_unpacks_the_same_and_a_warning_says_so() -> None:
    weight = PackedWeight.pack(torch.randn(100, 64, device="cpu"), "nf4")
    with pytest.warns(FallbackWarning, match="pip install numba"):
        unpacked = weight.dequantize()
    assert torch.equal(unpacked, reference.unpack(weight.packed, weight.scales, "nf4", torch.float32).view(100, 64))


def test_nf4_takes_the_nearest_code_and_keeps_zero_and_the_largest() -> None:
    codes = torch.tensor(reference.CODES)
    weight = torch.linspace(-1, 1, 640)
    weight[::64], weight[1::64] = 1.0, 0.0
    found = PackedWeight.pack(weight, "nf4").dequantize()
    nearest = codes[(weight[:, None] - codes).abs().argmin(1)]
    assert torch.equal(found, nearest)
    assert (found[::64] == 1).all() and (found[1::64] == 0).all()


def test_numbers_at_the_limits_between_two_codes_take_the_code_that_bucketize_says() -> None:
    codes = torch.tensor(reference.CODES, dtype=torch.float64)
    limits = ((codes[:-1] + codes[1:]) / 2).float()
    near = torch.stack([limits, limits.nextafter(torch.tensor(2.0)), limits.nextafter(torch.tensor(-2.0))]).flatten()
    edges = torch.arange(reference.BINS + 1).float() / (reference.BINS / 2) - 1
    weight = torch.cat((near, edges, edges.nextafter(torch.tensor(2.0)).clamp(max=1), torch.rand(50_000) * 2 - 1))
    blocks = F.pad(weight, (0, -len(weight) % 63)).view(-1, 63)
    blocks = torch.cat((torch.ones(len(blocks), 1), blocks), dim=1)  # so that the scale is one
    packed, scales = reference.pack(blocks, "nf4")
    assert (scales == 1).all()
    index = torch.stack((packed >> 4, packed & 15), dim=2).view(blocks.shape)
    assert torch.equal(index.int(), torch.bucketize(blocks, limits, out_int32=True))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_zeros_and_of_the_smallest_numbers_stay_finite(kind: Format) -> None:
    weight = torch.cat((torch.zeros(64), torch.full((64,), 1e-44), torch.full((64,), 3e38)))
    found = PackedWeight.pack(weight, kind).dequantize()
    assert (found[:64] == 0).all() and found.isfinite().all()
    torch.testing.assert_close(found[128:], weight[128:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_are_refused(kind: Format, bad: float) -> None:
    weight = torch.randn(200)
    weight[150] = bad
    with pytest.raises(ValueError, match="the weight holds NaN or infinity"):
        reference.pack(weight, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_moves_and_copies_stay_packed(kind: Format) -> None:
    weight = PackedWeight.pack(torch.randn(20, 30), kind)
    values = weight.dequantize()
    parameter = nn.Parameter(weight, requires_grad=False)
    for same in (parameter, weight.detach(), weight.clone(), copy.deepcopy(parameter), weight.data,
                 weight.to(values.device, copy=True), weight.contiguous()):  # fmt: skip
        assert type(same) is PackedWeight and same.shape == (20, 30) and same.dtype == torch.float32
        assert torch.equal(same.dequantize(), values)
    assert weight.clone().packed.data_ptr() != weight.packed.data_ptr() == weight.detach().packed.data_ptr()
    assert torch.equal(weight + 0, values) and type(weight + 0) is Tensor
    for made in (torch.empty_like(weight), torch.zeros_like(weight), weight.new_zeros(2, 3)):
        assert type(made) is Tensor
    buffer = io.BytesIO()
    torch.save({"weight": weight}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["weight"]
    assert type(loaded) is PackedWeight and torch.equal(loaded.dequantize(), values) and loaded.kind == kind


def test_a_layer_stays_packed_when_it_is_converted() -> None:
    layer = nn.Linear(70, 30)
    set_packed_(layer, "nf4")
    packed = layer.weight.packed.clone()
    for convert in (
        lambda: layer.to(torch.bfloat16), layer.half, layer.float, layer.bfloat16, lambda: layer.to("cpu"), layer.cpu,
    ):  # fmt: skip
        convert()
        assert type(layer.weight) is PackedWeight and torch.equal(layer.weight.packed.to(packed.device), packed)
        assert layer.weight.dtype == layer.bias.dtype and layer.weight.scales.dtype == torch.float32


@pytest.mark.parametrize("casts", list(itertools.product(DTYPES, repeat=3)), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_casts_round_as_those_of_the_unpacked_weight(kind: Format, casts: tuple[torch.dtype, ...]) -> None:
    weight = PackedWeight.pack(torch.randn(10, 64, dtype=torch.float32).to(casts[0]), kind)
    plain = weight.dequantize()
    for dtype in (*casts, casts[0]):
        weight, plain = weight.to(dtype), plain.to(dtype)
        assert type(weight) is PackedWeight and weight.dtype == dtype
        assert torch.equal(weight.dequantize(), plain)
    assert len(weight.casts) <= 4
    assert _cast((torch.bfloat16, torch.float32), torch.bfloat16) == (torch.bfloat16,)


def test_nothing_can_change_it_but_loading() -> None:
    weight = PackedWeight.pack(torch.randn(8, 64), "int8")
    for change in (lambda: weight.mul_(2), lambda: weight.data.add_(1), lambda: torch._foreach_mul_([weight], 2.0),
                   lambda: nn.init.zeros_(weight)):  # fmt: skip
        with pytest.raises(RuntimeError, match="would change a packed weight, which is frozen"):
            change()
    other = torch.randn(8, 64)
    with torch.no_grad():
        weight.copy_(other)
    assert torch.equal(weight.dequantize(), PackedWeight.pack(other, "int8").dequantize())
    layer, twin = nn.Linear(64, 8), nn.Linear(64, 8)
    set_packed_(layer, "int8")
    set_packed_(twin, "int8")
    assert not torch.equal(layer.weight.packed, twin.weight.packed)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(layer.weight.packed, twin.weight.packed)


def pair(kind: Format, dtype: torch.dtype) -> tuple[nn.Sequential, nn.Sequential]:
    """Layers with packed weights, and the same ones with the numbers unpacked once."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.Flatten(2), nn.Linear(36, 40), nn.Linear(40, 24, bias=False)
    ).to(dtype).requires_grad_(False)  # fmt: skip
    packed, plain = copy.deepcopy(net), net
    for mine, theirs in zip(packed, plain, strict=True):
        if hasattr(mine, "weight"):
            set_packed_(mine, kind)
            theirs.weight.data = mine.weight.dequantize()
    return packed, plain


def keeps(net: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and what autograd saves."""
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        return net(x), saved


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_native_layers_save_no_dequantized_weight_and_give_the_gradients_of_the_unpacked_ones(
    kind: Format, autocast: torch.dtype | None
) -> None:
    packed, plain = pair(kind, torch.float32)
    shapes = {tuple(layer.weight.shape) for layer in packed if hasattr(layer, "weight")}
    shapes |= {shape[::-1] for shape in shapes}
    gradients = []
    for net in (packed, plain):
        x = torch.randn(
            2, 4, 6, 6, generator=torch.Generator(torch.get_default_device()).manual_seed(1)
        ).requires_grad_()
        with torch.autocast(torch.get_default_device().type, autocast or torch.bfloat16, enabled=autocast is not None):
            y, saved = keeps(net, x)
        y.float().square().sum().backward()
        gradients.append((y.detach(), x.grad))
        whole = [tuple(t.shape) for t in saved if type(t) is not PackedWeight and tuple(t.shape) in shapes]
        assert (len(whole) == 0) == (net is packed), whole
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


def test_a_trained_bias_beside_a_packed_weight_learns() -> None:
    packed, plain = pair("int8", torch.float32)
    found = []
    for net in (packed, plain):
        net[2].bias.requires_grad_()
        x = torch.randn(
            2, 4, 6, 6, generator=torch.Generator(torch.get_default_device()).manual_seed(1)
        ).requires_grad_()
        net(x).square().sum().backward()
        found.append((net[2].bias.grad, x.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch 2.13's inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_compiles(kind: Format, backend: str) -> None:
    packed, plain = pair(kind, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(packed, backend=backend, fullgraph=True)
    found = []
    for net in (compiled, plain):
        x = torch.randn(
            2, 4, 6, 6, generator=torch.Generator(torch.get_default_device()).manual_seed(1)
        ).requires_grad_()
        y = net(x)
        y.square().sum().backward()
        found.append((y.detach(), x.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch 2.13's decompositions
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_saves_no_unpacked_weight(kind: Format) -> None:
    packed, _ = pair(kind, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(packed, backend="aot_eager_decomp_partition")
    x = torch.randn(2, 4, 6, 6).requires_grad_()
    _, saved = keeps(compiled, x)
    sizes = {layer.weight.numel() for layer in packed if hasattr(layer, "weight")}
    assert saved and not [tuple(t.shape) for t in saved if t.is_floating_point() and t.numel() in sizes]


def test_the_op_honours_its_contract() -> None:
    for kind in KINDS:
        packed, scales = reference.pack(torch.randn(5, 70), kind)
        torch.library.opcheck(
            torch.ops.lightning_aigc.unpack_weight, (packed, scales, kind, [5, 70], torch.bfloat16, False)
        )
