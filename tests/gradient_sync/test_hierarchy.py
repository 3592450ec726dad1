"""Four ranks on two nodes that are simulated: nodes first, then between them; and other numbers of ranks at resume."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fakes.processes.given_gradients import (
    MODES,
    SHAPES,
    SMALL,
    Training,
    make_gradients,
    make_round_gradients,
    poisoned,
    residuals_of,
)
from fakes.processes.ranks import run_ranks
from lightning_aigc.gradient_sync.transport import process_groups

STEPS = range(5)
WITH_RESIDUALS = [mode for mode in MODES if mode not in ("dense", "local", "ternary")]
NODES_FIRST = [mode for mode in MODES if mode not in ("dense", "local")]
EXACT = ("dense", "bf16", "sparse")
"""Modes whose sums of eighths are exact with everything sent."""
REPEATS = ("int8", "int4", "sparse_int8")
"""Modes of the same classes as int3 and sparse_int4 with other bits; they run in `make test-long`."""
RESUMED_ON = {"four flat": 4, "four on two nodes": 4, "two": 2}
Ranks = Callable[[str], list[Any]]
Resumed = Callable[[str], dict[str, list[Any]]]


def marked(modes: Iterable[str]) -> list[Any]:
    return [pytest.param(mode, marks=pytest.mark.long) if mode in REPEATS else mode for mode in modes]


def modes_beside(mode: str) -> tuple[str, ...]:
    """The modes that run together with this one."""
    return tuple(other for other in MODES if (other in REPEATS) == (mode in REPEATS))


def with_residuals(modes: Sequence[str]) -> list[str]:
    return [mode for mode in modes if mode in WITH_RESIDUALS]


def on_two_nodes(rank: int) -> None:
    process_groups.node_key = lambda: f"node {rank // 2}"


def all_states(run: Training) -> list[dict[str, Any]]:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, run.compressor.state_dict())
    return states


def four(rank: int, folder: str, modes: Sequence[str]) -> dict[str, Any]:
    on_two_nodes(rank)
    results: dict[str, Any] = {}
    for mode in modes:
        run = Training(mode=mode, local_steps=1, ddp={"bucket_cap_mb": 0.001}, bucket_mb=0.006)
        results[mode] = run.steps(rank, STEPS), run.compressor._sync.groups.inside is not None
        for hierarchical in ("auto", False) if mode in EXACT else ():
            choices = {"mode": mode, "hierarchical": hierarchical, "protect_layers": SMALL}
            exact = Training(sparsity_target=0.0, local_steps=1, **choices)
            results[mode, hierarchical] = exact.steps(rank, STEPS, make_round_gradients)
    for mode in with_residuals(modes):
        without, bad = Training(mode=mode), Training(mode=mode)
        without.steps(rank, [0, 1, 3])

        def make(step: int, rank: int) -> dict[str, Tensor]:
            # Of the unit's two halves this value is in the first, which rank 3 leaves to the other one of its node.
            gradients = make_gradients(step, rank)
            return poisoned(gradients, "third", 5) if (step, rank) == (2, 3) else gradients

        finite = [bad.step(make(step, rank)) for step in range(4)]
        results["bad", mode] = [finite, without.flat(), bad.flat(), all_states(without)[rank], all_states(bad)[rank]]

        unused = Training({"find_unused_parameters": True}, mode=mode)
        unused.steps(rank, [0, 1])
        before = residuals_of(unused.compressor.state_dict())["second"]
        gradients = make_gradients(2, rank)
        del gradients["second"]
        unused.step(gradients)
        results["unused", mode] = [before, residuals_of(unused.compressor.state_dict())["second"]]

        flat, layered = Training(mode=mode, hierarchical=False), Training(mode=mode)
        for name, run in (("four flat", flat), ("four on two nodes", layered)):
            run.steps(rank, [0, 1, 2])
            torch.save(all_states(run), Path(folder, f"{name} {mode}.pt"))
    return results


def two(rank: int, folder: str, modes: Sequence[str]) -> None:
    for mode in with_residuals(modes):
        run = Training(mode=mode)
        run.steps(rank, [0, 1, 2])
        torch.save(all_states(run), Path(folder, f"two {mode}.pt"))


def resume(rank: int, folder: str, layered: bool, modes: Sequence[str]) -> dict[str, Any]:
    if layered:
        on_two_nodes(rank)
    results = {}
    for mode in with_residuals(modes):
        for name in RESUMED_ON:
            states = torch.load(Path(folder, f"{name} {mode}.pt"), weights_only=True)
            run = Training(mode=mode)
            notes = run.compressor.load_state_dict(*states)
            residuals = residuals_of(run.compressor.state_dict())
            run.steps(rank, [3, 4])
            results[name, mode] = [residuals, notes, run.flat()]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    """Results of four ranks in a mode, which runs with the modes beside it when it is first asked for."""

    @functools.cache
    def run(modes: tuple[str, ...]) -> list[Any]:
        return run_ranks(four, 4, folder / f"four {modes[0]}", str(folder), modes)

    return lambda mode: run(modes_beside(mode))


@pytest.fixture(scope="module")
def resumed(folder: Path, ranks: Ranks) -> Resumed:
    """Results of the ranks that loaded the states of a mode."""

    @functools.cache
    def run(modes: tuple[str, ...]) -> dict[str, list[Any]]:
        ranks(modes[0])
        started = folder / f"resumed {modes[0]}"
        run_ranks(two, 2, started / "two", str(folder), modes)
        return {
            "two": run_ranks(resume, 2, started / "on two", str(folder), False, modes),
            "four flat": run_ranks(resume, 4, started / "on four", str(folder), False, modes),
            "four on two nodes": run_ranks(resume, 4, started / "on nodes", str(folder), True, modes),
        }

    return lambda mode: run(modes_beside(mode))


@pytest.mark.parametrize("mode", marked(MODES))
def test_four_ranks_on_two_nodes_stay_equal_to_the_bit(mode: str, ranks: Ranks) -> None:
    first, *others = ranks(mode)
    after, nodes_first = first[mode]
    assert nodes_first == (mode in NODES_FIRST)
    assert after[-1].isfinite().all() and after[-1].any()
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(after, other[mode][0], strict=True))


@pytest.mark.parametrize("mode", ["bf16", "sparse"])
def test_nodes_first_is_the_same_sum_where_numbers_are_exact(mode: str, ranks: Ranks) -> None:
    (first, *_) = ranks(mode)
    for step, layered in enumerate(first[mode, "auto"]):
        assert torch.equal(layered, first[mode, False][step])
        assert torch.equal(layered, first["dense", False][step])


@pytest.mark.parametrize("mode", marked(WITH_RESIDUALS))
def test_what_is_not_finite_in_another_ranks_half_skips_the_step_on_all(mode: str, ranks: Ranks) -> None:
    for rank in ranks(mode):
        finite, without, bad, state_without, state = rank["bad", mode]
        assert finite == [True, True, False, True]
        assert torch.equal(without, bad)
        for name, part in state["residuals"].items():
            assert torch.equal(part["values"], state_without["residuals"][name]["values"])


@pytest.mark.parametrize("mode", marked(WITH_RESIDUALS))
def test_the_residual_of_an_unused_parameter_waits_with_its_half(mode: str, ranks: Ranks) -> None:
    assert any(rank["unused", mode][0].any() for rank in ranks(mode))
    for rank in ranks(mode):
        before, after = rank["unused", mode]
        assert torch.equal(before, after)


@pytest.mark.parametrize("mode", marked(WITH_RESIDUALS))
@pytest.mark.parametrize("now", RESUMED_ON)
@pytest.mark.parametrize("before", RESUMED_ON)
def test_other_ranks_or_nodes_share_out_the_sum_of_the_residuals(
    before: str, now: str, mode: str, folder: Path, resumed: Resumed
) -> None:
    found = resumed(mode)[now]
    saved = [residuals_of(state) for state in torch.load(folder / f"{before} {mode}.pt", weights_only=True)]
    taken = [rank[before, mode][0] for rank in found]
    for name in SHAPES:
        residuals = sum(state[name] for state in saved)
        torch.testing.assert_close(sum(state[name] for state in taken), residuals, rtol=1e-6, atol=1e-7)
        if name in ("first", "second", "third"):
            assert residuals.any()  # type: ignore[union-attr]
    flat = {name: "nodes" if name == "four on two nodes" else "flat" for name in RESUMED_ON}
    same = RESUMED_ON[before] == RESUMED_ON[now] and flat[before] == flat[now]
    assert ("shared out evenly" in str(found[0][before, mode][1])) == (not same)
    for rank in found[1:]:
        assert torch.equal(rank[before, mode][2], found[0][before, mode][2])


def test_uneven_nodes_are_no_hierarchy_and_asking_for_one_says_so(tmp_path: Path) -> None:
    for said in run_ranks(uneven, 3, tmp_path):
        assert said == [
            False,
            "ConfigError: hierarchical: true wants several nodes with equally many ranks, two or more",
        ]


def uneven(rank: int) -> list[Any]:
    process_groups.node_key = lambda: "one" if rank < 2 else "other"
    run = Training(mode="int8")
    try:
        Training(mode="int8", hierarchical=True)
    except ValueError as error:
        return [run.compressor._sync.groups.inside is not None, f"{type(error).__name__}: {error}".partition(";")[0]]
    return []
