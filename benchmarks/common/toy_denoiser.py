"""A latent denoiser of 0.4 M parameters, its synthetic latents and its loss: small enough for many fine-tunings."""
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

TIMESTEPS = 1000
ALPHA_BAR = torch.cos((torch.arange(TIMESTEPS) + 0.5) / TIMESTEPS * math.pi / 2) ** 2


class Latents:
    """Latents [n, 16, 4] of ten classes from a random two-layer decoder; `mix` is its share if `other` is given."""

    def __init__(self, seed: int, other: Latents | None = None, mix: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = torch.randn(10, 16, generator=generator)
        self.first = torch.randn(24, 128, generator=generator) / 24**0.5
        self.second = torch.randn(128, 64, generator=generator) / 128**0.5 * 1.6
        if other is not None:
            self.first = (1 - mix) ** 0.5 * other.first + mix**0.5 * self.first
            self.second = (1 - mix) ** 0.5 * other.second + mix**0.5 * self.second

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return noisy latents, their noise, timesteps and classes."""
        label = torch.randint(10, (count,), generator=generator)
        hidden = torch.cat([torch.randn(count, 8, generator=generator), self.classes[label]], 1)
        latents = (torch.tanh(hidden @ self.first) @ self.second).view(count, 16, 4)
        timestep = torch.randint(TIMESTEPS, (count,), generator=generator)
        noise = torch.randn(latents.shape, generator=generator)
        signal = ALPHA_BAR[timestep][:, None, None]
        return signal.sqrt() * latents + (1 - signal).sqrt() * noise, noise, timestep.float(), label


class Block(nn.Module):
    """Self-attention and feed-forward under a condition's scale and shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff1, self.ff2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulation(condition)[:, None].chunk(2, -1)
        q, k, v = self.to_qkv(self.norm1(x) * (1 + scale) + shift).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.to_out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.ff2(F.gelu(self.ff1(self.norm2(x))))


class Denoiser(nn.Module):
    """Predicts the noise of 16 latent tokens from their timestep and class."""

    def __init__(self, width: int = 96, blocks: int = 3) -> None:
        super().__init__()
        self.conv_in, self.position = nn.Linear(4, width), nn.Parameter(0.1 * torch.randn(16, width))
        self.time1, self.time2, self.label = nn.Linear(64, width), nn.Linear(width, width), nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.conv_out = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        angle = timestep[:, None] * torch.exp(torch.arange(32) * (-math.log(1e4) / 32))
        time_ = self.time2(F.silu(self.time1(torch.cat([angle.sin(), angle.cos()], 1))))
        condition = F.silu(time_ + self.label(label))
        hidden = self.conv_in(x) + self.position
        for block in self.blocks:
            hidden = block(hidden, condition)
        out: Tensor = self.conv_out(self.norm(hidden))
        return out


def loss_of(model: nn.Module, batch: tuple[Tensor, ...], parameters: dict[str, Tensor] | None = None) -> Tensor:
    """Return the mean squared error of the predicted noise, with `parameters` instead of the model's if given."""
    noisy, noise, timestep, label = batch
    predicted = functional_call(model, parameters or dict(model.named_parameters()), (noisy, timestep, label))
    return F.mse_loss(predicted, noise)


@torch.no_grad()
def evaluate(model: nn.Module, data: Latents) -> float:
    """Return the loss on 4096 samples that no training saw."""
    batches = (data.sample(1024, torch.Generator().manual_seed(99 + i)) for i in range(4))
    return statistics.mean(loss_of(model, batch).item() for batch in batches)


def pretrain() -> dict[str, Tensor]:
    """Return the weights that every fine-tuning starts from."""
    torch.manual_seed(0)
    model, data, generator = Denoiser(), Latents(0), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1500)
    for _ in range(1500):
        loss_of(model, data.sample(64, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict()
