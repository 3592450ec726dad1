"""Cost of a step: operators and waits, which do not grow with the number of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fakes.models.denoisers import fit
from fakes.processes.launches import Operators, Waits
from lightning_aigc.callbacks.health import GradientHealthMonitor, monitor
from lightning_aigc.callbacks.health.parameter_stats import Sampler, sample_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Many(LightningModule):
    """So many trained and frozen weights, of sizes above and below what is sampled of each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [(40, 40), (4, 8)] * (count // 2)
        self.trained = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.kept = nn.ParameterList(nn.Parameter(torch.randn(shape), requires_grad=False) for shape in shapes)

    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return torch.stack([p.square().mean() for p in self.trained]).sum() * batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trained.parameters(), lr=1e-2)


class Counted(GradientHealthMonitor):
    """Counts operators and waits of each step, and how often remedies were put together."""

    def __init__(self) -> None:
        super().__init__(page=False)
        self.counts: list[tuple[int, int]] = []

    def on_train_batch_start(self, *given: Any) -> None:
        self.operators, self.waits = Operators(), Waits()
        with self.waits, self.operators:
            super().on_train_batch_start(*given)

    def on_before_backward(self, *given: Any) -> None:
        with self.waits, self.operators:
            super().on_before_backward(*given)

    def on_before_optimizer_step(self, *given: Any) -> None:
        with self.waits, self.operators:
            super().on_before_optimizer_step(*given)

    def on_train_batch_end(self, *given: Any) -> None:
        with self.waits, self.operators:
            super().on_train_batch_end(*given)
        self.counts.append((self.operators.count, self.waits.count))


@pytest.mark.parametrize("count", [8, 80])
def test_a_step_waits_once_and_launches_the_same_for_few_and_many_weights(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    of = monitor.Remedies.of
    monkeypatch.setattr(monitor.Remedies, "of", lambda *given: made.append(given) or of(*given))
    watching = Counted()
    fit(Many(count), [watching], 25, [torch.ones(1)] * 25, default_root_dir=str(tmp_path))
    between, look = watching.counts[4], watching.counts[19]
    assert between == (4, 1)
    assert look[1] == 1 and look[0] <= 50
    assert len(made) == 1  # at the end, for what the last step left


def test_a_sampler_gives_what_sampling_anew_gives_when_values_or_storage_change() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(40, 40), torch.randn(4, 8), torch.randn(3), torch.zeros(0), torch.randn(2, 64, 9, 9)]
    tensors[4] = tensors[4].to(memory_format=torch.channels_last)
    sampler = Sampler(tensors)
    assert torch.equal(sampler.rows(), sample_rows(tensors))
    tensors[0].add_(1)
    tensors[1].data = torch.randn(4, 8)
    assert torch.equal(sampler.rows(), sample_rows(tensors))
    assert torch.equal(sampler.rows()[2, :6], tensors[2].repeat(2))
    assert not sampler.rows()[3].any()
