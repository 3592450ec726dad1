"""quantize_frozen_: pack the frozen weights of any module, in place."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_aigc.errors import ConfigError
from lightning_aigc.quantization.layers import (
    FORMATS,
    BaseQuantization,
    Layer,
    check_kind,
    check_patterns,
    check_skip,
    frozen_layers,
)
from lightning_aigc.quantization.weight_budget import MIB, choose_formats, output_errors, target_mib
from lightning_aigc_kernels.packed_weight import Format, PackedWeight, packed_weights, set_packed_

MEANING = {
    "int8": "int8",
    "nf4": "nf4: linears NF4, convolutions int8",
    "nf4-all": "nf4-all: linears and convolutions NF4",
}
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module in which DistributedDataParallel looks for names that it must not broadcast."""


@dataclass
class PackedBase:
    """What was packed of a base, and what that saves."""

    kind: str
    packed: int = 0
    """Weights in few bits."""
    formats: Counter[str] = field(default_factory=Counter)
    """How many of them in which format."""
    bytes_before: int = 0
    """Of all parameters and buffers, trained ones left out."""
    bytes_after: int = 0
    left: Counter[str] = field(default_factory=Counter)
    """Frozen linear layers and convolutions that stay whole, by reason."""
    digest: str = ""
    """sha256 of the packed bytes by name."""

    def add(self, other: PackedBase) -> None:
        """Count another part of the same base."""
        self.packed += other.packed
        self.formats += other.formats
        self.bytes_before += other.bytes_before
        self.bytes_after += other.bytes_after
        self.left += other.left
        self.digest = hashlib.sha256(f"{self.digest} {other.digest}".encode()).hexdigest()

    def summary(self) -> str:
        """One line: how many weights, in which format, and the memory before and after."""
        before, after = self.bytes_before / 2**20, self.bytes_after / 2**20
        total = self.packed + self.left.total()
        how = MEANING.get(self.kind, "") or ", ".join(f"{count} {kind}" for kind, count in sorted(self.formats.items()))
        line = f"{self.packed} of {total} frozen weights packed ({how})"
        line += f", {_mib(before)} -> {_mib(after)} MiB"
        if self.left:
            line += "; left whole: " + ", ".join(f"{count} {reason}" for reason, count in sorted(self.left.items()))
        return line


def quantize_frozen_(
    module: nn.Module,
    kind: BaseQuantization,
    skip: Sequence[str] | None = None,
    outputs: Iterable[Tensor] | None = None,
) -> PackedBase:
    """Pack the frozen linear layers and convolutions of a module in place; what is trained stays as it is.

    The layers keep their classes, names and state_dict keys; their weights become `PackedWeight`s, which compute in
    the dtype that they had and take a quarter to a half of its memory. DistributedDataParallel around this module
    does not broadcast them. Call it once adapters are in place and before an optimizer is built.

    Args:
        module: A LightningModule or any other; a part of it to pack that part alone.
        kind: int8: all int8, 8.5 bits a number; nf4: linears NF4, 4.5 bits, and convolutions int8;
            nf4-all: both NF4. `{"target_mib": 1500}`: each weight in the format, or whole, with which all frozen
            weights and buffers together fit these MiB and the outputs move least.
        skip: Name patterns of layers that stay whole, as in FusedBackwardPrecision's `protect`; unset leaves the
            first and last convolution and the embeddings of a U-Net.
        outputs: For a budget, some outputs of the module for typical inputs; each is computed when it is asked for,
            so a generator, with gradients on.

    Raises: ConfigError for an unknown kind, a budget that cannot be met or comes without outputs, a pattern
        that covers nothing, a module that is packed already or has nothing to pack, and a weight with NaN or infinity.
    """
    target = target_mib(kind)
    if target is None:
        check_kind(kind)
    elif outputs is None:
        raise ConfigError("base_quantization: a budget is kept by the model's outputs; give some with outputs=")
    check_skip(skip)
    layers = frozen_layers(module, skip)
    check_patterns(skip, (layer.name for layer in layers))
    if target is None:
        linear, convolution = FORMATS[str(kind)]
        result = pack_layers(module, layers, lambda layer: linear if layer.is_linear else convolution)
    else:
        open_to_choice = [layer for layer in layers if not layer.why_not]
        errors = output_errors(open_to_choice, outputs or ())
        chosen = choose_formats(
            open_to_choice, errors, target * MIB, frozen_bytes(module) - weight_bytes(open_to_choice)
        )
        by_name = dict(zip((layer.name for layer in open_to_choice), chosen, strict=True))
        result = pack_layers(module, layers, lambda layer: by_name[layer.name])
    result.kind = str(kind)
    ignore_in_ddp(module)
    return result


def pack_layers(
    module: nn.Module,
    layers: Iterable[Layer],
    format_of: Callable[[Layer], Format | None],
    packing: Callable[[Layer, Format], PackedWeight] | None = None,
) -> PackedBase:
    """Pack these layers of a module, each in the format that `format_of` says; None leaves it whole.

    `packing` makes a layer's packed weight, if not `PackedWeight.pack`.
    """
    result = PackedBase("", bytes_before=frozen_bytes(module))
    digest = hashlib.sha256()
    for layer in layers:
        chosen = None if layer.why_not else format_of(layer)
        if chosen is None:
            result.left[layer.why_not or "left whole by the budget"] += 1
            continue
        try:
            weight = set_packed_(layer.module, chosen, packing and packing(layer, chosen))
        except ValueError as error:
            raise ConfigError(
                f"base_quantization: {layer.name} cannot be packed, {error}; load the base again, or another one"
            ) from None
        digest.update(f"{layer.name} {chosen} {tuple(weight.shape)}".encode())
        for tensor in (weight.packed, weight.scales):
            digest.update(tensor.cpu().numpy().data)
        result.packed += 1
        result.formats[chosen] += 1
    if not result.packed:
        raise ConfigError(
            "base_quantization: there is no frozen linear layer or convolution to pack"
            f" ({', '.join(f'{count} {reason}' for reason, count in result.left.items()) or 'all are trained'});"
            " leave base_quantization unset"
        )
    result.bytes_after = frozen_bytes(module)
    result.digest = digest.hexdigest()
    return result


def frozen_bytes(module: nn.Module) -> int:
    """Bytes of a module's frozen parameters and its buffers, of packed weights those that they take."""
    frozen = {id(p): p for p in (*module.parameters(), *module.buffers()) if not p.requires_grad}
    return sum(stored_bytes(tensor) for tensor in frozen.values())


def weight_bytes(layers: Iterable[Layer]) -> int:
    """Bytes of these layers' weights."""
    return sum(stored_bytes(layer.weight) for layer in layers)


def stored_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor takes, of a packed weight those of its packed numbers and scales."""
    return tensor.stored_bytes if isinstance(tensor, PackedWeight) else tensor.numel() * tensor.element_size()


def ignore_in_ddp(module: nn.Module) -> None:
    """Keep DistributedDataParallel from broadcasting unpacked copies of this module's packed weights at its start."""
    names = [*vars(module).get(IGNORED_BY_DDP, ()), *(name for name, _ in packed_weights(module))]
    setattr(module, IGNORED_BY_DDP, list(dict.fromkeys(names)))


def _mib(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
