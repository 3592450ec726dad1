"""GradientCompressor in whole training loops: the documented ones, loss scalers, and windows that are not finite."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fakes.processes.given_gradients import Training, make_gradients, poisoned, refusal, residuals_of
from fakes.processes.ranks import run_ranks
from lightning_aigc.gradient_sync import GradientCompressor

ROOT = Path(__file__).parents[2]
SCALED = ("dense", "int3", "sparse", "local")


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
    """Results of `finish_step` for a window with NaN on rank 1 and for the next, without setting gradients to zero."""
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
    hooked = "compressor.hook_into_model(ddp, optimizer"
    with_scaler = plain[: plain.index("for batch")].replace(hooked, f"{hooked}, scaler") + scaled
    ends = {}
    for name, code in {"plain": plain, "with a scaler": with_scaler}.items():
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Training(mode="int3", sparsity_target=0.95, strategy="uniform", outer_momentum=0.5)
        Training(mode="sparse", sparsity_target=0.95, strategy="uniform")
        articles = Training(strategy="layer_wise_adaptive", sparsity_target=0.75)
        Training()
    heard = [str(warning.message) for warning in caught if "GradientCompressor" in str(warning.message)]
    articles.steps(rank, [0, 1])
    assert articles.compressor.last_step is not None
    embedding = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    return {
        "article's words": (articles.compressor.mode, articles.compressor.report()),
        "scaled": scaled_loop(rank),
        "documented": documented_loops(rank),
        "heard": heard,
        "after a bad window": after_a_bad_window(rank),
        "part of an overflow": part_of_an_overflow(rank),
        "sparse gradients": refusal(lambda: Training(module=embedding)),
    }


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


@pytest.mark.parametrize("loop", ["plain", "with a scaler"])
def test_the_documented_loop_trains_all_ranks_alike(loop: str, of_loops: list[Any]) -> None:
    (before, after, steps), (_, other, _) = (row["documented"][loop] for row in of_loops)
    assert torch.equal(after, other) and not torch.equal(before, after)
    assert steps == 2


def test_an_argument_that_the_mode_does_not_look_at_is_said_once_and_by_its_name(of_loops: list[Any]) -> None:
    assert of_loops[1]["heard"] == []
    sparse = "mode: sparse or mode: sparse_int8 or mode: sparse_int4 to have it, or leave it out"
    assert of_loops[0]["heard"] == [
        f"GradientCompressor: sparsity_target: 0.95 changes nothing in mode int3: write {sparse}",
        f"GradientCompressor: strategy: uniform changes nothing in mode int3: write {sparse}",
        "GradientCompressor: outer_momentum: 0.5 changes nothing in mode int3: write mode: local to have it, or leave "
        "it out",
        "GradientCompressor: mode sparse, because sparsity_target: 0.75 and strategy: layer_wise_adaptive asks for it: "
        "what is not sent waits for a later step, which costs loss. mode: int3, the default without it, costs almost "
        "none; mode: sparse keeps this without the warning",
    ]


def test_the_articles_words_sparsify_and_the_report_says_so(of_loops: list[Any]) -> None:
    for mode, report in (row["article's words"] for row in of_loops):
        assert mode == "sparse"
        assert "gradient sync: mode sparse\nmode sparse, because sparsity_target: 0.75 and " in report


def test_sparse_gradients_are_refused_before_training(of_loops: list[Any]) -> None:
    for row in of_loops:
        assert row["sparse gradients"].startswith("ConfigError: 0, an Embedding with sparse=True, has a gradient")
