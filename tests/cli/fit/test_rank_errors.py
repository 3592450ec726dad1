"""An error of one rank ends all ranks with its sentence, and two jobs on one machine do not meet."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from fakes.processes.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loggers and folders


def fit(rank: int, path: str, odd_rank: int, of_odd_rank: list[str]) -> tuple[int, str, float]:
    """The command with other arguments on one rank: its exit code, what it said, and how long it took."""
    from lightning_aigc.cli import main

    said, start = io.StringIO(), time.monotonic()
    code = 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["lightning"]
        try:
            main(["fit", "-c", path, *(of_odd_rank if rank == odd_rank else [])])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 99
        # Under NCCL and HCCL the others do not notice that a process has ended, so here it does not end.
        time.sleep(3 if rank == odd_rank else 0)
    return code, said.getvalue(), time.monotonic() - start


def write(config: dict[str, Any], folder: Path, **trainer: Any) -> Path:
    config["trainer"] |= {"strategy": "npu_sparse", "devices": 2, "accelerator": "cpu"} | trainer
    config["trainer"]["default_root_dir"] = str(folder / "run")
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("odd_rank", [0, 1])
@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--data.init_args.train_data_dir", "the image folder {} does not exist"),
        ("--model.init_args.pretrained_model_name_or_path", "{}"),
    ],
)
def test_what_one_rank_refuses_all_ranks_say(
    argument: str, words: str, odd_rank: int, quick_config: dict[str, Any], tmp_path: Path
) -> None:
    path, nowhere = write(quick_config, tmp_path), tmp_path / "nowhere"
    launched = {"TORCHELASTIC_RUN_ID": "1"}  # as torchrun starts ranks
    ends = run_ranks(
        fit, 2, tmp_path / "ranks", str(path), odd_rank, [argument, str(nowhere)], gloo=False, environment=launched
    )
    for rank, (code, said, _) in enumerate(ends):
        assert code == 1, said
        (error,) = [line for line in said.splitlines() if line.startswith("error:")]
        assert words.format(nowhere) in error and "Traceback" not in said
        assert (f"rank {odd_rank} (" in error and "stopped, and this rank with it" in error) == (rank != odd_rank)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.long
def test_two_jobs_at_once_on_one_machine_train_as_if_alone(quick_config: dict[str, Any], tmp_path: Path) -> None:
    """They find ports of their own, and may share the cache folder, which both fill."""
    quick_config["data"]["init_args"]["cache_dir"] = str(tmp_path / "cache")
    paths = [write(quick_config, tmp_path / name) for name in ("first", "second")]
    clean = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "lightning_aigc", "fit", "-c", str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=path.parent,
            env=clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        for path in paths
    ]  # fmt: skip
    said = [job.communicate(timeout=400)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)[-4000:]
    first, second = (load_file(next((path.parent / "run").glob("*.safetensors"))) for path in paths)
    assert first and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
