"""`lightning fit --resume`: from the newest whole snapshot, with the same configuration, to the same LoRA."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lightning_aigc.callbacks import SaveLoRA
from lightning_aigc.checkpoint import find_snapshots
from lightning_aigc.checkpoint.resume import resume_command
from lightning_aigc.checkpoint.run_config import differences, relevant

Command = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def quick(quick_config: dict[str, Any], tmp_path: Path) -> Path:
    """Six steps of two micro-batches, a snapshot after each, EMA and dropout; its run goes to `tmp_path / "run"`."""
    config = quick_config
    config["trainer"] |= {"default_root_dir": str(tmp_path / "run"), "accumulate_grad_batches": 2}
    config["model"]["init_args"] |= {
        "max_train_steps": 6,
        "checkpointing_steps": 1,
        "validation_prompts": [],
        "lora_dropout": 0.2,
    }
    path = tmp_path / "quick.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def lora(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / "zorp.safetensors")


@pytest.fixture
def signal_at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sends this process a signal in the second micro-batch after a step, in the next fit only."""

    def arm(number: int, step: int) -> None:
        sent = []

        def send(self: Any, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == step and not sent:
                sent.append(step)
                os.kill(os.getpid(), number)

        monkeypatch.setattr(SaveLoRA, "on_train_batch_start", send)

    return arm


def test_an_interrupted_fit_ends_with_the_same_lora(
    command: Command,
    quick: Path,
    tmp_path: Path,
    signal_at_step: Callable[[int, int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = tmp_path / "whole"
    assert command("fit", "-c", quick, f"--trainer.default_root_dir={whole}").code == 0
    signal_at_step(signal.SIGTERM, 3)
    with caplog.at_level("INFO"):
        said = command("fit", "-c", quick)
    assert said.code == 143 and not (tmp_path / "run" / "zorp.safetensors").exists()
    assert f"resume with: lightning fit -c {quick} --resume" in caplog.text
    said = command("fit", "-c", quick, "--resume")
    assert said.code == 0, said.err
    one, other = lora(whole), lora(tmp_path / "run")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_nothing_to_resume_starts_and_a_finished_run_has_nothing_to_do(
    command: Command, quick: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert command("fit", "-c", quick, "--resume").code == 0
    assert "nothing to resume in" in caplog.text
    written = (tmp_path / "run" / "zorp.safetensors").stat().st_mtime_ns
    assert command("fit", "-c", quick, "--resume").code == 0
    assert (tmp_path / "run" / "zorp.safetensors").stat().st_mtime_ns == written
    assert find_snapshots(tmp_path / "run" / "snapshots")[0].facts["is_finished"]


def test_another_configuration_is_refused_with_both_values(command: Command, quick: Path, tmp_path: Path) -> None:
    assert command("fit", "-c", quick).code == 0
    saved = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    said = command("fit", "-c", quick, "--resume", "--model.init_args.rank=3", "--data.init_args.train_batch_size=1")
    assert said.code == 1
    assert "model.init_args.rank: 2 in the snapshot, 3 now" in said.err
    assert "data.init_args.train_batch_size: 2 in the snapshot, 1 now" in said.err
    (tmp_path / "no_model.png").write_bytes(b"an image")
    base = f"--model.init_args.pretrained_model_name_or_path={tmp_path / 'no_model.png'}"
    said = command("fit", "-c", quick, "--overwrite", base)
    assert said.code == 1
    assert (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8") == saved
    more = ["--model.init_args.max_train_steps=7", "--model.init_args.output_name=other"]
    assert command("fit", "-c", quick, "--resume", *more).code == 0


def test_a_folder_of_the_data_may_be_written_in_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    key = "data.init_args.train_data_dir"
    assert differences({key: "photos"}, {key: str(tmp_path / "photos")}) == []
    assert differences({key: "./photos"}, {key: "photos/"}) == []
    for one, other in (("photos", "others"), ("embedded:brand", "embedded:prior"), ("photos", None)):
        assert len(differences({key: one}, {key: other})) == 1
    assert len(differences({"model.init_args.class_word": "a"}, {"model.init_args.class_word": "./a"})) == 1


def test_a_config_file_may_say_latest(command: Command, quick: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(quick.read_text(encoding="utf-8")) | {"ckpt_path": "latest"}
    quick.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert command("fit", "-c", quick).code == 0
    shutil.rmtree(find_snapshots(tmp_path / "run" / "snapshots")[0].path)
    assert command("fit", "-c", quick).code == 0
    assert find_snapshots(tmp_path / "run" / "snapshots")[0].step == 6


def test_resume_and_a_checkpoint_exclude_each_other(command: Command, quick: Path) -> None:
    said = command("fit", "-c", quick, "--resume", "--ckpt_path=last")
    assert said.code == 1 and "--resume" in said.errors[0] and "ckpt_path" in said.errors[0]


def test_the_command_that_goes_on_is_the_one_that_was_given() -> None:
    assert resume_command(["/bin/lightning", "fit", "-c", "a b.yaml", "--ckpt_path", "x", "--ckpt_path=y"]) == (
        "lightning fit -c 'a b.yaml' --resume"
    )
    assert (
        resume_command(["/bin/lightning", "fit", "--overwrite", "-c", "a.yaml"]) == "lightning fit -c a.yaml --resume"
    )
    assert resume_command(["/bin/lightning", "fit", "-c", "a.yaml", "--resume"], Path("my runs/step-1")) == (
        "lightning fit -c a.yaml --ckpt_path 'my runs/step-1'"
    )
    assert resume_command(["train.py"]) == 'trainer.fit(..., ckpt_path="latest")'
    assert resume_command(["train.py"], Path("a")) == 'trainer.fit(..., ckpt_path="a")'


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "a bare command of a job"])
def test_a_command_of_several_nodes_is_described(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torchrun's nor srun's own arguments are known here."""
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    slurm = {"SLURM_NTASKS": "2" if launcher == "srun" else "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NAME": "sd"}
    for name, value in (torchrun if launcher == "torchrun" else slurm).items():
        monkeypatch.setenv(name, value)
    words = ["/bin/lightning", "fit", "-c", "a.yaml"]
    if launcher == "a bare command of a job":
        assert resume_command(words) == "lightning fit -c a.yaml --resume"
        return
    assert resume_command(words) == "the same command on every node, with --resume"
    assert resume_command(words, Path("a b")) == "the same command on every node, with --ckpt_path 'a b'"
    assert resume_command(["train.py"]) == 'trainer.fit(..., ckpt_path="latest")'


def test_last_is_no_way_to_an_unfinished_run_of_snapshots(command: Command, quick: Path, tmp_path: Path) -> None:
    """Lightning starts anew where it finds no checkpoint of its own."""
    assert command("fit", "-c", quick).code == 0
    before = {path.name for path in (tmp_path / "run" / "snapshots").iterdir()}
    said = command("fit", "-c", quick, "--ckpt_path", "last")
    assert said.code == 1 and "add --resume to continue that run" in said.errors[0]
    assert {path.name for path in (tmp_path / "run" / "snapshots").iterdir()} == before
    other = yaml.safe_load(quick.read_text(encoding="utf-8"))
    other["trainer"]["callbacks"] = [{"class_path": "OnExceptionCheckpoint", "init_args": {"dirpath": str(tmp_path)}}]
    quick.write_text(yaml.safe_dump(other), encoding="utf-8")
    assert command("fit", "-c", quick, "--ckpt_path", "last").code == 1
    assert command("fit", "-c", quick, "--ckpt_path", "last", "--trainer.default_root_dir", tmp_path / "new").code == 0


def test_what_does_not_change_training_is_not_compared() -> None:
    config: dict[str, Any] = {
        "seed_everything": 1,
        "trainer": {"max_steps": 5, "logger": True, "default_root_dir": "a", "accumulate_grad_batches": 2},
        "model": {"class_path": "M", "init_args": {"rank": 4, "output_name": "x"}},
        "data": {"class_path": "D", "init_args": {"num_workers": 2, "seed": 3}},
    }
    other = yaml.safe_load(yaml.safe_dump(config))
    other["trainer"] |= {"max_steps": 9, "logger": False, "default_root_dir": "b"}
    other["model"]["init_args"]["output_name"], other["data"]["init_args"]["num_workers"] = "y", 8
    ignored = {"model": ["output_name"], "data": ["num_workers"]}
    assert differences(relevant(config, ignored), relevant(other, ignored)) == []
    assert len(differences(relevant(config, {}), relevant(other, {}))) == 2
    other["data"]["init_args"]["seed"], other["seed_everything"] = 4, 2
    assert differences(relevant(config, ignored), relevant(other, ignored)) == [
        "seed_everything: 1 in the snapshot, 2 now",
        "data.init_args.seed: 3 in the snapshot, 4 now",
    ]
