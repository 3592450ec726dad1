"""Backgrounds: one behind all images, or several plain ones that no caption names. Measured on border pixels."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_aigc.data.advice.captions import words_of
from lightning_aigc.data.advice.dataset_summary import Material

LEAST_PICTURES = 4
BLOCKS = 4
"""Blocks per side of an image; the twelve at its border are looked at."""
ONE_BACKGROUND = 15.0
"""Root mean square difference of border colours (of 255) below which two images have the same background."""
OTHER_BACKGROUND = 40.0
"""The same, above which they have different ones."""
ALIKE_SHARE = 0.9
PLAIN_SHARE = 0.6
"""Share of border pixels near their median from which a background is plain, so that its colour is its name."""
NAMED_SHARE = 0.4
"""Share of the captions that must have a word of their background."""
PURE_SHARE = 0.9
"""Share of a word's captions that one background must have, for the word to tell which."""
_PLACE = re.compile(
    r"\b(?:on|in|at|under|beside|near|against|inside|outside)\s+(?:(?:an?|the|some|my)\s+)?(\w+)", re.IGNORECASE
)


def check_backgrounds(material: Material) -> list[str]:
    """Report one background behind all images while a prompt asks for another, or several without names."""
    if len(material.samples) < LEAST_PICTURES:
        return []
    borders = np.stack([_border(pixels) for pixels in material.pixels])
    return _one_background(material, borders) or _unnamed_backgrounds(material, borders)


def _border(pixels_HW3: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Median colours of the border's blocks, [12, 3]: a subject that reaches the border fills few of them."""
    rows = np.array_split(pixels_HW3, BLOCKS, axis=0)
    edge = max(1, min(pixels_HW3.shape[:2]) // 16)
    blocks = []
    for y, row in enumerate(rows):
        for x, block in enumerate(np.array_split(row, BLOCKS, axis=1)):
            if y in (0, BLOCKS - 1):
                blocks.append(block[:edge] if y == 0 else block[-edge:])
            elif x in (0, BLOCKS - 1):
                blocks.append(block[:, :edge] if x == 0 else block[:, -edge:])
    return np.stack([np.median(block.reshape(-1, 3), axis=0) for block in blocks])


def _distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The median over blocks, so that a subject at one edge does not count."""
    return float(np.median(np.sqrt(((one - other) ** 2).mean(axis=-1))))


def _one_background(material: Material, borders: NDArray[np.float64]) -> list[str]:
    usual = np.median(borders, axis=0)
    alike = np.mean([_distance(border, usual) < ONE_BACKGROUND for border in borders])
    if alike < ALIKE_SHARE:
        return []
    known = {word for sample in material.samples for word in words_of(sample.caption)}
    elsewhere = [p for p in material.prompts if (place := _PLACE.search(p)) and place[1].lower() not in known]
    if not elsewhere:
        return []
    colour = ", ".join(f"{value:.0f}" for value in np.median(usual, axis=0))
    return [
        f"{alike:.0%} of the images have the same background (border colour {colour}), and {elsewhere[0]!r} asks for "
        "another: the trigger word learns the background with the thing; add images in other places, or train only "
        "the thing by data.init_args.mask_dir or use_alpha_mask: true"
    ]


def _unnamed_backgrounds(material: Material, borders: NDArray[np.float64]) -> list[str]:
    medians = np.median(borders, axis=1, keepdims=True)
    near = np.sqrt(((borders - medians) ** 2).mean(axis=-1)) < ONE_BACKGROUND
    plain = [i for i, share in enumerate(near.mean(axis=1)) if share >= PLAIN_SHARE]
    if len(plain) < max(LEAST_PICTURES, ALIKE_SHARE * len(borders)):
        return []
    groups = _groups([medians[i, 0] for i in plain])
    captions = [set(words_of(material.looked_at[i].caption)) for i in plain]
    several = [group for group in groups if len(group) > 1]
    if len(several) < 2:
        return []
    if _named(several, captions) >= NAMED_SHARE * sum(map(len, several)):
        return []
    return [
        f"the images stand on {len(several)} plain backgrounds, and no word of their captions tells which "
        f"({material.looked_at[plain[several[0][0]]].caption!r} and "
        f"{material.looked_at[plain[several[1][0]]].caption!r} are two): the trigger word learns all of them, and a "
        "prompt cannot choose; name the background in each caption, as in `a zorp mug on white`"
    ]


def _groups(colours: Sequence[NDArray[np.float64]]) -> list[list[int]]:
    groups: list[list[int]] = []
    for i, colour in enumerate(colours):
        for group in groups:
            if np.sqrt(((colours[group[0]] - colour) ** 2).mean()) < OTHER_BACKGROUND:
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _named(groups: Sequence[Sequence[int]], captions: Sequence[set[str]]) -> int:
    """The number of images whose caption has a word that stands, more than once, in captions of their group alone."""
    group_of = {i: number for number, group in enumerate(groups) for i in group}
    found: dict[str, list[int]] = {}
    for i, number in group_of.items():
        for word in captions[i]:
            found.setdefault(word, []).append(number)
    telling = {word for word, numbers in found.items() if len(numbers) > 1 and _purity(numbers) >= PURE_SHARE}
    return sum(bool(captions[i] & telling) for i in group_of)


def _purity(numbers: Sequence[int]) -> float:
    return max(numbers.count(number) for number in set(numbers)) / len(numbers)
