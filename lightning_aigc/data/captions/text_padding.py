"""Embeddings of captions of unequal length: cut to their own length where they are stored, padded in a batch.

An entry that has `prompt_lengths` has padding after that number of its `prompt_embeds`.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn, stack

LENGTHS, PADDED = "prompt_lengths", "prompt_embeds"


def without_padding(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One caption's entry with `prompt_embeds` [T, D] of its own length."""
    if LENGTHS not in entry:
        return dict(entry)
    return {**entry, PADDED: entry[PADDED][: int(entry[LENGTHS])]}


def stack_padded(tensors: Sequence[Tensor]) -> Tensor:
    """[B, ...], with zeros behind the shorter ones."""
    if all(tensor.shape == tensors[0].shape for tensor in tensors):
        return stack(list(tensors))
    return nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)
