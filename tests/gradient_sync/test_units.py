"""Units of gradients that travel together, and the blocks that are selected first."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.modes.block_sparse import LEAST_SHARE, layer_of_each_block, quotas, rank_within
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.units import ALIGNMENT, entry_of_each_block, make_units


def named(**shapes: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    return [(name.replace("__", "."), torch.empty(shape)) for name, shape in shapes.items()]


NET = named(
    conv_in__weight=(32, 4, 3, 3),
    conv_in__bias=(32,),
    mid_block__attentions__0__weight=(40, 40),
    mid_block__attentions__0__bias=(40,),
    out__weight=(33, 47),
    out__small=(31, 33),
)


def test_small_protected_and_compressed_parameters_travel_apart_in_reversed_order() -> None:
    units = make_units(NET, SyncOptions())
    names = {unit.kind: [entry.name for entry in unit.entries] for unit in units}
    assert names == {
        "small": ["out.small", "conv_in.bias"],
        "values": ["out.weight", "conv_in.weight"],
        "protected": ["mid_block.attentions.0.bias", "mid_block.attentions.0.weight"],
    }
    assert [unit.index for unit in units] == [0, 1, 2]


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_compressed_parameters_are_aligned_and_their_units_divide_among_ranks(ranks: int) -> None:
    for unit in make_units(NET, SyncOptions(bucket_mb=0.004), ranks):
        if unit.uncompressed:
            continue
        assert unit.numel % (ALIGNMENT * ranks) == 0
        ends = [0]
        for entry in unit.entries:
            assert entry.start % unit.alignment == 0 and 0 <= entry.start - ends[-1] < unit.alignment
            ends.append(entry.stop)
        assert ends[-1] <= unit.numel < ends[-1] + ALIGNMENT * (ranks + 1)


@pytest.mark.parametrize(("ranks_inside", "length"), [(1, 1640), (2, 1640), (3, 1641)])
def test_what_is_sent_whole_is_padded_to_divide_inside_a_node_alone(ranks_inside: int, length: int) -> None:
    units = [unit for unit in make_units(NET, SyncOptions(), 4 * ranks_inside, ranks_inside) if unit.uncompressed]
    assert [unit.numel for unit in units] == [length]  # 40 * 40 + 40
    assert [entry.start for unit in units for entry in unit.entries] == [0, 40]


def test_small_parameters_fill_blocks_of_the_quantizer_and_no_block_has_two() -> None:
    (small,) = (unit for unit in make_units(NET, SyncOptions(), 4) if unit.kind == "small")
    assert [(entry.name, entry.start) for entry in small.entries] == [("out.small", 0), ("conv_in.bias", 1024)]
    assert small.numel == 2048  # of 31 * 33 + 1 + 32 values: two shards of ALIGNMENT values for each of four ranks
    assert entry_of_each_block(small).tolist() == [0] * 32 + [1] * 32


def test_the_default_protects_nothing_of_a_lora_and_a_pattern_of_the_users_does() -> None:
    lora = [("mid_block.attentions.0.to_q.lora_A.default.weight", torch.empty(16, 320))]
    assert [unit.kind for unit in make_units(lora, SyncOptions())] == ["values"]
    assert [unit.kind for unit in make_units(lora, SyncOptions(protect=["mid_block"]))] == ["protected"]


def test_a_unit_closes_when_its_megabytes_are_reached() -> None:
    parameters = [(str(i), torch.empty(32, 32)) for i in range(6)]
    units = make_units(parameters, SyncOptions(bucket_mb=0.008))  # 2000 values
    assert [[entry.name for entry in unit.entries] for unit in units] == [["5", "4"], ["3", "2"], ["1", "0"]]


def test_dtypes_travel_apart_because_ddps_buckets_do() -> None:
    parameters = [
        ("a", torch.empty(64, 64)),
        ("b", torch.empty(64, 64, dtype=torch.bfloat16)),
        ("c", torch.empty(64, 64)),
    ]
    units = make_units(parameters, SyncOptions())
    assert [[entry.name for entry in unit.entries] for unit in units] == [["c", "a"], ["b"]]


def test_a_pattern_of_the_users_that_covers_nothing_is_an_error_and_the_default_is_not() -> None:
    parameters = named(decoder__weight=(64, 64))
    assert not any(unit.uncompressed for unit in make_units(parameters, SyncOptions()))
    with pytest.raises(
        ConfigError, match=r"'encoder' covers no module.*leave protect out for the default, or give \[\]"
    ):
        make_units(parameters, SyncOptions(protect=["decoder", "encoder"]))


def test_blocks_know_their_layer_and_padding_joins_the_last() -> None:
    units = make_units(named(a=(40, 40), b=(33, 47), c=(32, 32)), SyncOptions(bucket_mb=0.01), 4)
    whole = {unit.index: 0 for unit in units}, {unit.index: unit.numel for unit in units}
    layers = layer_of_each_block(units, *whole)
    # c 4 blocks, b 7 and padding up to 12; a 7 and padding up to 8
    assert [layers[unit.index].tolist() for unit in units] == [[0] * 4 + [1] * 8, [2] * 8]
    second_half = {unit.index: unit.numel // 2 for unit in units}
    layers = layer_of_each_block(units, second_half, second_half)
    assert [layers[unit.index].tolist() for unit in units] == [[0] * 6, [1] * 4]


def test_blocks_know_their_parameter() -> None:
    (unit,) = make_units(named(a=(40, 40), b=(33, 47)), SyncOptions(), 3)
    assert entry_of_each_block(unit).tolist() == [0] * 7 + [1] * 8  # b first; padding belongs to a


def test_places_within_a_layer_are_those_of_a_plain_sort_with_ties_by_position() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        layers = torch.randint(0, 5, (60,), generator=generator).sort().values
        layers = torch.unique(layers, return_inverse=True)[1]
        score = torch.randint(0, 4, (60,), generator=generator)
        places = [
            sum(
                (score[other] > score[block]) or (score[other] == score[block] and other < block)
                for other in range(60)
                if layers[other] == layers[block]
            )
            for block in range(60)
        ]
        assert rank_within(layers, score).tolist() == places


def naive_shares(energy: Tensor, layers: Tensor, density: float) -> list[float]:
    """Fill up by weight; what a layer cannot take, or must be given, goes off the others' shares, one at a time."""
    count = int(layers.max()) + 1
    blocks = [int((layers == i).sum()) for i in range(count)]
    weight = [float((energy.double()[layers == i].sum() * blocks[i]).sqrt()) for i in range(count)]
    least = [LEAST_SHARE * density * b for b in blocks]
    best: list[float] = []
    # The factor lies between two of the points where a layer meets its bounds: on that stretch it is a division.
    points = sorted({p for w, lo, b in zip(weight, least, blocks, strict=True) for p in (lo / w, b / w)})
    wanted = density * sum(blocks)

    def shares(factor: float) -> list[float]:
        return [min(max(factor * w, lo), b) for w, lo, b in zip(weight, least, blocks, strict=True)]

    for low, high in itertools.pairwise([0.0, *points]):
        below, above = sum(shares(low)), sum(shares(high))
        if below <= wanted <= above:
            at = low if above == below else low + (high - low) * (wanted - below) / (above - below)
            best = shares(at)
            break
    return best


@pytest.mark.parametrize("spread", [1.0, 1e3, 1e8])
@pytest.mark.parametrize("density", [0.01, 0.25, 0.9])
def test_layers_share_by_the_size_of_their_gradients(density: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    layers = torch.repeat_interleave(torch.arange(6), torch.tensor([3, 200, 40, 1, 900, 12]))
    energy = torch.rand(len(layers), generator=generator) * spread ** -layers.float()
    got = quotas(energy, layers, density, adaptive=True)
    wanted = [max(1, round(share)) for share in naive_shares(energy, layers, density)]
    assert (got - torch.tensor(wanted)).abs().max() <= 1  # halves may round either way
    assert abs(int(got.sum()) - density * len(layers)) <= 6


def test_without_adaptation_and_without_sparsity_each_layer_sends_its_even_share() -> None:
    layers = torch.repeat_interleave(torch.arange(3), torch.tensor([3, 8, 5]))
    energy = torch.zeros(16)
    energy[5] = 1.0
    assert quotas(energy, layers, 0.25, adaptive=False).tolist() == [1, 2, 2]
    assert quotas(energy, layers, 1.0, adaptive=True).tolist() == [3, 8, 5]


def test_a_layer_without_gradient_sends_its_least_share() -> None:
    layers = torch.repeat_interleave(torch.arange(2), torch.tensor([64, 64]))
    energy = torch.cat([torch.ones(64), torch.zeros(64)])
    assert quotas(energy, layers, 0.5, adaptive=True).tolist() == [56, 8]
    assert quotas(torch.zeros(128), layers, 0.5, adaptive=True).tolist() == [8, 8]
