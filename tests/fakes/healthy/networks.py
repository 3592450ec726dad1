"""Small networks of common kinds."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, CLASSES = 48, 12, 5


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU, norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(a, b))
        if i < len(widths) - 2:
            layers += [nn.BatchNorm1d(b)] * norm + [act()] + [nn.Dropout(dropout)] * (dropout > 0)
    return nn.Sequential(*layers)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.second(F.relu(self.norm_1(self.first(x)))))
        return F.relu(x + y)


def resnet(width: int = 12) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), Residual(width), nn.MaxPool2d(2), Residual(width), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(width, CLASSES),
    )  # fmt: skip


class Recurrent(nn.Module):
    """Next-token prediction."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 32) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(VOCABULARY, width), kind(width, width, batch_first=True)  # type: ignore[arg-type]
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.cell(self.table(x))[0])
        return y


class LanguageModel(nn.Module):
    """A causal transformer; `is_tied` shares its table with its head."""

    def __init__(self, is_tied: bool, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.randn(LENGTH - 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if is_tied:
            nn.init.normal_(self.table.weight, std=0.05)
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=self.places.dtype)
        y: Tensor = self.head(self.layers(self.table(x) + self.places, mask=mask, is_causal=True))
        return y


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        y = self.layers(torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1) + self.places)
        out: Tensor = self.head(self.norm(y[:, 0]))
        return out


def autoencoder() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1),
    )  # fmt: skip


def unet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 2, 1),
    )  # fmt: skip


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 32, 8), mlp(4, 32, 16)

    def loss(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
        return ((self.decoder(z) - x).square().sum(-1) + 0.1 * kl).mean()


class Flow(nn.Module):
    """Affine coupling layers; its loss, a negative log likelihood, goes below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp(1, 24, 2, act=nn.Tanh) for _ in range(3))

    def loss(self, x: Tensor) -> Tensor:
        log_scale = torch.zeros(len(x))
        for part in self.parts:
            a, b = x.chunk(2, dim=-1)
            scale, shift = part(a).chunk(2, dim=-1)
            x, log_scale = torch.cat([b * scale.tanh().exp() + shift, a], -1), log_scale + scale.tanh().sum(-1)
        return (0.5 * x.square().sum(-1) - log_scale).mean()


class Experts(nn.Module):
    """A mixture of which each row asks the best two."""

    def __init__(self, width: int = 16, count: int = 4) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, count), nn.ModuleList(mlp(width, 32, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.router(x).softmax(-1).topk(2, dim=-1)
        share = torch.zeros(len(x), len(self.experts)).scatter(1, which, best)
        return torch.stack([expert(x) for expert in self.experts], -1).mul(share[:, None]).sum(-1)


class TwoTowers(nn.Module):
    """Pictures and captions into one space, with a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = mlp(16, 32, 8), mlp(16, 32, 8), nn.Parameter(torch.tensor(2.0))

    def loss(self, x: Tensor) -> Tensor:
        a, b = (F.normalize(t, dim=-1) for t in (self.left(x), self.right(x + 0.3 * torch.randn_like(x))))
        logits, own = self.scale.exp() * a @ b.T, torch.arange(len(x))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class Factors(nn.Module):
    """Users and things by their tables, each batch touching few rows."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.users, self.things = (nn.Embedding(100, 8, sparse=is_sparse) for _ in range(2))

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.users(pairs[:, 0]) * self.things(pairs[:, 1])).sum(-1)
