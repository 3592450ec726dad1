"""Each mode against a reference that plays all ranks in one process, and nothing is lost on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.processes.given_gradients import SHAPES, Training, make_gradients, make_round_gradients, residuals_of
from fakes.processes.ranks import run_ranks

STEPS = 5
ORDER = ("third", "second", "first")
"""Compressed parameters, in the order in which they travel."""
RANKS = (2, 4)
MODES = ("int8", "int4", "int3", "sparse", "sparse_int8", "two_four")
Ranks = list[Tensor]


def flatten(gradients: dict[str, Tensor], ranks: int) -> Tensor:
    """The vector that travels: each parameter at a multiple of 256 values, the whole a multiple for each rank."""
    parts = []
    for name in ORDER:
        flat = gradients[name].reshape(-1)
        parts.append(torch.nn.functional.pad(flat, (0, -len(flat) % 256)))
    vector = torch.cat(parts)
    return torch.nn.functional.pad(vector, (0, -len(vector) % (256 * ranks)))


def split(vector: Tensor) -> dict[str, Tensor]:
    parts, start = {}, 0
    for name in ORDER:
        length = math.prod(SHAPES[name])
        parts[name] = vector[start : start + length]
        start += -(-length // 256) * 256
    return parts


def rounded(x: Tensor, bits: int) -> Tensor:
    """Decoded values of x: blocks of 32 on a grid whose lowest level is the entry of largest magnitude."""
    half = 2 ** (bits - 1)
    out = torch.zeros_like(x)
    for start in range(0, len(x), 32):
        block = x[start : start + 32]
        extreme = block.max() if block.max() > -block.min() else block.min()
        scale = (-extreme / half).bfloat16().float()
        if scale.abs() >= 1e-30:
            out[start : start + 32] = (block * (1 / scale)).round().clamp(-half, half - 1) * scale
    return out


def two_hops(e: Ranks, bits: int) -> tuple[Tensor, Ranks]:
    """Rank k adds up part k of what all sent of it, rounded but for its own, and sends the sum, rounded anew."""
    ranks = len(e)
    parts = [list(x.chunk(ranks)) for x in e]
    left = [list(x.chunk(ranks)) for x in e]
    total = []
    for k in range(ranks):
        mine = parts[k][k].clone()
        for others in (range(k), range(k + 1, ranks)):
            if others:
                mine += sum(rounded(parts[r][k], bits) for r in others)
            for r in others:
                left[r][k] = parts[r][k] - rounded(parts[r][k], bits)
        total.append(rounded(mine, bits))
        left[k][k] = mine - total[k]
    return torch.cat(total), [torch.cat(x) for x in left]


def in_bfloat16(x: Ranks) -> tuple[Tensor, Ranks]:
    wires = [one.bfloat16() for one in x]
    total = wires[0]
    for wire in wires[1:]:
        total = total + wire
    return total.float(), [one - wire for one, wire in zip(x, wires, strict=True)]


class Sparse:
    """Blocks of 256 by the energy of the last sum of energies, and a quarter of the places by age."""

    def __init__(self, bits: int | None, density: float = 0.25) -> None:
        self.bits, self.density = bits, density

    def observe(self, total: Tensor) -> None:
        self.energy = torch.linalg.vector_norm(total.view(-1, 256), dim=1) ** 2
        self.age = [0] * len(self.energy)

    def chosen(self) -> list[int]:
        blocks = [-(-math.prod(SHAPES[name]) // 256) for name in ORDER]
        blocks[-1] += len(self.energy) - sum(blocks)  # padding belongs to the last
        chosen, start = [], 0
        for count in blocks:
            places = math.ceil(self.density * count)
            oldest = math.ceil(places / 4)
            waiting = sorted(range(start, start + count), key=lambda b: (-float(self.energy[b]), b))
            layer = [waiting.pop(0) for _ in range(places - oldest)]
            waiting.sort(key=lambda b: (-self.age[b], b))
            chosen += layer + waiting[:oldest]
            start += count
        return sorted(chosen)

    def reduce(self, e: Ranks) -> tuple[Tensor, Ranks]:
        chosen = self.chosen()
        values = [x.view(-1, 256)[chosen].reshape(-1) for x in e]
        energies, _ = in_bfloat16([torch.linalg.vector_norm(x.view(-1, 256), dim=1) ** 2 for x in e])
        if self.bits is None:
            sent, kept = in_bfloat16(values)
        else:
            pad = -len(values[0]) % (256 * len(e))
            sent, kept = two_hops([torch.nn.functional.pad(v, (0, pad)) for v in values], self.bits)
            sent, kept = sent[: len(values[0])], [k[: len(values[0])] for k in kept]
        total, left = torch.zeros_like(e[0]), [x.clone() for x in e]
        total.view(-1, 256)[chosen] = sent.view(-1, 256)
        for x, k in zip(left, kept, strict=True):
            x.view(-1, 256)[chosen] = k.view(-1, 256)
        self.energy = energies
        self.age = [0 if block in chosen else age + 1 for block, age in enumerate(self.age)]
        return total, left


class TwoOfFour:
    """Two of four neighbours: the one of largest expected size, and the one that waited longest."""

    def observe(self, total: Tensor) -> None:
        self.seen, self.age = total.abs().bfloat16().float(), torch.zeros_like(total)

    def reduce(self, e: Ranks) -> tuple[Tensor, Ranks]:
        chosen = []
        for start in range(0, len(self.seen), 4):
            four = range(start, start + 4)
            largest = max(four, key=lambda i: (float(self.seen[i] * (1 + self.age[i])), -i))
            oldest = max((i for i in four if i != largest), key=lambda i: (float(self.age[i]), -i))
            chosen += [largest, oldest]
        padding = -len(chosen) % (256 * len(e))
        sent, kept = two_hops([torch.nn.functional.pad(x[chosen], (0, padding)) for x in e], 8)
        sent, kept = sent[: len(chosen)], [k[: len(chosen)] for k in kept]
        total, left = torch.zeros_like(e[0]), [x.clone() for x in e]
        total[chosen] = sent
        for x, k in zip(left, kept, strict=True):
            x[chosen] = k
        self.age += 1
        self.age[chosen], self.seen[chosen] = 0, sent.abs().bfloat16().float()
        return total, left


class Quantized:
    def __init__(self, bits: int) -> None:
        self.bits = bits

    def reduce(self, e: Ranks) -> tuple[Tensor, Ranks]:
        return two_hops(e, self.bits)


REFERENCES: dict[str, Callable[[], Any]] = {
    "int8": lambda: Quantized(8),
    "int4": lambda: Quantized(4),
    "int3": lambda: Quantized(3),
    "sparse": lambda: Sparse(None),
    "sparse_int8": lambda: Sparse(8),
    "two_four": TwoOfFour,
}


def work(rank: int) -> dict[str, Any]:
    results = {}
    for mode in MODES:
        for make in (make_gradients, make_round_gradients):
            run = Training(mode=mode, strategy="uniform")
            after, residuals = [], []
            for step in range(STEPS):
                before = {name: p.detach().clone() for name, p in run.module.named_parameters()}
                run.step(make(step, rank))
                after.append({name: before[name] - p.detach() for name, p in run.module.named_parameters()})
                residuals.append(residuals_of(run.compressor.state_dict()))
            results[mode, make.__name__] = after, residuals
    return results


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return {ranks: run_ranks(work, ranks, tmp_path_factory.mktemp(f"ranks{ranks}")) for ranks in RANKS}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_that_of_the_reference(mode: str, ranks: int, done: dict[int, list[Any]]) -> None:
    reference = REFERENCES[mode]()
    residuals = [torch.zeros_like(flatten(make_gradients(0, 0), ranks)) for _ in range(ranks)]
    parameters = {name: torch.zeros(SHAPES[name]).view(-1) for name in ORDER}
    # How four ranks' bfloat16 add up is the ring's affair: numbers whose sums are exact, until energies' sums choose.
    by_sums = ranks > 2 and not mode.startswith("int")
    make, steps = (make_round_gradients, 2) if by_sums else (make_gradients, STEPS)
    for step in range(steps):
        e = [o.add(flatten(make(step, r), ranks), alpha=1 / ranks) for r, o in enumerate(residuals)]
        if step == 0 and hasattr(reference, "observe"):
            total, residuals = sum(e[1:], e[0]), [torch.zeros_like(x) for x in e]
            reference.observe(total)
        else:
            total, residuals = reference.reduce(e)
        for name, expected in split(total).items():
            got = done[ranks][0][mode, make.__name__][0][step][name].view(-1)
            before, parameters[name] = parameters[name], parameters[name] - expected
            wanted = before - parameters[name]  # as float32 keeps a step of SGD
            assert torch.equal(got, wanted), (step, name)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", MODES)
def test_residuals_and_what_was_sent_add_up_to_the_gradients(mode: str, ranks: int, done: dict[int, list[Any]]) -> None:
    sent = {name: torch.zeros(math.prod(SHAPES[name]), dtype=torch.float64) for name in ORDER}
    came = {name: torch.zeros_like(total) for name, total in sent.items()}
    for step in range(STEPS):
        for name in ORDER:
            sent[name] += done[ranks][0][mode, "make_round_gradients"][0][step][name].double().view(-1)
            for rank in range(ranks):
                came[name] += make_round_gradients(step, rank)[name].double().view(-1) / ranks
            residuals = sum(rank[mode, "make_round_gradients"][1][step][name] for rank in done[ranks])
            torch.testing.assert_close(sent[name] + residuals, came[name], rtol=0, atol=2e-6)
    assert any(
        residuals.abs().max() > 1e-3 for residuals in done[ranks][0][mode, "make_round_gradients"][1][-1].values()
    )
