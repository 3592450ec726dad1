"""quantize_frozen_ on any module: what is packed, what is left and why, the bytes, and what is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.models.small_models import call_unet, gradients, make_unet, with_lora
from fakes.processes.ranks import run_ranks
from fakes.runs.cpu_bits import HAS_EQUAL_BITS
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.quantization import quantize_frozen_
from lightning_aigc.quantization.frozen import frozen_bytes
from lightning_aigc_kernels.packed_weight import PackedWeight, packed_bytes, packed_weights

WIDE = {"block_out_channels": (32, 64), "attention_head_dim": 4}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    unet: nn.Module = with_lora(make_unet(**WIDE))
    return unet


@pytest.mark.parametrize("kind", ["int8", "nf4", "nf4-all"])
def test_the_bytes_are_those_of_the_formula(kind: Any) -> None:
    unet = make_net()
    before = {name: p for name, p in unet.named_parameters() if not p.requires_grad}
    result = quantize_frozen_(unet, kind)
    packed = dict(packed_weights(unet))
    linear = "int8" if kind == "int8" else "nf4"
    convolution = "nf4" if kind == "nf4-all" else "int8"
    expected = 0
    for name, parameter in before.items():
        if name in packed:
            format_ = linear if parameter.dim() == 2 else convolution
            assert packed[name].kind == format_
            expected += packed_bytes(parameter.numel(), format_)
        else:
            expected += parameter.nbytes
    assert frozen_bytes(unet) == result.bytes_after == expected
    assert result.bytes_before == sum(p.nbytes for p in before.values())
    assert result.packed == len(packed) > 20
    assert not [
        name for name in packed if name.startswith(("conv_in", "conv_out", "time_embedding")) or "lora_" in name
    ]
    assert (
        f"{result.packed} of {result.packed + result.left.total()} frozen weights quantized ({kind}" in result.summary()
    )
    assert "skipped by name" in result.summary() and "smaller than 4096 numbers" in result.summary()


def test_equal_weights_have_equal_digests_and_others_not() -> None:
    first, again, other = make_net(), make_net(), make_net()
    with torch.no_grad():
        other.get_parameter("mid_block.resnets.0.conv1.weight")[3, 4] += 1
    digests = [quantize_frozen_(net, "nf4").digest for net in (first, again, other)]
    assert digests[0] == digests[1] != digests[2]
    assert quantize_frozen_(make_net(), "int8").digest not in digests


def test_skip_patterns_leave_layers_whole_and_none_packs_all() -> None:
    unet = make_net()
    quantize_frozen_(unet, "int8", skip=["mid_block.attentions", "*.conv1"])
    names = [name for name, _ in packed_weights(unet)]
    assert names and not [n for n in names if "mid_block.attentions" in n or ".conv1." in n]
    whole = make_net()
    quantize_frozen_(whole, "int8", skip=[])
    assert type(whole.time_embedding.linear_2.weight) is PackedWeight


def test_what_is_trained_shared_or_parametrized_stays_whole() -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5))).requires_grad_(False)
    net[0].requires_grad_(True)
    net[2].weight = net[1].weight
    nn.utils.parametrizations.weight_norm(net[3])
    result = quantize_frozen_(net, "nf4")
    assert [name for name, _ in packed_weights(net)] == ["4.weight"]
    assert result.left == {"shared with another layer": 2}


def pack_twice(net: nn.Module) -> None:
    quantize_frozen_(net, "int8")
    quantize_frozen_(net, "nf4")


def with_nan(net: nn.Module) -> None:
    with torch.no_grad():
        net.get_parameter("mid_block.attentions.0.proj_in.weight")[0, 0] = torch.nan
    quantize_frozen_(net, "nf4")


def with_a_class_of(package: str) -> Callable[[nn.Module], None]:
    def run(net: nn.Module) -> None:
        theirs = type("Linear4bit", (nn.Linear,), {"__module__": f"{package}.nn"})
        net.add_module("theirs", theirs(64, 64).requires_grad_(False))
        quantize_frozen_(net, "int8")

    return run


def with_bytes(net: nn.Module) -> None:
    net.mid_block.attentions[0].proj_in.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.uint8), False)  # type: ignore
    quantize_frozen_(net, "int8")


def pack(kind: Any, skip: Any = None) -> Callable[[nn.Module], Any]:
    return lambda net: quantize_frozen_(net, kind, skip)


def all_trained(net: nn.Module) -> None:
    quantize_frozen_(net.requires_grad_(True), "nf4")


def too_small(net: nn.Module) -> None:
    quantize_frozen_(nn.Linear(9, 9).requires_grad_(False), "nf4")


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (
            pack("nf5"),
            "must be null, one of int8, fp8, nf4, nf4-all, or .target_mib: 1500., got 'nf5'; did you mean 'nf4'",
        ),
        (pack(4), "must be null, one of int8, fp8, nf4, nf4-all, or .target_mib: 1500., got 4"),
        (pack("nf4", ["mid_blok"]), "'mid_blok' covers no frozen layer; close names: mid_block"),
        (pack("nf4", "conv_in"), r"must be a list of name patterns, got 'conv_in'; write \['conv_in'\]"),
        (pack("nf4", [""]), r"must hold name patterns such as 'conv_in', got \[''\]"),
        (all_trained, r"there is no frozen linear layer or convolution to quantize \(all are trained\); leave"),
        (too_small, r"there is no frozen linear layer or convolution to quantize \(1 smaller than 4096 numbers\)"),
        (pack_twice, "is quantized already, by base_quantization; load the full-precision weights"),
        (
            with_nan,
            "mid_block.attentions.0.proj_in cannot be quantized, the weight holds NaN or infinity; load the",
        ),
        (with_bytes, "mid_block.attentions.0.proj_in is quantized already, by something that left torch.uint8"),
        (with_a_class_of("bitsandbytes"), "theirs is quantized already, by bitsandbytes"),
        (with_a_class_of("optimum.quanto"), "theirs is quantized already, by quanto"),
        (with_a_class_of("diffusers.quantizers.gguf"), "theirs is quantized already, by GGUF"),
    ],
)
def test_misuse_is_one_sentence(misuse: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as hit:
        misuse(make_net())
    assert "\n" not in str(hit.value) and str(hit.value).startswith("base_quantization")


def unpacked_once(net: nn.Module) -> nn.Module:
    """The same module with plain weights of the packed numbers."""
    plain = copy.deepcopy(net)
    for layer in plain.modules():
        weight = layer._parameters.get("weight")
        if isinstance(weight, PackedWeight):
            del layer._parameters["weight"]
            layer.register_parameter("weight", nn.Parameter(weight.dequantize(), requires_grad=False))
    assert not list(packed_weights(plain))
    return plain


def kept(net: nn.Module, dtype: torch.dtype) -> int:
    """Bytes that autograd saves, without the parameters' own; a packed weight's are its own."""
    own = {p.untyped_storage()._cdata for p in net.parameters() if not isinstance(p, PackedWeight)}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, PackedWeight) and tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        output = call_in(dtype, net)
    del output
    return sum(saved.values())


def call_in(dtype: torch.dtype, unet: nn.Module) -> Tensor:
    torch.manual_seed(2)
    given = torch.randn(2, 4, 16, 16).to(dtype), torch.tensor([10, 900]), torch.randn(2, 5, 24).to(dtype)
    output: Tensor = unet(*given).sample.float()
    return output


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("memory", ["off", "balanced", "lean", "max"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_every_level_keeps_the_bytes_and_gives_the_gradients_of_the_unpacked_base(
    kind: Any, memory: Any, precision: Any
) -> None:
    net = make_net()
    if precision == "bf16-mixed":  # as our modules load it
        net.to(torch.bfloat16)
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    quantize_frozen_(net, kind)
    call = functools.partial(call_in, torch.float32 if precision == "32-true" else torch.bfloat16)
    found = []
    for module in (net, unpacked_once(net)):
        plugin = FusedBackwardPrecision(precision, memory=memory)
        plugin.convert_module(module)
        with plugin.forward_context():
            found.append((kept(module, *call.args), gradients(module, call)))
        plugin.teardown()
    (mine_kept, mine), (their_kept, theirs) = found
    assert mine.keys() == theirs.keys() and len(mine) > 10
    limit = 0.0 if HAS_EQUAL_BITS or precision == "32-true" else 0.02
    for name, gradient in theirs.items():
        assert (mine[name] - gradient).norm() <= limit * gradient.norm(), name
    if memory == "off":  # native autograd keeps autocast's copies of plain weights
        assert mine_kept <= their_kept
    else:
        assert mine_kept == their_kept


def test_gradient_checkpointing_and_compiling_give_the_same_gradients() -> None:
    net = make_net()
    quantize_frozen_(net, "nf4")
    plain = unpacked_once(net)
    expected = gradients(plain, call_unet)
    net.enable_gradient_checkpointing()  # type: ignore[operator]
    checkpointed = gradients(net, call_unet)
    assert all(torch.equal(checkpointed[name], expected[name]) for name in expected)


def on_a_shard(rank: int) -> tuple[str, bool, bool]:
    """A rank of FSDP2: the packed weight's class, whether its bytes stayed, whether the trained layer learns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64))
    quantize_frozen_(net, "nf4")
    weights = dict(packed_weights(net))
    before = weights["0.weight"].packed.clone()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)), ignored_params=set(weights.values()))
    net(torch.randn(2, 64)).square().sum().backward()
    after = net[0].weight
    return type(after).__name__, torch.equal(after.packed, before), net[1].weight.grad is not None


def test_fsdp2_leaves_ignored_packed_weights_alone(tmp_path: Path) -> None:
    assert run_ranks(on_a_shard, 2, tmp_path) == [("PackedWeight", True, True)] * 2
