"""quantize_frozen_: quantize the frozen weights of any module in place."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_aigc.errors import ConfigError
from lightning_aigc.quantization.layers import (
    FORMATS,
    MIB,
    BaseQuantization,
    Layer,
    Packing,
    check_kind,
    check_patterns,
    check_skip,
    frozen_layers,
    target_mib,
)
from lightning_aigc.quantization.weight_budget import choose_formats, output_errors
from lightning_aigc_kernels.packed_weight import Format, PackedWeight, packed_bytes, packed_weights, set_packed_

MEANING = {
    "int8": "int8",
    "fp8": "fp8",
    "nf4": "nf4: linears NF4, convolutions int8",
    "nf4-all": "nf4-all: linears and convolutions NF4",
}
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module with the names that DistributedDataParallel does not broadcast."""


@dataclass
class PackedBase:
    """Result of quantizing a base: the number of weights and the memory before and after."""

    kind: str
    packed: int = 0
    """Number of quantized weights."""
    formats: Counter[str] = field(default_factory=Counter)
    """Number of weights per format."""
    bytes_before: int = 0
    """Bytes of all frozen parameters and buffers."""
    bytes_after: int = 0
    left: Counter[str] = field(default_factory=Counter)
    """Number of frozen linear layers and convolutions left in full precision, by reason."""
    digest: str = ""
    """sha256 of the quantized bytes by name."""

    def add(self, other: PackedBase) -> None:
        """Add the result for another component of the same base."""
        self.packed += other.packed
        self.formats += other.formats
        self.bytes_before += other.bytes_before
        self.bytes_after += other.bytes_after
        self.left += other.left
        self.digest = hashlib.sha256(f"{self.digest} {other.digest}".encode()).hexdigest()

    def summary(self) -> str:
        """Describe in one line the number of weights, their formats and the memory before and after."""
        before, after = self.bytes_before / 2**20, self.bytes_after / 2**20
        total = self.packed + self.left.total()
        how = MEANING.get(self.kind, "") or ", ".join(f"{count} {kind}" for kind, count in sorted(self.formats.items()))
        line = f"{self.packed} of {total} frozen weights quantized ({how})"
        line += f", {_mib(before)} -> {_mib(after)} MiB"
        if self.left:
            line += "; in full precision: " + ", ".join(
                f"{count} {reason}" for reason, count in sorted(self.left.items())
            )
        return line


def quantize_frozen_(
    module: nn.Module,
    kind: BaseQuantization,
    skip: Sequence[str] | None = None,
    outputs: Iterable[Tensor] | None = None,
    *,
    format_of: Callable[[Layer], Format | None] = lambda layer: None,
    packing_for: Callable[[Sequence[Layer]], Packing | None] = lambda layers: None,
    decide: Callable[[int, Callable[[], list[Format | None]]], list[Format | None]] = lambda count, choose: choose(),
) -> PackedBase:
    """Quantize the frozen linear layers and convolutions of a module in place; trained weights do not change.

    The layers keep their classes, names and state_dict keys; their weights become `PackedWeight` tensors, which compute
    in the dtype that they had and take a quarter to a half of its memory. DistributedDataParallel around this module
    does not broadcast them. Call it once adapters are in place and before an optimizer is built.

    Args:
        module: A LightningModule or any other module; a submodule to quantize only that one.
        kind: int8: all int8, 8.5 bits a number; fp8: all float8 in as many bits, exact for weights that were float8;
            nf4: linears NF4, 4.5 bits, and convolutions int8; nf4-all: both NF4. `{"target_mib": 1500}`: each weight in
            the format, or in full precision, with which all frozen weights and buffers together fit these MiB and the
            outputs change least.
        skip: Name patterns of layers that stay in full precision, as in FusedBackwardPrecision's `protect`; unset skips
            the first and last convolution and the embeddings of a U-Net.
        outputs: For a budget, some outputs of the module for typical inputs, computed with gradients on. Pass a
            generator, so that each output is computed when it is needed.
        format_of: Fixed format of a layer; None follows `kind`.
        packing_for: Returns the function that packs a layer, for example through a cache; None packs directly.
        decide: Calls the function that chooses the formats of this many layers for a budget, for example on one rank,
            and returns its result.

    Raises: ConfigError for an unknown kind, a budget that cannot be met or comes without outputs, a pattern that
        matches nothing, a module that is quantized already or has nothing to quantize, and a weight with NaN or
        infinity.
    """
    target = target_mib(kind)
    if target is None:
        check_kind(kind)
    elif outputs is None:
        raise ConfigError("base_quantization: a budget is kept by the model's outputs; give some with outputs=")
    check_skip(skip)
    layers = frozen_layers(module, skip)
    check_patterns(skip, (layer.name for layer in layers))
    candidates = [layer for layer in layers if not layer.skip_reason]
    packing = packing_for(candidates)
    formats = {layer.name: format_of(layer) for layer in candidates}
    free = [layer for layer in candidates if formats[layer.name] is None]
    if target is None:
        linear, convolution = FORMATS[str(kind)]
        chosen: list[Format | None] = [linear if layer.is_linear else convolution for layer in free]
    else:
        fixed_bytes = sum(packed_bytes(layer.weight.numel(), formats[layer.name] or "int8")
                          for layer in candidates if formats[layer.name] is not None)  # fmt: skip
        other_bytes = frozen_bytes(module) - weight_bytes(candidates) + fixed_bytes
        target_bytes = target * MIB
        chosen = decide(
            len(free),
            lambda: choose_formats(free, output_errors(free, outputs or (), packing), target_bytes, other_bytes),
        )
    formats |= zip((layer.name for layer in free), chosen, strict=True)
    result = quantize_layers(module, layers, lambda layer: formats[layer.name], packing)
    result.kind = str(kind)
    ignore_in_ddp(module)
    return result


def quantize_layers(
    module: nn.Module,
    layers: Iterable[Layer],
    format_of: Callable[[Layer], Format | None],
    packing: Packing | None = None,
) -> PackedBase:
    """Quantize these layers of a module, each in the format that `format_of` returns; None leaves it unchanged.

    Args: packing: Packs a layer's weight; None is `PackedWeight.pack`.
    """
    result = PackedBase("", bytes_before=frozen_bytes(module))
    digest = hashlib.sha256()
    for layer in layers:
        chosen = None if layer.skip_reason else format_of(layer)
        if chosen is None:
            result.left[layer.skip_reason or "chosen by the budget"] += 1
            continue
        try:
            weight = set_packed_(layer.module, chosen, packing and packing(layer, chosen))
        except ValueError as error:
            raise ConfigError(
                f"base_quantization: {layer.name} cannot be quantized, {error}; load the base again, or another one"
            ) from None
        digest.update(f"{layer.name} {chosen} {tuple(weight.shape)}".encode())
        for tensor in (weight.packed, weight.scales):
            digest.update(tensor.cpu().numpy().data)
        result.packed += 1
        result.formats[chosen] += 1
    if not result.packed:
        raise ConfigError(
            "base_quantization: there is no frozen linear layer or convolution to quantize"
            f" ({', '.join(f'{count} {reason}' for reason, count in result.left.items()) or 'all are trained'});"
            " leave base_quantization unset"
        )
    result.bytes_after = frozen_bytes(module)
    result.digest = digest.hexdigest()
    return result


def frozen_bytes(module: nn.Module) -> int:
    """Return the stored bytes of a module's frozen parameters and buffers."""
    frozen = {id(p): p for p in (*module.parameters(), *module.buffers()) if not p.requires_grad}
    return sum(stored_bytes(tensor) for tensor in frozen.values())


def weight_bytes(layers: Iterable[Layer]) -> int:
    """Return the stored bytes of these layers' weights."""
    return sum(stored_bytes(layer.weight) for layer in layers)


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; for a packed weight, of its packed numbers and scales."""
    return tensor.stored_bytes if isinstance(tensor, PackedWeight) else tensor.numel() * tensor.element_size()


def ignore_in_ddp(module: nn.Module) -> None:
    """Prevent DistributedDataParallel from broadcasting dequantized copies of this module's packed weights."""
    names = [*vars(module).get(IGNORED_BY_DDP, ()), *(name for name, _ in packed_weights(module))]
    setattr(module, IGNORED_BY_DDP, list(dict.fromkeys(names)))


def _mib(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
