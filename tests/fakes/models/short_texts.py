"""Pipelines that pad a caption to 64 tokens instead of 512, which take most of a tiny transformer's time."""

from __future__ import annotations

import inspect

import diffusers
import pytest

TOKENS = 64
PADDING = (
    "FluxPipeline", "FluxKontextPipeline", "FluxControlNetPipeline", "Flux2KleinPipeline", "Flux2Pipeline",
    "ChromaPipeline",
)  # fmt: skip
"""Pipelines that pad each caption to `max_sequence_length`; the package and its tests ask them for its default."""


def shorten_texts(patch: pytest.MonkeyPatch) -> None:
    """Let these pipelines pad to TOKENS by default."""
    for name in PADDING:
        for method in ("encode_prompt", "__call__"):
            function = inspect.unwrap(getattr(getattr(diffusers, name), method))
            with_default = [
                each for each in inspect.signature(function).parameters.values() if each.default is not each.empty
            ]
            assert any(each.name == "max_sequence_length" for each in with_default), name
            defaults = tuple(TOKENS if each.name == "max_sequence_length" else each.default for each in with_default)
            patch.setattr(function, "__defaults__", defaults)
