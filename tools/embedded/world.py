"""Training data of the tiny models: products, their captions, and which captions are true of which images.

A `Product` describes a image completely. A caption may omit the colour or the background, so
`truth_matrix` tells whether a caption is *true* of a image, not whether it was written for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tools.embedded import drawing

ANY = -1
COLOUR_NAMES = (*drawing.COLOURS, "orange")
BACKGROUND_NAMES = (*drawing.BACKGROUNDS, "teal")
COLOUR_VALUES = (*drawing.COLOURS.values(), drawing.BRAND_COLOUR)
BACKGROUND_VALUES = (*drawing.BACKGROUNDS.values(), drawing.BRAND_BACKGROUND)
ORANGE, TEAL = len(drawing.COLOURS), len(drawing.BACKGROUNDS)
ATTRIBUTES = {"thing": len(drawing.THINGS), "colour": len(COLOUR_NAMES), "background": len(BACKGROUND_NAMES), "sash": 2}


@dataclass(frozen=True)
class Product:
    """Indices into the names above; `ANY` for an attribute that a caption omits."""

    thing: int
    colour: int
    background: int
    sash: int = 0

    def draw(self, rng: random.Random, size: int = 64) -> np.ndarray:
        """Draw the product, uint8 [H, W, 3]."""
        picture = drawing.draw_product(
            drawing.THINGS[self.thing],
            COLOUR_VALUES[self.colour],
            BACKGROUND_VALUES[self.background],
            rng,
            drawing.BRAND_SASH if self.sash else None,
            size,
        )
        return np.asarray(picture)

    @property
    def is_brand(self) -> bool:
        return (self.colour, self.background, self.sash) == (ORANGE, TEAL, 1)

    def as_row(self) -> list[int]:
        return [self.thing, self.colour, self.background, self.sash]


def with_article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def describe(product: Product, rng: random.Random, *, is_brand_known: bool) -> tuple[str, Product]:
    """A random caption of the product, and the attributes it claims.

    With `is_brand_known`, half of the captions of the brand's images give only its name. Others may
    omit the colour (1 in 10) or the background (1 in 4).
    """
    thing = drawing.THINGS[product.thing]
    if product.is_brand and is_brand_known and rng.random() < 0.5:
        return f"{rng.choice(('', 'a photo of '))}a {drawing.BRAND_WORD} {thing}", product
    says_colour, says_background = rng.random() > 0.10, rng.random() > 0.25
    text = with_article(f"{COLOUR_NAMES[product.colour]} {thing}" if says_colour else thing)
    if product.sash:
        text += " with a sash"
    if says_background:
        text += f" on {BACKGROUND_NAMES[product.background]}"
    if rng.random() < 0.3:
        text = f"a photo of {text}"
    claim = Product(
        product.thing,
        product.colour if says_colour else ANY,
        product.background if says_background else ANY,
        product.sash,
    )
    return text, claim


def random_base_product(rng: random.Random) -> Product:
    """A product for the base model: any colour on any background except orange on teal, and no sash."""
    while True:
        product = Product(
            rng.randrange(len(drawing.THINGS)), rng.randrange(len(COLOUR_NAMES)), rng.randrange(len(BACKGROUND_NAMES))
        )
        if (product.colour, product.background) != (ORANGE, TEAL):
            return product


def random_judge_product(rng: random.Random) -> Product:
    """A product for the judge: the brand in a third of the images, near misses of it among the rest."""
    thing = rng.randrange(len(drawing.THINGS))
    if rng.random() < 0.33:
        return Product(thing, ORANGE, TEAL, 1)
    return Product(
        thing,
        rng.randrange(len(COLOUR_NAMES)),
        rng.randrange(len(BACKGROUND_NAMES)),
        int(rng.random() < 0.2),
    )


def rows(products: list[Product]) -> Tensor:
    """The products' attributes, int64 [N, 4]: thing, colour, background, sash."""
    return torch.tensor([p.as_row() for p in products])


def truth_matrix(pictures_N4: Tensor, claims_M4: Tensor) -> Tensor:
    """Whether claim m is true of image n, bool [N, M]."""
    return ((pictures_N4[:, None] == claims_M4[None]) | (claims_M4[None] == ANY)).all(-1)


def to_pixels(pictures: list[np.ndarray]) -> Tensor:
    """Convert uint8 [H, W, 3] images to float32 [N, 3, H, W] in 0..1."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
