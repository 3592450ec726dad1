"""A program with `lightning` and one with `pytorch_lightning` train alike, and neither loads the other package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.processes.programs import WITHOUT_COLLECTIONS

HIDE = """
import importlib, json, os, sys
from importlib.abc import MetaPathFinder
from pathlib import Path
package, folder = sys.argv[1], Path(sys.argv[2])
ROOTS = {"lightning": ("lightning",), "pytorch_lightning": ("pytorch_lightning", "lightning_fabric")}
HIDDEN = ROOTS["lightning" if package == "pytorch_lightning" else "pytorch_lightning"]

class Hidden(MetaPathFinder):
    # A package that is not installed.
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

# `find_spec` of the resolver asks for the package without importing it, and would see the error.
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name.partition(".")[0] in HIDDEN else find_spec(name, *args)
sys.meta_path.insert(0, Hidden())
import lightning_aigc
pl = importlib.import_module("lightning.pytorch" if package == "lightning" else package)
"""
FIT = (
    HIDE
    + """
import torch
from torch.utils.data import DataLoader
from lightning_aigc.callbacks import ExactSnapshot, GradientHealthMonitor, PartialWindowScaling
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.precision import FusedBackwardPrecision

WIDTH = 12
batches = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(1)).unbind(0)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.SiLU(), torch.nn.Linear(8, WIDTH))

    def training_step(self, batch_NC, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch_NC).float(), batch_NC)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)

def fit(module, data=None, resume=False, **arguments):
    quiet = {"max_steps": 4, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False}
    trainer = pl.Trainer(**(quiet | arguments))
    loader = DataLoader(batches, batch_size=None, shuffle=False)
    trainer.fit(module, data or loader, ckpt_path="latest" if resume else None)
    return trainer

def on_npu():
    from fakes.npu import fake_npu

    fake_npu.install()
    npu = fit(Module(), accelerator="npu", devices=1, precision="bf16-mixed")
    plugged = fit(Module(), accelerator="auto", devices=1, plugins=[FusedBackwardPrecision("16-mixed", memory="lean")])
    yield "npu", [isinstance(npu.accelerator, pl.accelerators.Accelerator), str(npu.strategy.root_device)]
    yield "autocast for", npu.precision_plugin.device
    yield "auto", [type(plugged.accelerator).__name__, type(plugged.precision_plugin).__name__]

def snapshots(where, steps, resume=False):
    monitor, module = GradientHealthMonitor(every_n_steps=1, dirpath=where), Module()
    callbacks = [ExactSnapshot(2, directory=str(where / "snapshots")), monitor, PartialWindowScaling()]
    fit(module, accelerator="cpu", devices=1, strategy="npu_sparse", max_steps=steps, callbacks=callbacks,
        resume=resume, max_epochs=2)
    return module.net[0].weight.detach().double().sum().item()

def on_cpu():
    yield "straight", snapshots(folder / "straight", 4)
    snapshots(folder / "parted", 2)
    yield "resumed", snapshots(folder / "parted", 4, resume=True)
    yield "files", sorted(path.name for path in (folder / "straight").iterdir())
    lora = DiffusionLoRA("embedded:sd", rank=2)
    data = ImageCaptionData("embedded:brand", resolution=64, train_batch_size=2, num_workers=0)
    trained = fit(lora, data, accelerator="cpu", devices=1, max_steps=2, default_root_dir=folder)
    yield "lora", [trained.global_step, isinstance(lora, pl.LightningModule), isinstance(data, pl.LightningDataModule)]

def write(name, rows):
    ours = {*ROOTS["lightning"], *ROOTS["pytorch_lightning"]}
    loaded = sorted(ours & {name.partition(".")[0] for name in sys.modules})
    (folder / f"{name}.json").write_text(json.dumps(dict(rows) | {f"loaded {name}": loaded}))

child = os.fork()  # a device that is made in Python needs a process in which no backward ran
if child == 0:
    write("on_npu", on_npu())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
write("on_cpu", on_cpu())
"""
)
ROOT = Path(__file__).parents[1]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "tests"))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", WITHOUT_COLLECTIONS + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture(scope="module", params=["lightning", "pytorch_lightning"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trainings by this package, with the other one hidden."""
    folder = tmp_path_factory.mktemp(request.param)
    done = run(FIT, request.param, str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    rows: dict[str, Any] = {"package": request.param}
    for name in ("on_npu", "on_cpu"):
        rows |= json.loads((folder / f"{name}.json").read_text())
    return rows


def test_only_the_imported_package_is_loaded(trained: dict[str, Any]) -> None:
    wanted = {"lightning": ["lightning"], "pytorch_lightning": ["lightning_fabric", "pytorch_lightning"]}
    assert trained["loaded on_npu"] == trained["loaded on_cpu"] == wanted[trained["package"]]


def test_the_accelerator_and_the_precision_are_the_npus(trained: dict[str, Any]) -> None:
    assert trained["npu"] == [True, "npu:0"]
    assert trained["autocast for"] == "npu"
    assert trained["auto"] == ["NPUAccelerator", "FusedBackwardPrecision"]


def test_a_strategy_by_name_trains_with_callbacks_and_resumes_to_the_same_weights(trained: dict[str, Any]) -> None:
    assert trained["resumed"] == trained["straight"]
    assert "health.jsonl" in trained["files"]


def test_a_diffusion_module_and_its_data_are_those_of_the_package(trained: dict[str, Any]) -> None:
    assert trained["lora"] == [2, True, True]
