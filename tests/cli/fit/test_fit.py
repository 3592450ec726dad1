"""`lightning fit` from its command line to what it leaves on disk."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from PIL import Image
from safetensors import safe_open

from fakes.models.few_pictures import few_of
from fakes.processes.commands import run_modules
from lightning_aigc.diffusion import DiffusionLoRA

Command = Callable[..., Any]
DEMO = Path(__file__).parents[3] / "configs" / "sd_lora_demo.yaml"
SUMMARY_KEYS = {"steps", "seconds", "peak_memory_mib", "lora_file", "report"}
SUMMARY_KEYS |= {"clip_t_before", "clip_t_after", "clip_i_before", "clip_i_after"}
pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loggers and folders


@pytest.fixture
def quick(quick_config: dict[str, Any], tmp_path: Path) -> Path:
    """A config of two steps in milliseconds; its run goes to `tmp_path / "run"`."""
    quick_config["trainer"]["default_root_dir"] = str(tmp_path / "run")
    path = tmp_path / "quick.yaml"
    path.write_text(yaml.safe_dump(quick_config))
    return path


def test_the_demo_leaves_lora_pictures_summary_and_report(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run, pictures = tmp_path / "run", tmp_path_factory.mktemp("pictures")
    quick = ["--model.init_args.num_validation_images=1", "--model.init_args.num_inference_steps=2"]
    callbacks = yaml.safe_load(DEMO.read_text())["trainer"]["callbacks"]
    few = {"RunReport": {"num_images": 3}, "CLIPConvergenceGuard": {"num_images": 1, "every_n_steps": 2}}
    few["FineTuneCheck"] = {"num_images": 1}
    for callback in callbacks:
        callback["init_args"] |= few.get(callback["class_path"], {})
    (tmp_path / "few.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    words = [
        *("demo", "-c", tmp_path / "few.yaml", "--trainer.max_steps=3"),
        *(f"--trainer.default_root_dir={run}", *quick, f"--data.init_args.cache_dir={tmp_path / 'cache'}"),
        f"--data.init_args.train_data_dir={few_of('embedded:brand', 48, pictures / 'brand')}",
        f"--data.init_args.class_data_dir={few_of('embedded:prior', 24, pictures / 'prior')}",
    ]
    (done,) = run_modules("lightning_aigc", [words], tmp_path, {"HF_HUB_OFFLINE": "1"})
    assert done.code == 0, done.err[-3000:]
    assert "Traceback" not in done.err
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 3 and summary["seconds"] > 0 and summary["peak_memory_mib"] > 0
    for score in ("clip_t_before", "clip_t_after", "clip_i_before", "clip_i_after"):
        assert -1 <= summary[score] <= 1

    lora = (tmp_path / summary["lora_file"]).resolve()
    assert lora == (run / "zorp.safetensors").resolve()
    with safe_open(lora, "pt") as file:
        assert file.metadata()["ss_network_dim"] == "16"
        assert all(key.startswith("lora_unet_") for key in file.keys())  # noqa: SIM118 it is no dict
    page = (run / "report.html").read_text()
    assert page.count("data:image/") >= 2 * (3 + 4) and "max_train_steps" in page
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?\s*(?:https?:|//)|@import""", page)
    assert Image.open(run / "samples" / "step_000000.png").size[0] > 64
    assert (run / "samples" / "step_000003.png").is_file()
    assert (run / "health.html").is_file() and (run / "health.jsonl").is_file()
    assert (run / "guard" / "step_000002.png").is_file() and "CLIPConvergenceGuard: training ended" in done.err
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["trainer"]["max_steps"] == 3 and saved["model"]["init_args"]["rank"] == 16
    assert {path.name for path in tmp_path.iterdir()} == {"run", "cache", "few.yaml"}
    for word in ("steps", "peak memory", "CLIP-T before -> after", "CLIP-I before -> after", "zorp.safetensors"):
        assert word in done.out
    assert "it/s" in done.err or "step/s" in done.err
    assert "loss=" in done.err and "clip_t=" in done.err


def test_the_demo_is_a_fit_of_its_config_in_the_current_folder(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command("demo", "--trainer.max_steps", "5", "--print_config")
    assert said.code == 0, said.err
    assert said.out == command("fit", "-c", DEMO, "--trainer.max_steps", "5", "--print_config").out
    config = yaml.safe_load(said.out)
    assert config["trainer"]["max_steps"] == 5
    assert config["trainer"]["default_root_dir"] == "runs/demo"
    assert config["data"]["init_args"]["cache_dir"] == "runs/demo/cache"


def test_a_mistake_in_the_demos_arguments_is_one_line(command: Command) -> None:
    said = command("demo", "--model.init_args.rnak", "4")
    assert said.code == 2 and len(said.errors) == 1 and "rnak" in said.errors[0]


def test_a_dry_run_reports_and_writes_nothing(command: Command, quick: Path, tmp_path: Path) -> None:
    said = command("fit", "-c", quick, "--dry_run")
    assert said.code == 0, said.err
    for words in (
        "6 found",
        "6 matched",
        "bucket",
        "32 x 32",
        "trainable parameters:",
        "memory estimate:",
        "one step:",
    ):
        assert words in said.out
    assert re.search(r"loss: \d+\.\d+", said.out)
    assert not (tmp_path / "run").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"quick.yaml"}


def test_several_configs_merge_and_the_last_word_wins(command: Command, quick: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {init_args: {rank: 3, output_name: mine}}\n")
    said = command("fit", "-c", quick, "-c", tmp_path / "mine.yaml", "--model.init_args.rank=5", "--print_config")
    printed = yaml.safe_load(said.out)
    assert printed["model"]["init_args"]["rank"] == 5
    assert printed["model"]["init_args"]["output_name"] == "mine"
    assert printed["data"]["init_args"]["train_batch_size"] == 2


def test_a_saved_config_runs_again_to_the_same_lora(command: Command, quick: Path, tmp_path: Path) -> None:
    assert command("fit", "-c", quick).code == 0
    again = command("fit", "-c", tmp_path / "run" / "config.yaml", "--trainer.default_root_dir", tmp_path / "again")
    assert again.code == 0, again.err
    files = [tmp_path / run / "zorp.safetensors" for run in ("run", "again")]
    with safe_open(files[0], "pt") as first, safe_open(files[1], "pt") as second:
        for key in first.keys():  # noqa: SIM118 it is no dict
            assert torch.equal(first.get_tensor(key), second.get_tensor(key))


@pytest.mark.parametrize("written", ["'1e-4'", "1e-4", "'0.0001'", "1.0e-4"])
def test_a_learning_rate_written_as_text_is_a_number(
    command: Command, quick: Path, tmp_path: Path, written: str
) -> None:
    (tmp_path / "rate.yaml").write_text(f"model: {{init_args: {{learning_rate: {written}}}}}\n")
    said = command("fit", "-c", quick, "-c", tmp_path / "rate.yaml", "--print_config")
    assert yaml.safe_load(said.out)["model"]["init_args"]["learning_rate"] == pytest.approx(1e-4)


def test_rank_zero_is_refused_before_anything_is_loaded(
    command: Command, quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("lightning_aigc.diffusion.training.module.load_components", never)
    said = command("fit", "-c", quick, "--model.init_args.rank=0")
    assert said.code == 1
    assert said.errors == ["error: model.init_args.rank must be at least 1, got 0"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["a file in the way", "a file among its parents"])
def test_an_output_folder_that_cannot_be_made_is_one_line(
    command: Command, quick: Path, tmp_path: Path, where: str
) -> None:
    (tmp_path / "taken").write_text("mine")
    root = tmp_path / "taken" / ("deeper" if "parents" in where else "")
    said = command("fit", "-c", quick, "--trainer.default_root_dir", root)
    assert said.code == 1
    assert len(said.errors) == 1 and "taken" in said.errors[0] and "default_root_dir" in said.errors[0]
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user who is not root: root writes anywhere")
def test_a_read_only_output_folder_is_one_line(command: Command, quick: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o500)
    said = command("fit", "-c", quick)
    assert said.code == 1 and len(said.errors) == 1 and "default_root_dir" in said.errors[0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_gets_full_is_one_line(
    command: Command, quick: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "runs/mine/zorp.safetensors")

    monkeypatch.setattr(DiffusionLoRA, "save_lora", full)
    said = command("fit", "-c", quick)
    assert said.code == 1
    assert len(said.errors) == 1
    assert "runs/mine/zorp.safetensors" in said.errors[0] and "default_root_dir" in said.errors[0]


def test_a_fit_goes_on_from_its_last_checkpoint(command: Command, quick: Path, tmp_path: Path) -> None:
    writer = "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"
    own = [writer, "--trainer.callbacks.every_n_train_steps=1", "--trainer.callbacks.save_last=true"]
    assert command("fit", "-c", quick, *own).code == 0
    checkpoints = sorted((tmp_path / "run").rglob("*.ckpt"))
    assert checkpoints
    more = ["--model.init_args.max_train_steps=4", f"--ckpt_path={next(c for c in checkpoints if 'last' in c.name)}"]
    said = command("fit", "-c", quick, *more)
    assert said.code == 0, said.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4
    said = command("fit", "-c", quick, *more, "--model.init_args.rank=3")
    assert said.code == 1 and len(said.errors) == 1 and "rank" in said.errors[0]


def test_what_is_not_the_users_fault_keeps_its_traceback(
    command: Command, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(self: Any, *_: Any) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Callback, "on_train_start", bug)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        command("fit", "-c", quick)
