"""Text encoders that leave before the transformer comes: captions and prompts are encoded, and never both in memory.

Legend: T text tokens, D width.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_aigc.data.texts import stack_padded, without_padding
from lightning_aigc.devices import accelerator_module
from lightning_aigc.diffusion.encoders import FrozenEncoders
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.packed_base import pack_text_encoders
from lightning_aigc.protocols import CachesCaptions, DrawsPrompts

if TYPE_CHECKING:
    from lightning_aigc.diffusion.components import Components
    from lightning_aigc.diffusion.transformer_training import TransformerTraining

CPU = torch.device("cpu")


class StoredTexts:
    """The embeddings of prompts, and those that a data module caches, where the text encoders are gone.

    Args:
        find: A caption's cached entry without its padding, None for one that is not cached.
        load: Loads the text encoders alone, for a prompt that nobody foresaw.
    """

    def __init__(
        self, find: Callable[[str], Mapping[str, Tensor] | None], load: Callable[[], Components], identity: str
    ) -> None:
        self._find, self._load = find, load
        self.identity = identity
        """The text encoders' part of cache keys."""
        self._entries: dict[str, Mapping[str, Tensor]] = {}

    def add(self, prompts: Iterable[str], encoders: FrozenEncoders) -> None:
        """Encode and keep the prompts that are not kept yet, one after the other."""
        for prompt in prompts:
            if prompt not in self._entries:
                encoded = encoders.encode_captions([prompt])
                self._entries[prompt] = without_padding({name: tensor[0].cpu() for name, tensor in encoded.items()})

    def encode(self, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        """What the text encoders made of these prompts, padded to the longest."""
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


def load_after_texts(module: TransformerTraining, data: CachesCaptions) -> Components:
    """The pipeline without its text encoders, which have encoded all captions and prompts, and left before.

    Collective: each rank encodes its share of the captions.
    """
    trainer, args = module.trainer, module.args

    def load_text_encoders() -> Components:
        text = module.load_parts("texts")
        if args.base_quantization is not None:
            pack_text_encoders(text, args.base_quantization_skip)
        return text

    text = load_text_encoders()
    device = trainer.strategy.root_device
    encoders = FrozenEncoders(text, device)
    stored = StoredTexts(
        data.cache_captions(encoders, trainer), load_text_encoders, encoders.encoder_identity()["text"]
    )
    stored.add(_foreseen(module, trainer, TRANSFORMERS[text.family].negative_prompt), encoders)
    tokenizers = text.tokenizers
    del text, encoders
    gc.collect()
    accelerator: Any = accelerator_module(device)
    if accelerator is not None:
        accelerator.empty_cache()
    rank_zero_info("captions and prompts are encoded; the text encoders leave memory before the transformer is loaded")
    return dataclasses.replace(module.load_parts("pictures"), tokenizers=tokenizers, stored_texts=stored)


def _foreseen(module: TransformerTraining, trainer: Trainer, negative: str | None) -> list[str]:
    """The prompts that the module and its callbacks will draw, and the one that guidance leads away from."""
    drawn = [prompt for c in trainer.callbacks if isinstance(c, DrawsPrompts) for prompt in c.prompts_drawn(trainer)]  # type: ignore[attr-defined]
    return [*([] if negative is None else [negative]), *module.validation_prompts, *drawn]
