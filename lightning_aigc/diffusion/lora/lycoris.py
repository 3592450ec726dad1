"""LoKr and LoHa files: read LyCORIS', ai-toolkit's and peft's, and write what ComfyUI and diffusers read alike.

A layer's change is a Kronecker product (LoKr) or an elementwise product of two low-rank matrices (LoHa). peft scales
each layer by alpha / rank; LyCORIS and ComfyUI do so only where a factor is decomposed. So the scale is folded into the
first factor and no alpha is written, which every reader takes as 1.

Legend: L K rows and M N columns of a Kronecker product's two factors, R rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_aigc.diffusion.families import TransformerFamily
from lightning_aigc.diffusion.lora import entries as lora_entries
from lightning_aigc.diffusion.lora import names as lora_names
from lightning_aigc.diffusion.lora import original_names, reading
from lightning_aigc.diffusion.lora.layers import check_cast
from lightning_aigc.diffusion.lora.names import TRANSFORMER, UNET
from lightning_aigc.errors import ModelError

LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")
KERNELS = ("lokr_w2", "lokr_t2", "hada_t1")
"""Parts whose last two sides are a convolution's kernel."""
_ENTRY = re.compile(r"(?P<name>.+)\.(?P<part>(?:lokr|hada)_\w+?|alpha|dora_scale|scalar)(?:\.default)?")
Kind = Literal["LoKr", "LoHa"]


@dataclass(frozen=True)
class FactorLayer:
    """One adapted module of a LoKr or LoHa, with the scale in its first factor."""

    component: str
    module: str
    """Dotted name within the component, as in diffusers."""
    parts: dict[str, Tensor]

    @property
    def kind(self) -> Kind:
        return kind_of(self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the layer's weight, which hold a convolution's kernel where the parts do."""
        return shape_of(self.parts)

    def fits(self, shape: torch.Size) -> bool:
        """Whether it changes a weight of this shape; a convolution's columns may hold its kernel."""
        rows, columns = self.shape
        whole = next((self.parts[part] for part in KERNELS if part in self.parts), None)
        inner = columns * (1 if whole is None else math.prod(whole.shape[2:]))
        return rows == shape[0] and inner == math.prod(shape[1:])

    def delta(self, shape: torch.Size) -> Tensor:
        """The change of a weight of this shape, float32."""
        parts = {name: value.float() for name, value in self.parts.items()}
        if self.kind == "LoKr":
            w1, w2 = kron_factors(parts)
            w1 = w1.reshape(*w1.shape, *[1] * (w2.ndim - w1.ndim))
            return torch.kron(w1, w2.contiguous()).reshape(shape)
        first, second = (_hada_side(parts, side) for side in ("1", "2"))
        return (first * second).reshape(shape)


def is_lycoris(keys: Iterable[str]) -> bool:
    """Whether a file's entries are those of a LoKr or LoHa."""
    return any(".lokr_" in key or ".hada_" in key for key in keys)


def kind_of(parts: Mapping[str, Tensor]) -> Kind:
    """LoKr or LoHa, by the parts' names."""
    return "LoKr" if any(name.startswith("lokr") for name in parts) else "LoHa"


def shape_of(parts: Mapping[str, Tensor]) -> tuple[int, int]:
    """Rows and columns of the weight that these parts change. Raises: KeyError for a part that is missing."""
    if kind_of(parts) == "LoKr":
        w1, w2 = (_sides(parts, part) for part in ("lokr_w1", "lokr_w2"))
        return w1[0] * w2[0], w1[1] * w2[1]
    rows = parts["hada_w1_a"].shape[1 if "hada_t1" in parts else 0]
    return int(rows), int(parts["hada_w1_b"].shape[1])


def kron_factors(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The two factors w1 [L, M] and w2 [K, N], or a convolution's [K, N, height, width]."""
    w1 = parts["lokr_w1"] if "lokr_w1" in parts else parts["lokr_w1_a"] @ parts["lokr_w1_b"]
    if "lokr_w2" in parts:
        return w1, parts["lokr_w2"]
    w2_a, w2_b = parts["lokr_w2_a"], parts["lokr_w2_b"]
    if "lokr_t2" in parts:
        return w1, torch.einsum("ijhw,jn,ik->knhw", parts["lokr_t2"], w2_b, w2_a)
    return w1, w2_a @ w2_b


def collect(component: str, network: nn.Module, adapter_name: str = "default") -> list[FactorLayer]:
    """The LoKr layers of a peft model. Raises: ModelError if there are none."""
    found = []
    for name, module in network.named_modules():
        own: dict[str, Any] = {part: getattr(module, part, {}) for part in LOKR}
        parts = {part: tensors[adapter_name].detach() for part, tensors in own.items() if adapter_name in tensors}
        if parts:
            scaling: Any = module.scaling
            found.append(FactorLayer(component, name, _scaled(parts, float(scaling[adapter_name]))))
    if not found:
        raise ModelError(f"got a {component} without a LoKr to save; add one with lora_type: lokr")
    return found


def read_factors(
    state: Mapping[str, Tensor],
    header: Mapping[str, str],
    *,
    base_model: str | None = None,
    layers_per_block: int = lora_names.SDXL_LAYERS_PER_BLOCK,
) -> list[FactorLayer]:
    """The layers of a LoKr's or LoHa's state.

    base_model: as of `reading.read_layers`.
    Raises: ModelError for other entries, a part that is missing, or layers of no known model.
    """
    groups = _grouped(state)
    shaped = [_as_lora(component, name, parts) for (component, name), parts in groups.items()]
    for each in shaped:
        if each.component in lora_entries.TEXT_ENCODERS:
            raise ModelError(
                f"got a {kind_of(groups[each.component, each.name])} on {each}; only the denoiser's are read: leave"
                " the text encoder out where it was trained"
            )
    family, modules = reading.denoiser_modules(shaped, header, base_model, layers_per_block)
    layers = []
    for each in shaped:
        names, parts = modules[each.name], groups[each.component, each.name]
        if len(names) == 1:
            layers.append(FactorLayer(TRANSFORMER if family else UNET, names[0], parts))
            continue
        assert family is not None
        sizes = original_names.rows_of(names, shape_of(parts)[1], family)
        cut = [_cut(parts, end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        if None in cut:
            raise ModelError(
                f"got a LoKr on {each}, which joins {', '.join(names)}, with a second factor of"
                f" {_sides(parts, 'lokr_w2')[0]} rows, which cannot be cut apart there: train it on diffusers' layers,"
                " or merge it by the program that trained it"
            )
        layers += [FactorLayer(TRANSFORMER, name, own) for name, own in zip(names, cut, strict=True) if own is not None]
    return layers


def _cut(parts: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor] | None:
    """The product's rows from `start` to `stop`; None where a Kronecker product has no boundary between its blocks."""
    if kind_of(parts) == "LoHa":
        cut = {name: slice(start, stop) for name in ("hada_w1_a", "hada_w2_a")}
    else:
        rows = _sides(parts, "lokr_w2")[0]
        if start % rows or stop % rows:
            return None
        cut = {"lokr_w1" if "lokr_w1" in parts else "lokr_w1_a": slice(start // rows, stop // rows)}
    return {name: (value[cut[name]] if name in cut else value).clone() for name, value in parts.items()}


def unread_by_diffusers(layers: Sequence[FactorLayer]) -> str | None:
    """A half sentence on why diffusers does not load these layers; None if it does.

    It infers one factor for all layers, of which peft makes their sizes again, and takes a kernel as columns.
    Source: diffusers, utils/peft_utils.py: _create_lokr_config.
    """
    from peft.tuners.lokr.layer import factorization

    pairs: set[tuple[int, int]] = set()
    for layer in layers:
        if layer.kind == "LoHa":
            return "a LoHa, and diffusers reads LoRA and LoKr alone"
        if layer.parts.get("lokr_w2", torch.empty(0)).ndim > 2:
            where = f"{layer.module}, a convolution"
            return f"a LoKr with a whole second factor on {where}, and diffusers reads decomposed ones alone there"
        parts = _without_tucker(layer.parts)
        pairs |= set(zip(_sides(parts, "lokr_w1"), _sides(parts, "lokr_w2"), strict=True))
    for factor in (*sorted({pair[0] for pair in pairs}), -1):
        if all(factorization(first * second, factor) == (first, second) for first, second in pairs):
            return None
    return "a LoKr whose sizes follow no one factor, as diffusers wants it, such as convolutions at LyCORIS' factor -1"


def to_state(
    layers: Sequence[FactorLayer],
    *,
    layout: str,
    sdxl: bool = False,
    layers_per_block: int = lora_names.SDXL_LAYERS_PER_BLOCK,
    family: TransformerFamily | None = None,
) -> dict[str, Tensor]:
    """The state dict in diffusers' layout, or in kohya's for ComfyUI.

    family: the transformer's. In kohya's layout a layer has its original's name, but for one that the original joins
        with others: ComfyUI knows diffusers' name of it, and changes its part of the weight.
    Raises: ModelError for layers in diffusers' layout that diffusers does not load.
    """
    state: dict[str, Tensor] = {}
    if layout == "diffusers" and (reason := unread_by_diffusers(layers)):
        raise ModelError(f"got {reason}; write it with --to kohya for ComfyUI, or merge it with --merge_into PIPELINE")
    for layer in layers:
        name = f"{layer.component}.{layer.module}"
        if layer.component == UNET and layout == "kohya":
            name = lora_names.to_kohya_name(UNET, layer.module, sdxl=sdxl, layers_per_block=layers_per_block)
        elif family is not None and layout == "kohya":
            name = original_names.name_alone(layer.module, family) or name
        parts = _without_tucker(layer.parts) if layout == "diffusers" else layer.parts
        state |= {f"{name}.{part}": value.contiguous() for part, value in parts.items()}
    return state


def _without_tucker(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same second factor as a product of two matrices of the same rank, which diffusers reads."""
    if "lokr_t2" not in parts:
        return dict(parts)
    kernel_RNhw = torch.einsum("ijhw,jn->inhw", parts["lokr_t2"], parts["lokr_w2_b"])
    rest = {name: value for name, value in parts.items() if not name.startswith(("lokr_t2", "lokr_w2"))}
    return rest | {"lokr_w2_a": parts["lokr_w2_a"].T, "lokr_w2_b": kernel_RNhw.flatten(1)}


def cast(layer: FactorLayer, dtype: torch.dtype) -> FactorLayer:
    """The layer in this dtype. Raises: ModelError for a value that is not finite in it."""
    parts = {name: value.to(dtype) for name, value in layer.parts.items()}
    check_cast(f"{layer.component}.{layer.module}", list(layer.parts.values()), list(parts.values()))
    return dataclasses.replace(layer, parts=parts)


def _grouped(state: Mapping[str, Tensor]) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Parts by component and name, scaled; no alpha is left."""
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        match = _ENTRY.fullmatch(key)
        if match is None or match["part"] not in (*LOKR, *LOHA, "alpha"):
            if match is not None and match["part"] == "dora_scale":
                raise ModelError(f"got {key}, a LoKr or LoHa with magnitudes; train it without weight decomposition")
            if match is None and ".lora_" in key:
                raise ModelError(f"got {key} in a file with LoKr or LoHa entries; wanted one kind in a file")
            raise lora_entries.not_lora([key])
        component, name = lora_entries.without_prefix(match["name"])
        groups.setdefault((component, name), {})[match["part"]] = tensor
    for (_, name), parts in groups.items():
        alpha = parts.pop("alpha", None)
        try:
            shape_of(parts)
            parts |= _scaled(parts, _scale(parts, alpha))
        except (KeyError, StopIteration) as error:
            raise ModelError(f"got {name} with only {', '.join(sorted(parts))}; the file is incomplete") from error
        if not all(bool(value.isfinite().all()) for value in parts.values()):
            raise ModelError(f"got {name} with values that are not finite: the training diverged; use an earlier file")
    return groups


def _scale(parts: Mapping[str, Tensor], alpha: Tensor | None) -> float:
    """The scale as LyCORIS and ComfyUI have it: alpha / rank where a factor is decomposed, else 1."""
    decomposed = ("lokr_w2_b", "lokr_w1_b") if kind_of(parts) == "LoKr" else ("hada_w1_b",)
    rank = next((parts[part].shape[0] for part in decomposed if part in parts), None)
    return 1.0 if alpha is None or rank is None else float(alpha) / rank


def _scaled(parts: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    first = next(name for name in ("lokr_w1", "lokr_w1_a", "hada_w1_a") if name in parts)
    return {name: value.float() * (scale if name == first else 1.0) for name, value in parts.items()}


def _sides(parts: Mapping[str, Tensor], part: str) -> tuple[int, int]:
    """Rows and columns of a factor, whole or decomposed; a decomposed convolution's second part holds its kernel."""
    if part in parts:
        return int(parts[part].shape[0]), int(parts[part].shape[1])
    first, second = parts[f"{part}_a"], parts[f"{part}_b"]
    return int(first.shape[1 if part == "lokr_w2" and "lokr_t2" in parts else 0]), int(second.shape[1])


def _hada_side(parts: Mapping[str, Tensor], side: str) -> Tensor:
    a, b = parts[f"hada_w{side}_a"], parts[f"hada_w{side}_b"]
    if f"hada_t{side}" not in parts:
        return a @ b
    return torch.einsum("ijhw,jn,ik->knhw", parts[f"hada_t{side}"], b, a)


def _as_lora(component: str, name: str, parts: Mapping[str, Tensor]) -> lora_entries.Entries:
    """An entry of a LoRA of rank 1 on the same layer, without numbers, for what tells models apart by it."""
    rows, columns = shape_of(parts)
    down, up = torch.empty(1, columns, device="meta"), torch.empty(rows, 1, device="meta")
    return lora_entries.Entries(component, name, {"down": down, "up": up})
