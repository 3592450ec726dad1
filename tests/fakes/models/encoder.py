"""An encoder for the data module's caches that takes no time."""

from __future__ import annotations

import torch
from torch import Tensor


class FakeEncoder:
    """A VAE and a text encoder of one convolution and one table, with the methods that caches ask for."""

    def __init__(self, vae: str = "vae-1 float32", text: str = "text-1") -> None:
        self.identity = {"vae": vae, "text": text}
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(8, 3, 8, 8, generator=generator) / 14
        self.table = torch.randn(256, 6, generator=generator)
        self.pictures_encoded = 0
        self.captions_encoded: list[str] = []

    def encoder_identity(self) -> dict[str, str]:
        return self.identity

    def encode_pixels(self, pixels_B3HW: Tensor) -> Tensor:
        self.pictures_encoded += len(pixels_B3HW)
        return torch.nn.functional.conv2d(pixels_B3HW, self.weight, stride=8)

    def encode_captions(self, captions: list[str]) -> dict[str, Tensor]:
        self.captions_encoded += captions
        tokens = [(list(caption.encode()) + [0] * 16)[:16] for caption in captions]
        prompt_embeds = self.table[torch.tensor(tokens)]
        return {"prompt_embeds": prompt_embeds, "pooled_prompt_embeds": prompt_embeds.mean(1)}


class UnequalTexts(FakeEncoder):
    """A token a byte, as many as the caption has, and padding that is not zero."""

    def encode_captions(self, captions: list[str]) -> dict[str, Tensor]:
        lengths = [len(caption.encode()) + 1 for caption in captions]
        tokens = [
            [*caption.encode(), 0] + [7] * (max(lengths) - n) for caption, n in zip(captions, lengths, strict=True)
        ]
        return {"prompt_embeds": self.table[torch.tensor(tokens)], "prompt_lengths": torch.tensor(lengths)}
