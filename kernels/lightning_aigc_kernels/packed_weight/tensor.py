"""PackedWeight: a frozen weight that is stored in few bits and computes in its nominal dtype.

It stands in a plain layer as its parameter. What moves or copies it keeps it packed; every other operator gets the
dequantized numbers, for the time of that operator. What autograd saves of an operator's arguments is the packed weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lightning_aigc_kernels.packed_weight import reference
from lightning_aigc_kernels.packed_weight.op import unpack_weight
from lightning_aigc_kernels.packed_weight.reference import Format

aten = torch.ops.aten
SAME_VALUES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
EMPTY = {aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.rand_like.default,
         aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default}  # fmt: skip
"""Operators that read a tensor's shape and dtype, not its values."""


class PackedWeight(Tensor):
    """A frozen weight in blocks of 64, with `int8` or `nf4` numbers and a float32 scale for each block.

    `dtype` is nominal: the dtype that operators see. `to(dtype)` changes it and nothing else, so `module.to(dtype)`
    never unpacks; the numbers are then exactly those of the unpacked weight after the same casts.
    """

    packed: Tensor
    """[B, 64] int8, or [B, 32] uint8 with two numbers a byte."""
    scales: Tensor
    """float32 [B]."""
    kind: Format
    casts: tuple[torch.dtype, ...]
    """The dtypes that the numbers are rounded to in turn; the last is `dtype`."""

    @staticmethod
    def __new__(
        cls, packed: Tensor, scales: Tensor, kind: Format, shape: Sequence[int], casts: tuple[torch.dtype, ...]
    ) -> PackedWeight:
        self: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=casts[-1], device=packed.device, requires_grad=False
        )
        self.packed, self.scales, self.kind, self.casts = packed, scales, kind, casts
        return self

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def pack(cls, weight: Tensor, kind: Format) -> PackedWeight:
        """Pack a weight; its dtype becomes the nominal one. Raises: ValueError for NaN or infinity."""
        return cls(*reference.pack(weight, kind), kind, weight.shape, (weight.dtype,))

    def dequantize(self) -> Tensor:
        """The numbers as a plain tensor in the nominal dtype."""
        first, *further = self.casts
        weight = unpack_weight(self.packed, self.scales, self.kind, self.shape, first)
        for dtype in further:
            weight = weight.to(dtype)
        return weight

    @property
    def stored_bytes(self) -> int:
        """Bytes that are in memory."""
        return self.packed.nbytes + self.scales.nbytes

    def with_bytes(self, packed: Tensor, scales: Tensor, casts: tuple[torch.dtype, ...] | None = None) -> PackedWeight:
        """A weight of this shape and kind with other bytes."""
        return PackedWeight(packed, scales, self.kind, self.shape, casts or self.casts)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedWeight({tuple(self.shape)}, {self.kind}, dtype={self.dtype}, device='{self.device}')"

    # torch.compile and functionalization see the two tensors inside.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["packed", "scales"], (self.kind, tuple(self.shape), self.casts)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: tuple[Any, ...], *_: Any) -> PackedWeight:
        kind, shape, casts = meta
        return PackedWeight(inner["packed"], inner["scales"], kind, shape, casts)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            # Autograd would save the transposed numbers: `linear` reads a view of its weight, which is dequantized.
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            x, weight, bias = given["input"], given["weight"], given.get("bias")
            if isinstance(weight, PackedWeight) and x.requires_grad:
                from lightning_aigc_kernels.frozen_conv2d import frozen_linear

                if bias is None or not bias.requires_grad:
                    return frozen_linear(x, weight, bias)
                y = frozen_linear(x, weight)
                return y + bias.to(y.dtype)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, PackedWeight):
            handler = _handler_of(func)
            if handler is not None:
                return handler(first, func, args, kwargs)
        if func._schema.is_mutable:
            _refuse_to_change(func, args)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, PackedWeight) else value


def _refuse_to_change(func: Any, args: Sequence[Any]) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        values = value if isinstance(value, (list, tuple)) else (value,)
        if written and any(isinstance(v, PackedWeight) for v in values):
            raise RuntimeError(
                f"{func} would change a packed weight, which is frozen; train an adapter on it, or do not quantize it"
            )


Handler = Callable[[PackedWeight, Any, tuple[Any, ...], dict[str, Any]], Any]


def _handler_of(func: Any) -> Handler | None:
    if func in SAME_VALUES:
        return lambda weight, func, args, kwargs: weight.with_bytes(weight.packed, weight.scales)
    if func in EMPTY:
        return _like
    return {
        aten.clone.default: lambda weight, *_: weight.with_bytes(weight.packed.clone(), weight.scales.clone()),
        aten._pin_memory.default: lambda weight, *_: weight.with_bytes(
            weight.packed.pin_memory(), weight.scales.pin_memory()
        ),
        aten._to_copy.default: _to_copy,
        aten.copy_.default: _copy_,
    }.get(func)


def _like(weight: PackedWeight, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run an operator that reads only shape and dtype on a tensor without numbers."""
    empty = torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
    result: Tensor = func(empty, *args[1:], **kwargs)
    return result.contiguous()


def _to_copy(weight: PackedWeight, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    dtype = kwargs.get("dtype") or weight.dtype
    if not dtype.is_floating_point:
        result: Tensor = func(weight.dequantize(), *args[1:], **kwargs)
        return result
    device = kwargs.get("device") or weight.device
    non_blocking = bool(kwargs.get("non_blocking"))
    packed, scales = (tensor.to(device, non_blocking=non_blocking) for tensor in (weight.packed, weight.scales))
    return weight.with_bytes(packed, scales, _cast(weight.casts, dtype))


def _cast(casts: tuple[torch.dtype, ...], dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The casts and one more, without those that change no number."""
    if dtype in casts:
        place = casts.index(dtype)
        if all(torch.promote_types(dtype, later) == later for later in casts[place:]):
            return casts[: place + 1]  # later dtypes hold these numbers exactly
    return (*casts, dtype)


def _copy_(weight: PackedWeight, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedWeight:
    """Load other numbers: the bytes of a packed weight, or a full weight, which is packed."""
    source = args[1]
    if isinstance(source, PackedWeight) and source.kind == weight.kind and source.shape == weight.shape:
        weight.packed.copy_(source.packed)
        weight.scales.copy_(source.scales)
        return weight
    packed, scales = reference.pack(_plain(source).expand(weight.shape), weight.kind)
    weight.packed.copy_(packed)
    weight.scales.copy_(scales)
    return weight


def packed_weights(module: nn.Module) -> Iterator[tuple[str, PackedWeight]]:
    """Yield the packed weights of a module by name, each once."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, PackedWeight):
            yield name, parameter


def set_packed_(layer: nn.Module, kind: Format, weight: PackedWeight | None = None) -> PackedWeight:
    """Pack a layer's weight in place, or put `weight` there; the full one is freed.

    Raises: ValueError for NaN or infinity.
    """
    packed = PackedWeight.pack(layer.get_parameter("weight"), kind) if weight is None else weight
    del layer._parameters["weight"]  # a parameter of another class cannot be assigned over it
    layer.register_parameter("weight", nn.Parameter(packed, requires_grad=False))
    return packed


# A checkpoint that holds packed weights loads with `weights_only=True`: rebuilding one runs no code of the file.
torch.serialization.add_safe_globals([PackedWeight])
