"""An error of one rank ends all ranks with its sentence, and two jobs on one machine do not meet."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from fakes.processes.ranks import run_ranks
from lightning_aigc.errors import DataError

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


def test_an_error_of_all_ranks_is_printed_once(quick_config: dict[str, Any], tmp_path: Path) -> None:
    path, nowhere = write(quick_config, tmp_path), str(tmp_path / "nowhere")
    config = yaml.safe_load(path.read_text())
    config["data"]["init_args"]["train_data_dir"] = nowhere
    path.write_text(yaml.safe_dump(config))
    launched = {"TORCHELASTIC_RUN_ID": "1"}
    ends = run_ranks(fit, 2, tmp_path / "ranks", str(path), 0, [], gloo=False, environment=launched)
    assert [code for code, _, _ in ends] == [1, 1]
    assert [said.count(f"error: the image folder {nowhere} does not exist") for _, said, _ in ends] == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trainer.strategy", "ddp"], "runs trainer.strategy "),
        (["--trainer.devices", "1"], "1 device(s) each; add --trainer.devices 2 --trainer.num_nodes 1, or"),
    ],
)
def test_a_node_that_was_started_otherwise_ends_both_within_seconds(
    arguments: list[str], words: str, quick_config: dict[str, Any], tmp_path: Path
) -> None:
    path, launched = write(quick_config, tmp_path), {"TORCHELASTIC_RUN_ID": "1"}
    ends = run_ranks(fit, 2, tmp_path / "ranks", str(path), 1, arguments, gloo=False, environment=launched)
    for code, said, seconds in ends:
        (error,) = [line for line in said.splitlines() if line.startswith("error:")]
        assert code == 1 and words in error and seconds < 40 and "Traceback" not in said


def test_an_error_of_all_ranks_before_they_meet_is_printed_once(quick_config: dict[str, Any], tmp_path: Path) -> None:
    path, launched = write(quick_config, tmp_path), {"TORCHELASTIC_RUN_ID": "1"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "zorp.safetensors").touch()
    ends = run_ranks(fit, 2, tmp_path / "ranks", str(path), 0, [], gloo=False, environment=launched)
    assert [(code, said.count("has the results of an earlier run")) for code, said, _ in ends] == [(1, 1), (1, 0)]


def fail_apart(rank: int, where: str) -> list[str]:
    """Errors of two ranks of which one fails where each works alone, before a collective of both."""
    from lightning_aigc.data.cache import encoded_caches
    from lightning_aigc.diffusion.pipeline import quantized_base
    from lightning_aigc.gradient_sync.transport.process_groups import raise_on_all_ranks

    def fill(*_: Any, **__: Any) -> Any:
        if rank == 1:
            raise DataError("the disk is full")
        return []

    def measure(*_: Any, **options: Any) -> Any:
        def choose() -> Any:
            raise torch.OutOfMemoryError("out of memory")

        return options["decide"](1, choose)

    group = SimpleNamespace(world_size=2, global_rank=rank, is_global_zero=rank == 0, num_devices=2)
    group.strategy = SimpleNamespace(root_device=torch.device("cpu"), broadcast=_broadcast)
    errors = []
    cache = SimpleNamespace(keys=[], fill=fill)
    for _ in range(2):  # a second time, as the collectives must fit after the first
        try:
            if where == "texts":
                caches = encoded_caches.EncodedCaches.__new__(encoded_caches.EncodedCaches)
                caches._embeddings, caches.batch_size = lambda *_: cache, 1  # type: ignore[assignment, method-assign]
                caches.fill_texts_together(group, SimpleNamespace(encoder_identity=dict), [])  # type: ignore[arg-type]
            else:
                quantized_base.quantize_frozen_ = measure  # type: ignore[assignment]
                parts = SimpleNamespace(family=SimpleNamespace(denoiser_name="unet"), denoiser=torch.nn.Identity(),
                                        text_encoders=(), vae=torch.nn.Linear(1, 1), stored_texts=None)  # fmt: skip
                quantized_base.pack_base(torch.nn.Linear(1, 1), parts, {"target_mib": 1}, None, iter, group)  # type: ignore[arg-type]
        except Exception as error:  # the test compares it
            errors.append(f"{type(error).__name__}: {error}")
    raise_on_all_ranks(None)
    return errors


def _broadcast(value: Any) -> Any:
    held = [value]
    torch.distributed.broadcast_object_list(held)
    return held[0]


@pytest.mark.parametrize(
    ("where", "odd_rank", "said"),
    [("texts", 1, "DataError: the disk is full"), ("budget", 0, "OutOfMemoryError: out of memory")],
)
def test_an_error_where_each_rank_works_alone_is_not_waited_for(
    where: str, odd_rank: int, said: str, tmp_path: Path
) -> None:
    ends = run_ranks(fail_apart, 2, tmp_path, where)
    assert ends[odd_rank] == [said] * 2
    for error in ends[1 - odd_rank]:
        assert error.startswith(f"ConfigError: rank {odd_rank} (")
        assert error.endswith(f"stopped, and this rank with it: {said.removeprefix('DataError: ')}")


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
