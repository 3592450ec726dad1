"""Bytes: what is counted is the formula, and the default stays below its promise on a real network's shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig

from fakes.processes.given_gradients import MODES, SHAPES, Given, Training, make_gradients
from fakes.processes.ranks import run_ranks
from lightning_aigc.cluster import cost_model
from lightning_aigc.cluster.workload import Job, Shape
from lightning_aigc.gradient_sync.modes.reductions import BlockQuantizer
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.transport import process_groups
from lightning_aigc.gradient_sync.units import FlatUnit, make_units

COMPRESSED = tuple(mode for mode in MODES if mode not in ("dense", "local"))
DENSITY = 0.25
SETTINGS = {"two": (1, 2), "four": (1, 4), "two nodes of two": (2, 2)}
"""Nodes, and ranks of each."""
SMALL = 1024
EVEN = {"wide": (512, 320), "bias": (301,), "deep": (256, 64, 3, 3), "scale": (SMALL,)}
"""Shapes that need no padding on up to four ranks: 640, 576 and 4 blocks of 256. `bias` is protected."""
N = 512 * 320 + 256 * 64 * 9
PER_VALUE = {
    **{"bf16": 2, "int8": 1 + 2 / 32, "int4": 1 / 2 + 2 / 32, "int3": 3 / 8 + 2 / 32, "two_four": (1 + 2 / 32) / 2},
    **{"sparse_int8": DENSITY * (1 + 2 / 32), "sparse_int4": DENSITY * (1 / 2 + 2 / 32)},
    "sparse": DENSITY * 2 + 2 / 256,
    "ternary": (52 + 2) / 256,
}  # fmt: skip
"""Bytes; a scale of two bytes for 32 values, and for 256 an energy of two, which `sparse` sends with its values."""


def work(rank: int, nodes: int, inside: int) -> dict[str, Any]:
    process_groups.node_key = lambda: f"node {rank // inside}"

    def last_step(shapes: Mapping[str, tuple[int, ...]], **options: Any) -> tuple[dict[str, float], float]:
        run = Training(module=Given(shapes), strategy="uniform", sparsity_target=1 - DENSITY, **options)
        run.steps(rank, range(2), partial(make_gradients, shapes=shapes))  # the first of a sparse mode is dense
        run.compressor.close()
        report = run.compressor.last_step
        assert report is not None
        return report.sent_bytes, report.ratio

    sent: dict[str, Any] = {mode: last_step(EVEN, mode=mode, protect_layers=["bias"]) for mode in COMPRESSED}
    sent["dense"] = last_step(SHAPES, mode="dense")
    sent["all protected"] = last_step(SHAPES, protect_layers=list(SHAPES))
    return sent


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return {
        name: run_ranks(work, nodes * inside, tmp_path_factory.mktemp("bytes"), nodes, inside)
        for name, (nodes, inside) in SETTINGS.items()
    }


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", COMPRESSED)
def test_counted_bytes_are_those_of_the_parameters(mode: str, setting: str, counted: dict[str, list[Any]]) -> None:
    nodes, inside = SETTINGS[setting]
    per_small = PER_VALUE["bf16" if mode == "bf16" else "int8"]
    if nodes > 1:
        # One of the two cards of each node sends half: 2 (M-1) / M is 1. Of 301 values a half is 151 with its padding.
        wanted = {"values": PER_VALUE[mode] * N / 2, "protected": 4 * 151, "small": per_small * SMALL / 2}
        wanted["intra_node"] = 4 * (N + 302 + SMALL)
        yardstick = 4 * (N + 301 + SMALL) / 2
    else:
        ring = {2: 1.0, 4: 1.5}[nodes * inside]
        wanted = {"values": ring * PER_VALUE[mode] * N, "protected": ring * 4 * 301}
        wanted["small"] = ring * per_small * SMALL
        yardstick = ring * 4 * (N + 301 + SMALL)
    if mode in ("sparse_int8", "sparse_int4"):
        wanted["index"] = wanted["values"] / PER_VALUE[mode] * 2 / 256
    for sent, ratio in (row[mode] for row in counted[setting]):
        assert {kind: size for kind, size in sent.items() if size} == pytest.approx(wanted)
        assert ratio == pytest.approx((sum(sent.values()) - sent["intra_node"]) / yardstick)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", COMPRESSED)
def test_plan_says_the_bytes_that_are_counted(mode: str, setting: str, counted: dict[str, list[Any]]) -> None:
    nodes, inside = SETTINGS[setting]
    job = Job(N + 301 + SMALL, 1.0, 2.0, protected=301, small=SMALL, sparsity=1 - DENSITY)
    in_node, between = cost_model.sent_bytes(mode, job, Shape(nodes, inside))
    for sent, _ in (row[mode] for row in counted[setting]):
        if nodes > 1:
            assert sent["intra_node"] == pytest.approx(in_node, rel=1e-4)
            assert sum(sent.values()) - sent["intra_node"] == pytest.approx(between, rel=1e-4)
        else:
            assert sum(sent.values()) == pytest.approx(in_node + between)


@pytest.mark.parametrize("setting", SETTINGS)
def test_with_everything_protected_it_sends_what_dense_does(setting: str, counted: dict[str, list[Any]]) -> None:
    nodes, inside = SETTINGS[setting]
    numel = 33 * 47 + 47 + 64 * 40 + 16 * 8 * 9 + 40
    for sent, ratio in (row["all protected"] for row in counted[setting]):
        assert ratio == 1.0
        assert sent["protected"] == (4 * numel / 2 if nodes > 1 else {2: 1.0, 4: 1.5}[inside] * 4 * numel)
        assert sent["intra_node"] == (4 * numel if nodes > 1 else 0)


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


def ratio_of(units: list[FlatUnit], numel: int, values_bytes: Any) -> float:
    """To the dense float32 ring; the factor of the ranks is in both."""
    bytes_of = {"protected": lambda u: 4 * u.numel, "small": lambda u: BlockQuantizer(8).wire_bytes(u.numel)}
    sent = sum(bytes_of.get(unit.kind, values_bytes)(unit) for unit in units)
    return sent / (4 * numel)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 384])
def test_the_default_sends_less_than_0_15_of_stable_diffusions_gradient(
    ranks: int, unet: list[tuple[str, torch.Tensor]]
) -> None:
    options = SyncOptions()
    numel = sum(p.numel() for _, p in unet)
    assert numel == 859_520_964
    units = make_units(unet, options, ranks, min(ranks, 8))
    assert any(unit.uncompressed for unit in units)
    code = BlockQuantizer(int(options.mode[3:]))
    ratio = ratio_of(units, numel, lambda unit: code.wire_bytes(unit.numel))
    assert 0.1 < ratio <= 0.15
    if ranks == 8:
        held = {
            kind: sum(e.shape.numel() for u in units if u.kind == kind for e in u.entries)
            for kind in ("protected", "small")
        }
        job = Job(numel, 1.0, 2.0, protected=held["protected"], small=held["small"])
        assert cost_model.payload_bytes(options.mode, job) / (4 * numel) == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 384])
def test_a_twentieth_in_int8_sends_a_fiftieth(ranks: int, unet: list[tuple[str, torch.Tensor]]) -> None:
    options = SyncOptions(mode="sparse_int8", sparsity=0.95, protect=[])
    units = make_units(unet, options, ranks)
    code = BlockQuantizer(8)

    def values_bytes(unit: FlatUnit) -> float:
        blocks = unit.numel // 256
        sent = math.ceil((1 - options.sparsity) * blocks) + len(unit.entries)  # a layer rounds up
        return code.wire_bytes(-(-sent // ranks) * ranks * 256) + 2 * blocks

    assert ratio_of(units, sum(p.numel() for _, p in unet), values_bytes) <= 0.02


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 384])
def test_two_of_four_send_a_sixth_of_stable_diffusions_gradient(
    ranks: int, unet: list[tuple[str, torch.Tensor]]
) -> None:
    code = BlockQuantizer(8)

    def values_bytes(unit: FlatUnit) -> float:
        return code.wire_bytes(-(-unit.numel // 2 // (256 * ranks)) * 256 * ranks)

    units = make_units(unet, SyncOptions(mode="two_four"), ranks)
    assert 0.1 < ratio_of(units, sum(p.numel() for _, p in unet), values_bytes) <= 0.17


@pytest.fixture(scope="module", params=[4, 16, 128])
def lora(request: pytest.FixtureRequest) -> list[tuple[str, torch.Tensor]]:
    """A LoRA of the attention of Stable Diffusion 1.5."""
    with torch.device("meta"):
        model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=request.param, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_lora_sends_less_than_0_11_of_its_gradient_by_default(
    ranks: int, lora: list[tuple[str, torch.Tensor]]
) -> None:
    units = make_units(lora, SyncOptions(), ranks)
    assert not any(unit.uncompressed for unit in units)
    assert any(unit.uncompressed for unit in make_units(lora, SyncOptions(protect=["mid_block.attentions"]), ranks))
    code = BlockQuantizer(3)
    assert ratio_of(units, sum(p.numel() for _, p in lora), lambda unit: code.wire_bytes(unit.numel)) <= 0.11
