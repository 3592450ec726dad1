"""PartialWindowScaling: what Lightning's step sees in a partial last window and in full ones; its former name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_aigc.callbacks import PartialWindowScaling

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLES = torch.linspace(0, 1, 10).view(5, 2)
"""Five micro-batches: with accumulation 3 the last window has two."""


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.seen: list[Tensor] = []

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch_NC).sum().square()

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> None:
        assert self.weight.grad is not None
        self.seen.append(self.weight.grad.clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def gradients(root: Path, *callbacks: PartialWindowScaling) -> list[Tensor]:
    module = Plain()
    Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=3, callbacks=list(callbacks), default_root_dir=root,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, DataLoader(SAMPLES, batch_size=1))  # fmt: skip
    return module.seen


def test_a_short_window_is_the_mean_of_what_it_has_before_clipping(tmp_path: Path) -> None:
    weight = torch.tensor([0.3, -0.2], requires_grad=True)
    loss = torch.stack([(weight * sample).sum().square() for sample in SAMPLES[3:]]).mean()
    (wanted,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(gradients(tmp_path, PartialWindowScaling())[1], wanted)
    torch.testing.assert_close(gradients(tmp_path)[1], wanted * 2 / 3)  # what Lightning does


def test_full_windows_keep_their_bits(tmp_path: Path) -> None:
    assert torch.equal(gradients(tmp_path, PartialWindowScaling())[0], gradients(tmp_path)[0])


def test_the_effective_batch_size_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        gradients(tmp_path, PartialWindowScaling())
    assert "effective batch size: 3 samples a step: 1 in a batch x 3 batches x 1 rank(s)" in caplog.text
