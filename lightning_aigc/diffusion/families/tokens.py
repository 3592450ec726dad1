"""Tokens of 2 x 2 latent pixels, padded texts, sources of an edit, and the check that latents divide into patches.

Legend: B batch, C channels, H and W latent height and width, N image tokens, T text tokens, D text width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_aigc.errors import ModelError


def check_divides(patch: int, pixels_per_latent: int, height: int, width: int) -> None:
    """Raise ModelError for latents that do not divide into patches with sides of `patch` latent pixels."""
    if height % patch or width % patch:
        raise ModelError(
            f"images of {width * pixels_per_latent} x {height * pixels_per_latent} pixels do not divide into the"
            " transformer's patches; set data.init_args.bucket_reso_steps and resolution to a multiple of"
            f" {patch * pixels_per_latent}"
        )


def pack(latents_BCHW: Tensor) -> Tensor:
    """Tokens [B, H / 2 x W / 2, 4C] of 2 x 2 latent pixels each, channel by channel."""
    batch, channels, height, width = latents_BCHW.shape
    patches = latents_BCHW.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens_BNC: Tensor, height: int, width: int) -> Tensor:
    """Latents [B, C, H, W] from the tokens of `pack`."""
    batch, _, channels = tokens_BNC.shape
    patches = tokens_BNC.reshape(batch, height // 2, width // 2, channels // 4, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)


def source_name(number: int) -> str:
    """The key of a source in a condition; numbers count from 1."""
    return f"source_{number}"


def sources_of(condition: Mapping[str, Tensor]) -> list[Tensor]:
    """Scaled, clean latents of the images that an edit starts from, each [B, C, h, w] of its own size, in order."""
    names = map(source_name, itertools.count(1))
    return [condition[name] for name in itertools.takewhile(condition.__contains__, names)]


def pack_with_sources(noisy_BCHW: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
    """Tokens of the noisy latents, then those of each source."""
    return torch.cat([pack(each) for each in (noisy_BCHW, *sources_of(condition))], dim=1)


def unpack_first(tokens_BNC: Tensor, height: int, width: int) -> Tensor:
    """Latents [B, C, H, W] from the first tokens; the sources' behind them are dropped."""
    return unpack(tokens_BNC[:, : height * width // 4], height, width)


def pad_texts(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """`prompt_embeds` [B, T, D], padded with zeros to the longest text, and `prompt_lengths` int64 [B]."""
    lengths = torch.tensor([len(text) for text in texts], device=texts[0].device)
    return {"prompt_embeds": nn.utils.rnn.pad_sequence(list(texts), batch_first=True), "prompt_lengths": lengths}
