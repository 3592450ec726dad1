"""Entries of TensorBoard and Weights & Biases, read back from their files, and the places that `fit` names."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401 - here, so that its log does not end with the first test's captured output
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

Command = Callable[..., Any]
REPO = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning and wandb say about folders


@pytest.fixture
def scored(quick_config: dict[str, Any], tmp_path: Path) -> Path:
    """A config of two steps with scores; its run goes to `tmp_path / "run"`."""
    quick_config["trainer"] |= {"default_root_dir": str(tmp_path / "run"), "log_every_n_steps": 1}
    quick_config["trainer"]["callbacks"][0]["init_args"] |= {
        "clip_model": "embedded:clip", "prompts": ["a zorp cup"], "prior_prompts": ["a red mug"], "num_images": 2,
    }  # fmt: skip
    path = tmp_path / "scored.yaml"
    path.write_text(yaml.safe_dump(quick_config))
    return path


def test_tensorboard_has_pictures_curves_and_hyperparameters_with_final_scores(
    command: Command, scored: Path, tmp_path: Path
) -> None:
    said = command("fit", "-c", scored)
    assert said.code == 0, said.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (folder,) = (tmp_path / "run" / "lightning_logs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert "samples" in events.Tags()["images"]
    assert {"loss", "clip_t", "final/clip_t", "final/prior_clip_t", "final/seconds"} <= set(events.Tags()["scalars"])
    assert events.Scalars("final/clip_t")[-1].value == pytest.approx(summary["clip_t_after"], abs=1e-4)
    content = events.SummaryMetadata("_hparams_/experiment").plugin_data.content  # TensorBoard shows the first
    experiment = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    assert "final/clip_t" in [info.name.tag for info in experiment.metric_infos]
    started = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hyperparameters = plugin_data_pb2.HParamsPluginData.FromString(started).session_start_info.hparams
    assert hyperparameters["rank"].number_value == 2 and hyperparameters["learning_rate"].number_value > 0


def test_fit_says_where_to_look_while_it_trains(command: Command, scored: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = command("fit", "-c", scored)
    lines = (said.out + said.err).splitlines()
    (where,) = [line for line in lines if line.startswith("run: ")]
    (live,) = [line for line in lines if line.startswith("live: ")]
    assert str(run) in where and "samples/" in where and "report.html" in where
    logdir = re.search(r"tensorboard --logdir (\S+)", live)
    assert logdir is not None and list(Path(logdir[1]).rglob("events.out.tfevents*"))
    page = re.search(r"open (\S+), which renews itself", where)
    assert page is not None and Path(page[1]).is_file()


def test_a_dry_run_and_a_run_without_a_logger_say_less(command: Command, scored: Path) -> None:
    dry = command("fit", "-c", scored, "--dry_run")
    assert not [line for line in dry.out.splitlines() if line.startswith(("run: ", "live: "))]
    silent = command("fit", "-c", scored, "--trainer.logger=false")
    said = [line.split()[0] for line in silent.out.splitlines() if line.startswith(("run: ", "live: "))]
    assert said == ["run:"]


def records(file: Path) -> Iterator[Any]:
    """The records of a wandb file: a 7-byte header, then LevelDB's log format, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        rest_of_block = 32768 - at % 32768
        if rest_of_block < 7:
            at += rest_of_block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


@pytest.mark.long
def test_one_line_of_config_sends_pictures_curves_and_hyperparameters_to_wandb(scored: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is missing: pip install -e '.[dev]'")
    paths = os.pathsep.join(str(path) for path in (REPO, REPO / "kernels"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lightning_aigc", "fit", "-c", str(scored), "--trainer.logger", "WandbLogger"),
            f"--trainer.logger.save_dir={tmp_path}",
        ],
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "live: Weights & Biases, offline: wandb sync" in done.stdout + done.stderr
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    found = list(records(file))
    logged = {".".join(item.nested_key) or item.key for r in found for item in r.history.item}
    assert {"loss", "clip_t", "samples", "final/clip_t"} <= {key.split(".")[0] for key in logged}
    config = {item.key or ".".join(item.nested_key) for r in found for item in r.config.update}
    assert {"rank", "learning_rate"} <= config
    assert list(file.parent.glob("files/media/images/samples*.png"))
