"""Trainer(accelerator="npu", strategy="npu_sparse") end to end on the fake npu with the fake hccl."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from fakes.models.small_lightning import Small, fit
from fakes.npu import fake_npu
from fakes.processes.given_gradients import MODES
from fakes.processes.ranks import run_ranks

PRECISIONS = {"32-true": "float32", "bf16-mixed": "bfloat16", "16-mixed": "float16"}
RESUMED = ("int3", "sparse_int8", "local")
IN_EVERY_PRECISION = ("int3", "sparse", "auto")
PAIRS = list(itertools.product((*MODES, "auto"), PRECISIONS))
WALKED = [(mode, precision) for mode, precision in PAIRS if precision == "16-mixed" or mode in IN_EVERY_PRECISION]
"""Every mode with a loss scale, and every precision in a few modes; `make test-long` trains the other pairs."""


OPTIONS: dict[str, dict[str, Any]] = {
    "without overlap": {"overlap": False},
    "unused": {"find_unused_parameters": True},
    "unused sparse": {"mode": "sparse", "find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


def run(rank: int, ranks: int, mode: str, precision: str = "32-true", **arguments: Any) -> Any:
    from lightning_aigc.strategies import NPUSparseStrategy

    strategy = NPUSparseStrategy(
        **({"mode": mode, "local_steps": 1 if mode == "local" else 8} | arguments.pop("options", {}))
    )
    arguments = {"batches": 4, "accelerator": "npu", "devices": ranks, "precision": precision} | arguments
    return fit(rank, arguments.pop("module", None), strategy=strategy, **arguments)


def in_modes(rank: int, ranks: int, pairs: Sequence[tuple[str, str]]) -> dict[Any, Any]:
    """Results of a training in each mode and precision."""
    warnings.simplefilter("ignore")
    fake_npu.install()
    fake_npu.pin_everything()
    results: dict[Any, Any] = {}
    for mode, precision in pairs:
        module, trainer = run(rank, ranks, mode, precision, batches=3)
        where = [str(trainer.strategy.root_device.type), trainer.strategy._process_group_backend]
        results[mode, precision] = [module.after, *where]
    return results


def work(rank: int, ranks: int, folder: str) -> dict[Any, Any]:
    results = in_modes(rank, ranks, WALKED)
    for name, options in OPTIONS.items():
        module = Small(unused=name.startswith("unused"))
        results[name] = [run(rank, ranks, "int3", module=module, options=options)[0].after]  # the first may be zero
    results["accumulation"] = [run(rank, ranks, "sparse", batches=8, accumulate_grad_batches=2)[0].after]
    results["drift"] = drift(rank, ranks)
    for precision in PRECISIONS:
        dtypes: list[str] = []
        seen = Small()
        seen.net[0].register_forward_hook(lambda m, given, out, d=dtypes: d.append(f"{out.device.type} {out.dtype}"))
        seen, _ = run(rank, ranks, "int3", precision, module=seen)
        results[precision] = [seen.after, dtypes]
    bad = Small([(1, ranks - 1)], 1e37)
    module, trainer = run(rank, ranks, "sparse", "16-mixed", module=bad, batches=5)
    results["overflow"] = [module.after, trainer.precision_plugin.scaler.get_scale()]

    for mode in RESUMED:
        place = Path(folder, mode)
        saving = {
            "enable_checkpointing": True,
            "callbacks": [ModelCheckpoint(place, filename="{epoch}", save_top_k=-1)],
        }
        whole, _ = run(rank, ranks, mode, "16-mixed", max_epochs=2, **saving)
        resumed, _ = run(rank, ranks, mode, "16-mixed", max_epochs=2, ckpt_path=place / "epoch=0.ckpt")
        results["resumed", mode] = [whole.after[4:], resumed.after]
    module, trainer = fit(rank, batches=4, accelerator="npu", devices=ranks, strategy="npu_sparse")
    results["by name"] = [module.after, type(trainer.strategy).__name__]
    return results


class Meddle(Callback):
    """Changes one parameter on the last rank."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, batch_idx) == (trainer.world_size - 1, 1):
            with torch.no_grad():
                module.head.bias[0] += 1


def drift(rank: int, ranks: int) -> str:
    try:
        run(rank, ranks, "int3", callbacks=[Meddle()], options={"checksum_every_n_steps": 2})
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module", params=[1, 2])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp("on_npu")
    return run_ranks(work, request.param, folder, request.param, str(folder), gloo=False), folder


Rows = tuple[list[Any], Path]


def assert_alike_and_moving(rows: Rows, key: Any) -> list[torch.Tensor]:
    after: list[torch.Tensor] = rows[0][0][key][0]
    for row in rows[0][1:]:
        assert all(torch.equal(a, b) for a, b in zip(after, row[key][0], strict=True))
    assert after[-1].isfinite().all() and not torch.equal(after[-2], after[-1])
    return after


@pytest.mark.parametrize(("mode", "precision"), WALKED)
def test_every_mode_trains_on_the_npu_over_hccl(mode: str, precision: str, rows: Rows) -> None:
    assert_alike_and_moving(rows, (mode, precision))
    assert rows[0][0][mode, precision][1:] == ["npu", "hccl"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_mode_trains_in_the_other_precisions_too(ranks: int, tmp_path: Path) -> None:
    others = [pair for pair in PAIRS if pair not in WALKED]
    rows = run_ranks(in_modes, ranks, tmp_path, ranks, others, gloo=False)
    for pair in others:
        assert_alike_and_moving((rows, tmp_path), pair)
        assert rows[0][pair][1:] == ["npu", "hccl"]


@pytest.mark.parametrize("name", [*OPTIONS, "accumulation"])
def test_every_way_to_sync_trains_on_the_npu(name: str, rows: Rows) -> None:
    after = assert_alike_and_moving(rows, name)
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(after)]
    assert moved[1:] == ([False, True] * 3 if name == "accumulation" else [True] * 2)


def test_ranks_that_drifted_apart_on_the_npu_are_named(rows: Rows) -> None:
    for row in rows[0]:
        said = "RanksDivergedError: the ranks' parameters differ: " if len(rows[0]) > 1 else "nothing"
        assert row["drift"].startswith(said)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_is_the_one_asked_for(precision: str, rows: Rows) -> None:
    assert_alike_and_moving(rows, precision)
    assert rows[0][0][precision][1] == [f"npu torch.{PRECISIONS[precision]}"] * 4


def test_an_overflow_skips_the_step_on_all(rows: Rows) -> None:
    after = assert_alike_and_moving(rows, "overflow")
    assert torch.equal(after[0], after[1]) and not torch.equal(after[1], after[2])
    assert [row["overflow"][1] for row in rows[0]] == [2.0**15] * len(rows[0])


@pytest.mark.parametrize("mode", RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(mode: str, rows: Rows) -> None:
    for row in rows[0]:
        whole, resumed = row["resumed", mode]
        assert len(resumed) == 4 and all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_what_ranks_owe_is_written_as_cpu_tensors(rows: Rows) -> None:
    ranks, folder = rows
    paths = sorted((folder / "int3" / "epoch=0.ckpt.sync").glob("*"))
    assert len(paths) == (len(ranks) if len(ranks) > 1 else 0)
    for path in paths:
        state = torch.load(path, weights_only=True)  # no map_location: this process has no npu
        weights = {"net.0.weight", "net.2.weight", "head.weight"}
        assert state["residuals"].keys() == weights | {name.replace("weight", "bias") for name in weights}
        assert all(part["values"].device.type == "cpu" for part in state["residuals"].values())
        assert all(state["residuals"][name]["values"].any() for name in weights)


def test_the_name_alone_trains_on_the_npu(rows: Rows) -> None:
    assert_alike_and_moving(rows, "by name")
    assert all(row["by name"][1] == "NPUSparseStrategy" for row in rows[0])
