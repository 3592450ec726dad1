"""Units that are packed straight from their gradients: the same bits as by way of a flat vector."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.processes.echoing_groups import EchoingGroups
from lightning_aigc.gradient_sync.hook import BucketFuture
from lightning_aigc.gradient_sync.modes.direct_quantized import pieces_of
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.sync import GradientSync
from lightning_aigc.gradient_sync.unit_reducer import UnitReducer
from lightning_aigc.gradient_sync.units import make_units

# Whole groups, and as many in each of two or four shards: a rank that echoes another's shard would fill its padding.
SHAPES = {"first": (40, 32), "second": (64, 48), "third": (44, 64), "bias": (40,)}
UNEVEN = {"first": (40, 30), "second": (64, 48), "third": (33, 65), "bias": (40,)}


def parameters(shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


def train(gradients: list[dict[str, Tensor]], ranks: int, rank: int, **options: Any) -> tuple[list[Tensor], Any]:
    """The gradients after each step, and the sync's state; the other ranks echo this one."""
    named = parameters()
    sync = GradientSync(
        named, SyncOptions(overlap=False, **options), EchoingGroups(ranks, 1, rank), loss_scale=lambda: 2.0**10
    )
    found = []
    for given in gradients:
        own = {name: gradient.clone() for name, gradient in given.items()}
        waiting = BucketFuture(next(iter(own.values())))
        sync.gradients_ready([p for _, p in named], [own[name] for name, _ in named], waiting, last=True)
        sync.end_step()
        found += own.values()
    return found, sync.state_dict()


@pytest.mark.parametrize("mode", ["int3", "int4", "int8"])
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_sums_and_residuals_are_those_of_a_flat_vector(
    ranks: int, rank: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(rank)
    gradients = [{n: torch.randn(s, generator=generator) * 1e3 for n, s in SHAPES.items()} for _ in range(3)]
    gradients[1]["second"][3, 4] = torch.nan  # this step is skipped, and its residuals with it
    called = []
    direct_of = UnitReducer._direct_of
    monkeypatch.setattr(UnitReducer, "_direct_of", lambda *a: called.append(direct_of(*a)) or called[-1])  # type: ignore[func-returns-value]
    direct, direct_state = train(gradients, ranks, rank, mode=mode)
    assert any(called), "no unit was packed straight from its gradients"
    monkeypatch.setattr(UnitReducer, "_direct_of", lambda *_: None)
    flat, flat_state = train(gradients, ranks, rank, mode=mode)
    for i, (ours, theirs) in enumerate(zip(direct, flat, strict=True)):
        if i // len(SHAPES) != 1:
            assert torch.equal(ours, theirs)
    skipped = slice(len(SHAPES), 2 * len(SHAPES))
    assert any(not each.isfinite().all() for each in direct[skipped]), "a loss scaler must find what is not finite"
    assert direct_state["step"] == flat_state["step"] == 2
    for name, kept in flat_state["residuals"].items():
        assert torch.equal(direct_state["residuals"][name]["values"], kept["values"]), name


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_pieces_cover_every_value_once_and_begin_at_groups(shards: int) -> None:
    (unit,) = (u for u in make_units(parameters(UNEVEN), SyncOptions(), shards) if u.kind == "values")
    covered = torch.zeros(unit.numel, dtype=torch.int64)
    size = unit.numel // shards
    for piece in pieces_of(unit, shards):
        assert piece.start % 256 == 0 and piece.start + piece.length <= size
        start = piece.shard * size + piece.start
        covered[start : start - (-piece.length // 256) * 256] += 1
    assert (covered == 1).all()


def test_gradients_that_do_not_lie_as_float32_go_by_way_of_a_flat_vector() -> None:
    strided = [{n: torch.randn(tuple(reversed(s))).T if len(s) == 2 else torch.randn(s) for n, s in SHAPES.items()}]
    whole = [{name: gradient.contiguous() for name, gradient in strided[0].items()}]
    for ours, theirs in zip(train(strided, 2, 0)[0], train(whole, 2, 0)[0], strict=True):
        assert torch.equal(ours, theirs)
