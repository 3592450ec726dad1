"""Tokens of captions by the tokenizers of each family."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_aigc.diffusion.pipeline.caption_tokens import count_tokens


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("sd3", 75), ("flux", 511), ("flux2", 512), ("z_image", 512), ("qwen_image", 1024), ("flux2_dev", 460),
        ("chroma", 511), ("krea2", 507), ("qwen_image_edit", 1024),
    ],
)  # fmt: skip
def test_the_encoder_that_keeps_the_most_decides(family: str, kept: int, transformers: Callable[[str], str]) -> None:
    counted = count_tokens(transformers(family), None, ["zorp " * 2000, "a"])
    assert counted is not None
    assert counted[0][0] > counted[1] > 0 == counted[0][1]
    assert counted[1] <= kept
