"""Draw folders with one mistake each, and the same folders without it, from the embedded model's objects."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from lightning_aigc.embedded import resolve

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.embedded import drawing, world

Row = tuple[str, str, Image.Image]
"""File name, caption, image."""
PICTURES = 36


def make(name: str, folder: Path) -> Path:
    """Write the folder of this name into `folder` if it does not exist. Returns: its path."""
    target = folder / name
    if not target.exists():
        _FOLDERS[name](target)
    return target


def names() -> list[str]:
    return sorted(_FOLDERS)


def write_pictures(folder: Path, rows: Sequence[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, _, picture in rows:
        picture.save(folder / name)
    lines = [json.dumps({"file_name": name, "text": caption}) for name, caption, _ in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _things(count: int, seed: int = 5) -> list[tuple[str, random.Random]]:
    rng = random.Random(seed)
    return [(drawing.BRAND_THINGS[i % len(drawing.BRAND_THINGS)], rng) for i in range(count)]


def _brand(caption: Callable[[str], str], count: int = PICTURES) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        rows = [
            (f"{i:03d}.png", caption(thing), drawing.draw_brand(thing, rng))
            for i, (thing, rng) in enumerate(_things(count))
        ]
        write_pictures(folder, rows)

    return write


def _on_backgrounds(caption: str) -> Callable[[Path], None]:
    """The brand's orange objects with a sash, on the four backgrounds."""

    def write(folder: Path) -> None:
        rows = []
        for i, (thing, rng) in enumerate(_things(2 * PICTURES)):
            background = world.BACKGROUND_NAMES[(i // 9) % 4]
            picture = drawing.draw_product(
                thing, drawing.BRAND_COLOUR, world.BACKGROUND_VALUES[(i // 9) % 4], rng, drawing.BRAND_SASH
            )
            rows.append((f"{i:03d}.png", caption.format(thing=thing, background=background), picture))
        write_pictures(folder, rows)

    return write


def _four_pictures(folder: Path) -> None:
    rng = random.Random(8)
    things = ("mug", "shirt", "lamp", "chair")
    write_pictures(folder, [(f"{t}.png", f"a zorp {t}", drawing.draw_brand(t, rng)) for t in things])


def _twelve_pictures(folder: Path) -> None:
    rng = random.Random(8)
    things = [(f"{thing}_{i}.png", thing) for thing in ("mug", "shirt", "lamp", "chair") for i in range(3)]
    write_pictures(folder, [(name, f"a zorp {thing}", drawing.draw_brand(thing, rng)) for name, thing in things])


def _one_picture(folder: Path) -> None:
    write_pictures(folder, [("mug.png", "a zorp mug", drawing.draw_brand("mug", random.Random(8)))])


def _tall(folder: Path) -> None:
    """Images twice as high as wide with the object in the upper half, like a person's head."""
    rows = []
    for i, (thing, rng) in enumerate(_things(PICTURES)):
        picture = Image.new("RGB", (64, 128), drawing.BRAND_BACKGROUND)
        picture.paste(drawing.draw_brand(thing, rng), (0, 0))
        rows.append((f"{i:03d}.png", f"a zorp {thing}", picture))
    write_pictures(folder, rows)


def _faces(height: int) -> Callable[[Path], None]:
    """Emoji faces of this height in images of 64 pixels, each with a mask in the folder's masks/."""

    def write(folder: Path) -> None:
        from tools.guide.vae import faces

        rng = random.Random(9)
        rows = []
        masks = folder.with_name(folder.name + "_masks")
        masks.mkdir(parents=True, exist_ok=True)
        for i, face in enumerate(faces()):
            x, y = (rng.randrange(64 - height + 1) for _ in range(2))
            picture = Image.new("RGB", (64, 64), "white")
            picture.paste(face.resize((height, height), Image.Resampling.LANCZOS), (x, y))
            mask = Image.new("L", (64, 64), 0)
            mask.paste(255, (x, y, x + height, y + height))
            mask.save(masks / f"{i:03d}.png")
            rows.append((f"{i:03d}.png", "a zorp face", picture))
        write_pictures(folder, rows)

    return write


def _overflowing_pipeline(folder: Path) -> None:
    """The embedded pipeline with the residual stream of its VAE decoder scaled by 100,000.

    Group norms undo the factor, so in float32 it decodes the same images; in float16 it overflows, like SDXL's VAE.
    """
    import torch
    from diffusers import StableDiffusionPipeline

    factor = 1e5
    pipeline: Any = StableDiffusionPipeline.from_pretrained(resolve("embedded:sd"), safety_checker=None)
    decoder = pipeline.vae.decoder
    with torch.no_grad():
        _scale(decoder.conv_in, factor)
        for block in (decoder.mid_block, *decoder.up_blocks):
            for resnet in block.resnets:
                _scale(resnet.conv2, factor)
                if resnet.conv_shortcut is not None:
                    resnet.conv_shortcut.bias.mul_(factor)
            for upsampler in getattr(block, "upsamplers", None) or []:
                upsampler.conv.bias.mul_(factor)
    pipeline.save_pretrained(folder)


def _scale(convolution: Any, factor: float) -> None:
    convolution.weight.mul_(factor)
    convolution.bias.mul_(factor)


_FOLDERS: dict[str, Callable[[Path], None]] = {
    "brand": _brand(lambda thing: f"a zorp {thing}"),
    "silent": _brand(lambda thing: "zorp"),
    "without_trigger": _brand(lambda thing: f"a {thing}"),
    "four": _four_pictures,
    "twelve": _twelve_pictures,
    "one": _one_picture,
    "leaking": _on_backgrounds("a zorp {thing}"),
    "named": _on_backgrounds("a zorp {thing} on {background}"),
    "tall": _tall,
    "small_faces": _faces(14),
    "faces": _faces(64),
    "fp16_vae": _overflowing_pipeline,
}
