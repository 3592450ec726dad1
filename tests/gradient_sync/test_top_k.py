"""Averages in top_k: the packed bytes, the values that they hold, and what is left for the next average.

Up to 341 of 4,096 values have positions and two sizes, more have a bitmap, signs and one size.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.processes.given_gradients import SHAPES, Training, make_gradients, refusal, residuals_of
from fakes.processes.ranks import run_ranks
from lightning_aigc.cluster import cost_model
from lightning_aigc.cluster.modes import average_bytes
from lightning_aigc.cluster.workload import Job
from lightning_aigc.gradient_sync.modes.local_sgd import LocalSGD
from lightning_aigc.gradient_sync.modes.top_k import CHUNK, TopKQuantizer
from lightning_aigc.gradient_sync.options import SyncOptions, unused_options
from lightning_aigc.gradient_sync.transport.collectives import dense_ring_bytes
from lightning_aigc.gradient_sync.watch.dense_comparison import compare

KEPT = 16
BITMAP = 1000
BOTH_LAYOUTS = pytest.mark.parametrize("kept", [KEPT, 336, 344, BITMAP])
"""The last that is sent with positions, and the first with a bitmap, whose 43 bytes of signs are an odd number."""
DECAY = 0.5
LOCAL: dict[str, Any] = {"mode": "local", "average": "top_k", "local_steps": 2, "top_k": KEPT}
SECONDS = {"plain": 0.0, "decay": 1e9}
"""Time that a dense sync seems to take."""
WITH_DECAY = LOCAL | {"error_feedback_decay": DECAY, "outer_momentum": 0.5}


def packed(values_RN: Tensor, kept: int = KEPT) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Wire bytes, decoded values, what was not sent, and the check."""
    quantizer, left = TopKQuantizer(kept), values_RN.clone()
    wire = torch.empty(len(values_RN), quantizer.wire_bytes(values_RN.shape[1]), dtype=torch.uint8)
    quantizer.encode_(left, wire)
    arrived = torch.empty_like(values_RN)
    check = quantizer.decode(wire, arrived)
    return wire, arrived, left, check


def gaussian(rows: int, chunks: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, chunks * CHUNK, generator=torch.Generator().manual_seed(seed))


def reference(chunk: Tensor, kept: int = KEPT) -> tuple[Tensor, bytes]:
    """One chunk value by value: decoded values, and the bytes of its places and values."""
    values = chunk.tolist()
    at = sorted(sorted(range(CHUNK), key=lambda i: -abs(values[i]))[:kept])
    sizes = [abs(values[i]) for i in at]
    mean = sum(sizes) / kept
    has_positions = kept <= 341
    halves = [[s for s in sizes if s <= mean], [s for s in sizes if s > mean]] if has_positions else [sizes]
    levels = torch.tensor([sum(half) / len(half) for half in halves]).bfloat16().tolist()
    decoded, places, codes = torch.zeros(CHUNK), 0, 0
    for place, (i, size) in enumerate(zip(at, sizes, strict=True)):
        is_large, is_negative = has_positions and size > mean, values[i] < 0
        decoded[i] = math.copysign(levels[is_large], values[i])
        places |= i << 12 * place if has_positions else 1 << i
        codes |= is_large + 2 * is_negative << 2 * place if has_positions else is_negative << place
    lengths = (kept * 12 // 8, kept // 4) if has_positions else (CHUNK // 8, kept // 8)
    return decoded, b"".join(bits.to_bytes(n, "little") for bits, n in zip((places, codes), lengths, strict=True))


@BOTH_LAYOUTS
def test_the_largest_of_each_chunk_arrive_with_their_sign_and_a_size_of_their_chunk(kept: int) -> None:
    values = gaussian(2, 3)
    _, arrived, left, _ = packed(values, kept)
    wanted = torch.stack([reference(chunk, kept)[0] for chunk in values.view(-1, CHUNK)]).view_as(values)
    assert torch.equal(arrived, wanted)
    assert torch.equal(left, values - wanted)


@BOTH_LAYOUTS
def test_a_chunk_is_its_sizes_then_positions_or_a_bitmap_then_values_of_two_bits_or_one(kept: int) -> None:
    values = gaussian(1, 1)
    wire, arrived, _, _ = packed(values, kept)
    _, wanted = reference(values[0], kept)
    assert bytes(wire[0, -len(wanted) :].tolist()) == wanted
    sizes = wire[0, : -len(wanted)].clone().view(torch.bfloat16).tolist()
    assert sizes == sorted(set(arrived.abs().unique().tolist()) - {0.0})


@pytest.mark.parametrize(
    ("kept", "nbytes"), [(64, 116), (336, 592), (344, 557), (1712, 728), (CHUNK, 2 + CHUNK // 8 * 2)]
)
def test_a_chunk_costs_fourteen_bits_a_value_or_a_bitmap_and_a_bit_a_value(kept: int, nbytes: int) -> None:
    assert TopKQuantizer(kept).wire_bytes(10 * CHUNK) == 10 * nbytes
    assert average_bytes("top_k", kept) * CHUNK == nbytes
    values = gaussian(1, 2, seed=kept)
    _, arrived, _, _ = packed(values, kept)
    assert (arrived.view(-1, CHUNK) != 0).sum(-1).tolist() == [kept] * 2


@BOTH_LAYOUTS
def test_rows_are_added_as_they_decode(kept: int) -> None:
    values = gaussian(3, 2)
    wire, arrived, _, _ = packed(values, kept)
    total = torch.ones(2 * CHUNK)
    TopKQuantizer(kept).add_rows_(wire, total)
    torch.testing.assert_close(total, 1 + arrived.sum(0))
    TopKQuantizer(kept).add_rows_(wire[:0], total)


@BOTH_LAYOUTS
def test_the_bytes_do_not_depend_on_how_many_chunks_are_packed_at_once(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = gaussian(2, 5)
    at_once = packed(values, kept)
    monkeypatch.setattr("lightning_aigc.gradient_sync.modes.top_k.CPU_VALUES", CHUNK)
    assert all(torch.equal(a, b) for a, b in zip(at_once, packed(values, kept), strict=True))


@pytest.mark.parametrize("kept", [KEPT, BITMAP])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_shows_in_the_check(bad: float, kept: int) -> None:
    values = gaussian(3, 2)
    values[1, CHUNK + 5] = bad
    assert not packed(values, kept)[3].isfinite()


@pytest.mark.parametrize("kept", [KEPT, BITMAP])
def test_equal_values_and_zeros_arrive_exactly(kept: int) -> None:
    equal = torch.zeros(1, CHUNK)
    equal[0, 7 : 11 + kept] = -0.25
    _, arrived, left, check = packed(equal, kept)
    assert torch.equal(arrived + left, equal) and (arrived == -0.25).sum() == kept and check.isfinite()
    assert not packed(torch.zeros(1, CHUNK), kept)[1].any()


def work(rank: int) -> dict[str, Any]:
    found = {}
    for name, case in {"plain": LOCAL, "decay": WITH_DECAY}.items():
        run = Training(**case)
        assert isinstance(run.compressor._sync, LocalSGD) and run.compressor._sync.comparison is not None
        dense_s, run.compressor._sync.comparison.dense_s = run.compressor._sync.comparison.dense_s, SECONDS[name]
        after = run.steps(rank, range(4))
        state = run.compressor.state_dict()
        report = run.compressor.last_step
        run.compressor.close()
        assert report is not None
        found[name] = [after, residuals_of(state), report.ratio, dense_s, run.compressor.report()]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return {n: run_ranks(work, n, tmp_path_factory.mktemp("top_k"), timeout_s=60) for n in (2, 3)}


def mean_moved(steps: range, ranks: int) -> Tensor:
    """Update of SGD at a rate of 1 with the ranks' mean gradient."""
    flat = [torch.cat([g.reshape(-1) for g in make_gradients(s, r).values()]) for s in steps for r in range(ranks)]
    return -torch.stack(flat).double().sum(0) / ranks


@pytest.mark.parametrize("count", [2, 3])
def test_what_the_averages_sent_and_what_they_left_are_together_what_the_ranks_moved(
    count: int, ranks: dict[int, list[Any]]
) -> None:
    parameters = ranks[count][0]["plain"][0]
    left = sum(torch.cat(list(rank["plain"][1].values())) for rank in ranks[count])
    torch.testing.assert_close(parameters[3].double() - left, mean_moved(range(4), count), rtol=0, atol=1e-5)
    assert all(torch.equal(parameters[3], rank["plain"][0][3]) for rank in ranks[count])
    assert not torch.equal(parameters[2], ranks[count][1]["plain"][0][2])  # between averages each is alone


def test_few_values_change_in_an_average(ranks: dict[int, list[Any]]) -> None:
    chunks = -(-sum(math.prod(shape) for shape in SHAPES.values()) // CHUNK)
    changed = int((ranks[2][0]["plain"][0][1] != 0).sum())
    assert KEPT * chunks / 2 < changed <= 2 * KEPT * chunks  # the two ranks' largest, of which some are the same


def test_with_a_decay_of_a_half_an_average_takes_half_of_what_the_last_one_left(ranks: dict[int, list[Any]]) -> None:
    """Outer momentum moves the parameters but not the residuals, so that the sums can be taken apart again."""
    first = ranks[2][0]["plain"][0][1].double() - mean_moved(range(2), 2)  # what the first average left, both ranks
    momentum, step = 0.5, 1.5
    of_first, of_second = ranks[2][0]["decay"][0][1].double() / step, ranks[2][0]["decay"][0][3].double()
    second = (of_second - step * of_first - momentum**2 * of_first) / step
    left = sum(torch.cat(list(rank["decay"][1].values())) for rank in ranks[2])
    wanted = mean_moved(range(2, 4), 2) - DECAY * first
    torch.testing.assert_close(second - left, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [2, 3])
def test_the_reported_bytes_are_those_of_the_plan(count: int, ranks: dict[int, list[Any]]) -> None:
    """With the padding of these small parameters, which fill a chunk for each rank and no more."""
    numel = sum(math.prod(shape) for shape in SHAPES.values())
    chunks = -(-numel // (CHUNK * count)) * count
    sent = TopKQuantizer(KEPT).wire_bytes(chunks * CHUNK) * 2 * (count - 1) / count
    assert ranks[count][0]["plain"][2] == pytest.approx(sent / dense_ring_bytes(numel, count) / 2)
    job = Job(numel, 1, 1, local_steps=2, average_bytes=SyncOptions(**LOCAL).average_bytes)
    assert cost_model.bytes_per_element("local", job) * chunks * CHUNK == pytest.approx(
        TopKQuantizer(KEPT).wire_bytes(chunks * CHUNK) / 2
    )


def test_where_a_dense_sync_is_as_fast_the_report_says_so(ranks: dict[int, list[Any]]) -> None:
    for rank in ranks[2]:
        assert "plain DDP is as fast here: dense gradients would take 0.0 ms of a step" in rank["plain"][4]
        assert "plain DDP" not in rank["decay"][4]
        assert all(0 < rank[case][3] < 10 for case in SECONDS)  # it was timed


@pytest.mark.parametrize(
    ("dense_s", "average_s", "is_said"), [(0.02, 0.03, True), (0.02, 0.01, False), (0.009, 0.001, True)]
)
def test_dense_is_as_fast_below_the_averages_or_a_tenth_of_a_step(
    dense_s: float, average_s: float, is_said: bool
) -> None:
    assert bool(compare(dense_s, 0.1, average_s)) == is_said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 12}, "top_k must be a multiple of 8 from 8 to 4096, got 12"),
        ({"top_k": 8192}, "top_k must be a multiple of 8 from 8 to 4096, got 8192"),
        ({"error_feedback_decay": 1.5}, "error_feedback_decay must be in [0, 1], got 1.5"),
        ({"average": "top_q"}, "average must be one of float32, int8, int4, int3, top_k; got 'top_q'"),
    ],
)
def test_values_outside_their_range_are_refused(options: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda: SyncOptions(**(LOCAL | options)))


def test_options_that_the_averages_do_not_read_are_named() -> None:
    assert unused_options(SyncOptions(**WITH_DECAY)) == []
    sentences = unused_options(SyncOptions("local", average="int3", top_k=128))
    assert sentences == [
        "top_k: 128 changes nothing with average: int3: write average: top_k to have it, or leave it out"
    ]
    (sentence,) = unused_options(SyncOptions("local", error_feedback_decay=0.9))
    assert "error_feedback_decay: 0.9 changes nothing with average: float32" in sentence
    for mode in ("dense", "local"):
        (sentence,) = unused_options(SyncOptions(mode, warmup_steps=20))
        assert f"warmup_steps: 20 changes nothing in mode {mode}" in sentence
    assert unused_options(SyncOptions("int3", warmup_steps=20)) == []
