"""Optional parameters as lists and back, and the arguments of an autograd.Function with lists in them."""

from __future__ import annotations

import pytest
import torch

from lightning_aigc_kernels import LoRAProjection, NormParameters, custom_op
from lightning_aigc_kernels.packing import empty_wanted, pack, pack_layers, spread, unpack, unpack_layers, wanted

A, B = torch.ones(2), torch.zeros(3)


def test_what_is_packed_comes_back_in_its_place() -> None:
    packed, given = pack((None, A, None, B))
    assert [t is there for t, there in zip(packed, (A, B), strict=True)] == [True, True]
    assert given == [False, True, False, True]
    back = unpack(packed, given)
    assert back[0] is back[2] is None and back[1] is A and back[3] is B
    assert unpack([True, False], given, absent=False) == [False, True, False, False]


@pytest.mark.parametrize("with_lora", [True, False])
def test_layers_come_back_with_their_scales(with_lora: bool) -> None:
    norm = NormParameters(A, None, 1e-3)
    layers = [
        LoRAProjection(A, B, A if with_lora else None, B if with_lora else None, 0.5),
        LoRAProjection(B, scale=2.0),
    ]
    parameters, given, scales = pack_layers(norm, layers)
    again, layers_again = unpack_layers(parameters, given, norm.on, norm.eps, scales)
    assert again.weight is A and again.bias is None and again.eps == 1e-3 and again.on
    for layer, before in zip(layers_again, layers, strict=True):
        assert all(x is y for x, y in zip(layer.tensors, before.tensors, strict=True)) and layer.scale == before.scale


def test_gradients_that_are_needed_go_where_their_parameters_are() -> None:
    needs = (True, False, True)
    gradients = wanted((A.double(), B, None), (A, B, None), needs)
    assert len(gradients) == 1 and gradients[0].dtype == torch.float32
    assert [t.shape for t in empty_wanted((A, B, None), needs)] == [A.shape]
    found = spread(iter([A, B]), needs)
    assert found[0] is A and found[1] is None and found[2] is B


def test_lists_among_arguments_are_flattened_and_nested_again() -> None:
    args = (1, [2, 3], 4, [], 5)
    flat = custom_op._flatten(args, [1, 3])
    assert flat == [1, 2, 3, 4, 5]
    assert custom_op._nest(flat, [1, 3], [2, 0]) == list(args)
