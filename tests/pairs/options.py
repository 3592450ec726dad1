"""Options that users combine, the pairs of them that are refused, and arrays of rows that hold every other pair."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
Key = tuple[tuple[str, Any], ...]

FACTORS: dict[str, list[Any]] = {
    "family": [
        "sd", "sdxl", "sd3", "flux", "flux2", "qwen_image", "z_image", "flux2_dev", "chroma", "krea2", "flux_kontext",
        "qwen_image_edit", "qwen_image_edit_plus",
    ],
    "method": ["lora", "dora", "full", "controlnet", "controlnet_lora", "lokr"],
    "strategy": ["auto", "ddp", "npu_sparse", "npu_sparse_local", "zero_1", "zero_2", "zero_3"],
    "device": ["cpu", "npu"],
    "precision": ["bf16-mixed", "32-true", "bf16-true", "16-mixed"],
    "memory": ["off", "stock", "balanced", "lean", "max", "budget"],
    "graph": [False, True],
    "weights": ["pipeline", "file", "single"],
    "base": ["whole", "int8", "fp8", "nf4", "budget"],
    "preserve": ["none", "class", "blank"],
    "streamed": [False, True],
    "adapter": [False, True],
    "continued": [False, True],
    "optimizer": ["AdamW", "Adafactor", "Prodigy", "AdamWScheduleFree", "SGD"],
    "rate": ["constant", "cosine", "adaptive", "plateau"],
    "caches": ["none", "latents", "both"],
    "source": ["folder", "shards", "pairs"],
    "class_images": [False, True],
    "held_out": [False, True],
    "masks": [False, True],
    "captions": ["plain", "shuffled"],
    "crops": ["center", "random"],
    "objective": ["plain", "other"],
    "ema": [False, True],
    "text_encoder": [False, True],
    "checkpointing": [False, True],
    "accumulation": [1, 2],
    "clipping": [0.0, 1.0],
    "guard": [False, True],
    "step_files": ["all", "one"],
    "ending": ["whole", "killed"],
    "export": ["none", "kohya", "diffusers", "merge"],
}  # fmt: skip
U_NETS = ("sd", "sdxl")
SEEN = ("qwen_image_edit", "qwen_image_edit_plus")
"""Families whose text encoder sees the sources of an edit."""
NEED_SOURCES = ("flux_kontext", *SEEN)
TAKE_SOURCES = ("sd3", "flux2", "flux2_dev")
"""Families that edit, and draw from text alone too."""
LARGE_SOURCES = ("flux2", "flux2_dev")
"""Families whose pipeline draws from sources of 64 pixels a side and more."""
NO_CONTROLNET = ("flux2", "flux2_dev", "chroma", "krea2", *NEED_SOURCES)
CONTROL = ("controlnet", "controlnet_lora")
SHARDED = ("zero_2", "zero_3")

PLAIN: Row = {name: values[0] for name, values in FACTORS.items()}
"""A row that works; a refused pair is put into it."""


def completed(pair: Row) -> Row:
    """A whole row around a pair of options, which works but for the pair."""
    row = PLAIN | pair
    if row["family"] in NEED_SOURCES and "source" not in pair:
        row["source"] = "pairs"
    if "family" not in pair and (row["source"] == "pairs" or row["weights"] == "file"):
        row["family"] = "sd3"
    return row


def refused() -> Iterator[Row]:
    """Every pair of options that ends in one sentence before the first step."""
    for family in FACTORS["family"]:
        if family not in U_NETS:
            yield {"family": family, "method": "dora"}
            yield {"family": family, "method": "controlnet_lora"}
            yield {"family": family, "text_encoder": True}
            yield {"family": family, "weights": "single"}
        if family in NO_CONTROLNET:
            yield {"family": family, "method": "controlnet"}
        if family not in (*NEED_SOURCES, *TAKE_SOURCES):
            yield {"family": family, "source": "pairs"}
    yield from ({"family": family, "source": "folder"} for family in NEED_SOURCES)
    yield from ({"family": family, "caches": "latents"} for family in SEEN)
    yield from ({"family": family, "weights": "file"} for family in U_NETS)
    yield from ({"method": method, "weights": "file"} for method in ("dora", "controlnet_lora"))  # of U-Nets
    yield {"text_encoder": True, "weights": "file"}
    yield {"captions": "shuffled", "caches": "both"}
    yield {"captions": "shuffled", "preserve": "blank"}  # a dropped caption is the blank one
    yield from ({"crops": "random", "caches": caches} for caches in ("latents", "both"))
    yield {"source": "pairs", "class_images": True}
    yield {"source": "pairs", "method": "controlnet"}
    yield {"method": "lokr", "text_encoder": True}
    yield {"family": "chroma", "checkpointing": True}  # diffusers' checkpointing leaves out its text's mask
    yield {"family": "sd3", "export": "kohya"}  # its layers have no other names than diffusers'
    yield {"method": "dora", "continued": True}
    yield from ({"streamed": True, "strategy": strategy} for strategy in SHARDED)
    yield {"streamed": True, "checkpointing": True}
    yield {"streamed": True, "memory": "budget"}
    yield {"streamed": True, "graph": True}
    yield {"streamed": True, "adapter": True}
    yield {"optimizer": "AdamWScheduleFree", "rate": "cosine"}
    for strategy in ("zero_1", "zero_2", "zero_3"):
        yield {"strategy": strategy, "optimizer": "Prodigy"}
    yield {"strategy": "zero_1", "optimizer": "AdamWScheduleFree"}
    for strategy in SHARDED:
        yield {"strategy": strategy, "optimizer": "Adafactor"}
        yield {"strategy": strategy, "precision": "16-mixed"}
    yield from ({"method": method, "source": "shards"} for method in CONTROL)
    for preserve in ("class", "blank"):
        yield {"preserve": preserve, "text_encoder": True}
        yield {"preserve": preserve, "source": "shards"}
        yield {"preserve": preserve, "source": "pairs"}
    yield {"device": "npu", "strategy": "ddp"}  # Lightning's DDP opens a CUDA stream
    yield {"device": "npu", "base": "fp8"}
    for base in ("int8", "fp8", "nf4", "budget"):
        yield {"method": "dora", "base": base}
        yield {"method": "full", "base": base}


def without_effect() -> Iterator[Row]:
    """Pairs that no config can spell: the second option has no argument in the first one's class."""
    yield {"memory": "stock", "graph": True}
    for method in CONTROL:
        yield {"method": method, "text_encoder": True}
    for method in (*CONTROL, "full"):
        yield from ({"method": method, "preserve": preserve} for preserve in ("class", "blank"))
        yield from ({"method": method, name: True} for name in ("streamed", "adapter", "continued"))
        yield from ({"method": method, "export": target} for target in ("kohya", "diffusers", "merge"))
    for caches in ("none", "latents"):
        yield {"source": "shards", "caches": caches}  # shards hold both caches
    yield {"source": "shards", "class_images": True}  # they are in the shards, or nowhere
    yield {"source": "shards", "text_encoder": True}
    yield {"source": "shards", "masks": True}  # as masks, captions and crops are
    yield {"source": "shards", "captions": "shuffled"}
    yield {"source": "shards", "crops": "random"}
    for family in NEED_SOURCES:
        yield {"family": family, "source": "shards"}  # shards have no sources
        yield {"family": family, "class_images": True}  # nor have class images
        yield from ({"family": family, "preserve": preserve} for preserve in ("class", "blank"))
    yield from ({"source": "pairs", "method": method} for method in ("dora", "controlnet_lora"))  # of U-Nets
    yield {"source": "pairs", "text_encoder": True}
    yield {"source": "pairs", "weights": "single"}  # of U-Nets
    yield {"caches": "both", "text_encoder": True}
    for family in set(FACTORS["family"]) - set(U_NETS):  # their tiny ControlNets have fewer blocks than ranks
        yield {"family": family, "method": "controlnet", "strategy": "zero_3"}


def allowed_pairs() -> list[Row]:
    """Every pair of options that is neither refused nor without effect."""
    excluded = [*refused(), *without_effect()]
    pairs = [
        {first: one, second: other}
        for first, second in itertools.combinations(FACTORS, 2)
        for one, other in itertools.product(FACTORS[first], FACTORS[second])
    ]
    return [pair for pair in pairs if pair not in excluded]


def covering_array(seed: int) -> list[Row]:
    """Rows that hold every allowed pair; another seed gives other rows.

    Greedy: a row begins with a pair that no row holds yet, and takes for each other option the value that adds most
    such pairs. allpairspy 2.5.1 leaves one pair in four out where pairs are excluded.
    """
    order = random.Random(seed)
    excluded = [*refused(), *without_effect()]
    missing = {_key(pair) for pair in allowed_pairs()}
    rows = []
    while missing:
        row = None
        while row is None:
            row = _row_from(dict(order.choice(sorted(missing, key=str))), missing, excluded, order)
        missing -= {_key(dict(pair)) for pair in itertools.combinations(row.items(), 2)}
        rows.append({name: row[name] for name in FACTORS})
    return rows


def _row_from(row: Row, missing: set[Key], excluded: list[Row], order: random.Random) -> Row | None:
    """A whole row that begins with a pair; None where an option has no allowed value left."""
    for name in order.sample([name for name in FACTORS if name not in row], len(FACTORS) - len(row)):
        best = None
        for value in order.sample(FACTORS[name], len(FACTORS[name])):
            if any(pair.items() <= (row | {name: value}).items() for pair in excluded):
                continue
            gain = sum(_key({name: value, other: known}) in missing for other, known in row.items())
            if best is None or gain > best[0]:
                best = (gain, value)
        if best is None:
            return None
        row = row | {name: best[1]}
    return row


def _key(pair: Row) -> Key:
    return tuple(sorted(pair.items()))
