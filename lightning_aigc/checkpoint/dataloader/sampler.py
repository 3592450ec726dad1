"""ReplayableSampler: an epoch's permutation, replayed under the random states that it was drawn under."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.rng import CPU, RandomStates, from_plain, random_states, restore_random_states, to_plain


@dataclass(frozen=True)
class LoaderRNG:
    """The random states that a loader draws from: the global ones and those of its generators."""

    states: RandomStates
    generators: tuple[Tensor, ...] = ()

    @classmethod
    def capture(cls, generators: Iterable[torch.Generator] = ()) -> LoaderRNG:
        return cls(random_states(CPU), tuple(generator.get_state() for generator in generators))

    def restore(self, generators: Sequence[torch.Generator] = ()) -> None:
        restore_random_states(self.states)
        for generator, state in zip(generators, self.generators, strict=True):
            generator.set_state(state)

    def to_plain(self) -> dict[str, Any]:
        return {"states": to_plain(self.states), "generators": list(self.generators)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> LoaderRNG:
        return cls(from_plain(plain["states"], CPU), tuple(plain["generators"]))


class ReplayableSampler:
    """Records the RNG state before each epoch so that its permutation can be replayed.

    A sampler draws when its iterator is made, or, if it is a generator like torch's, with the first index.
    """

    def __init__(self, sampler: Any, generators: list[torch.Generator]) -> None:
        self.sampler, self.generators = sampler, generators
        self.before: LoaderRNG | None = None
        self.at_first: LoaderRNG | None = None
        self._replay: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._replay is not None:
            iter(self.sampler)  # advances the random states as the first time
            return self._replay
        self.before, self.at_first = LoaderRNG.capture(self.generators), None
        return _Recording(iter(self.sampler), self)

    def replay(self, before: LoaderRNG, at_first: LoaderRNG | None, skip: int) -> None:
        """Replay an epoch without its first `skip` indices; iterators yield it until `end_replay`."""
        self.before, self.at_first = before, at_first
        before.restore(self.generators)
        indices = iter(self.sampler)
        if at_first is None:
            self._replay = _Recording(indices, self)
            return
        at_first.restore(self.generators)
        first = list(islice(indices, skip + 1))  # at least one index, because the first draws the permutation
        self._replay = chain(first[skip:], indices)

    def end_replay(self) -> None:
        """Let each iterator draw a new epoch again."""
        self._replay = None


class _Recording:
    def __init__(self, indices: Iterator[Any], sampler: ReplayableSampler) -> None:
        self.indices, self.sampler = indices, sampler
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_first:
            self._is_first, self.sampler.at_first = False, LoaderRNG.capture(self.sampler.generators)
        return next(self.indices)
