"""A rate a thousand times too high is an error within 30 steps with the default arguments, whatever the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_aigc.callbacks.health import GradientHealthMonitor

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*num_workers")
WORDS = 40


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 16), nn.Linear(32, WORDS)
        self.lstm = nn.LSTM(16, 32, 2, batch_first=True)

    def forward(self, tokens_NL: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(tokens_NL))[0])


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x_NC: Tensor) -> Tensor:
        return self.base(x_NC) + self.lora_B(self.lora_A(x_NC))


def regression(net: nn.Module, step: int) -> Tensor:
    x_NC = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
    return F.mse_loss(net(x_NC), x_NC.roll(1, 1))


def next_words(net: nn.Module, step: int) -> Tensor:
    first_N = torch.randint(0, WORDS, (8, 1), generator=torch.Generator().manual_seed(step))
    tokens_NL = (first_N + torch.arange(16)) % WORDS
    return F.cross_entropy(net(tokens_NL[:, :-1]).flatten(0, 1), tokens_NL[:, 1:].flatten())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], Tensor], float]] = {
    "perceptron": (perceptron, regression, 1e-3),
    "lstm": (Tagger, next_words, 3e-3),
    "lora": (Adapted, regression, 1e-3),
}


class Training(LightningModule):
    def __init__(self, net: nn.Module, loss: Callable[[Any, int], Tensor], optimizer: Any) -> None:
        super().__init__()
        self.net, self.loss, self.make_optimizer = net, loss, optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def alerts(module: Training, steps: int, folder: Path) -> list[Any]:
    """The warnings and errors of a training with the default arguments."""
    monitor = GradientHealthMonitor(page=False)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder), callbacks=[monitor],
    )  # fmt: skip
    trainer.fit(module, DataLoader(range(steps)))  # type: ignore[arg-type]
    return [alert for alert in monitor.alerts if alert.level != "info"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_a_rate_a_thousand_times_too_high_is_an_error_and_a_good_one_is_silent(
    name: str, seed: int, tmp_path: Path
) -> None:
    make, loss, rate = MODELS[name]
    found = {}
    for times in (1, 1000):
        torch.manual_seed(seed)
        adamw = lambda parameters, rate=rate * times: torch.optim.AdamW(parameters, rate)  # noqa: E731
        found[times] = alerts(Training(make(), loss, adamw), 30, tmp_path)
    assert found[1] == []
    first = found[1000][0]
    assert (first.check, first.level, first.step) == ("update_ratio", "error", 10)
    assert first.remedy == f"learning_rate: {100 * rate:g}"  # a tenth


def test_an_optimizer_that_stands_still_at_its_minimum_is_not_told_to_go_faster(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lbfgs = Training(perceptron(), lambda net, _: regression(net, 0), lambda p: torch.optim.LBFGS(p, lr=0.5))
    assert alerts(lbfgs, 40, tmp_path) == []
