"""GradientCompressor in a plain torch loop: its promises to the user, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fakes.processes.given_gradients import (
    MODES,
    Given,
    Training,
    make_gradients,
    make_round_gradients,
    poisoned,
    refusal,
)
from fakes.processes.ranks import run_ranks
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync import GradientCompressor, SyncOptions, factory
from lightning_aigc.gradient_sync.factory import ModeTimings, choose_mode
from lightning_aigc.gradient_sync.watch.replica_check import bits_of, check_equal

FAST = ModeTimings(1 << 20, {"dense": 1e-4, "bf16": 5e-5, "int8": 2e-3, "int4": 2e-3, "int3": 2e-3})
SLOW = ModeTimings(1 << 20, {"dense": 1e-1, "bf16": 5e-2, "int8": 2.8e-2, "int4": 1.6e-2, "int3": 1.3e-2})


def micro_batches(step: int, rank: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Eighths that are sixteenths of each other's: sums over micro-batches and ranks are exact in float32."""
    return [make_round_gradients(10 * step + k, rank) for k in range(count)]


def two_ranks(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for mode, sync_mode in (("dense", "overlap"), ("sparse", "overlap"), ("sparse", "plain"), ("int3", "overlap")):
        once = Training(mode="dense")
        often = Training(mode=mode, sync_mode=sync_mode, accumulate=4, sparsity_target=0.0)
        for step in range(3):
            batches = micro_batches(step, rank, 4)
            once.step({name: sum(b[name] for b in batches) / 4 for name in batches[0]})
            often.step(*batches)
        results[mode, sync_mode] = [once.flat(), often.flat(), often.compressor.report()]

    # One block in four travels, and what is large turns up in another place with the last step's first micro-batches.
    for sync_mode in ("overlap", "plain"):
        run = Training(mode="sparse", sync_mode=sync_mode, accumulate=2, sparsity_target=0.75, strategy="uniform")
        small = {name: torch.full(p.shape, 1e-3) for name, p in run.module.named_parameters()}
        run.step(small, small)
        large = small | {"second": small["second"].clone()}
        large["second"].view(-1)[6 * 256 : 7 * 256] = 1.0
        run.step(large, small)
        run.step(small, small)
        before = run.module.second.detach().clone()
        moved = small | {"second": small["second"].clone()}
        moved["second"].view(-1)[9 * 256 : 10 * 256] = 1.0
        run.step(moved, small)
        results["early", sync_mode] = (before - run.module.second.detach()).view(-1)[9 * 256 : 10 * 256]

    results["refused"] = {
        "pattern": refusal(lambda: Training(protect_layers=["secnd"])),
        "local": refusal(lambda: GradientCompressor(mode="local").hook_into_model(Training().ddp)),
        "twice": refusal(lambda: (run := Training()).compressor.hook_into_model(run.ddp)),
        "hierarchical": refusal(lambda: Training(hierarchical=True)),
        "flat": refusal(lambda: Training(mode="dense", hierarchical=True)),
        "accumulation": refusal(lambda: GradientCompressor().enable_gradient_accumulation()),
        "no steps": refusal(lambda: Training(accumulate=2, sync_mode="eager")),
    }
    run = Training(mode="int3")
    results["first report"] = run.compressor.report()
    run.steps(rank, [0, 1])
    results["report"] = run.compressor.report()

    for name, measured in (("fast", FAST), ("slow", SLOW)):
        factory.measure_modes = lambda *_, m=measured: m
        run = Training(mode="auto", module=Given({"weight": (1024, 1024)}))
        run.step({"weight": torch.full((1024, 1024), float(rank))})
        stepped = []
        if name == "slow":
            stepped.append(run.step({"weight": torch.full((1024, 1024), torch.nan if rank == 1 else 0.0)}))
            stepped.append(run.step({"weight": torch.zeros(1024, 1024)}))
        results[name] = [run.compressor.mode, run.compressor.report(), run.module.weight[0, 0].item(), stepped]
    results["drift"] = drift(rank)
    results["closed"] = {mode: closed(mode) for mode in ("dense", "local")}
    return results


def closed(mode: str) -> Any:
    """Process groups before, with and after a sync, and what is said by a backward pass that comes later."""
    groups = dist.distributed_c10d._world.pg_map
    counts = [len(groups)]
    run = Training(mode=mode)
    run.step(make_gradients(0, 0))
    counts.append(len(groups))
    run.compressor.close()
    run.compressor.close()
    counts.append(len(groups))
    return counts, refusal(lambda: run.ddp(make_gradients(1, 0)).backward())


def drift(rank: int) -> dict[str, str]:
    """Messages when one rank's parameter changes in one bit, and when none does."""
    said = {}
    for bit in (0, 22, 23, 30, 31):
        module = Given()
        check_equal(list(module.named_parameters()))
        if rank == 1:
            with torch.no_grad():
                module.second.view(torch.int32)[3, 5] ^= torch.tensor(1 << bit).to(torch.int32)
        said[f"bit {bit}"] = refusal(lambda m=module: check_equal(list(m.named_parameters())))
    run = Training(checksum_every_n_steps=3)
    run.steps(rank, [0])
    if rank == 0:
        with torch.no_grad():
            run.module.tail[1] += 1
    run.steps(rank, [1])
    said["in training"] = refusal(lambda: run.steps(rank, [2]))

    module = Given()
    ddp = nn.parallel.DistributedDataParallel(module)
    compressor = GradientCompressor(checksum_every_n_steps=3)
    compressor.hook_into_model(ddp)  # its optimizer is nobody's business
    for step in range(3):
        module.zero_grad()
        ddp(poisoned(make_gradients(step, rank), "tail", 0) if step == 1 else make_gradients(step, rank)).backward()
        assert compressor.finish_step() == (step != 1)
    if rank == 0:
        with torch.no_grad():
            module.bias[3] += 1
    ddp(make_gradients(3, rank)).backward()
    said["without an optimizer"] = refusal(compressor.finish_step)  # the third that counts
    return said


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(two_ranks, 2, tmp_path_factory.mktemp("compressor"))


@pytest.mark.parametrize(("mode", "sync_mode"), [("dense", "overlap"), ("sparse", "overlap"), ("sparse", "plain")])
def test_accumulation_is_one_large_batch_with_one_sync(mode: str, sync_mode: str, both: list[Any]) -> None:
    for rank in both:
        once, often, report = rank[mode, sync_mode]
        torch.testing.assert_close(often, once, rtol=0, atol=2.0**-7 if mode == "sparse" else 0)  # bfloat16's rounding
        assert "step 3:" in report


def test_accumulation_of_integers_syncs_once_a_step(both: list[Any]) -> None:
    assert "step 3:" in both[0]["int3", "overlap"][2]


def test_an_early_choice_sees_this_steps_gradients_and_a_plain_one_the_last_steps(both: list[Any]) -> None:
    assert (both[0]["early", "overlap"] > 0.4).all()
    assert not both[0]["early", "plain"].any()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("pattern", "ConfigError: protect pattern 'secnd' covers no module; close names: second"),
        ("local", "ConfigError: mode local averages parameters after optimizer steps: hook_into_model(ddp, optimizer)"),
        ("twice", "ConfigError: this GradientCompressor has a model already"),
        (
            "hierarchical",
            "ConfigError: hierarchical: true wants several nodes with equally many ranks, two or more; got 2",
        ),
        ("flat", "ConfigError: mode dense adds up over all ranks at once; leave hierarchical at auto"),
        ("accumulation", "ConfigError: call hook_into_model(ddp_model) before enable_gradient_accumulation"),
        ("no steps", "ConfigError: wanted steps of at least 1 and sync_mode overlap or plain, got 2 and 'eager'"),
    ],
)
def test_what_does_not_fit_the_model_or_the_ranks_is_refused_on_each(what: str, words: str, both: list[Any]) -> None:
    for rank in both:
        assert rank["refused"][what].startswith(words)


def test_the_report_says_what_was_sent_and_what_that_cost(both: list[Any]) -> None:
    assert both[0]["first report"] == "gradient sync: mode int3\nno step yet"
    line = both[0]["report"].splitlines()[1]
    assert line.startswith("step 2: sent values 0.00 MB, small 0.00 MB; 0.") and " ms exposed, " in line


def test_auto_leaves_ddp_alone_on_a_fast_link_and_compresses_on_a_slow_one(both: list[Any]) -> None:
    for rank in both:
        mode, report, weight, _ = rank["fast"]
        assert mode == "dense" and "link carries 41943 MB/s" in report and "step" not in report.splitlines()[1:]
        assert weight == -0.5
        mode, report, weight, _ = rank["slow"]
        assert mode == "int4" and "step 2:" in report and weight == -0.5


def test_nan_on_one_rank_skips_the_step_on_all_in_a_mode_that_auto_chose(both: list[Any]) -> None:
    for rank in both:
        assert rank["slow"][3] == [False, True] and "1 steps skipped" in rank["slow"][1]


@pytest.mark.parametrize("mode", ["dense", "local"])
def test_a_closed_sync_has_no_groups_left_and_says_so_in_a_later_backward(mode: str, both: list[Any]) -> None:
    for rank in both:
        (before, within, after), said = rank["closed"][mode]
        assert before == after < within
        assert "this gradient sync is closed, and DDP still calls it" in said


@pytest.mark.parametrize(
    ("measured", "numel", "mode"),
    [(FAST, 1e6, "dense"), (FAST, 1e9, "bf16"), (SLOW, 1e6, "int4"), (SLOW, 1e4, "dense")],
)
def test_auto_weighs_the_link_against_the_packing(measured: ModeTimings, numel: float, mode: str) -> None:
    assert choose_mode(measured, int(numel), 4)[0] == mode


@pytest.mark.parametrize("bit", [0, 22, 23, 30, 31])
def test_one_bit_that_differs_is_named_on_every_rank(bit: int, both: list[Any]) -> None:
    for rank in both:
        assert rank["drift"][f"bit {bit}"].startswith(
            "RanksDivergedError: the ranks' parameters differ: second is the first"
        )


def test_training_stops_where_ranks_have_drifted_apart(both: list[Any]) -> None:
    for rank in both:
        assert rank["drift"]["in training"].startswith("RanksDivergedError: the ranks' parameters differ: tail")
        assert "start again from the last checkpoint" in rank["drift"]["in training"]
        assert rank["drift"]["without an optimizer"].startswith(
            "RanksDivergedError: the ranks' parameters differ: bias is the first"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_changed_bit_changes_the_number_of_a_tensor(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    before = int(bits_of(tensor))
    for bit in range(8 * tensor.element_size()):
        mask = torch.tensor(-(1 << bit) if bit == 8 * tensor.element_size() - 1 else 1 << bit).to(words)
        changed = tensor.clone()
        changed.view(words)[7] ^= mask
        assert 0 <= before < 2**31 and int(bits_of(changed)) != before


def test_one_rank_has_nothing_to_send_and_says_so(tmp_path: Path) -> None:
    ((report, state, left, notes, _),) = run_ranks(alone, 1, tmp_path)
    assert report == "gradient sync: one rank: nothing to send, gradients are left alone"
    assert state == {} and notes == []
    assert torch.equal(left, -make_gradients(0, 0)["second"])


def alone(rank: int) -> Any:
    run = Training(mode="int3", accumulate=1)
    run.steps(rank, [0])
    state = run.compressor.state_dict()
    notes, after = run.compressor.load_state_dict(state), run.module.second.detach().clone()

    window = Training(accumulate=2)
    told = []
    for _ in range(4):
        window.ddp(make_gradients(0, 0)).backward()
        told.append(window.compressor.finish_step())
    return run.compressor.report(), state, after, notes, told


def test_one_rank_waits_for_a_whole_window_as_many_do(tmp_path: Path) -> None:
    ((*_, told),) = run_ranks(alone, 1, tmp_path)
    assert told == [False, True, False, True]


def test_a_model_that_is_not_ddp_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wants a .*DistributedDataParallel, got Linear; wrap"):
        GradientCompressor().hook_into_model(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sparsity_target": 1.0}, r"sparsity must be in \[0, 1\), got 1.0: 0.75 sends a quarter"),
        ({"sparsity_target": -0.1}, r"sparsity must be in \[0, 1\), got -0.1"),
        (
            {"mode": "int5"},
            "mode must be one of auto, dense, bf16, int8, int4, int3, ternary, sparse.*local; got 'int5'",
        ),
        ({"strategy": "random"}, "strategy must be layer_wise_adaptive or uniform, got 'random'"),
        ({"protect_layers": "vae"}, r"protect wants a list of name patterns, got the string 'vae'; write \['vae'\]"),
        ({"sparsty": 0.5}, "unexpected keyword argument 'sparsty'; SyncOptions has mode, sparsity"),
        ({"hierarchical": "yes"}, "hierarchical must be true, false or auto; got 'yes'"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"bucket_mb": 0}, "bucket_mb must be above 0, got 0"),
        ({"rank": 16}, "unexpected keyword argument 'rank'; SyncOptions has mode, sparsity"),
        ({"mode": "low_rank"}, "mode must be one of auto, .*; got 'low_rank'"),
        ({"delay_one_step": True}, "unexpected keyword argument 'delay_one_step'"),
        ({"local_steps": 0}, "local_steps must be above 0, got 0"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
    ],
)
def test_a_value_outside_what_is_accepted_is_refused_with_what_is(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GradientCompressor(**arguments)


def test_every_mode_is_an_option() -> None:
    assert {SyncOptions(mode=mode).mode for mode in MODES} == set(MODES)  # type: ignore[arg-type]
