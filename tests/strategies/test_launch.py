"""Every way to start ranks: Lightning's own for each registered name, torchrun, SLURM; and which card a rank gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fakes.models.small_lightning import Small, fit
from fakes.npu import fake_npu
from fakes.processes.programs import WITHOUT_COLLECTIONS
from fakes.processes.ranks import meeting_point, run_ranks
from lightning_aigc.cluster.topology import Reading, parse_topology
from lightning_aigc.strategies import rendezvous

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
import lightning_aigc
from lightning.pytorch import Callback
from fakes.models.small_lightning import Small, make_batches, make_trainer
from torch.utils.data import DataLoader

class Report(Callback):
    def __init__(self, name):
        self.name = name

    def on_train_end(self, trainer, module):
        row = [trainer.strategy.mode, trainer.world_size, trainer.strategy.sync.step, module.flat().tolist()]
        with open(f"{sys.argv[1]}/{self.name}{trainer.global_rank}.json", "w") as file:
            json.dump(row, file)

if __name__ == "__main__":
    for name in sys.argv[2:]:
        trainer = make_trainer(strategy=name, devices=2, callbacks=[Report(name)])
        trainer.fit(Small(unused="find_unused" in name), DataLoader(make_batches(0, 4), batch_size=None))
"""
# A table of four cards, of which every second one is close.
TABLE = """
       NPU0  NPU1  NPU2  NPU3  CPU Affinity
NPU0   X     SYS   HCCS  SYS   0-3
NPU1   SYS   X     SYS   HCCS  4-7
NPU2   HCCS  SYS   X     SYS   0-3
NPU3   SYS   HCCS  SYS   X     4-7
"""


def trained(folder: Path, *names: str, launcher: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Reports of both ranks for a run under each of these names."""
    script = folder / "script.py"
    script.write_text(WITHOUT_COLLECTIONS + SCRIPT)
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "tests"))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with meeting_point() as where:
        done = subprocess.run(
            [sys.executable, *launcher, str(script), str(folder), *names],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment | ({} if launcher else where),
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in (0, 1)] for name in names}


def assert_trained_alike(rows: list[Any]) -> None:
    for mode, ranks, steps, _ in rows:
        assert (mode, ranks, steps) == ("int3", 2, 4)
    assert rows[0][3] == rows[1][3] and rows[0][3] != Small().flat().tolist()


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("npu_sparse_spawn",), marks=pytest.mark.long),
        pytest.param(("npu_sparse", "npu_sparse_find_unused_parameters_true"), marks=pytest.mark.long),
        pytest.param(("npu_sparse_notebook",), marks=pytest.mark.long),
    ],
)
def test_every_registered_name_trains_on_two_ranks(names: tuple[str, ...], tmp_path: Path) -> None:
    for rows in trained(tmp_path, *names).values():
        assert_trained_alike(rows)


@pytest.mark.long  # in `make test` torchrun starts the ranks of tests/cli/test_multi_node.py
def test_torchrun_starts_the_ranks_too(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    assert_trained_alike(trained(tmp_path, "npu_sparse", launcher=launcher)["npu_sparse"])


def under_slurm(rank: int) -> Any:
    """Variables that srun sets, instead of the variables that Lightning's own launcher sets."""
    warnings.simplefilter("ignore")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"):
        del os.environ[name]
    os.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    os.environ |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
    module, trainer = fit(rank, strategy="npu_sparse", devices=2)
    kind = type(trainer.strategy.cluster_environment).__name__
    return kind, trainer.global_rank, trainer.strategy.sync, module.after


def test_slurm_starts_the_ranks_too(tmp_path: Path) -> None:
    rows = run_ranks(under_slurm, 2, tmp_path, gloo=False)
    assert [row[:3] for row in rows] == [("SLURMEnvironment", 0, None), ("SLURMEnvironment", 1, None)]
    assert all(torch.equal(a, b) for a, b in zip(rows[0][3], rows[1][3], strict=True))


def on_four_cards(rank: int) -> Any:
    warnings.simplefilter("ignore")
    fake_npu.install()
    torch.npu.count = 4
    rows = []
    for _ in range(2):  # the second fit finds the process group of the first
        module, trainer = fit(rank, strategy="npu_sparse", devices=4, accelerator="npu", batches=2)
        rows.append([trainer.strategy.root_device.index, torch.npu.current, module.after])
    return rows


def stub_npu_smi(folder: Path) -> dict[str, str]:
    """An npu-smi that answers once, as a driver that does not like to be asked by many at a time."""
    folder.mkdir()
    (folder / "table").write_text(TABLE)
    tool = folder / "npu-smi"
    once = f'[ "$(wc -l < {folder}/calls)" = 1 ] && cat {folder}/table'
    tool.write_text(f"#!/bin/sh\necho asked >> {folder}/calls\n{once}\n")
    tool.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_ranks_get_the_cards_that_one_of_them_chose_by_their_links(tmp_path: Path) -> None:
    path = stub_npu_smi(tmp_path / "bin")
    rows = run_ranks(on_four_cards, 4, tmp_path / "ranks", gloo=False, environment=path)
    for fits in zip(*rows, strict=True):
        assert [card for card, _, _ in fits] == [current for _, current, _ in fits] == [0, 2, 1, 3]
        assert all(torch.equal(after[-1], fits[0][2][-1]) for _, _, after in fits)
    assert (tmp_path / "bin" / "calls").read_text() == "asked\n"


def test_a_ranktable_keeps_the_order_and_nobody_is_asked(tmp_path: Path) -> None:
    path = stub_npu_smi(tmp_path / "bin") | {"RANK_TABLE_FILE": "hccl.json"}
    rows = run_ranks(on_four_cards, 4, tmp_path / "ranks", gloo=False, environment=path)
    assert [fits[0][0] for fits in rows] == [0, 1, 2, 3]
    assert not (tmp_path / "bin" / "calls").exists()


def test_some_of_a_nodes_cards_are_ordered_by_their_own_links() -> None:
    lines = [f"NPU{i}" for i in range(8)]
    pairs = (0, 1, 0, 1, 2, 2, 3, 3)  # whose cards are close
    cells = [["X" if i == j else "PIX" if pairs[i] == pairs[j] else "SYS" for j in range(8)] for i in range(8)]
    rows = [f"{name} {' '.join(row)} {i}" for i, (name, row) in enumerate(zip(lines, cells, strict=True))]
    table = parse_topology("\n".join([" ".join([*lines, "CPU Affinity"]), *rows]))
    assert rendezvous.ordered([4, 5, 6, 7], table) == [4, 5, 6, 7]
    assert rendezvous.ordered([4, 6, 5, 7], table) == [4, 5, 6, 7]
    assert rendezvous.ordered([0, 1, 2, 3], table) == [0, 2, 1, 3]
    assert rendezvous.ordered([7, 1, 3], table) == [7, 1, 3]
    assert rendezvous.ordered([6, 7, 8], table) == [6, 7, 8]  # a card that the tool does not know
    assert rendezvous.ordered([1, 0], None) == [1, 0]


def test_each_node_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_agreed", {})
    store = dist.HashStore()
    asked = iter([parse_topology(TABLE), None])
    monkeypatch.setattr(rendezvous, "read_topology", lambda: Reading(next(asked), "a stub"))
    said = []
    for node, decides in ((0, True), (1, True), (0, False), (1, False)):
        rendezvous._agreed.clear()  # as in a process of its own
        said.append(rendezvous.agree_on_order([0, 1, 2, 3], lambda: store, node, decides=decides))
    assert [order for order, _ in said] == [[0, 2, 1, 3], [0, 1, 2, 3]] * 2
    assert said[0][1] == "puts the ranks of a node on its devices in the order [0, 2, 1, 3], by their links"
    assert said[1][1] == ""
