"""A model whose gradients are given as input, and its training in a plain torch loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.gradient_sync import GradientCompressor

SHAPES: dict[str, tuple[int, ...]] = {
    "first": (33, 47),  # 1551 values: a last block of integers and of energies that are not full
    "bias": (47,),
    "second": (64, 40),
    "third": (16, 8, 3, 3),
    "tail": (40,),
}
SMALL = ("bias", "tail")
"""Parameters that travel in eight bits in most modes, unless protected."""
MODES = (
    *("dense", "bf16", "int8", "int4", "int3", "ternary", "sparse", "sparse_int8", "sparse_int4"),
    *("two_four", "local"),
)
MakeGradients = Callable[[int, int], dict[str, Tensor]]


class Given(nn.Module):
    """`forward(gradients)` has exactly these gradients; a parameter that is not among them goes unused."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtypes: Mapping[str, torch.dtype] = {}) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtypes.get(name, torch.float32))))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.get_parameter(n) * g).sum().float() for n, g in gradients.items()]).sum()


def make_gradients(step: int, rank: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """Other numbers for each step and rank, of very different sizes from row to row."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    gradients = {}
    for name, shape in shapes.items():
        rows = torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator).exp()
        gradients[name] = torch.randn(shape, generator=generator) * rows
    return gradients


def make_round_gradients(step: int, rank: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """Eighths between -1 and 1: their sums are exact in bfloat16."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randint(-8, 9, shape, generator=generator).float() / 8 for name, shape in shapes.items()}


class Training:
    """Given under DDP and a GradientCompressor, with SGD at a rate of 1: a step is minus the gradient."""

    def __init__(
        self,
        ddp: Mapping[str, Any] = {},
        *,
        module: nn.Module | None = None,
        accumulate: int = 1,
        scaler: Any = None,
        sync_mode: Any = "overlap",
        **options: Any,
    ) -> None:
        self.module = Given() if module is None else module
        self.ddp = DistributedDataParallel(self.module, **ddp)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 1.0)
        self.compressor = GradientCompressor(**options)
        self.compressor.hook_into_model(self.ddp, self.optimizer, scaler)
        self.accumulate = accumulate
        if accumulate > 1:
            self.compressor.enable_gradient_accumulation(accumulate, sync_mode)

    def step(self, *micro_batches: Mapping[str, Tensor]) -> bool:
        """One step of the optimizer, unless the gradients were not finite."""
        self.optimizer.zero_grad()
        for gradients in micro_batches:
            (self.ddp(gradients) / len(micro_batches)).backward()
        finite = self.compressor.finish_step()
        if finite:
            self.optimizer.step()
        return finite

    def steps(self, rank: int, numbers: Sequence[int], make: MakeGradients = make_gradients) -> list[Tensor]:
        """The parameters after each of the steps of these numbers."""
        after = []
        for number in numbers:
            self.step(*[make(number + 100 * k, rank) for k in range(self.accumulate)])
            after.append(self.flat())
        return after

    def flat(self) -> Tensor:
        return torch.cat([p.detach().float().reshape(-1) for p in self.module.parameters()])


def poisoned(gradients: dict[str, Tensor], name: str, at: int, value: float = math.nan) -> dict[str, Tensor]:
    """These gradients with one value replaced."""
    changed = gradients[name].clone()
    changed.view(-1)[at] = value
    return gradients | {name: changed}


def residuals_of(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """The residuals in a rank's state, by name, float64 [values of the parameter]."""
    residuals = {name: torch.zeros(math.prod(shape), dtype=torch.float64) for name, shape in shapes.items()}
    for name, part in state["residuals"].items():
        residuals[name][part["start"] : part["start"] + part["values"].numel()] = part["values"].double()
    return residuals


def refusal(call: Callable[[], Any]) -> str:
    """The error that a call ends with, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
