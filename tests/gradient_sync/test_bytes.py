"""Bytes: what is counted is the formula, and the default stays below its promise on a real network's shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from fakes.given_gradients import MODES, SHAPES, Training
from fakes.ranks import run_ranks
from lightning_aigc.gradient_sync import cost_model, groups
from lightning_aigc.gradient_sync.block_integers import BlockIntegers
from lightning_aigc.gradient_sync.layout import Unit, make_units
from lightning_aigc.gradient_sync.options import SyncOptions

COMPRESSED = tuple(mode for mode in MODES if mode not in ("dense", "local"))
RANK = 5
DENSITY = 0.25
ORDER = ("third", "second", "first")
SETTINGS = {"two": (1, 2), "four": (1, 4), "two nodes of two": (2, 2)}
"""Nodes, and ranks of each."""


def work(rank: int, nodes: int, inside: int) -> dict[str, Any]:
    groups.node_key = lambda: f"node {rank // inside}"
    sent = {}
    for mode in (*COMPRESSED, "dense"):
        run = Training(mode=mode, strategy="uniform", sparsity_target=1 - DENSITY, rank=RANK, protect_layers=["bias"])
        run.steps(rank, range(2))  # the first of a sparse mode is dense
        assert run.compressor.last_step is not None
        sent[mode] = (run.compressor.last_step.sent_bytes, run.compressor.last_step.ratio)
        run.compressor.close()
    return sent


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return {
        name: run_ranks(work, nodes * inside, tmp_path_factory.mktemp("bytes"), nodes, inside)
        for name, (nodes, inside) in SETTINGS.items()
    }


def integer_bytes(length: int, bits: int) -> float:
    """A block of 32 values has a scale of two bytes."""
    return length * bits / 8 + length / 32 * 2


def layer_blocks(first: int, stop: int, length: int) -> list[int]:
    """Blocks of 256 that each parameter has between two places of the vector; padding joins the last."""
    ends, at = [], 0
    for name in ORDER:
        at += -(-math.prod(SHAPES[name]) // 256)
        ends.append(at)
    ends[-1] = length // 256
    starts = [0, *ends[:-1]]
    counts = [min(e, stop // 256) - max(s, first // 256) for s, e in zip(starts, ends, strict=True)]
    return [count for count in counts if count > 0]


def payload(mode: str, first: int, stop: int, length: int, ranks: int) -> dict[str, float]:
    """Bytes of values and of what chooses them, for the part of the vector that is added up among `ranks`."""
    n = stop - first
    blocks = layer_blocks(first, stop, length)
    sent = sum(math.ceil(DENSITY * count) for count in blocks) * 256
    if mode.startswith("int"):
        return {"values": integer_bytes(n, int(mode[3:]))}
    if mode in ("sparse_int8", "sparse_int4"):
        whole = -(-sent // (256 * ranks)) * 256 * ranks
        return {"values": integer_bytes(whole, int(mode[-1])), "index": 2 * sum(blocks)}
    low_rank = sum(RANK * (SHAPES[name][0] + math.prod(SHAPES[name][1:])) for name in ORDER)
    return {
        "values": {
            "bf16": 2 * n,
            "sparse": 2 * (sent + sum(blocks)),
            "two_four": n,
            "low_rank": 4 * low_rank,  # one factor after the other
        }[mode]
    }


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", COMPRESSED)
def test_counted_bytes_are_the_formula(mode: str, setting: str, counted: dict[str, list[Any]]) -> None:
    nodes, inside = SETTINGS[setting]
    ranks, layered = nodes * inside, nodes > 1 and mode != "low_rank"
    length = -(-(1280 + 2560 + 1792) // (256 * ranks)) * 256 * ranks
    protected, small = (-(-256 // (256 * ranks)) * 256 * ranks for _ in range(2))
    for rank, (sent, ratio) in enumerate(row[mode] for row in counted[setting]):
        part = length // inside if layered else length
        first = rank % inside * part if layered else 0
        among = nodes if layered else ranks
        wanted = {
            kind: 2 * (among - 1) / among * size
            for kind, size in payload(mode, first, first + part, length, among).items()
        }
        wanted |= {"protected": 2 * (ranks - 1) / ranks * 4 * protected, "small": 2 * (ranks - 1) / ranks * 4 * small}
        wanted["intra_node"] = 2 * (inside - 1) / inside * 4 * length if layered else 0.0
        assert {kind: size for kind, size in sent.items() if size} == {k: v for k, v in wanted.items() if v}
        numel = sum(math.prod(shape) for shape in SHAPES.values())
        yardstick = 2 * (among - 1) / among * 4 * numel / (inside if layered else 1)
        assert ratio == pytest.approx((sum(sent.values()) - sent["intra_node"]) / yardstick)


@pytest.mark.parametrize("setting", SETTINGS)
def test_dense_sends_a_ring_of_float32(setting: str, counted: dict[str, list[Any]]) -> None:
    ranks = math.prod(SETTINGS[setting])
    numel = sum(math.prod(shape) for shape in SHAPES.values())
    sent, ratio = counted[setting][0]["dense"]
    assert sum(sent.values()) == 2 * (ranks - 1) / ranks * 4 * numel and ratio == 1.0


@pytest.fixture(scope="module")
def unet() -> list[tuple[str, torch.Tensor]]:
    """Stable Diffusion 1.5's U-Net, without its 3.4 GB."""
    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=64,
            cross_attention_dim=768,
            attention_head_dim=8,
        )
    return list(model.named_parameters())


def ratio_of(units: list[Unit], numel: int, values_bytes: Any) -> float:
    """To the dense float32 ring; the factor of the ranks is in both."""
    sent = sum(4 * unit.numel if unit.whole else values_bytes(unit) for unit in units)
    return sent / (4 * numel)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 384])
def test_the_default_sends_less_than_0_15_of_stable_diffusions_gradient(
    ranks: int, unet: list[tuple[str, torch.Tensor]]
) -> None:
    options = SyncOptions()
    numel = sum(p.numel() for _, p in unet)
    assert numel == 859_520_964
    units = make_units(unet, options, ranks)
    assert any(unit.protected for unit in units)
    code = BlockIntegers(int(options.mode[3:]))
    ratio = ratio_of(units, numel, lambda unit: code.wire_bytes(unit.numel))
    assert 0.1 < ratio <= 0.15
    if ranks == 8:
        held = {
            kind: sum(e.shape.numel() for u in units if u.protected is kind and u.whole for e in u.entries)
            for kind in (True, False)
        }
        job = cost_model.Job(numel, 1.0, 2.0, protected=held[True], small=held[False])
        assert cost_model.payload_bytes(options.mode, job) / (4 * numel) == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 384])
def test_a_twentieth_in_int8_sends_a_fiftieth(ranks: int, unet: list[tuple[str, torch.Tensor]]) -> None:
    options = SyncOptions(mode="sparse_int8", sparsity=0.95, protect=[])
    units = make_units(unet, options, ranks)
    code = BlockIntegers(8)

    def values_bytes(unit: Unit) -> float:
        blocks = unit.numel // 256
        sent = math.ceil((1 - options.sparsity) * blocks) + len(unit.entries)  # a layer rounds up
        return code.wire_bytes(-(-sent // ranks) * ranks * 256) + 2 * blocks

    assert ratio_of(units, sum(p.numel() for _, p in unet), values_bytes) <= 0.02
