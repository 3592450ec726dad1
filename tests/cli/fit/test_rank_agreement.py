"""Ranks that were given different trainings stop at once, and each says what differs."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from PIL import Image

from fakes.processes.ranks import run_ranks
from lightning_aigc.checkpoint.coordination import check_shared
from lightning_aigc.cli.fit.rank_agreement import check_world, differences
from lightning_aigc.errors import ConfigError, SnapshotError

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loggers and folders


def fit(rank: int, path: str, of_rank_1: list[str]) -> tuple[int, str]:
    """The command with other arguments on rank 1: its exit code, and what it said."""
    from lightning_aigc.cli import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["lightning"]
        try:
            main(["fit", "-c", path, *(of_rank_1 if rank else [])])
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 99, said.getvalue()
    return 0, said.getvalue()


def run(config: dict[str, Any], folder: Path, *of_rank_1: object) -> list[tuple[int, str]]:
    config["trainer"] |= {"strategy": "npu_sparse", "devices": 2, "accelerator": "cpu"}
    config["trainer"]["default_root_dir"] = str(folder / "run")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return run_ranks(fit, 2, folder / "ranks", str(path), [str(word) for word in of_rank_1], gloo=False)


def test_another_rate_and_batch_on_one_rank_are_named_once(quick_config: dict[str, Any], tmp_path: Path) -> None:
    said = run(quick_config, tmp_path, "--model.init_args.learning_rate", 7e-5, "--data.init_args.train_batch_size", 1)
    assert [code for code, _ in said] == [1, 1]
    (error,) = [line for line in said[0][1].splitlines() if line.startswith("error:")]
    assert "the ranks do not run the same training" in error
    assert "model.init_args.learning_rate is 0.001 on rank 0" in error and "and 7e-05 on rank 1" in error
    assert "data.init_args.train_batch_size is 2 on rank 0" in error
    assert not any("Traceback" in words for _, words in said)
    assert "do not run the same training" not in said[1][1]  # ranks of one node print it once
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_other_pictures_on_one_rank_are_found_before_the_first_step(
    quick_config: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    fewer = tmp_path / "fewer"
    fewer.mkdir()
    for number in range(3):
        Image.open(photos / f"{number}.png").save(fewer / f"{number}.png")
        (fewer / f"{number}.txt").write_text("a zorp cup")
    (code, words), (other_code, _) = run(quick_config, tmp_path, "--data.init_args.train_data_dir", fewer)
    assert (code, other_code) == (1, 1)
    assert "the images' num_train_images is 6 on rank 0" in words and "and 3 on rank 1" in words


def test_another_image_of_the_same_name_and_caption_on_one_rank_is_found(
    quick_config: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    with Image.open(other / "0.png") as picture:
        changed = Image.effect_noise(picture.size, 64).convert("RGB")
    changed.save(other / "0.png")
    (code, words), (other_code, _) = run(quick_config, tmp_path, "--data.init_args.train_data_dir", other)
    assert (code, other_code) == (1, 1)
    assert "the checksum of the images is " in words and "(6 files) on rank 0" in words


@pytest.mark.parametrize(("tasks", "nodes"), [("8", "2"), ("4", "1")])
def test_tasks_of_slurm_that_do_not_fit_are_answered_with_the_flags(
    tasks: str, nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"NTASKS": "16", "NTASKS_PER_NODE": tasks, "NNODES": nodes, "JOB_NAME": "sd", "PROCID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    connector = SimpleNamespace(cluster_environment=SLURMEnvironment())
    trainer = SimpleNamespace(_accelerator_connector=connector, num_devices=4, num_nodes=2, strategy=DDPStrategy())
    with pytest.raises(ConfigError, match=f"add --trainer.devices {tasks} --trainer.num_nodes {nodes}, or start"):
        check_world(trainer)  # type: ignore[arg-type]
    trainer.strategy = None  # one device
    check_world(trainer)  # type: ignore[arg-type]  # a bare command in the job
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    with pytest.raises(ConfigError, match="or start as many processes"):
        check_world(trainer)  # type: ignore[arg-type]


def test_tasks_of_slurm_without_a_number_of_each_node_are_one_sentence(
    quick_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NTASKS": "4", "JOB_NAME": "sd", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(quick_config))
    monkeypatch.setattr("lightning_aigc.strategies.rendezvous.open_store", None)
    code, said = fit(0, str(config), [])
    assert code == 1 and "error: SLURM's job has --ntasks=4, which does not say how many run on a node" in said


def test_what_is_a_nodes_own_business_may_differ(quick_config: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in photos.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    said = run(quick_config, tmp_path, "--data.init_args.train_data_dir", copy, "--data.init_args.num_workers", 0)
    assert [code for code, _ in said] == [0, 0], said


def test_ranks_are_counted_by_their_value() -> None:
    everybody = [("a", {"torch": "2.13"}), ("a", {"torch": "2.13"}), ("b", {"torch": "2.11"}), ("b", {})]
    assert differences(everybody) == [
        "torch is 2.13 on rank 0 and 1 more (a) and 2.11 on rank 2 (b) and not set on rank 3 (b)"
    ]
    assert differences([("a", {"x": "1"}), ("b", {"x": "1"})]) == []


class TwoRanks:
    """A strategy whose rank 0 holds the run `ab`."""

    world_size = 2

    def __init__(self, other_sees_it: bool) -> None:
        self.other_sees_it = other_sees_it

    def barrier(self, name: str) -> None:
        pass

    def broadcast(self, value: Any) -> str:
        return "ab"

    def reduce_boolean_decision(self, decision: bool, all: bool) -> bool:  # noqa: A002
        return decision and self.other_sees_it


def test_a_folder_that_a_rank_does_not_see_is_an_error_on_all(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"this rank, on .* does not see the snapshots of rank 0 .* not shared"):
        check_shared(str(tmp_path), TwoRanks(True), wait_s=0.2)
    (tmp_path / ".lock").write_text('{"run": "ab"}')
    with pytest.raises(SnapshotError, match="another rank does not see"):
        check_shared(str(tmp_path), TwoRanks(False), wait_s=0.2)
    check_shared(str(tmp_path), TwoRanks(True), wait_s=0.2)
