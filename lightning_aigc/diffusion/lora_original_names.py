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
from lightning_aigc.diffusion.lora_layers import LoRALayer
from lightning_aigc.diffusion.lora_names import TRANSFORMER
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


def from_original(state: Mapping[str, Tensor], family: TransformerFamily) -> list[LoRALayer]:
    """The layers of a state dict in sd-scripts' layout; a layer without alpha has scale 1."""
    layers = []
    for name in _names(state):
        modules = _modules_of(name, family)
        assert modules is not None
        try:
            down, up = state[f"{name}.lora_down.weight"], state[f"{name}.lora_up.weight"]
        except KeyError as error:
            raise ModelError(f"got {name} without {error.args[0]}; the file is incomplete") from error
        rank = down.shape[0]
        alpha = float(state[f"{name}.alpha"].item()) if f"{name}.alpha" in state else float(rank)
        layers += _apart(down, up, alpha / rank, modules, family)
    return layers


def family_of(state: Mapping[str, Tensor], base_model: str | None = None) -> TransformerFamily | None:
    """The family whose original layers a file's names and sizes are, `base_model` if it is one; None for a U-Net's."""
    names = _names(state)
    found = [f for f in TRANSFORMERS.values() if names and all(_fits(name, state, f) for name in names)]
    return next((family for family in found if family.name == base_model), found[0] if found else None)


def family_of_modules(layers: Sequence[LoRALayer], base_model: str | None = None) -> TransformerFamily | None:
    """The family whose original layers hold all of these; `base_model` if that is one."""
    templates = {re.sub(r"\d+", "{}", layer.module, count=1) for layer in layers}
    known = {name: {part for parts in f.original_layers.values() for part in parts} for name, f in TRANSFORMERS.items()}
    found = [name for name, modules in known.items() if templates <= modules]
    return TRANSFORMERS[base_model if base_model in found else found[0]] if found else None


def _names(state: Mapping[str, Tensor]) -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in state))


def _fits(name: str, state: Mapping[str, Tensor], family: TransformerFamily) -> bool:
    """Whether a layer is one of the family's, and holds as many outputs as its parts."""
    modules = _modules_of(name, family)
    down, up = state.get(f"{name}.lora_down.weight"), state.get(f"{name}.lora_up.weight")
    if modules is None or len(modules) == 1 or down is None or up is None:
        return modules is not None
    return up.shape[0] == sum(_rows(module, down.shape[1], family) for module in modules)


def _modules_of(name: str, family: TransformerFamily) -> tuple[str, ...] | None:
    """diffusers' modules of an original layer's name in a file."""
    for original, modules in family.original_layers.items():
        pattern = re.escape(PREFIX + original.replace(".", "_")).replace(r"\{\}", r"(\d+)")
        if match := re.fullmatch(pattern, name):
            return tuple(module.format(match[1]) for module in modules)
    return None


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


def _apart(
    down: Tensor, up: Tensor, scale: float, modules: Sequence[str], family: TransformerFamily
) -> list[LoRALayer]:
    """The layers that are joined in one; parts that are zeros are left out."""
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
        own_down, own_up = (down[own], part[:, own].contiguous()) if is_joined else (down, part)
        layers.append(LoRALayer(TRANSFORMER, module, own_down, own_up, scale * own_down.shape[0]))
    return layers


def _block_diagonal(parts: Sequence[Tensor]) -> Tensor:
    """[rows of all, columns of all], zero beside the parts."""
    whole = parts[0].new_zeros(sum(part.shape[0] for part in parts), sum(part.shape[1] for part in parts))
    row = column = 0
    for part in parts:
        rows, columns = part.shape
        whole[row : row + rows, column : column + columns] = part
        row, column = row + rows, column + columns
    return whole
