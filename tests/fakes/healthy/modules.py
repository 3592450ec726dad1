"""LightningModules that train a network with a loss in different ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

MakeOptimizer = Callable[[Any], Any]
Loss = Callable[[nn.Module, Any], Tensor]


class Training(LightningModule):
    """Minimises `loss(net, batch)`."""

    def __init__(self, net: nn.Module, loss: Loss, optimizer: MakeOptimizer, warmup_and_decay: int = 0) -> None:
        super().__init__()
        self.net, self.loss, self.make, self.schedule_steps = net, loss, optimizer, warmup_and_decay

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make([p for p in self.parameters() if p.requires_grad])
        if not self.schedule_steps:
            return optimizer
        rate = max(group["lr"] for group in optimizer.param_groups)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=self.schedule_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WithEma(Training):
    """Keeps a moving average of its weights, which is frozen and moves."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn()
        )

    def configure_optimizers(self) -> Any:
        return self.make(self.net.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.net)


class WithTeacher(Training):
    """Learns from a moving average of itself, written by hand: a frozen copy that moves every step."""

    def __init__(self, net: nn.Module, optimizer: MakeOptimizer) -> None:
        super().__init__(net, self._agree, optimizer)
        self.teacher, self.predictor = frozen_copy(net), nn.Linear(8, 8)

    def _agree(self, net: nn.Module, x_BC: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x_BC + 0.1 * torch.randn_like(x_BC))
        return 2 - 2 * F.cosine_similarity(self.predictor(net(x_BC)), wanted).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.02)


class Adversarial(LightningModule):
    """Two optimizers by hand: a generator against a critic, `critic_steps` of the critic to one of the generator."""

    def __init__(self, generator: nn.Module, critic: nn.Module, is_wasserstein: bool, critic_steps: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = generator, critic
        self.is_wasserstein, self.critic_steps = is_wasserstein, critic_steps

    def training_step(self, real_BC: Tensor, number: int) -> None:
        of_generator, of_critic = self.optimizers()  # type: ignore[misc, attr-defined]
        fake_BC = self.generator(torch.randn(len(real_BC), 8))
        self.toggle_optimizer(of_critic)
        self._step(of_critic, self._critic_loss(real_BC, fake_BC.detach()))
        self.untoggle_optimizer(of_critic)
        if (number + 1) % self.critic_steps == 0:
            self.toggle_optimizer(of_generator)
            score = self.critic(fake_BC)
            self._step(of_generator, -score.mean() if self.is_wasserstein else F.softplus(-score).mean())
            self.untoggle_optimizer(of_generator)

    def _critic_loss(self, real_BC: Tensor, fake_BC: Tensor) -> Tensor:
        real, fake = self.critic(real_BC), self.critic(fake_BC)
        if not self.is_wasserstein:
            return F.softplus(-real).mean() + F.softplus(fake).mean()
        part = torch.rand(len(real_BC), 1)
        mixed = (part * real_BC + (1 - part) * fake_BC).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return fake.mean() - real.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        if self.is_wasserstein:
            return [torch.optim.RMSprop(part.parameters(), 1e-3) for part in (self.generator, self.critic)]
        return [torch.optim.Adam(part.parameters(), 2e-4, (0.5, 0.999)) for part in (self.generator, self.critic)]


class Distilled(Training):
    """A student of a frozen teacher."""

    def __init__(self, net: nn.Module, teacher: nn.Module, optimizer: MakeOptimizer) -> None:
        super().__init__(
            net,
            lambda net, x: F.kl_div(net(x).log_softmax(-1), teacher(x).softmax(-1), reduction="batchmean"),
            optimizer,
        )
        self.teacher = teacher.requires_grad_(False)


class Lion(torch.optim.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2."""

    def __init__(
        self, parameters: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"]).sub_(momentum.lerp(p.grad, 1 - fast).sign(), alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - slow)
        return loss


def frozen_copy(net: nn.Module) -> nn.Module:
    return copy.deepcopy(net).requires_grad_(False)
