"""Quantizers with fewer bits than int3, for a gradient of a twentieth of its bytes: losses of the toy denoiser.

The fine-tuning of gradient_quality.py on four ranks with AdamW at dense's best rate. A rank's gradient is quantized,
the sums are quantized again, and every rank decodes the same. Parameters with one dimension or fewer than 1024 values
are not quantized, which stands for eight bits. Tried are: fewer levels, the levels of least error for a Gaussian, a
Hadamard rotation with random signs before them, stochastic rounding, ternary values, signs, decaying error feedback,
fewer bits for the reduce (where the ranks' errors average out) than for the gather, and 1-bit Adam (Tang et al.,
arXiv:2102.02888): after some dense steps Adam's second moment is frozen, and the first moment is sent.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.few_bits [--cases "ternary, rotated" ...] [--seeds 0 1]
        [--output FILE]
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.func import grad, vmap

from benchmarks import RESULTS
from benchmarks.common.rows import keep_row
from benchmarks.common.toy_denoiser import Denoiser, Latents, evaluate, loss_of, pretrain
from benchmarks.gradient_sync.gradient_quality import batches_of_ranks
from lightning_aigc.gradient_sync.modes.ternary import hadamard

RANKS, RATE, ROTATED = 4, 1e-3, 256
BETA = 0.9
"""AdamW's decay of the first moment."""
SCALE_BITS = 16
ROWS = RESULTS / "studies" / "few_bits.jsonl"


def uniform(bits: int) -> Callable[[Tensor, torch.Generator], Tensor]:
    """The package's integers: the entry of largest magnitude is exact."""

    def quantized(blocks: Tensor, generator: torch.Generator) -> Tensor:
        half = 2 ** (bits - 1)
        highest, lowest = blocks.amax(1, True), blocks.amin(1, True)
        scale = (torch.where(highest > -lowest, highest, lowest) * (-1 / half)).bfloat16().float()
        inverse = torch.where(scale.abs() < 1e-30, 0, 1 / scale)
        rounded: Tensor = (blocks * inverse).round().clamp(-half, half - 1) * scale
        return rounded

    return quantized


def gaussian(levels: list[float]) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Levels of least squared error for a Gaussian, in units of a block's root mean square (Lloyd, Max)."""
    values = torch.tensor(sorted([-level for level in levels if level] + levels))
    bounds = (values[1:] + values[:-1]) / 2

    def quantized(blocks: Tensor, generator: torch.Generator) -> Tensor:
        size = blocks.square().mean(1, True).sqrt().bfloat16().float()
        nearest: Tensor = values[torch.bucketize(blocks / size.clamp(min=1e-30), bounds)]
        return nearest * size

    return quantized


def stochastic_ternary(blocks: Tensor, generator: torch.Generator) -> Tensor:
    """TernGrad (Wen et al., arXiv:1705.07878): unbiased."""
    most = blocks.abs().amax(1, True)
    chance = blocks.abs() / most.clamp(min=1e-30)
    return torch.where(torch.rand(chance.shape, generator=generator) < chance, blocks.sign() * most, 0)


FOUR, TERNARY, SIGN = gaussian([0.4528, 1.51]), gaussian([0.0, 1.2240]), gaussian([0.7979])


@dataclass(frozen=True)
class Case:
    quantize: Callable[[Tensor, torch.Generator], Tensor]
    bits: float
    block: int
    feedback: float = 1.0
    """Share of the rounding error that is added to the next gradient."""
    is_rotated: bool = False
    dense_steps: int = 0
    first: Callable[[Tensor, torch.Generator], Tensor] | None = None
    """Quantizer of a rank's gradient, if it differs from that of the sum."""
    first_bits: float = 0.0
    is_momentum: bool = False
    """1-bit Adam: the first moment is sent instead of the gradient."""

    @property
    def ratio(self) -> float:
        """Bytes of a step that is not dense, over float32's."""
        bits = self.bits if self.first is None else (self.bits + self.first_bits) / 2
        return (bits + SCALE_BITS / self.block) / 32


CASES = {
    "int3 (ships)": Case(uniform(3), 3, 32),
    "int3, no feedback": Case(uniform(3), 3, 32, 0.0),
    "int2": Case(uniform(2), 2, 32),
    "four levels": Case(FOUR, 2, 128),
    "four levels, rotated": Case(FOUR, 2, 128, is_rotated=True),
    "four levels, rotated, feedback 0.5": Case(FOUR, 2, 128, 0.5, is_rotated=True),
    "four levels, rotated, no feedback": Case(FOUR, 2, 128, 0.0, is_rotated=True),
    "ternary": Case(TERNARY, 1.6, 256),
    "ternary, rotated": Case(TERNARY, 1.6, 256, is_rotated=True),
    "ternary, rotated, feedback 0.9": Case(TERNARY, 1.6, 256, 0.9, is_rotated=True),
    "ternary, rotated, feedback 0.5": Case(TERNARY, 1.6, 256, 0.5, is_rotated=True),
    "ternary, rotated, no feedback": Case(TERNARY, 1.6, 256, 0.0, is_rotated=True),
    "ternary, rotated, no feedback, 40 dense steps first": Case(TERNARY, 1.6, 256, 0.0, True, 40),
    "stochastic ternary, no feedback": Case(stochastic_ternary, 1.6, 64, 0.0),
    "signs, rotated": Case(SIGN, 1, 256, is_rotated=True),
    "signs, rotated, no feedback": Case(SIGN, 1, 256, 0.0, is_rotated=True),
    "signs in, four levels back, rotated, no feedback": Case(FOUR, 2, 256, 0.0, True, first=SIGN, first_bits=1),
    "1-bit Adam, ternary, rotated": Case(TERNARY, 1.6, 256, 1.0, True, 40, is_momentum=True),
    "1-bit Adam, signs, rotated": Case(SIGN, 1, 256, 1.0, True, 40, is_momentum=True),
    "1-bit Adam, ternary, rotated, no feedback": Case(TERNARY, 1.6, 256, 0.0, True, 40, is_momentum=True),
}


class Channel:
    """Sum four ranks' flat gradients [ranks, N] in two quantized hops."""

    def __init__(self, case: Case, length: int) -> None:
        self.case, self.owed_RN, self.owed_N = case, torch.zeros(RANKS, length), torch.zeros(length)
        self.generator = torch.Generator().manual_seed(3)
        self.signs_N = torch.randint(0, 2, (length,), generator=self.generator) * 2.0 - 1
        self.rotation = hadamard(ROTATED)

    def total(self, shares_RN: Tensor) -> Tensor:
        wanted_RN = shares_RN + self.case.feedback * self.owed_RN
        first = self.case.first or self.case.quantize
        sent_RN = torch.stack([self.decoded(share_N, first) for share_N in wanted_RN])
        self.owed_RN = wanted_RN - sent_RN
        sum_N = sent_RN.sum(0) + self.case.feedback * self.owed_N
        decoded_N = self.decoded(sum_N, self.case.quantize)
        self.owed_N = sum_N - decoded_N
        return decoded_N

    def decoded(self, x_N: Tensor, quantize: Callable[[Tensor, torch.Generator], Tensor]) -> Tensor:
        """Quantize and decode a vector."""
        case = self.case
        if case.is_rotated:
            x_N = ((x_N * self.signs_N).view(-1, ROTATED) @ self.rotation).view(-1)
        x_N = quantize(x_N.view(-1, case.block), self.generator).view(-1)
        if case.is_rotated:
            x_N = (x_N.view(-1, ROTATED) @ self.rotation.T).view(-1) * self.signs_N
        return x_N


def moment_of(optimizer: torch.optim.AdamW, model: Denoiser, names: Iterable[str], padding: int) -> Tensor:
    """Flat first moment of AdamW for these parameters."""
    moments = [optimizer.state[model.get_parameter(name)]["exp_avg"].flatten() for name in names]
    return torch.cat([*moments, torch.zeros(padding)])


@torch.no_grad()
def step_with_moments(
    optimizer: torch.optim.AdamW, model: Denoiser, means: Mapping[str, Tensor], large: Collection[str]
) -> None:
    """Step large parameters by the first moments in `means` over the second moments that they have, others as AdamW."""
    options = optimizer.param_groups[0]
    for name in large:
        parameter = model.get_parameter(name)
        state = optimizer.state[parameter]
        state["exp_avg"].copy_(means[name])
        taken = float(state["step"])
        size = (state["exp_avg_sq"] / (1 - options["betas"][1] ** taken)).sqrt() + options["eps"]
        parameter.mul_(1 - options["lr"] * options["weight_decay"])
        parameter.sub_(options["lr"] * means[name] / size)
    for name, parameter in model.named_parameters():
        parameter.grad = None if name in large else means[name].clone()
    optimizer.step()


def fine_tune(start: dict[str, Tensor], seed: int, case: Case | None) -> float:
    """Return the loss on new samples after fine-tuning; without a case gradients are sent in float32."""
    model, data = Denoiser(), Latents(1000, Latents(0))
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    rank_gradients = vmap(grad(lambda p, *batch: loss_of(model, batch, p)), in_dims=(None, 0, 0, 0, 0))
    large = {n: p.numel() for n, p in model.named_parameters() if p.ndim > 1 and p.numel() >= 1024}
    padding = -sum(large.values()) % (RANKS * 1024)
    channel = None if case is None else Channel(case, sum(large.values()) + padding)
    for step, batch in enumerate(batches_of_ranks(data, seed)):
        gradients = rank_gradients({n: p.detach() for n, p in model.named_parameters()}, *batch)
        means = {n: g.mean(0) for n, g in gradients.items()}
        if channel is not None and case is not None and step >= case.dense_steps:
            parts = [gradients[n].reshape(RANKS, -1) for n in large] + [torch.zeros(RANKS, padding)]
            shares_RN = torch.cat(parts, 1)
            if case.is_momentum:
                shares_RN = BETA * moment_of(optimizer, model, large, padding) + (1 - BETA) * shares_RN
            total_N = channel.total(shares_RN / RANKS)
            for name, mean in zip(large, total_N.split([*large.values(), padding]), strict=False):
                means[name] = mean.view_as(means[name])
            if case.is_momentum:
                step_with_moments(optimizer, model, means, set(large))
                continue
        for name, parameter in model.named_parameters():
            parameter.grad = means[name].clone()
        optimizer.step()
    return evaluate(model, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--output", type=Path, default=ROWS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = pretrain()
    dense = [fine_tune(start, seed, None) for seed in options.seeds]
    for name in options.cases:
        losses = [fine_tune(start, seed, CASES[name]) for seed in options.seeds]
        row = {
            "benchmark": "few_bits", "torch": torch.__version__, "case": name,
            "seeds": options.seeds, "sent_ratio": round(CASES[name].ratio, 4), "losses": [round(x, 5) for x in losses],
            "loss_to_dense": round(statistics.mean(losses) / statistics.mean(dense), 4),
        }  # fmt: skip
        keep_row(row, options.output)


if __name__ == "__main__":
    main()
