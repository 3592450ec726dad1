"""Two ranks over Gloo, in every mode: parameters equal to the bit after every step, whatever happens between."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fakes.processes.given_gradients import (
    MODES,
    SHAPES,
    SMALL,
    Given,
    Training,
    make_gradients,
    make_round_gradients,
    poisoned,
    residuals_of,
)
from fakes.processes.ranks import run_ranks
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.sync import GradientSync
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups

STEPS = range(6)
TINY = {"bucket_mb": 0.002, "sparsity_target": 0.6}
CASES: dict[str, dict[str, Any]] = {mode: {"mode": mode, "local_steps": 1} for mode in MODES}
MANY = {**TINY, "local_steps": 1, "ddp": {"bucket_cap_mb": 0.001}}
CASES |= {f"{mode} in many units and buckets": {"mode": mode, **MANY} for mode in MODES}
CASES |= {
    "one unit of many buckets": {"ddp": {"bucket_cap_mb": 0.001}},
    "many units in one bucket": {"bucket_mb": 0.002},
    "static graph": {"ddp": {"static_graph": True}, **TINY},
    "bucket views": {"ddp": {"gradient_as_bucket_view": True}, **TINY, "mode": "sparse_int8"},
    "without overlap": {"overlap": False, **TINY},
    "without error feedback": {"error_feedback": False, "mode": "sparse"},
    "warm-up": {"warmup_steps": 3, "mode": "two_four"},
    "even shares": {"strategy": "uniform", "mode": "sparse"},
    "accumulation": {"mode": "sparse", "accumulate": 4, **TINY},
    "accumulation, plain": {"mode": "sparse_int4", "accumulate": 4, "sync_mode": "plain"},
    "accumulation of integers": {"accumulate": 4},
    "averages in three bits": {"mode": "local", "local_steps": 1, "average": "int3"},
    "averages in top_k": {"mode": "local", "local_steps": 1, "average": "top_k", "top_k": 256},
    "averages in top_k with a bitmap": {"mode": "local", "local_steps": 1, "average": "top_k", "top_k": 1000},
    "averages in eight bits, without error feedback": {
        "mode": "local",
        "local_steps": 1,
        "average": "int8",
        "error_feedback": False,
    },
    "mixed dtypes": {"dtypes": {"second": torch.bfloat16, "tail": torch.bfloat16}},
}
BAD = {"NaN at the end of a parameter": ("first", 1550, torch.nan), "infinity at a start": ("second", 0, -torch.inf)}
RESUMED = {mode: {"mode": mode, "local_steps": 2} for mode in MODES} | {
    "averages in four bits": {"mode": "local", "average": "int4", "local_steps": 2},
    "averages in top_k": {"mode": "local", "average": "top_k", "local_steps": 2, "error_feedback_decay": 0.9},
    "overlapped averages in top_k": {
        "mode": "local",
        "average": "top_k",
        "top_k": 1000,
        "local_steps": 3,
        "overlap_average": True,
    },
    "overlapped averages": {"mode": "local", "average": "int3", "local_steps": 3, "overlap_average": True},
}


def training(case: dict[str, Any]) -> Training:
    case = dict(case)
    return Training(case.pop("ddp", {}), module=Given(dtypes=case.pop("dtypes", {})), **case)


def every_case(rank: int) -> dict[str, Any]:
    after = {}
    for name, case in CASES.items():
        run = training(case)
        after[name] = run.steps(rank, STEPS)
        run.compressor.close()
    return after


def steps_that_did_not_count(rank: int) -> dict[str, Any]:
    """Runs whose rank 1 has one bad gradient in step 3, and runs to which that step never came."""
    ends: dict[str, Any] = {}
    for name, case in RESUMED.items():
        without = training(case)
        without.steps(rank, [0, 1, 2, 4, 5])
        ends[name] = {"without": [without.flat(), without.compressor.state_dict()]}
        for what, (parameter, at, value) in BAD.items():
            run = training(case)

            def make(step: int, rank: int, p: str = parameter, i: int = at, v: float = value) -> dict[str, Tensor]:
                gradients = make_gradients(step, rank)
                return poisoned(gradients, p, i, v) if (step, rank) == (3, 1) else gradients

            bad_gradients: list[bool] = []
            look_and_finish(run, bad_gradients)
            run.steps(rank, STEPS, make)
            ends[name][what] = [run.flat(), run.compressor.state_dict(), run.compressor.report(), bad_gradients]
    early = {"mode": "sparse", "accumulate": 2, "sparsity_target": 0.6}
    without, run = training(early), training(early)
    without.steps(rank, [0, 1, 2])
    for number in range(4):
        batches = [make_gradients(number + 100 * k, rank) for k in range(2)]
        batches[0] = poisoned(batches[0], "second", 7) if (number, rank) == (3, 1) else batches[0]
        run.step(*batches)
    ends["early choice"] = [[r.flat(), r.compressor.state_dict()] for r in (without, run)]
    return ends


def look_and_finish(run: Training, bad_gradients: list[bool]) -> None:
    """Note for each step that does not count whether the gradients showed it."""
    finish_step = run.compressor.finish_step

    def finish_after_a_look() -> bool:
        finite = all(bool(p.grad.isfinite().all()) for p in run.module.parameters() if p.grad is not None)
        counts = finish_step()
        if not counts:
            bad_gradients.append(not finite)
        return counts

    run.compressor.finish_step = finish_after_a_look  # type: ignore[method-assign]


def resumed_runs(rank: int, folder: str) -> dict[str, Any]:
    ends = {}
    for name, case in RESUMED.items():
        whole = training(case)
        whole.steps(rank, STEPS)
        first = training(case)
        first.steps(rank, [0, 1, 2])
        path = Path(folder, f"{name}{rank}.pt")
        torch.save(first.compressor.state_dict(), path)
        second = training(case)
        second.module.load_state_dict(first.module.state_dict())
        notes = second.compressor.load_state_dict(torch.load(path, weights_only=True))
        second.steps(rank, [3, 4, 5])
        ends[name] = [[run.flat(), run.compressor.state_dict()] for run in (whole, second)] + [notes]
    return ends


def unused_parameters(rank: int) -> dict[str, Any]:
    """`second` goes unused on both ranks in steps 2 and 3, and `first` on rank 1 in step 4."""
    after = {}
    for mode in MODES:
        run = training({"mode": mode, "local_steps": 1, "ddp": {"find_unused_parameters": True}})
        residuals, parameters = [], []
        for step in STEPS:
            gradients = make_gradients(step, rank)
            if step in (2, 3):
                del gradients["second"]
            if step == 4 and rank == 1:
                del gradients["first"]
            run.step(gradients)
            parameters.append(run.flat())
            residuals.append(residuals_of(run.compressor.state_dict())["second"])
        after[mode] = [parameters, residuals]
    return after


def scaled_runs(rank: int) -> dict[str, Any]:
    """The residuals under a loss scale that changes from step to step, and what without one."""
    ends = {}
    for mode in MODES[1:-1]:
        scaler = SimpleNamespace(is_enabled=lambda: True)
        plain, scaled = training({"mode": mode}), training({"mode": mode, "scaler": scaler})
        for step in STEPS:
            scale = 2.0 ** (4 * step % 7)
            scaler.get_scale = lambda s=scale: s
            gradients = make_gradients(step, rank)
            plain.step(gradients)
            scaled.step({name: gradient * scale for name, gradient in gradients.items()})
        given = [[p.grad for p in run.module.parameters()] for run in (plain, scaled)]
        ends[mode] = [plain.compressor.state_dict(), scaled.compressor.state_dict(), *given, scale]
    return ends


def work(rank: int, folder: str) -> dict[str, Any]:
    results = {
        "cases": every_case(rank),
        "bad": steps_that_did_not_count(rank),
        "resumed": resumed_runs(rank, folder),
        "unused": unused_parameters(rank),
        "scaled": scaled_runs(rank),
    }
    for mode in MODES:
        run = training({"mode": mode, "sparsity_target": 0.0, "local_steps": 1, "protect_layers": SMALL})
        results[f"round {mode}"] = run.steps(rank, STEPS, make_round_gradients)
    return results


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("two_ranks")
    return run_ranks(work, 2, folder, str(folder))


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_equal_to_the_bit_after_every_step(case: str, both: list[Any]) -> None:
    one, other = (rank["cases"][case] for rank in both)
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(mine, theirs), f"step {step}"
    assert one[-1].isfinite().all() and not torch.equal(one[-2], one[-1])


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("mode", RESUMED)
def test_a_step_that_is_not_finite_on_one_rank_never_happened_on_any(mode: str, what: str, both: list[Any]) -> None:
    for rank in both:
        parameters, state = rank["bad"][mode]["without"]
        parameters_after, state_after, report, bad_gradients = rank["bad"][mode][what]
        assert torch.equal(parameters, parameters_after)
        assert_same(state, state_after)
        assert "1 steps skipped" in report
        assert bad_gradients == [True]  # a loss scaler looks for the overflow in the gradients of its own rank


def test_a_choice_made_early_by_bad_numbers_is_forgotten(both: list[Any]) -> None:
    for rank in both:
        (parameters, state), (parameters_after, state_after) = rank["bad"]["early choice"]
        assert torch.equal(parameters, parameters_after)
        assert_same(state, state_after)


@pytest.mark.parametrize("mode", RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(mode: str, both: list[Any]) -> None:
    for rank in both:
        (parameters, state), (parameters_after, state_after), notes = rank["resumed"][mode]
        assert torch.equal(parameters, parameters_after)
        assert_same(state, state_after)
        assert notes == []


@pytest.mark.parametrize("mode", MODES)
def test_the_residual_of_a_parameter_waits_while_no_rank_uses_it(mode: str, both: list[Any]) -> None:
    for rank in both:
        parameters, residuals = rank["unused"][mode]
        start = sum(torch.Size(shape).numel() for name, shape in SHAPES.items() if name in ("first", "bias"))
        of_second = [p[start : start + 2560] for p in parameters]
        assert torch.equal(of_second[1], of_second[3]) and not torch.equal(of_second[3], of_second[4])
        assert torch.equal(residuals[1], residuals[3])
        assert residuals[1].any() == (mode not in ("dense", "local", "ternary"))
    assert all(torch.equal(a, b) for a, b in zip(both[0]["unused"][mode][0], both[1]["unused"][mode][0], strict=True))


@pytest.mark.parametrize("mode", ["bf16", "sparse", "local"])
def test_with_nothing_left_out_and_numbers_that_fit_it_is_dense(mode: str, both: list[Any]) -> None:
    dense, compressed = both[0]["round dense"], both[0][f"round {mode}"]
    assert all(torch.equal(a, b) for a, b in zip(dense, compressed, strict=True))


@pytest.mark.parametrize("mode", MODES[1:-1])
def test_residuals_are_kept_without_the_loss_scale(mode: str, both: list[Any]) -> None:
    for rank in both:
        plain, scaled, gradients, scaled_gradients, scale = rank["scaled"][mode]
        assert_same(plain, scaled)
        assert all(torch.equal(a * scale, b) for a, b in zip(gradients, scaled_gradients, strict=True))


def assert_same(one: Any, other: Any) -> None:
    """Nested dicts with the same tensors, bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def closed(rank: int, overlap: bool) -> dict[str, Any]:
    """A sync that is closed in the middle of a run, and many that are made and closed."""
    groups = dist.distributed_c10d._world.pg_map
    run = training({"mode": "sparse", "overlap": overlap, "ddp": {"bucket_cap_mb": 0.001}})
    run.steps(rank, [0, 1, 2])
    before = run.compressor.state_dict()
    run.ddp(make_gradients(3, rank)).backward()  # and never finished
    run.compressor.close()
    run.compressor.close()
    found: dict[str, Any] = {"states": [before, run.compressor.state_dict()], "report": run.compressor.report()}
    try:
        run.ddp(make_gradients(4, rank)).backward()
    except RuntimeError as error:
        found["error"] = f"{type(error).__name__}: {error}"

    counts = []
    for _ in range(5):
        again = training({"mode": "int3"})
        again.steps(rank, [0])
        again.compressor.close()
        counts.append(len(groups))
    total = torch.ones(1)
    dist.all_reduce(total)
    last = training({"mode": "int3"})
    last.steps(rank, [0])
    found["groups"] = [counts, len(groups), total.item()]
    dist.destroy_process_group()
    last.compressor.close()
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_a_closed_sync_lets_go_of_its_groups_and_a_backward_pass_after_it_says_so(
    overlap: bool, tmp_path: Path
) -> None:
    for rank, found in enumerate(run_ranks(closed, 2, tmp_path, overlap, timeout_s=60)):
        assert f"SyncError: rank {rank}: this gradient sync is closed" in found["error"]
        assert "wrap the module in a new DistributedDataParallel" in found["error"]
        before, after = found["states"]
        assert after["step"] == before["step"] + 1
        assert before["residuals"].keys() == after["residuals"].keys()
        counts, with_one_open, total = found["groups"]
        assert counts == [1] * 5 and with_one_open == 3  # the default group, and one with a second lane
        assert total == 2
        assert "sent values" in found["report"]


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 32, sparse=True)
        self.head = torch.nn.Linear(32, 64)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words)).sum()


def sparse_gradients(rank: int) -> str:
    """Under the sync alone: GradientCompressor refuses such a module before."""
    ddp = torch.nn.parallel.DistributedDataParallel(Words())
    sync = GradientSync(list(ddp.module.named_parameters()), SyncOptions(), ProcessGroups(False))
    sync.attach(ddp)
    try:
        ddp(torch.arange(4)).backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sync.close()
    return "nothing was said"


def test_a_sparse_gradient_is_refused_with_what_is_accepted(tmp_path: Path) -> None:
    for said in run_ranks(sparse_gradients, 2, tmp_path, timeout_s=60):
        assert said.startswith("SyncError: the gradient of table.weight is sparse") and "sparse=False" in said


def sleepy(rank: int) -> dict[str, Any]:
    """Every rank dawdles at random, in forward, at each gradient and between steps."""
    after = {}
    for mode in ("int3", "sparse", "dense"):
        chance = random.Random(rank)

        def dawdle(*_: Any, chance: random.Random = chance) -> None:
            time.sleep(chance.random() ** 4 * 0.008)

        run = training(
            {"mode": mode, **TINY, "accumulate": 2 if mode == "sparse" else 1, "ddp": {"bucket_cap_mb": 0.001}}
        )
        run.ddp.register_forward_pre_hook(dawdle)
        for parameter in run.module.parameters():
            parameter.register_hook(dawdle)
        after[mode] = run.steps(rank, range(30))
    return after


def test_ranks_that_dawdle_at_random_stay_in_step(tmp_path: Path) -> None:
    ranks = run_ranks(sleepy, 3, tmp_path)
    for mode, after in ranks[0].items():
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(after, other[mode], strict=True)), mode
