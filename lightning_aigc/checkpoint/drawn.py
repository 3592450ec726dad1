"""The order of an epoch, drawn a second time: under the random states that it was drawn under the first time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.rng import CPU, RandomStates, from_plain, random_states, restore_random_states, to_plain


@dataclass(frozen=True)
class Draws:
    """The random states that drawing samples starts from: the global ones, and those of a loader's own generators."""

    states: RandomStates
    generators: tuple[Tensor, ...] = ()

    @classmethod
    def take(cls, generators: Iterable[torch.Generator] = ()) -> Draws:
        return cls(random_states(CPU), tuple(generator.get_state() for generator in generators))

    def restore(self, generators: Sequence[torch.Generator] = ()) -> None:
        restore_random_states(self.states)
        for generator, state in zip(generators, self.generators, strict=True):
            generator.set_state(state)

    def to_plain(self) -> dict[str, Any]:
        return {"states": to_plain(self.states), "generators": list(self.generators)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Draws:
        return cls(from_plain(plain["states"], CPU), tuple(plain["generators"]))


class Drawn:
    """A loader's index sampler that notes the random states before it is asked, and can be asked as it was then.

    A sampler draws when its iterator is made, or, written as a generator like torch's own, with the first index.
    """

    def __init__(self, sampler: Any, generators: list[torch.Generator]) -> None:
        self.sampler, self.generators = sampler, generators
        self.before: Draws | None = None
        self.at_first: Draws | None = None
        self._again: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._again is not None:
            iter(self.sampler)  # draws what it drew then
            return self._again
        self.before, self.at_first = Draws.take(self.generators), None
        return _Noting(iter(self.sampler), self)

    def draw_again(self, before: Draws, at_first: Draws | None, skip: int) -> None:
        """Draw an epoch as it was drawn, without its first `skip`; iterators have it until `done`."""
        self.before, self.at_first = before, at_first
        before.restore(self.generators)
        again = iter(self.sampler)
        if at_first is None:
            self._again = _Noting(again, self)
            return
        at_first.restore(self.generators)
        drawn = list(islice(again, skip + 1))  # one more than is left out: the first one draws for all
        self._again = chain(drawn[skip:], again)

    def done(self) -> None:
        """From here on each iterator draws an epoch of its own."""
        self._again = None


class _Noting:
    def __init__(self, indices: Iterator[Any], drawn: Drawn) -> None:
        self.indices, self.drawn = indices, drawn
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_first:
            self._is_first, self.drawn.at_first = False, Draws.take(self.drawn.generators)
        return next(self.indices)
