"""docs/articles.md: every name of ours beside an article's name is one that a user can type."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.callbacks.health import Alert
from lightning_aigc.cli import OWN_VERBS, TRAINER_VERBS
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import ControlNetTraining, StableDiffusionLoRA
from lightning_aigc.gradient_sync.watch.step_report import StepReport
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.strategies import NPUSparseStrategy, ZeROStrategy
from lightning_aigc.strategies.npu_sparse import NAMES as SYNCS
from lightning_aigc.strategies.zero.strategy import NAMES as STAGES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "articles.md"
STATES = {"built", "called otherwise", "planned", "not real"}
CONFIGURED = (
    Trainer, NPUSparseStrategy, ZeROStrategy, FusedBackwardPrecision, StableDiffusionLoRA,
    ControlNetTraining, ImageCaptionData, ExactSnapshot,
)  # fmt: skip
NOT_OURS = {".grad", "async", "hccl_v2", "torchrun", "srun"}
"""Names in our column that the row itself says are torch's, SLURM's, or the article's."""


def rows() -> list[list[str]]:
    """Every table's rows: the article's name, ours, the state."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "the article's name"]


def names_of_ours() -> list[str]:
    return sorted({name for row in rows() for name in re.findall(r"`([^`]+)`", row[1])})


def exists(name: str) -> bool:
    """Whether a user can import, run, configure or read it."""
    verb, _, rest = name.partition(" ")
    if name in NOT_OURS:
        return True
    if name.startswith("lightning_aigc"):
        return is_importable(name)
    if verb == "lightning":
        return rest in (*TRAINER_VERBS, *OWN_VERBS)
    if verb == "make":
        return re.search(rf"^{re.escape(rest)}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    if "/" in name:
        return (ROOT / name).is_file()
    if ": " in name:
        return accepts(*name.split(": ", 1))
    if name in ("--trainer.strategy npu_sparse", *SYNCS, *STAGES):
        return "npu_sparse" in SYNCS
    if name == "--resume":
        return "--resume" in (ROOT / "lightning_aigc" / "cli" / "fit" / "aigc_cli.py").read_text()
    arguments = {
        field for shown in (Alert, StepReport) for field in dir(shown) + list(inspect.signature(shown).parameters)
    }
    return name in arguments or any(name in inspect.signature(owner).parameters for owner in CONFIGURED)


def is_importable(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
            reduce(getattr, parts[count:], found)
        except (ImportError, AttributeError):
            continue
        return True
    return False


def accepts(key: str, value: str) -> bool:
    """Whether a class that YAML configures takes this key, and this value where it lists the accepted ones."""
    if not any(key in inspect.signature(owner).parameters for owner in CONFIGURED):
        return False
    checked = [
        owner for owner in (NPUSparseStrategy, FusedBackwardPrecision) if key in inspect.signature(owner).parameters
    ]
    if not checked or value.startswith("["):
        return True
    try:
        checked[0](**{key: yaml.safe_load(value)})  # type: ignore[operator]
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", names_of_ours())
def test_a_name_of_ours_can_be_typed(name: str) -> None:
    assert exists(name), f"{PAGE.name} names {name}, which is neither imported, a verb, a make target, a file nor a key"


def test_every_row_has_a_state_and_what_is_built_has_a_name() -> None:
    assert len(rows()) > 50
    for article, ours, state in rows():
        assert state in STATES, (article, state)
        assert ours or state == "planned", f"{article} is {state}, and the row names nothing to use"


@pytest.mark.parametrize(
    "name",
    [
        "lightning_aigc.gradient_sync.Nothing",
        "lightning tune",
        "make nothing",
        "mode: int5",
        "sparsty: 0.5",
        "no/file.py",
        "nothing",
    ],
)
def test_a_name_that_is_not_there_is_found_out(name: str) -> None:
    assert not exists(name)


@pytest.mark.parametrize(
    "name",
    [
        "GradientCompressor", "hook_into_model", "enable_gradient_accumulation", "AIGCLRScheduler", "_suggest_fixes",
        "enable_convergence_monitor", "hccl_fusion", "sparse_allreduce", "groupnorm_grad_opt", "attention_grad_sparse",
        "vae_decoder_grad_protect", "GradientHealthMonitor", "training_opt", "demo.py --task sd_lora", "ds_config.json",
        "should_stop_early", "best_metric", "hccl_v2", "QLoRA", "ControlNet", "offload", "TrainOneStepCell", "sens",
    ],
)  # fmt: skip
def test_the_articles_names_are_all_there(name: str) -> None:
    assert any(name in row[0] for row in rows())


def test_torchrun_is_installed_with_torch() -> None:
    assert shutil.which("torchrun") or (Path(__import__("sys").executable).parent / "torchrun").exists()
