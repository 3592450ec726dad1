"""Tensors of a diffusion transformer under the names of the original model's published file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_aigc.diffusion.families import TransformerFamily
from lightning_aigc.diffusion.pipeline.tensor_stream import DeferredTensor

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def original_tensors(tensors: Mapping[str, DeferredTensor], family: TransformerFamily) -> Mapping[str, DeferredTensor]:
    """The tensors as ComfyUI and diffusers' `from_single_file` read them; diffusers' names where both read those.

    Source: diffusers, `loaders/single_file_utils.py`, which converts the other way.
    """
    if not family.original_names:
        return tensors
    renamed: dict[str, DeferredTensor] = {}
    joined: dict[str, dict[int, DeferredTensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if module in family.swapped_halves:
            tensor = _swapped(tensor)
        number = NUMBER.search(module)
        template = module if number is None else NUMBER.sub("{}", module, count=1)
        original, part, parts = _layer(template, family)
        if original is None:
            new = _other_name(name, number, family)
        else:
            new = f"{original.format(number[0] if number else '')}.{kind}"
        if parts > 1:
            joined.setdefault(new, {})[part] = tensor
        else:
            renamed[new] = tensor
    return renamed | {name: _joined([found[i] for i in sorted(found)]) for name, found in joined.items()}


def _layer(template: str, family: TransformerFamily) -> tuple[str | None, int, int]:
    """A layer's original, its place among the layers that this one joins, and their number."""
    for original, parts in family.original_layers.items():
        if template in parts:
            return original, parts.index(template), len(parts)
    return None, 0, 1


def _other_name(name: str, number: re.Match[str] | None, family: TransformerFamily) -> str:
    for ours, original in family.original_names.items():
        at = number[0] if number else ""
        if name == ours.format(at) or name.startswith(f"{ours.format(at)}."):
            return original.format(at) + name.removeprefix(ours.format(at))
    return name


def _joined(parts: Sequence[DeferredTensor]) -> DeferredTensor:
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return DeferredTensor(shape, parts[0].dtype, lambda: torch.cat([part.make() for part in parts]))


def _swapped(tensor: DeferredTensor) -> DeferredTensor:
    def make() -> Tensor:
        first, second = tensor.make().chunk(2)
        return torch.cat([second, first])

    return DeferredTensor(tensor.shape, tensor.dtype, make)
