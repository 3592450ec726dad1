"""Convert the LoRA of a transformer to and from the names of the model's own code, in sd-scripts' (kohya) layout.

sd-scripts writes and ComfyUI reads `lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight`, `lora_up` and `alpha`.
Where one of the original layers is several in diffusers, their LoRAs stand in one: `down` holds theirs row by row, and
`up` is block diagonal, so that it can be taken apart again. A part that is not trained is zeros.
Source: kohya-ss/sd-scripts networks/convert_flux_lora.py; diffusers reads it by loaders/lora_conversion_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_aigc.diffusion.families import TRANSFORMERS, TransformerFamily
from lightning_aigc.diffusion.lora import base_model as lora_base_model
from lightning_aigc.diffusion.lora.layers import LoRALayer
from lightning_aigc.diffusion.lora.names import TRANSFORMER
from lightning_aigc.errors import ModelError

PREFIX = "lora_unet_"


def to_original(layers: Sequence[LoRALayer], family: TransformerFamily) -> dict[str, Tensor]:
    """A state dict in sd-scripts' layout. Raises: ModelError for a layer that has no name there, or a DoRA."""
    by_module = {layer.module: layer for layer in layers}
    state: dict[str, Tensor] = {}
    for original, modules in _original_of(by_module, family).items():
        down, up, alpha = _joined([by_module.get(module) for module in modules], modules, family)
        name = PREFIX + original.replace(".", "_")
        state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": alpha}
    return state


def name_alone(module: str, family: TransformerFamily) -> str | None:
    """The entry name of the original layer that is this module and no other; None where it is joined with others."""
    number = re.search(r"\d+", module)
    if number is None:
        return None
    whole = (module.replace(number[0], "{}", 1),)
    found = next((name for name, modules in family.original_layers.items() if modules == whole), None)
    return None if found is None else PREFIX + found.format(number[0]).replace(".", "_")


def family_to_write(inputs: Mapping[str, int], base_model: str | None) -> TransformerFamily:
    """The family whose own names these layers get: `base_model`, else the one whose names and sizes they have.

    inputs: of each layer's module, the width of what it reads.
    Raises: ModelError if it has no names of its own, or several families would name the layers otherwise.
    """
    modules = list(inputs)
    families = [TRANSFORMERS[base_model]] if base_model in TRANSFORMERS else _that_hold(modules)
    if len({tuple(_names_of(modules, family)) for family in families}) > 1:
        families = lora_base_model.likely(families, inputs.items())
        if len({tuple(_names_of(modules, family)) for family in families}) > 1:
            raise lora_base_model.ambiguous(modules, families)
    if not families or not families[0].original_layers:
        raise ModelError(
            f"the LoRA of {families[0].name if families else 'this transformer'} has diffusers' layout only, which "
            "ComfyUI reads too: give --to diffusers"
        )
    return families[0]


def _that_hold(modules: Sequence[str]) -> list[TransformerFamily]:
    """The families that have all of these modules."""
    names = [module.replace(".", "_") for module in modules]
    return [f for f in TRANSFORMERS.values() if all(lora_base_model.modules_of(name, f) is not None for name in names)]


def _names_of(modules: Sequence[str], family: TransformerFamily) -> Iterable[str]:
    return _original_of(modules, family) if family.original_layers else ()


def holds(down: Tensor, up: Tensor, modules: Sequence[str], family: TransformerFamily) -> bool:
    """Whether a layer has as many outputs as the family's modules have together, where that is known."""
    if len(modules) == 1 and not modules[0].endswith(tuple(family.widening)):
        return True
    return up.shape[0] == sum(_rows(module, down.shape[1], family) for module in modules)


def _original_of(modules: Iterable[str], family: TransformerFamily) -> dict[str, tuple[str, ...]]:
    """The original layers that these modules are part of, each with all its parts."""
    found: dict[str, tuple[str, ...]] = {}
    for module in modules:
        number = re.search(r"\d+", module)
        template = module.replace(number[0], "{}", 1) if number else module
        original = next((name for name, parts in family.original_layers.items() if template in parts), None)
        if original is None or number is None:
            raise ModelError(
                f"got a LoRA on {module}, which has no name in ComfyUI's layout of {family.name}; write diffusers'"
            )
        parts = family.original_layers[original]
        found[original.format(number[0])] = tuple(part.format(number[0]) for part in parts)
    return found


def rows_of(modules: Sequence[str], inputs: int, family: TransformerFamily) -> list[int]:
    """Outputs of each of the layers that are joined in one."""
    return [_rows(module, inputs, family) for module in modules]


def _rows(module: str, inputs: int, family: TransformerFamily) -> int:
    """Outputs of a layer that shares its original with others."""
    return inputs * next((times for end, times in family.widening.items() if module.endswith(end)), 1)


def _joined(
    layers: Sequence[LoRALayer | None], modules: Sequence[str], family: TransformerFamily
) -> tuple[Tensor, Tensor, Tensor]:
    """`down`, `up` and alpha of the layers in one; alphas that differ are folded into `up`."""
    present = [layer for layer in layers if layer is not None]
    if any(layer.magnitude is not None for layer in present):
        raise ModelError("got a DoRA of a transformer, which has diffusers' layout only; leave out --to")
    first = present[0]
    scale = first.alpha / first.rank
    downs, ups = [], []
    for layer, module in zip(layers, modules, strict=True):
        if layer is None:
            rows = _rows(module, first.down.shape[1], family)
            layer = LoRALayer(
                TRANSFORMER, module, torch.zeros_like(first.down), first.up.new_zeros(rows, first.rank), first.alpha
            )
        own = layer.alpha / layer.rank
        downs.append(layer.down)
        ups.append(layer.up if own == scale else (layer.up.float() * (own / scale)).to(layer.up.dtype))
    down, up = torch.cat(downs), _block_diagonal(ups)
    return down, up, torch.tensor(scale * down.shape[0], dtype=torch.float32)


def apart(down: Tensor, up: Tensor, scale: float, modules: Sequence[str], family: TransformerFamily) -> list[LoRALayer]:
    """The layers that are joined in one; parts that are zeros are left out. Raises: ModelError for other sizes."""
    count, rank = len(modules), down.shape[0] // len(modules)
    rows = [_rows(module, down.shape[1], family) for module in modules] if count > 1 else [up.shape[0]]
    if sum(rows) != up.shape[0]:
        raise ModelError(f"got up of {up.shape[0]} rows for {', '.join(modules)}; wanted {' + '.join(map(str, rows))}")
    ups = torch.split(up, rows)
    columns = [slice(number * rank, (number + 1) * rank) for number in range(count)]
    is_joined = down.shape[0] == rank * count and torch.equal(
        up, _block_diagonal([part[:, own] for part, own in zip(ups, columns, strict=True)])
    )
    layers = []
    for module, part, own in zip(modules, ups, columns, strict=True):
        if not part.any() and not (is_joined and down[own].any()):
            continue
        own_down, own_up = (down[own], part[:, own].contiguous()) if is_joined else (down.clone(), part)
        layers.append(LoRALayer(TRANSFORMER, module, own_down, own_up, scale * own_down.shape[0]))
    return layers


def _block_diagonal(parts: Sequence[Tensor]) -> Tensor:
    """[rows of all, columns of all], zero outside the parts."""
    whole = parts[0].new_zeros(sum(part.shape[0] for part in parts), sum(part.shape[1] for part in parts))
    row = column = 0
    for part in parts:
        rows, columns = part.shape
        whole[row : row + rows, column : column + columns] = part
        row, column = row + rows, column + columns
    return whole
