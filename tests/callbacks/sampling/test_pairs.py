"""Pairs of prompt and seed: each is drawn on one rank, and every rank has all images and scores in their order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fakes.processes.ranks import run_ranks
from lightning_aigc.callbacks.sampling.pairs import make_pairs, sample_on_all_ranks
from lightning_aigc.errors import ConfigError, SamplingTooSlow


class Colours(nn.Module):
    """An image's every value is its seed over 100."""

    device = torch.device("cpu")
    failing_rank = -1
    error: Exception = SamplingTooSlow("an hour")

    def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
        if dist.get_rank() == self.failing_rank:
            raise self.error
        self.drawn = list(zip(prompts, seeds, strict=True))
        return torch.stack([torch.full((3, 4, 6), seed / 100) for seed in seeds])

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)


class Judge:
    """Scores an image by its first value and its prompt's length."""

    names = ("value", "length")

    def scores(self, images: Tensor, pairs: list[tuple[str, int]]) -> dict[str, Tensor]:
        return {"value": images[:, 0, 0, 0], "length": torch.tensor([float(len(prompt)) for prompt, _ in pairs])}


def any_rank(decision: bool, all: bool) -> bool:  # noqa: A002  Lightning's name
    votes = torch.tensor(int(decision))
    dist.all_reduce(votes)
    return bool(votes)


def sample(rank: int, seeds: int, has_judge: bool, failing_rank: int, error: Exception | None = None) -> Any:
    strategy = SimpleNamespace(reduce_boolean_decision=any_rank)
    trainer: Any = SimpleNamespace(global_rank=rank, world_size=dist.get_world_size(), strategy=strategy)
    module: Any = Colours()
    module.failing_rank, module.error = failing_rank, error or module.error
    judge: Any = Judge() if has_judge else None
    try:
        found = sample_on_all_ranks(trainer, module, make_pairs(["a", "bcd"], range(seeds)), judge)
    except (SamplingTooSlow, ConfigError, ZeroDivisionError) as raised:
        return str(raised)
    return getattr(module, "drawn", []), found.images, found.scores


@pytest.mark.parametrize("has_judge", [True, False])
@pytest.mark.parametrize("seeds", [1, 2, 4], ids=lambda seeds: f"{2 * seeds} pairs")
def test_three_ranks_draw_each_pair_once_and_all_have_the_results_in_order(
    seeds: int, has_judge: bool, tmp_path: Path
) -> None:
    """With two pairs the third rank draws none, and must come to every collective."""
    ranks = run_ranks(sample, 3, tmp_path, seeds, has_judge, -1)
    pairs = make_pairs(["a", "bcd"], range(seeds))
    assert [drawn for drawn, *_ in ranks] == [pairs[rank::3] for rank in range(3)]
    for _, images, scores in ranks:
        assert images.shape == (2 * seeds, 3, 4, 6)
        torch.testing.assert_close(images[:, 0, 0, 0], torch.tensor([seed / 100 for _, seed in pairs]))
        if has_judge:
            assert torch.equal(scores["value"], images[:, 0, 0, 0])
            assert scores["length"].tolist() == [len(prompt) for prompt, _ in pairs]
        else:
            assert scores == {}


def test_a_slow_rank_ends_the_sampling_on_every_rank(tmp_path: Path) -> None:
    said = run_ranks(sample, 2, tmp_path, 2, True, 1)
    assert said == ["another rank was too slow", "an hour"]


def test_an_error_of_one_rank_is_raised_on_every_rank(tmp_path: Path) -> None:
    error = ZeroDivisionError("in sample")
    said = run_ranks(sample, 2, tmp_path, 2, True, 1, error)
    assert said[1] == "in sample"
    assert "stopped, and this rank with it: ZeroDivisionError: in sample" in said[0]
