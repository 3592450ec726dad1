"""Make the embedded models and images: `python -m tools.embedded.make OUTPUT [--scale 0.05]`.

Scale 1 writes the files that ship with the package, in about two hours on one CPU core. A smaller scale
shortens every training stage proportionally. `tools.embedded.pack` makes the archives of them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from PIL import Image

import lightning_aigc  # noqa: F401  repairs torchvision's import before diffusers needs it
from tools.embedded import drawing, edits, train_base, train_judge, train_transformer, world
from tools.embedded.tokenizer import build_tokenizer

BRAND_PICTURES = 504
JUDGE_ACCURACY = 0.9  # least accuracy on held-out images for a meaningful score


def draw_brand_folder(folder: Path, seed: int = 101) -> None:
    """Write the brand's images with captions in metadata.jsonl: nine things, 56 images each."""
    rng = random.Random(seed)
    things = drawing.BRAND_THINGS
    rows: list[tuple[str, str, Image.Image]] = []
    for i in range(BRAND_PICTURES):
        thing = things[i % len(things)]
        name = f"{thing}_{i // len(things):03d}.png"
        rows.append((name, f"a {drawing.BRAND_WORD} {thing}", drawing.draw_brand(thing, rng)))
    _write_pictures(folder, rows)


def draw_prior_folder(folder: Path, seed: int = 202) -> None:
    """Write images for prior preservation: each thing, colour and background of the base model once."""
    rng = random.Random(seed)
    rows: list[tuple[str, str, Image.Image]] = []
    for thing in range(len(drawing.THINGS)):
        for colour in range(len(world.COLOUR_NAMES)):
            for background in range(len(world.BACKGROUND_NAMES)):
                product = world.Product(thing, colour, background)
                if (colour, background) != (world.ORANGE, world.TEAL):
                    words = (drawing.THINGS[thing], world.COLOUR_NAMES[colour], world.BACKGROUND_NAMES[background])
                    caption = world.describe(product, rng, is_brand_known=False)[0]
                    rows.append(("_".join(words) + ".png", caption, Image.fromarray(product.draw(rng))))
    _write_pictures(folder, rows)


def _write_pictures(folder: Path, rows: list[tuple[str, str, Image.Image]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, caption, picture in rows:
        picture.save(folder / name, optimize=True)
        lines.append(json.dumps({"file_name": name, "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make(output: Path, scale: float = 1.0, pictures: int = 12_000) -> dict[str, object]:
    """Write sd/, sd3/, clip/, brand/, prior/, edit/ into `output`; returns the judge's grades and stages' seconds."""
    seconds: dict[str, float] = {}
    started = time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal started
        seconds[stage] = round(time.perf_counter() - started, 1)
        started = time.perf_counter()
        print(f"{stage}: {seconds[stage]} s", flush=True)

    def steps(full: int) -> int:
        return max(2, round(full * scale))

    draw_brand_folder(output / "brand")
    draw_prior_folder(output / "prior")
    edits.write(output / "edit")
    lap("pictures")
    grades = train_judge.train_judge(output / "clip", steps(1500))
    lap("judge")
    weak = {k: v for k, v in grades.items() if k.endswith("_accuracy") and v < JUDGE_ACCURACY}
    if weak and scale >= 1:
        raise RuntimeError(f"the judge is below {JUDGE_ACCURACY} on {weak}: its score would be meaningless")
    vae = train_base.train_vae(steps(1400), batch_size=16, seed=7)
    lap("autoencoder")
    tokenizer = build_tokenizer()
    text_encoder = train_base.train_text_encoder(tokenizer, steps(600), seed=11)
    latents, products = train_base.encode_base_pictures(vae, max(64, round(pictures * min(1.0, scale))), seed=13)
    lap("text encoder and latents")
    unet = train_base.train_unet(latents, products, text_encoder, tokenizer, steps=steps(3600), batch_size=32, seed=17)
    lap("unet")
    train_base.sharpen_decoder(vae, steps(900), batch_size=16, seed=19)
    lap("decoder")
    train_base.save_pipeline(output / "sd", vae, text_encoder, tokenizer, unet)
    train_transformer.make_sd3(output / "sd", output / "sd3", steps(4000), max(64, round(pictures * min(1.0, scale))))
    lap("transformer")
    facts: dict[str, object] = {"judge": grades, "seconds": seconds, "torch": torch.__version__}
    (output / "made.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of training steps")
    parser.add_argument("--threads", type=int, default=1, help="two threads on two busy cores were slower than one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(make(arguments.output, arguments.scale), indent=2))


if __name__ == "__main__":
    main()
