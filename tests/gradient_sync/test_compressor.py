"""GradientCompressor in a plain torch loop: its promises to the user, and what it refuses."""

from __future__ import annotations

import inspect
import logging
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fakes.given_gradients import MODES, Given, Training, make_gradients, make_round_gradients, poisoned, residuals_of
from fakes.ranks import run_ranks
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync import GradientCompressor, SyncError, SyncOptions, factory
from lightning_aigc.gradient_sync.autotune import ModeTimings, choose_mode
from lightning_aigc.gradient_sync.replica_check import bits_of, check_equal

ROOT = Path(__file__).parents[2]
SCALED = ("dense", "int3", "sparse", "low_rank", "local")
SHORT = timedelta(seconds=3)
ENDS = ("int3", "dense", "sparse", "local", "inline", "late")
FAST = ModeTimings(1 << 20, {"dense": 1e-4, "bf16": 5e-5, "int8": 2e-3, "int4": 2e-3, "int3": 2e-3})
SLOW = ModeTimings(1 << 20, {"dense": 1e-1, "bf16": 5e-2, "int8": 2.8e-2, "int4": 1.6e-2, "int3": 1.3e-2})


def refusal(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


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
        "low_rank": refusal(lambda: Training(mode="low_rank", hierarchical=True)),
        "late": refusal(lambda: Training({"find_unused_parameters": True}, delay_one_step=True)),
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
    """What is said when one rank's parameter changes in one bit, and what when none does."""
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


def scaled_loop(rank: int) -> dict[str, Any]:
    """A loop under torch's loss scaler, whose scale grows and whose fourth step overflows on rank 1; and none of it."""
    results = {}
    for mode in SCALED:
        options: dict[str, Any] = {"mode": mode, "local_steps": 2, "sparsity_target": 0.6}
        without = Training(**options)
        without.steps(rank, [0, 1, 2, 4, 5])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        run = Training(**options, scaler=scaler)
        told, scales, moved = [], [], []
        for step in range(6):
            gradients = make_gradients(step, rank)
            if (step, rank) == (3, 1):
                gradients = poisoned(gradients, "second", 7, 3e38)
            before = run.flat()
            run.optimizer.zero_grad()
            scales.append(scaler.get_scale())
            scaler.scale(run.ddp(gradients)).backward()
            told.append(run.compressor.finish_step())
            scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            moved.append(not torch.equal(before, run.flat()))
        residuals = [residuals_of(r.compressor.state_dict()) for r in (without, run)] if mode != "local" else [{}, {}]
        results[mode] = [without.flat(), run.flat(), residuals, told, scales, moved]
    return results


def after_a_bad_window(rank: int) -> list[Any]:
    """What `finish_step` says of a window with NaN on rank 1 and of the next, with nobody setting gradients to zero."""
    run = Training(accumulate=2)
    told = []
    for step in range(4):
        gradients = make_gradients(step, rank)
        run.ddp(poisoned(gradients, "tail", 0) if (step, rank) == (1, 1) else gradients).backward()
        told.append(run.compressor.finish_step())
    return told


def part_of_an_overflow(rank: int) -> list[Any]:
    """Whether the optimizers of two parameters stepped, where one of the two overflowed on rank 1."""
    run = Training(mode="dense", scaler=(scaler := torch.amp.GradScaler("cpu")))
    parts = [torch.optim.SGD([parameter], 1.0) for parameter in (run.module.first, run.module.second)]
    gradients = make_gradients(0, rank)
    scaler.scale(run.ddp(poisoned(gradients, "second", 7, 3e38) if rank == 1 else gradients)).backward()
    run.compressor.finish_step()
    for optimizer in parts:
        scaler.step(optimizer)
    scaler.update()
    return [bool(run.module.first.any()), bool(run.module.second.any())]


def documented_loops(rank: int) -> dict[str, Any]:
    """The loops of our documents, as printed, on batches of each rank's own: parameters before and after."""
    text = Path(ROOT, "docs", "gradient_sync.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    plain, scaled = (block for block in blocks if "compressor.finish_step()" in block)
    in_docstring = re.findall(r"```python\n(.*?)```", inspect.getdoc(GradientCompressor) or "", re.DOTALL)[0]
    hooked = "compressor.hook_into_model(ddp, optimizer"
    with_scaler = plain[: plain.index("for batch")].replace(hooked, f"{hooked}, scaler") + scaled
    ends = {}
    for name, code in {"plain": plain, "with a scaler": with_scaler, "in the docstring": in_docstring}.items():
        torch.manual_seed(0)
        model = Decoder()
        before = torch.cat([p.detach().clone().view(-1) for p in model.parameters()])
        torch.manual_seed(1 + rank)
        names: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), 1e-3),
            "loader": [torch.randn(8, 64) for _ in range(10)],  # two whole windows, and a half
            "scaler": torch.amp.GradScaler("cpu"),
            "loss": lambda value: value,
            "torch": torch,
            "DistributedDataParallel": nn.parallel.DistributedDataParallel,
            "GradientCompressor": GradientCompressor,
        }
        exec(code, names)
        after = torch.cat([p.detach().view(-1) for p in model.parameters()])
        ends[name] = [before, after, names["optimizer"].state[next(model.parameters())]["step"].item()]
    return ends


class Decoder(nn.Module):
    """Has the layers that the documents protect, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = nn.ModuleDict({"decoder": nn.Linear(64, 64)})
        self.net = nn.Linear(64, 64)

    def forward(self, batch_NC: torch.Tensor) -> torch.Tensor:
        return (self.net(self.vae["decoder"](batch_NC)) - batch_NC.roll(1, 1)).square().mean()


def loops(rank: int) -> dict[str, Any]:
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_aigc").addHandler(handler)
    Training(sparsity_target=0.95, strategy="uniform", rank=4)
    Training(mode="sparse", sparsity_target=0.95, strategy="uniform")
    logging.getLogger("lightning_aigc").removeHandler(handler)
    embedding = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    return {
        "scaled": scaled_loop(rank),
        "documented": documented_loops(rank),
        "heard": heard,
        "after a bad window": after_a_bad_window(rank),
        "part of an overflow": part_of_an_overflow(rank),
        "sparse gradients": refusal(lambda: Training(module=embedding)),
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(two_ranks, 2, tmp_path_factory.mktemp("compressor"))


@pytest.fixture(scope="module")
def of_loops(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(loops, 2, tmp_path_factory.mktemp("loops"))


@pytest.mark.parametrize("mode", SCALED)
def test_under_a_loss_scaler_a_step_that_overflowed_leaves_no_trace_on_any_rank(mode: str, of_loops: list[Any]) -> None:
    for row in of_loops:
        without, with_it, (residuals, residuals_with_it), told, scales, moved = row["scaled"][mode]
        assert scales == [2.0**8, 2.0**8, 2.0**9, 2.0**9, 2.0**8, 2.0**8]
        assert told == [True] * 6 and moved == [step != 3 for step in range(6)]
        assert torch.equal(without, with_it)
        assert all(torch.equal(residuals[name], residuals_with_it[name]) for name in residuals)
    assert mode == "local" or torch.equal(of_loops[0]["scaled"][mode][1], of_loops[1]["scaled"][mode][1])


def test_a_window_that_is_not_finite_is_dropped_and_the_next_begins_anew(of_loops: list[Any]) -> None:
    assert [row["after a bad window"] for row in of_loops] == [[False, False, False, True]] * 2


def test_an_overflow_in_one_optimizers_part_skips_the_steps_of_all(of_loops: list[Any]) -> None:
    assert [row["part of an overflow"] for row in of_loops] == [[False, False]] * 2


@pytest.mark.parametrize("loop", ["plain", "with a scaler", "in the docstring"])
def test_the_documented_loop_trains_all_ranks_alike(loop: str, of_loops: list[Any]) -> None:
    (before, after, steps), (_, other, _) = (row["documented"][loop] for row in of_loops)
    assert torch.equal(after, other) and not torch.equal(before, after)
    assert steps == 2


def test_an_argument_that_the_mode_does_not_look_at_is_said_once_and_by_its_name(of_loops: list[Any]) -> None:
    assert of_loops[1]["heard"] == []
    sparse = "mode='sparse' or mode='sparse_int8' or mode='sparse_int4' to have it, or leave it out"
    assert of_loops[0]["heard"] == [
        f"GradientCompressor: sparsity_target=0.95 changes nothing in mode int3: write {sparse}",
        f"GradientCompressor: strategy='uniform' changes nothing in mode int3: write {sparse}",
        "GradientCompressor: rank=4 changes nothing in mode int3: write mode='low_rank' to have it, or leave it out",
    ]


def test_sparse_gradients_are_refused_before_training(of_loops: list[Any]) -> None:
    for row in of_loops:
        assert row["sparse gradients"].startswith("ConfigError: 0, an Embedding with sparse=True, has a gradient")


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
        ("low_rank", "ConfigError: mode low_rank adds up over all ranks at once; leave hierarchical at auto"),
        ("late", "ConfigError: delay_one_step wants a gradient for every parameter in each step"),
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
        assert "this gradient sync was closed, and DDP calls it still" in said


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
        ({"mode": "int5"}, "mode must be one of auto, dense, bf16, int8, int4, int3, sparse.*local; got 'int5'"),
        ({"strategy": "random"}, "strategy must be layer_wise_adaptive or uniform, got 'random'"),
        ({"protect_layers": "vae"}, r"protect wants a list of name patterns, got the string 'vae'; write \['vae'\]"),
        ({"sparsty": 0.5}, "unexpected keyword argument 'sparsty'; SyncOptions has mode, sparsity"),
        ({"hierarchical": "yes"}, "hierarchical must be true, false or auto; got 'yes'"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"bucket_mb": 0}, "bucket_mb must be above 0, got 0"),
        ({"rank": 0}, "rank must be above 0, got 0"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"mode": "local", "delay_one_step": True}, "delay_one_step wants a mode that compresses, got mode='local'"),
    ],
)
def test_a_value_outside_what_is_accepted_is_refused_with_what_is(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GradientCompressor(**arguments)


def test_every_mode_is_an_option() -> None:
    assert {SyncOptions(mode=mode).mode for mode in MODES} == set(MODES)  # type: ignore[arg-type]


def left_alone(rank: int, how: str) -> Any:
    """What rank 0 meets in the step that rank 1 never takes, and after how many seconds."""
    options: dict[str, Any] = {
        "inline": {"mode": "int3", "overlap": False},
        "late": {"mode": "int3", "delay_one_step": True},
    }.get(how, {"mode": how})
    run = Training({"bucket_cap_mb": 0.001}, **options, bucket_mb=0.002, timeout=SHORT)
    run.steps(rank, [0, 1])
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        run.steps(rank, [2, 3])
    except SyncError as error:
        return str(error), time.monotonic() - start, refusal(run.compressor.state_dict)
    return None


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_dies_is_an_error_on_the_others_and_never_a_hang(how: str, tmp_path: Path) -> None:
    (said, seconds, afterwards), _ = run_ranks(left_alone, 2, tmp_path, how, may_die=[1])
    assert "rank 0 of 2 could not add up gradients in step" in said
    assert "another rank has stopped or hangs: look at its log first" in said
    assert seconds < SHORT.total_seconds() + 2
    if how in ("int3", "sparse", "inline", "late"):
        assert afterwards.startswith("SyncError: rank 0 of 2 could not")  # a state of half a step would be none


def stuck(rank: int, mode: Any) -> Any:
    run = Training(mode=mode, timeout=SHORT)
    run.steps(rank, [0, 1])  # DDP rebuilds its buckets before the second, in its own group and time
    if rank == 1:
        time.sleep(SHORT.total_seconds() + 2)
        return None
    start = time.monotonic()
    return refusal(lambda: run.steps(rank, [2])), time.monotonic() - start


@pytest.mark.parametrize("mode", ["int3", "dense"])
def test_a_rank_that_hangs_is_an_error_after_the_timeout(mode: str, tmp_path: Path) -> None:
    (said, seconds), _ = run_ranks(stuck, 2, tmp_path, mode)
    assert said.startswith("SyncError: rank 0 of 2 could not") and "a longer timeout than 0:00:03" in said
    assert 2 < seconds < SHORT.total_seconds() + 2
