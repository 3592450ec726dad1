"""Two small diffusion trainings for the health monitor: the embedded Stable Diffusion and a network of a few layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_aigc.diffusion import StableDiffusionLoRA

CHANNELS, SIDE, TEXT_WIDTH = 4, 8, 96


class LoRALinear(nn.Module):
    """A frozen linear layer and its LoRA, named as peft names them."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        self.scaling = {"default": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return out


class Block(nn.Module):
    """Norm, two linear layers around a SiLU, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up: nn.Module = nn.Linear(width, 2 * width)
        self.down: nn.Module = nn.Linear(2 * width, width)
        self.extra: nn.Module = nn.Identity()  # where tests put a fault

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.extra(torch.nn.functional.silu(self.up(self.norm(x)))))
        return out


class Denoiser(LightningModule):
    """Learns to predict the noise in mixed pairs of rows; its loss depends on the timestep, which it tells.

    Args:
        kind: full trains everything; lora trains a LoRA on each block's `up` and `down`.
    """

    num_train_timesteps = 1000

    def __init__(self, kind: str = "full", learning_rate: float = 1e-3, width: int = 16, seed: int = 3) -> None:
        super().__init__()
        seed_everything(seed, verbose=False)
        self.learning_rate = learning_rate
        self.inlet = nn.Linear(CHANNELS + 1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.outlet = nn.Linear(width, CHANNELS)
        if kind == "lora":
            self.requires_grad_(False)
            for block in self.blocks:
                block.up, block.down = LoRALinear(block.up), LoRALinear(block.down)  # type: ignore[arg-type]
        self.last_example_losses: Tensor | None = None
        self.last_timesteps: Tensor | None = None

    def training_step(self, batch_BSC: Tensor, batch_idx: int) -> Tensor:
        t_B = torch.randint(0, self.num_train_timesteps, (len(batch_BSC),))
        part_B11 = (t_B / self.num_train_timesteps).view(-1, 1, 1)
        noise = torch.randn_like(batch_BSC)
        noisy = (1 - part_B11) * batch_BSC + part_B11 * noise
        x = torch.cat([noisy, part_B11.expand(*noisy.shape[:2], 1)], dim=-1).to(self.inlet.weight.dtype)
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        loss_B = (self.outlet(x).float() - noise).square().mean(dim=(1, 2))
        self.last_example_losses, self.last_timesteps = loss_B.detach(), t_B
        return loss_B.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.learning_rate)


class LeanSD(StableDiffusionLoRA):
    """The embedded Stable Diffusion, without a run's default callbacks."""

    def configure_callbacks(self) -> list[Callback]:
        return []


class FullSD(LeanSD):
    """The same with every weight of the U-Net trained, and no LoRA."""

    def configure_model(self) -> None:
        if self.components is None:
            super().configure_model()
            unet = self.loaded().denoiser
            unet.unload_lora()
            unet.requires_grad_(True).float()


def sd_batches(count: int, rows: int = 2) -> list[dict[str, Any]]:
    """Batches of made-up latents and text embeddings, in the shapes of the embedded model."""
    generator = torch.Generator().manual_seed(1)
    moments = [torch.randn(rows, 2 * CHANNELS, 2 * SIDE, 2 * SIDE, generator=generator) for _ in range(count)]
    texts = [torch.randn(rows, 16, TEXT_WIDTH, generator=generator) for _ in range(count)]
    return [{"latent_moments": m, "prompt_embeds": t} for m, t in zip(moments, texts, strict=True)]


def batches(count: int, rows: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, SIDE, CHANNELS, generator=generator) for _ in range(count)]


def fit(
    module: LightningModule, callbacks: Sequence[Callback], steps: int = 40, data: Any = None, **arguments: Any
) -> Trainer:
    """Train quietly on a CPU for so many optimizer steps."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": steps,
    }
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = Trainer(**(quiet | arguments), callbacks=list(callbacks))
    seed_everything(5, verbose=False)
    trainer.fit(module, DataLoader(data if data is not None else batches(8), batch_size=None), ckpt_path=ckpt_path)
    return trainer
