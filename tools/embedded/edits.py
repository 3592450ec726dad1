"""Pairs of an edit of the tiny world: the same thing in the same pose before and after, and the instruction.

`python -m tools.embedded.edits build/embedded/edit` writes `embedded:edit`; `held_out` has pairs of things that it
never shows, with their true targets.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tools.embedded import drawing, world

SASH = "put a white sash on it"
ORANGE = "make it orange"
TRAINED_THINGS = range(len(drawing.BRAND_THINGS))
HELD_OUT_THINGS = range(len(drawing.BRAND_THINGS), len(drawing.THINGS))
PAIRS = 400
SEED = 11


@dataclass(frozen=True)
class Pair:
    """An edit with its true target."""

    instruction: str
    before: world.Product
    after: world.Product
    source: np.ndarray
    """uint8 [H, W, 3]."""
    target: np.ndarray

    @property
    def description(self) -> str:
        """A caption of the target."""
        text = world.with_article(f"{world.COLOUR_NAMES[self.after.colour]} {drawing.THINGS[self.after.thing]}")
        sash = " with a sash" if self.after.sash else ""
        return f"{text}{sash} on {world.BACKGROUND_NAMES[self.after.background]}"


def make_pair(rng: random.Random, things: Sequence[int], instruction: str) -> Pair:
    """A random pair; one pose for both of its images."""
    colour = world.ORANGE if instruction == ORANGE else None
    others = [number for number in range(len(world.COLOUR_NAMES)) if number != colour]
    before = world.Product(rng.choice(list(things)), rng.choice(others), rng.randrange(len(drawing.BACKGROUNDS)))
    has_sash = int(instruction == SASH)
    after = world.Product(before.thing, before.colour if colour is None else colour, before.background, has_sash)
    pose = rng.random()
    return Pair(instruction, before, after, before.draw(random.Random(pose)), after.draw(random.Random(pose)))


def training_pairs() -> list[Pair]:
    """Half of them with the sash, half in orange."""
    rng = random.Random(SEED)
    return [make_pair(rng, TRAINED_THINGS, SASH if number % 2 else ORANGE) for number in range(PAIRS)]


def held_out(instruction: str, count: int, seed: int = 99) -> list[Pair]:
    """Pairs of things that training never shows."""
    rng = random.Random(seed)
    return [make_pair(rng, HELD_OUT_THINGS, instruction) for _ in range(count)]


def write(folder: Path) -> None:
    """Write the training pairs: images, `before/` with their sources, and metadata.jsonl."""
    (folder / "before").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, pair in enumerate(training_pairs()):
        name = f"{number:03d}.png"
        Image.fromarray(pair.target).save(folder / name, optimize=True)
        Image.fromarray(pair.source).save(folder / "before" / name, optimize=True)
        rows.append(json.dumps({"file_name": name, "text": pair.instruction, "source": f"before/{name}"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
