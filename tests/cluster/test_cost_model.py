"""The model's bytes against their formulas, its constants against the compressors', its time against what must hold."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from benchmarks.gradient_sync import published_scaling
from lightning_aigc.cluster import cost_model
from lightning_aigc.cluster.cost_model import memory_bytes, predict, sent_bytes
from lightning_aigc.cluster.modes import FLAT_MODES, MODES, QUANTIZED_MODES, Mode
from lightning_aigc.cluster.workload import Job, Links, Shape
from lightning_aigc.errors import ConfigError

N = 1_000_000
LINKS = Links(local_Bps=200e9, between_Bps=25e9 / 8)
SD15 = Job(trainable=859.5e6, protected=34.9e6, forward_s=0.4, backward_s=0.8)


def job(**changes: Any) -> Job:
    return replace(Job(trainable=N, forward_s=0.1, backward_s=0.2), **changes)


@pytest.mark.parametrize(
    ("mode", "bytes_each"),
    [
        ("dense", 4), ("bf16", 2), ("int8", 8.5 / 8), ("int4", 4.5 / 8), ("int3", 3.5 / 8),
        ("sparse", 0.25 * 2 + 2 / 256), ("sparse_int8", 0.25 * 8.5 / 8 + 2 / 256),
        ("sparse_int4", 0.25 * 4.5 / 8 + 2 / 256), ("two_four", 2 / 4 * 8.5 / 8), ("local", 4 / 8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 8, 384])
def test_bytes_follow_the_formula_of_each_mode(mode: str, bytes_each: float, ranks: int) -> None:
    inside, between = sent_bytes(mode, job(), Shape(1, ranks))
    assert between == 0 and inside == pytest.approx(2 * (ranks - 1) / ranks * bytes_each * N)


def test_protected_parameters_are_sent_uncompressed_and_small_ones_in_eight_bits() -> None:
    plain, _ = sent_bytes("int3", job(), Shape(1, 2))
    mixed, _ = sent_bytes("int3", job(protected=N // 10, small=N // 100), Shape(1, 2))
    assert mixed == pytest.approx(plain * 0.89 + (4 * 0.1 + 1.0625 * 0.01) * N)


def test_nodes_add_up_inside_first_and_send_a_share_each() -> None:
    inside, between = sent_bytes("int8", SD15, Shape(48, 8))
    assert inside == pytest.approx(2 * 7 / 8 * 4 * 859.5e6)
    assert between == pytest.approx(2 * 47 / 48 / 8 * (4 * 34.9e6 + 8.5 / 8 * (859.5e6 - 34.9e6)))


@pytest.mark.parametrize("mode", FLAT_MODES)
def test_modes_that_know_no_nodes_send_one_ring_over_all_ranks(mode: str) -> None:
    some = job()
    alike, _ = sent_bytes(mode, some, Shape(1, 16))
    inside, between = sent_bytes(mode, some, Shape(4, 4))
    assert inside + between == pytest.approx(alike)
    assert between == pytest.approx(alike / 4)  # one card of four has its neighbour in another node
    assert memory_bytes(mode, some, Shape(4, 4)) == memory_bytes(mode, some, Shape(1, 16))


def test_one_card_a_node_sends_only_between_nodes() -> None:
    assert sent_bytes("dense", job(), Shape(2, 1)) == (0, pytest.approx(4 * N))


def test_a_single_rank_sends_nothing_and_is_linear() -> None:
    for mode in ("dense", "int3", "local"):
        cost = predict(mode, job(), Shape(1, 1), LINKS)
        assert cost.local_bytes == cost.between_bytes == cost.exposed_s == 0 and cost.efficiency == 1


def test_constants_are_the_compressors_own() -> None:
    from lightning_aigc.gradient_sync.modes import block_sparse
    from lightning_aigc_kernels.quantize_blocks import BLOCK, SCALE_BYTES

    assert BLOCK == cost_model.QUANTIZATION_BLOCK
    assert 8 * SCALE_BYTES == cost_model.SCALE_BITS
    assert block_sparse.BLOCK == cost_model.ENERGY_BLOCK


def test_every_mode_that_compresses_has_a_reduction_with_the_bits_of_the_table() -> None:
    import torch

    from fakes.processes.echoing_groups import EchoingGroups
    from lightning_aigc.gradient_sync.modes.make_reductions import make_reductions
    from lightning_aigc.gradient_sync.modes.reductions import Quantized, Uncompressed
    from lightning_aigc.gradient_sync.options import SyncOptions

    for mode, traits in MODES.items():
        reductions = make_reductions(SyncOptions(mode=mode), [], EchoingGroups(), torch.device("cpu"))  # type: ignore[arg-type]
        reduction = reductions["values"]
        assert isinstance(reduction, Uncompressed) == traits.is_exact
        assert isinstance(reduction, Quantized) == (mode in QUANTIZED_MODES)
        if isinstance(reduction, Quantized):
            assert reduction.quantizer.bits == traits.value_bits


@pytest.mark.parametrize("mode", cost_model.LAUNCHES)
def test_launches_are_those_of_a_bucket_on_many_nodes(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes are too few: the first rank of a group packs nothing for ranks before it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from fakes.processes.echoing_groups import EchoingGroups
    from lightning_aigc.gradient_sync.hook import BucketFuture
    from lightning_aigc.gradient_sync.options import SyncOptions
    from lightning_aigc.gradient_sync.sync import GradientSync
    from lightning_aigc_kernels.quantize_blocks import op

    class Counted(TorchDispatchMode):
        launches = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.launches += not op.is_view and "empty" not in op.name()
            return op(*args, **(kwargs or {}))

    class Triton:
        """Stand-in for the kernels: counts launches, and returns numbers of the right shapes."""

        launches = 0

        def quantize_blocks(self, values: Any, packed: Any, bits: int) -> None:
            self.launches += 1

        def add_quantized_rows(self, packed: Any, out: Any, bits: int) -> None:
            self.launches += 1

        def dequantize_blocks(self, packed: Any, out: Any, bits: int) -> Any:
            self.launches += 2  # the second looks for a scale that is not finite
            return torch.zeros(())

    triton = Triton()
    monkeypatch.setattr(op, "_implementation", lambda values: triton)
    parameters = [(f"layer{i}", torch.nn.Parameter(torch.zeros(256, 256))) for i in range(4)]
    groups = EchoingGroups(8, 2, rank=3)
    sync = GradientSync(parameters, SyncOptions(mode=mode, overlap=False), groups)
    sync.reducer.on_cpu = False
    for _ in range(2):  # the first of a sparse mode is dense
        gradients = [torch.randn(256, 256) for _ in parameters]
        waiting = BucketFuture(gradients[0])
        triton.launches = 0
        with Counted() as counted:
            sync.gradients_ready([p for _, p in parameters], gradients, waiting, last=True)
        sync.end_step()
    assert counted.launches + triton.launches == pytest.approx(cost_model.LAUNCHES[mode], rel=0.15)


def test_modes_are_those_that_can_be_chosen() -> None:
    assert set(MODES) == set(get_args(Mode)) - {"auto"}


def test_quantized_values_pack_to_the_modelled_bytes() -> None:
    from lightning_aigc.gradient_sync.modes.reductions import BlockQuantizer

    for mode in QUANTIZED_MODES:
        bits = MODES[mode].value_bits
        assert bits is not None
        assert BlockQuantizer(bits).wire_bytes(25_600) == 25_600 * cost_model.bytes_per_element(mode, job())


def test_a_faster_link_never_costs_time_and_fewer_bytes_never_do_either() -> None:
    shape = Shape(48, 8)
    steps = [predict("dense", SD15, shape, replace(LINKS, between_Bps=b)).step_s for b in (1e9, 1e10, 1e11)]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]
    assert predict("int3", SD15, shape, LINKS).step_s < predict("int8", SD15, shape, LINKS).step_s


def test_the_last_bucket_is_always_seen() -> None:
    cost = predict("dense", job(trainable=100e6), Shape(1, 8), LINKS)
    buckets = 16  # 400 MB in buckets of 25 MiB
    assert cost.exposed_s == pytest.approx(cost.wire_s / buckets)


def test_traffic_longer_than_backward_sticks_out_by_the_rest() -> None:
    slow = Links(local_Bps=1e9, between_Bps=1e9, latency_local_s=0)
    cost = predict("dense", job(trainable=100e6), Shape(1, 2), slow)
    assert cost.wire_s == pytest.approx(0.4)
    assert cost.exposed_s == pytest.approx(0.4 - 0.9 * 0.2)


def test_cores_that_compute_hide_nothing() -> None:
    cost = predict("dense", job(trainable=100e6, overlap_share=0.0), Shape(1, 2), LINKS)
    assert cost.exposed_s == pytest.approx(cost.wire_s)


def test_the_cards_of_a_node_share_its_link() -> None:
    still = replace(LINKS, latency_local_s=0.0, latency_between_s=0.0)
    inside, between = sent_bytes("int8", SD15, Shape(48, 8))
    wire = predict("int8", SD15, Shape(48, 8), still).wire_s
    assert wire == pytest.approx(inside / still.local_Bps + 8 * between / still.between_Bps)


def test_latency_counts_every_hop_of_every_bucket() -> None:
    still = replace(LINKS, latency_local_s=0.0, latency_between_s=0.0)
    shape, some = Shape(4, 2), job(trainable=100e6)
    slower = replace(still, latency_local_s=1e-3, latency_between_s=1e-2)
    more = predict("dense", some, shape, slower).wire_s - predict("dense", some, shape, still).wire_s
    assert more == pytest.approx(16 * (2 * 1 * 1e-3 + 2 * 3 * 1e-2))


def test_averaging_every_few_steps_divides_its_traffic_and_hides_none() -> None:
    rare, often = (predict("local", job(local_steps=steps), Shape(1, 4), LINKS) for steps in (16, 4))
    assert often.wire_s == pytest.approx(4 * rare.wire_s)
    assert rare.exposed_s == rare.wire_s


def test_an_average_that_travels_has_two_steps_to_arrive_and_its_packing_hides_behind_none() -> None:
    some, shape = job(local_steps=16, average_bytes=0.05, packing=5.0, trainable=100e6, device="cpu"), Shape(2, 1)
    slow = replace(LINKS, between_Bps=1e5)
    waited, travelled = (predict("local", replace(some, overlap_average=on), shape, slow) for on in (False, True))
    assert waited.exposed_s == pytest.approx(waited.wire_s + waited.compression_s)
    assert waited.exposed_s - travelled.exposed_s == pytest.approx(2 * some.compute_s / 16)
    assert waited.compression_s == pytest.approx(5 * 400e6 / 0.72e9 / 16)
    fast = predict("local", replace(some, overlap_average=True), shape, replace(LINKS, between_Bps=1e12))
    assert fast.exposed_s == pytest.approx(fast.compression_s)


def test_compressing_on_a_cpu_can_cost_more_than_it_saves() -> None:
    dense, int8 = (predict(mode, job(trainable=50e6, device="cpu"), Shape(1, 2), LINKS) for mode in ("dense", "int8"))
    assert int8.step_s > dense.step_s


def test_on_a_cpu_the_headers_of_tcp_take_their_part_of_the_link() -> None:
    card, cpu = (predict("dense", job(device=device), Shape(2, 1), LINKS) for device in ("npu", "cpu"))
    latency = 2 * LINKS.latency_between_s
    assert cpu.wire_s - latency == pytest.approx((card.wire_s - latency) * 1538 / 1448)


@pytest.mark.parametrize(
    ("shape", "buckets", "share"),
    [
        (Shape(2, 1), 1, 0), (Shape(2, 1), 2, 1 / 2), (Shape(2, 1), 10, 9 / 10), (Shape(2, 1), 2.5, 2 / 3),
        (Shape(2, 2), 2, 0), (Shape(2, 2), 3, 1 / 6), (Shape(2, 2), 10, 15 / 20),
    ],
)  # fmt: skip
def test_a_cpu_hides_the_traffic_of_all_buckets_but_the_last_ones(shape: Shape, buckets: float, share: float) -> None:
    some = job(trainable=N, bucket_bytes=4 * N / buckets, backward_s=100.0, device="cpu", overlap_share=1.0)
    cost = predict("int3", some, shape, replace(LINKS, local_Bps=1e15, latency_local_s=0.0))
    assert cost.exposed_s - cost.compression_s == pytest.approx((1 - share) * cost.wire_s, rel=1e-4)


def test_a_card_launches_its_kernels_for_every_bucket_and_a_cpu_does_not() -> None:
    some, buckets = job(trainable=100e6), 16  # 400 MB in buckets of 25 MiB
    card, cpu = (predict("int3", replace(some, device=device), Shape(1, 8), LINKS) for device in ("npu", "cpu"))
    assert card.compression_s == pytest.approx(400e6 / 160e9 + buckets * cost_model.LAUNCHES["int3"] * 5e-6)
    assert cpu.compression_s == pytest.approx(400e6 / 0.72e9)
    assert predict("dense", some, Shape(1, 8), LINKS).compression_s == 0


def test_residuals_are_shared_inside_a_node() -> None:
    flat, shared = (memory_bytes("int8", job(), shape)["residuals"] for shape in (Shape(1, 8), Shape(2, 8)))
    assert (flat, shared) == (8 * N, 8 * N / 8)  # the residual, and the next one until the step is known to be finite
    assert memory_bytes("dense", job(), Shape(2, 8))["residuals"] == 0


def test_memory_counts_weights_gradients_and_adamw() -> None:
    kinds = memory_bytes("dense", job(frozen=N, frozen_bytes=2), Shape(1, 2))
    assert kinds == {"weights": 6 * N, "gradients": 4 * N, "optimizer": 8 * N, "residuals": 0}


@pytest.mark.parametrize("mode", ["dense", "int8", "int3", "sparse_int4"])
def test_the_link_for_an_efficiency_reaches_it_just_so(mode: str) -> None:
    shape = Shape(48, 8)
    link = cost_model.link_for_efficiency(mode, SD15, shape, LINKS, 0.927)
    assert link is not None
    assert predict(mode, SD15, shape, replace(LINKS, between_Bps=link)).efficiency == pytest.approx(0.927)


def test_the_step_time_for_an_efficiency_reaches_it_just_so() -> None:
    shape = Shape(48, 8)
    step = cost_model.step_time_for_efficiency("dense", SD15, shape, LINKS, 0.927)
    assert step is not None
    longer = replace(SD15, forward_s=step / 3, backward_s=2 * step / 3)
    assert predict("dense", longer, shape, LINKS).efficiency == pytest.approx(0.927)


def test_a_step_waits_for_the_slowest_card_and_link() -> None:
    draws = np.random.default_rng(0).standard_normal((4000, 384)).max(axis=1)
    assert cost_model.slowest_of(384) == pytest.approx(draws.mean(), rel=0.01) and cost_model.slowest_of(1) == 0
    shape = Shape(48, 8)
    even, uneven = (predict("dense", replace(SD15, spread=spread), shape, LINKS) for spread in (0.0, 0.025))
    assert uneven.step_s - even.step_s == pytest.approx(0.025 * cost_model.slowest_of(384) * SD15.compute_s)
    shared = replace(LINKS, spread=0.05)
    slow = LINKS.between_Bps * (1 - 0.05 * cost_model.slowest_of(48))
    assert predict("dense", SD15, shape, shared) == predict("dense", SD15, shape, replace(LINKS, between_Bps=slow))
    assert predict("dense", replace(SD15, spread=0.1), Shape(1, 1), LINKS).efficiency == 1


@pytest.mark.parametrize("mode", ["dense", "int8", "local"])
def test_a_measured_step_is_predicted_from_itself_and_smaller_batches_cost_more_a_sample(mode: str) -> None:
    given = replace(SD15, fixed_s=0.01, spread=0.02)
    run = cost_model.Measured(Shape(2, 8), 32, 2.5)
    again = cost_model.job_of(run, mode, given, LINKS, 32)
    assert predict(mode, again, run.shape, LINKS).step_s == pytest.approx(2.5)
    smaller = predict(mode, cost_model.job_of(run, mode, given, LINKS, 8), run.shape, LINKS)
    assert 2.5 / 4 < smaller.step_s < 2.5
    with pytest.raises(ConfigError, match="shorter than its traffic"):
        cost_model.job_of(replace(run, step_s=1e-3), mode, given, LINKS, 32)


def test_published_runs_are_predicted_from_the_smallest_of_them() -> None:
    found = [row for row in published_scaling.rows() if not row["splits_layers"]]
    assert len(found) == 9
    for row in found:
        assert abs(row["error_points"]) <= (3 if row["batch"] == row["from_batch"] else 8), row
    kept = [json.loads(line) for line in published_scaling.FILE.read_text(encoding="utf-8").splitlines()]
    assert [row | {"date": None} for row in kept] == [row | {"date": None} for row in published_scaling.rows()]


def test_no_link_mends_a_latency_that_is_too_long() -> None:
    far = replace(LINKS, latency_between_s=1.0)
    assert cost_model.link_for_efficiency("dense", SD15, Shape(48, 8), far, 0.9) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trainable": 0}, "above 0"), ({"protected": 2 * N}, "part of the trainable"), ({"sparsity": 1.0}, "sparsity"),
        ({"forward_s": 0, "backward_s": 0}, "take time"), ({"device": "tpu"}, "npu"), ({"overlap_share": 2}, "overlap"),
        ({"local_steps": 0}, "local_steps"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job(**change)


def test_links_shapes_modes_and_efficiencies_are_checked() -> None:
    with pytest.raises(ConfigError, match="bandwidths"):
        Links(local_Bps=0, between_Bps=1)
    with pytest.raises(ConfigError, match="at least 1"):
        Shape(0, 8)
    with pytest.raises(ConfigError, match="mode must be one of"):
        predict("topk", job(), Shape(1, 2), LINKS)
    with pytest.raises(ConfigError, match="efficiency"):
        cost_model.link_for_efficiency("dense", job(), Shape(2, 2), LINKS, 92.7)
