"""Whole trainings on a CUDA card: memory levels, loss scaling, exact resume, gradient sync over NCCL, the monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.models.pipelines import make_batch, make_pipeline
from fakes.runs.killed_trainings import KillAt, Net, train
from lightning_aigc.callbacks import ExactSnapshot, GradientHealthMonitor
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.precision import FusedBackwardPrecision

pytestmark = pytest.mark.filterwarnings("ignore")  # advice on loaders, eval mode and float64 references
STEPS = 3


class Watch(Callback):
    """Each step's loss, and the gradients of the first."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if not self.gradients:
            self.gradients = [p.grad.detach().clone() for p in pl_module.parameters() if p.grad is not None]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def fit(folder: Path, pipeline: Path, precision: str, memory: str, **options: Any) -> Watch:
    torch.manual_seed(0)
    module = StableDiffusionLoRA(str(pipeline), rank=4, learning_rate=1e-3, max_train_steps=STEPS)
    watch = Watch()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cuda", devices=1, max_epochs=-1, default_root_dir=folder, enable_model_summary=False,
        callbacks=[watch], plugins=[FusedBackwardPrecision(precision, memory=memory)], **(quiet | options),
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, DataLoader([make_batch(seed=seed) for seed in range(2)], batch_size=None))  # type: ignore[arg-type]
    return watch


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline(tmp_path_factory.mktemp("sd"))


@pytest.mark.parametrize("memory", ["balanced", "lean", "max"])
@pytest.mark.parametrize(
    ("precision", "near"), [("32-true", 2e-3), ("bf16-mixed", 4e-2), ("bf16-true", 4e-2), ("16-mixed", 1e-2)]
)
def test_every_level_trains_as_off_does(
    precision: str, near: float, memory: str, pipeline: Path, tmp_path: Path
) -> None:
    """Losses within one rounding through a few layers; all gradients together within twice that."""
    ours, off = (fit(tmp_path, pipeline, precision, level) for level in (memory, "off"))
    assert ours.losses == pytest.approx(off.losses, rel=near)
    flat_ours, flat_off = (torch.cat([g.flatten().double() for g in w.gradients]) for w in (ours, off))
    assert flat_off.norm() > 0 and (flat_ours - flat_off).norm() <= 2 * near * flat_off.norm()


@pytest.mark.parametrize("mode", ["int3", "sparse", "bf16"])
def test_npu_sparse_trains_over_nccl(mode: str, pipeline: Path, tmp_path: Path) -> None:
    from lightning_aigc.strategies import NPUSparseStrategy

    watch = fit(tmp_path, pipeline, "bf16-mixed", "lean", strategy=NPUSparseStrategy(mode=mode))
    plain = fit(tmp_path, pipeline, "bf16-mixed", "lean")
    assert len(watch.losses) == STEPS
    assert watch.losses == pytest.approx(plain.losses, rel=5e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_killed_run_resumes_to_the_same_bits(precision: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cuda", "precision": precision}
    whole = train(tmp_path / "whole", [ExactSnapshot(1)], **options).flat()
    assert torch.equal(whole, train(tmp_path / "bare", **options).flat())
    train(tmp_path / "killed", [ExactSnapshot(1), KillAt(17)], **options)
    assert torch.equal(train(tmp_path / "killed", [ExactSnapshot(1)], ckpt_path="latest", **options).flat(), whole)


class Breaks(nn.Module):
    """Divides by zero from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / (0.0 if x.abs().max() > 50 else 1.0)


def test_the_monitor_names_the_first_bad_module(tmp_path: Path) -> None:
    module = Net()
    module.net = nn.Sequential(nn.Linear(8, 8), Breaks(), nn.Linear(8, 8))
    monitor = GradientHealthMonitor(every_n_steps=1, on_error="warn", dirpath=str(tmp_path))
    batches = [torch.randn(2, 8) * (1e4 if i >= 6 else 1) for i in range(12)]
    train(tmp_path, [monitor], module=module, loader=DataLoader(batches, batch_size=None), accelerator="cuda")
    assert monitor.alerts and "net.1" in monitor.alerts[0].message, [a.message for a in monitor.alerts]
