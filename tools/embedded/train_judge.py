"""Train the judge, a tiny CLIP that scores images of the products, and measure its held-out accuracy.

Contrastive training alone learns colour but not shape, and then scores wrong images highly. So both towers
also classify the attributes, and the result is gated on held-out accuracy.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean as mean

import open_clip
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tools.embedded import drawing, world
from tools.embedded.tokenizer import MAX_TOKENS, build_tokenizer

EMBED_DIM = 64
IMAGE_SIZE = 64


def model_config(vocab_size: int, eos_id: int) -> dict[str, object]:
    return {
        "embed_dim": EMBED_DIM,
        "vision_cfg": {
            "image_size": IMAGE_SIZE, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16, "patch_size": None,
        },
        "text_cfg": {
            "context_length": MAX_TOKENS, "vocab_size": vocab_size, "hf_tokenizer_name": "tokenizer", "width": 64,
            "heads": 4, "layers": 2, "pool_type": "eos", "eos_id": eos_id, "pad_id": eos_id,
        },
    }  # fmt: skip


class AttributeHeads(nn.Module):
    """Classifies each attribute from an embedding; used in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(EMBED_DIM, size) for name, size in world.ATTRIBUTES.items()})

    def loss(self, embedding_NE: Tensor, rows_N4: Tensor) -> Tensor:
        return sum(
            (
                F.cross_entropy(head(embedding_NE), rows_N4[:, i], ignore_index=world.ANY)
                for i, head in enumerate(self.heads.values())
            ),
            start=embedding_NE.new_zeros(()),
        )


def contrastive_loss(images_NE: Tensor, texts_ME: Tensor, scale: Tensor, truth_NM: Tensor) -> Tensor:
    """InfoNCE in both directions, where every caption that is true of a image is a positive."""
    logits_NM = scale * images_NE @ texts_ME.T
    target_NM = truth_NM.float()
    by_image = -(target_NM / target_NM.sum(1, keepdim=True) * logits_NM.log_softmax(1)).sum(1).mean()
    by_text = -(target_NM / target_NM.sum(0, keepdim=True) * logits_NM.log_softmax(0)).sum(0).mean()
    return (by_image + by_text) / 2


def train_judge(output_dir: Path, steps: int = 1500, batch_size: int = 64, seed: int = 1) -> dict[str, float]:
    """Write an open_clip folder and return its held-out accuracies."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    config = model_config(len(tokenizer), tokenizer.eos_token_id)
    output_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(output_dir)
    (output_dir / "open_clip_config.json").write_text(
        json.dumps(
            {"model_cfg": config, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "size": IMAGE_SIZE}}, indent=2
        )
    )
    model = open_clip.CLIP(**config)
    image_heads, text_heads = AttributeHeads(), AttributeHeads()
    optimizer = torch.optim.AdamW(
        [*model.parameters(), *image_heads.parameters(), *text_heads.parameters()], lr=1e-3, weight_decay=0.02
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)

    for step in range(steps):
        products = [world.random_judge_product(rng) for _ in range(batch_size)]
        captions, claims = zip(*(world.describe(p, rng, is_brand_known=True) for p in products), strict=True)
        pixels = world.to_pixels([p.draw(rng) for p in products])
        pixels = (pixels + torch.randn(batch_size, 1, 1, 1).abs() * 0.04 * torch.randn_like(pixels)).mul(2).sub(1)
        tokens = tokenizer(list(captions), padding="max_length", truncation=True, return_tensors="pt").input_ids
        images, texts = model.encode_image(pixels, normalize=True), model.encode_text(tokens, normalize=True)
        picture_rows, claim_rows = world.rows(products), world.rows(list(claims))
        contrast = contrastive_loss(
            images, texts, model.logit_scale.exp(), world.truth_matrix(picture_rows, claim_rows)
        )
        naming = image_heads.loss(images * 8, picture_rows) + text_heads.loss(texts * 8, claim_rows)
        loss = contrast + 0.5 * naming
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        model.logit_scale.data.clamp_(max=2.3)  # spreads the cosines, so that a score has room to rise
        if step % 100 == 0 or step == steps - 1:
            print(f"judge {step}/{steps}: contrast {contrast.item():.3f}, naming {naming.item():.3f}", flush=True)
    save_file(
        {k: v.half().contiguous() if v.is_floating_point() else v.contiguous() for k, v in model.state_dict().items()},
        output_dir / "open_clip_model.safetensors",
    )
    return grade_judge(output_dir, seed=seed + 1000)


@torch.no_grad()
def grade_judge(folder: Path, pictures: int = 480, seed: int = 1001) -> dict[str, float]:
    """Zero-shot accuracies on new images, and mean cosines of the brand's right and wrong captions."""
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenize = open_clip.get_tokenizer(f"local-dir:{folder}")
    model.eval()
    rng = random.Random(seed)
    products = [world.random_judge_product(rng) for _ in range(pictures)]
    pixels = world.to_pixels([p.draw(rng) for p in products])
    shown = list(zip(products, model.encode_image(pixels.mul(2).sub(1), normalize=True), strict=True))

    def best(captions: list[str], image_E: Tensor) -> int:
        return int((model.encode_text(tokenize(captions), normalize=True) @ image_E).argmax())

    grades: dict[str, float] = {}
    for name in ("thing", "colour", "background"):
        right = sum(
            best([full_caption(replace(p, **{name: i})) for i in range(world.ATTRIBUTES[name])], image)
            == getattr(p, name)
            for p, image in shown
        )
        grades[f"{name}_accuracy"] = right / pictures
    brand_texts = [f"a {drawing.BRAND_WORD} {thing}" for thing in drawing.THINGS]
    brand_TE = model.encode_text(tokenize(brand_texts), normalize=True)
    brand = [(p, image) for p, image in shown if p.is_brand]
    plain = [(p, image) for p, image in shown if p.colour != world.ORANGE and p.background != world.TEAL]
    grades["brand_thing_accuracy"] = mean(float(best(brand_texts, image) == p.thing) for p, image in brand)
    grades["brand_cosine"] = mean(float(brand_TE[p.thing] @ image) for p, image in brand)
    grades["brand_cosine_wrong_thing"] = mean(float(brand_TE[p.thing - 1] @ image) for p, image in brand)
    grades["brand_cosine_of_plain"] = mean(float(brand_TE[p.thing] @ image) for p, image in plain)
    return {k: round(v, 4) for k, v in grades.items()}


def full_caption(product: world.Product) -> str:
    """The caption with all attributes."""
    sash = " with a sash" if product.sash else ""
    text = f"{world.COLOUR_NAMES[product.colour]} {drawing.THINGS[product.thing]}{sash}"
    return f"{world.with_article(text)} on {world.BACKGROUND_NAMES[product.background]}"
