"""The table of healthy trainings: module, data and number of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fakes.healthy import networks as n
from fakes.healthy.modules import (
    Adversarial,
    Distilled,
    Lion,
    MakeOptimizer,
    Training,
    WithEma,
    WithTeacher,
    frozen_copy,
)

STEPS = 300
ROWS = 16


@dataclass(frozen=True)
class Kind:
    """One healthy training."""

    name: str
    make: Callable[[], LightningModule]
    data: Callable[[int], Any] = field(repr=False)
    """A batch, by its number; the random state is that of the run's seed and this number."""
    batches: int = 0
    """Different batches; 0 means that none comes twice."""
    steps: int = STEPS
    trainer: dict[str, Any] = field(default_factory=dict)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.values.append(float(loss.detach()))


def fit_healthy(kind: Kind, seed: int, callbacks: list[Any], folder: Path) -> list[float]:
    """Train, and give the losses."""
    seed_everything(1000 + seed, verbose=False)
    module, losses = kind.make(), Losses()
    numbers = [
        i % kind.batches if kind.batches else i
        for i in range(kind.steps * kind.trainer.get("accumulate_grad_batches", 1))
    ]
    made: dict[int, Any] = {}
    for i in numbers:
        if i not in made:
            torch.manual_seed(100_000 * (seed + 1) + i)
            made[i] = kind.data(i)
    torch.manual_seed(seed)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder), callbacks=[*callbacks, losses], **kind.trainer,
    )  # fmt: skip
    trainer.fit(module, DataLoader([made[i] for i in numbers], batch_size=None))
    return losses.values


# Data: each has something to be learned, the same for every seed of a run.


def _teacher(seed: int, *widths: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return frozen_copy(n.mlp(*widths, act=nn.Tanh))


_REGRESSION, _CLASSES = _teacher(11, 16, 32, 8), _teacher(12, 16, 32, n.CLASSES)


def rows(_: int, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 16)
    return x, 2 * _REGRESSION(x) + noise * torch.randn(ROWS, 8)


def labelled(_: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 16)
    return x, (4 * _CLASSES(x)).argmax(-1)


def pictures(_: int) -> tuple[Tensor, Tensor]:
    """Noise around one of five patterns."""
    label = torch.randint(0, n.CLASSES, (ROWS,))
    places = torch.arange(16) / 16
    waves = torch.sin(2 * torch.pi * (label + 1)[:, None] * places)
    return waves[:, None, None, :].expand(-1, 3, 16, -1) + 0.5 * torch.randn(ROWS, 3, 16, 16), label


def tokens(_: int) -> Tensor:
    """Each token is the last one times three and some, now and then another."""
    x = torch.randint(0, n.VOCABULARY, (ROWS, 1))
    for _ in range(n.LENGTH - 1):
        following = torch.where(torch.rand(ROWS, 1) < 0.9, 3 * x[:, -1:] + 1, torch.randint(0, n.VOCABULARY, (ROWS, 1)))
        x = torch.cat([x, following % n.VOCABULARY], dim=1)
    return x


def curved(_: int) -> Tensor:
    """Points around a curve in 16 dimensions."""
    angle = torch.linspace(0, 3, 16) + 6 * torch.rand(ROWS, 1)
    return torch.sin(angle) + 0.1 * torch.randn(ROWS, 16)


def plane(_: int) -> Tensor:
    return torch.randn(64, 2) @ torch.tensor([[1.0, 0.8], [0.0, 0.4]]) + torch.tensor([1.0, -1.0])


def pairs(_: int) -> tuple[Tensor, Tensor]:
    pair = torch.randint(0, 100, (4 * ROWS, 2))
    return pair, torch.cos(pair[:, 0] * 0.7) * torch.cos(pair[:, 1] * 0.3) + 0.1 * torch.randn(len(pair))


# Losses


def mse(net: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(net(batch[0]).float(), batch[1])


def l1(net: nn.Module, batch: Any) -> Tensor:
    return F.l1_loss(net(batch[0]), batch[1])


def summed(net: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(net(batch[0]), batch[1], reduction="sum")


def cross_entropy(net: nn.Module, batch: Any, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(net(batch[0]).float(), batch[1], label_smoothing=smoothing)


def next_token(net: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(net(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())


def back(net: nn.Module, batch: Any) -> Tensor:
    """Reconstruction."""
    x = batch if isinstance(batch, Tensor) else batch[0]
    return F.mse_loss(net(x), x)


def segments(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), (batch[0].mean(dim=1) > 0).long())


def hinge(net: nn.Module, batch: Any) -> Tensor:
    """Zero, and its gradient too, once every row is right by a margin."""
    return F.multi_margin_loss(net(batch[0]), batch[1])


def own(net: Any, batch: Any) -> Tensor:
    return net.loss(batch)  # type: ignore[no-any-return]


def gaussian(net: nn.Module, batch: Any) -> Tensor:
    """A likelihood, below zero where the fit is close."""
    mean, log_variance = net(batch[0]).chunk(2, dim=-1)
    return F.gaussian_nll_loss(mean, batch[1], log_variance.exp())


def noise_of(net: nn.Module, x: Tensor) -> Tensor:
    """Diffusion on vectors."""
    part, noise = torch.rand(len(x), 1), torch.randn_like(x)
    return F.mse_loss(net(torch.cat([(1 - part) * x + part * noise, part], dim=-1)), noise)


def reinforce(net: nn.Module, batch: Any) -> Tensor:
    """Policy gradient on a bandit with contexts; the loss changes its sign."""
    policy = torch.distributions.Categorical(logits=net(batch[0]))
    action = policy.sample()
    reward = (action == batch[1]).float()
    return -((reward - reward.mean()) * policy.log_prob(action)).mean() - 0.01 * policy.entropy().mean()


# Optimizers


def adam(rate: float = 1e-3, **given: Any) -> MakeOptimizer:
    return lambda parameters: torch.optim.AdamW(parameters, rate, **given)


def sgd(rate: float = 0.05, momentum: float = 0.9) -> MakeOptimizer:
    return lambda parameters: torch.optim.SGD(parameters, rate, momentum=momentum)


def train(net: Callable[[], nn.Module], loss: Any, optimizer: MakeOptimizer, decay: int = 0) -> Callable[[], Training]:
    return lambda: Training(net(), loss, optimizer, decay)


def with_frozen_trunk() -> Training:
    net = n.mlp(16, 64, 32, n.CLASSES, norm=True)
    net[:6].requires_grad_(False)
    return Training(net, cross_entropy, adam(1e-2))


def with_lora() -> Training:
    from fakes.models.denoisers import LoRALinear

    net = n.mlp(16, 64, 64, 8)
    for i in (0, 2, 4):
        net[i].requires_grad_(False)
    net[2] = LoRALinear(net[2])  # type: ignore[arg-type]
    net[4] = LoRALinear(net[4])  # type: ignore[arg-type]
    return Training(net, mse, adam())


net = functools.partial
REGRESSOR, CLASSIFIER = net(n.mlp, 16, 64, 64, 8), net(n.mlp, 16, 64, 64, n.CLASSES)
TRANSFORMER, TIED = net(n.LanguageModel, False), net(n.LanguageModel, True)
LONG = 900

KINDS = [
    Kind("MLP regression, AdamW", train(REGRESSOR, mse, adam()), rows),
    Kind("MLP regression, SGD", train(REGRESSOR, mse, sgd()), rows),
    Kind("MLP regression, summed loss", train(REGRESSOR, summed, adam()), rows),
    Kind("MLP regression, L1", train(REGRESSOR, l1, adam()), rows),
    Kind("MLP regression, Gaussian likelihood", train(net(n.mlp, 16, 64, 16), gaussian, adam()), rows),
    Kind("MLP regression, Adagrad", train(REGRESSOR, mse, lambda p: torch.optim.Adagrad(p, 1e-2)), rows),
    Kind("MLP regression, Lion", train(REGRESSOR, mse, lambda p: Lion(p, 3e-4)), rows),
    Kind("MLP classification, SGD, one cycle", train(CLASSIFIER, cross_entropy, sgd(0.1), STEPS), labelled),
    Kind("MLP classification, batch norm", train(net(n.mlp, 16, 64, 64, 5, norm=True), cross_entropy, adam()),
         labelled),
    Kind("MLP classification, dropout 0.5", train(net(n.mlp, 16, 64, 64, 5, dropout=0.5), cross_entropy,
         adam()), labelled),
    Kind("MLP classification, hinge", train(CLASSIFIER, hinge, adam(3e-3)), labelled, 8, LONG),
    Kind("MLP, EMA of the weights", lambda: WithEma(n.mlp(16, 64, 8), mse, adam()), rows),
    Kind("MLP, EMA teacher", lambda: WithTeacher(n.mlp(16, 64, 8), adam()), lambda i: rows(i)[0]),
    Kind("MLP, distilled", lambda: Distilled(n.mlp(16, 24, 5), frozen_copy(n.mlp(16, 64, 5)), adam(3e-3)),
         lambda i: rows(i)[0]),
    Kind("MLP, policy gradient", train(CLASSIFIER, reinforce, adam()), labelled),
    Kind("linear regression to its floor, one batch", train(net(nn.Linear, 16, 8), mse, sgd(0.2, 0.5)), rows, 1, LONG),
    Kind("logistic regression, one batch", train(net(nn.Linear, 16, 5), cross_entropy, sgd(0.05)), labelled, 1, LONG),
    Kind("memorising MLP, regression, AdamW", train(REGRESSOR, mse, adam(3e-3, weight_decay=0)), rows, 1, LONG),
    Kind("memorising MLP, regression, SGD", train(REGRESSOR, mse, sgd(0.2)), rows, 1, 2 * LONG),
    Kind("memorising MLP, regression, 16 batches", train(net(n.mlp, 16, 512, 8), mse, adam()), net(rows,
         noise=0), 4, 2 * LONG),
    Kind("memorising MLP, classification, AdamW", train(CLASSIFIER, cross_entropy, adam(1e-2)), labelled, 2, LONG),
    Kind("memorising MLP, classification, SGD", train(CLASSIFIER, cross_entropy, sgd(0.3)), labelled, 2, LONG),
    Kind("memorising MLP, label smoothing", train(CLASSIFIER, net(cross_entropy, smoothing=0.1), adam(3e-3)),
         labelled, 1, LONG),
    Kind("memorising MLP, 16-mixed", train(REGRESSOR, mse, adam(3e-3)), rows, 1, LONG, {"precision": "16-mixed"}),
    Kind("memorising MLP, bf16-mixed", train(REGRESSOR, mse, adam(3e-3)), rows, 1, LONG, {"precision": "bf16-mixed"}),
    Kind("ResNet, SGD", train(n.resnet, cross_entropy, sgd(), STEPS), pictures),
    Kind("ResNet, bf16-mixed", train(n.resnet, cross_entropy, sgd()), pictures, trainer={"precision": "bf16-mixed"}),
    Kind("ResNet, 16-mixed", train(n.resnet, cross_entropy, sgd()), pictures, trainer={"precision": "16-mixed"}),
    Kind("ResNet, memorising", train(n.resnet, cross_entropy, adam(3e-3)), pictures, 2, STEPS),
    Kind("LSTM, clipped by norm", train(net(n.Recurrent, nn.LSTM), next_token, adam(3e-3)), tokens,
         trainer={"gradient_clip_val": 1.0}),
    Kind("GRU, clipped by value", train(net(n.Recurrent, nn.GRU), next_token, adam(3e-3)), tokens,
         trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Kind("ViT, one cycle", train(n.VisionTransformer, cross_entropy, adam(), STEPS), pictures),
    Kind("ViT, bf16-true", train(n.VisionTransformer, cross_entropy, adam()),
         lambda i: (pictures(i)[0].bfloat16(), pictures(i)[1]), trainer={"precision": "bf16-true"}),
    Kind("transformer, language", train(TRANSFORMER, next_token, adam()), tokens),
    Kind("transformer, tied, Lion", train(TIED, next_token, lambda p: Lion(p, 1e-4)), tokens),
    Kind("transformer, memorising", train(TRANSFORMER, next_token, adam(3e-3)), tokens, 1, STEPS),
    Kind("transformer, 16-mixed, accumulate 4", train(TIED, next_token, adam()), tokens, steps=150,
         trainer={"precision": "16-mixed", "accumulate_grad_batches": 4}),
    Kind("autoencoder", train(n.autoencoder, back, adam(3e-3)), pictures),
    Kind("variational autoencoder", train(n.Variational, own, adam(3e-3)), curved),
    Kind("normalizing flow", train(n.Flow, own, adam(3e-3)), plane),
    Kind("segmentation, group norm", train(n.unet, segments, adam(3e-3)), pictures),
    Kind("diffusion on vectors", train(net(n.mlp, 17, 64, 64, 16, act=nn.SiLU), noise_of, adam()), curved),
    Kind("contrastive, learned temperature", train(n.TwoTowers, own, adam(3e-3)), curved),
    Kind("mixture of experts", train(n.Experts, back, adam(3e-3)), curved),
    Kind("embedding tables, Adam", train(net(n.Factors, False), mse, adam(1e-2)), pairs),
    Kind("embedding tables, sparse", train(net(n.Factors, True), mse, lambda p: torch.optim.SparseAdam(p,
         1e-2)), pairs),
    Kind("frozen trunk, trained head", with_frozen_trunk, labelled),
    Kind("LoRA on an MLP", with_lora, rows),
    Kind("GAN", lambda: Adversarial(n.mlp(8, 64, 16), n.mlp(16, 64, 1, act=nn.LeakyReLU), False), curved),
    Kind("Wasserstein GAN, 5 to 1", lambda: Adversarial(n.mlp(8, 64, 16), n.mlp(16, 64, 1, act=nn.LeakyReLU), True, 5),
         curved, steps=600),
]  # fmt: skip
