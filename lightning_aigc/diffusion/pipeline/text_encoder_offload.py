"""Encode all text first and free the text encoders before the transformer is loaded.

Legend: T text tokens, D width.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_aigc._lightning import Trainer, rank_zero_info, rank_zero_warn
from lightning_aigc.data.cache.encoded import stack_padded, without_padding
from lightning_aigc.devices import accelerator_module
from lightning_aigc.diffusion.families import Components
from lightning_aigc.diffusion.pipeline.encoders import FrozenEncoders
from lightning_aigc.protocols import CachesCaptions

CPU = torch.device("cpu")


@runtime_checkable
class DrawsPrompts(Protocol):
    """A callback that draws images."""

    def prompts_drawn(self, trainer: Any) -> Sequence[str]:
        """Return the prompts that it will draw, which are encoded while the text encoders are in memory."""
        ...


class StoredTexts:
    """Embeddings of prompts, and of a data module's captions, for use after the text encoders were freed.

    Args:
        find: A caption's cached entry without its padding; None for a caption that is not cached.
        load: Loads the text encoders, for a prompt that was not known.
    """

    def __init__(
        self, find: Callable[[str], Mapping[str, Tensor] | None], load: Callable[[], Components], identity: str
    ) -> None:
        self._find, self._load = find, load
        self.identity = identity
        """The text encoders' part of cache keys."""
        self._entries: dict[str, Mapping[str, Tensor]] = {}

    def add(self, prompts: Iterable[str], encoders: FrozenEncoders) -> None:
        """Encode and store new prompts, in turn."""
        for prompt in prompts:
            if prompt not in self._entries:
                encoded = encoders.encode_captions([prompt])
                self._entries[prompt] = without_padding({name: tensor[0].cpu() for name, tensor in encoded.items()})

    def encode(self, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        """The text encoders' output for these prompts, padded to the longest."""
        entries = [self._entries.get(prompt) or self._find(prompt) for prompt in prompts]
        missing = list(dict.fromkeys(p for p, entry in zip(prompts, entries, strict=True) if entry is None))
        if missing:
            rank_zero_warn(
                f"{len(missing)} prompts, such as {missing[0]!r}, were not known when the text encoders left memory;"
                " they are loaded again on the CPU: name the prompts in model.init_args.validation_prompts"
            )
            self.add(missing, FrozenEncoders(self._load(), CPU))
            entries = [self._entries.get(prompt) or self._find(prompt) for prompt in prompts]
        found = [entry for entry in entries if entry is not None]
        return {name: stack_padded([entry[name] for entry in found]).to(device) for name in found[0]}


def load_without_text_encoders(
    load_text_encoders: Callable[[], Components],
    load_denoiser: Callable[[], Components],
    trainer: Trainer,
    data: CachesCaptions,
    prompts: Sequence[str],
) -> Components:
    """The pipeline with stored texts: all captions and prompts are encoded, and then the text encoders are freed.

    Collective: each rank encodes its share of the captions.

    Args:
        load_text_encoders: Loads the half of the pipeline with the text encoders.
        load_denoiser: Loads the other half.
        prompts: Those of the samples that the module generates; the callbacks add theirs.
    """
    text = load_text_encoders()
    device = trainer.strategy.root_device
    encoders = FrozenEncoders(text, device)
    stored = StoredTexts(
        data.cache_captions(encoders, trainer), load_text_encoders, encoders.encoder_identity()["text"]
    )
    negative: str | None = getattr(text.family, "negative_prompt", None)
    of_callbacks = [p for c in trainer.callbacks if isinstance(c, DrawsPrompts) for p in c.prompts_drawn(trainer)]  # type: ignore[attr-defined]
    stored.add([*([] if negative is None else [negative]), *prompts, *of_callbacks], encoders)
    tokenizers = text.tokenizers
    del text, encoders
    gc.collect()
    accelerator: Any = accelerator_module(device)
    if accelerator is not None:
        accelerator.empty_cache()
    rank_zero_info("captions and prompts are encoded; the text encoders are freed before the transformer is loaded")
    return dataclasses.replace(load_denoiser(), tokenizers=tokenizers, stored_texts=stored)
