"""Read the parameters of layers that fused ops can serve: plain linear, convolution and norm layers, peft's LoRA.

Nothing here imports peft or diffusers: classes are recognised by their dotted name, exactly, so that a subclass with a
forward of its own is never taken for its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_aigc_kernels import Norm, Projection

PEFT_LINEAR = "peft.tuners.lora.layer.Linear"
INSTALLED = "_fused_forward"
"""Where a swapped module keeps the forward that was put on it, to tell it from other replacements."""


class CannotSwapError(Exception):
    """Why a module keeps its own forward; the message is the reason, in lower case and without the module's name."""


def class_path(module: object) -> str:
    """module.path.ClassName of an object."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def refuse_hooks(module: nn.Module) -> None:
    """Raises: CannotSwapError for a layer with what a fused op would pass by: hooks, parametrizations, a new forward.

    kohya's and LyCORIS's LoRA, and accelerate's hooks, put a forward of their own on the layer.
    """
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise CannotSwapError("a layer inside has hooks")
    if "parametrizations" in module._modules:
        raise CannotSwapError("a layer inside is parametrized")
    own = module.__dict__
    if "forward" in own and own["forward"] is not own.get(INSTALLED):
        raise CannotSwapError("a layer inside has a forward that somebody else replaced")


def read_projection(module: Any) -> Projection:
    """The tensors of a linear layer and of the one LoRA active on it.

    Raises: CannotSwapError for any other layer, several active LoRAs, LoRA dropout, DoRA and other LoRA variants.
    """
    refuse_hooks(module)
    if type(module) is nn.Linear:
        return Projection(module.weight, module.bias)
    if class_path(module) != PEFT_LINEAR:
        raise CannotSwapError(f"{class_path(module)} is not a linear layer that a fused op knows")
    base = module.base_layer
    if type(base) is not nn.Linear:
        raise CannotSwapError(f"LoRA on {class_path(base)}")
    refuse_hooks(base)
    if module.disable_adapters and module.merged:
        raise CannotSwapError("a merged LoRA that is switched off")
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or not active:
        return Projection(base.weight, base.bias)
    if len(active) > 1:
        raise CannotSwapError("several LoRAs active at once")
    (name,) = active
    if name in module.lora_variant:
        raise CannotSwapError(f"{type(module.lora_variant[name]).__name__} in place of plain LoRA")
    down, up, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    for layer in (down, up):
        refuse_hooks(layer)
        if type(layer) is not nn.Linear:
            raise CannotSwapError(f"a LoRA made of {class_path(layer)}")
    if down.bias is not None or up.bias is not None:
        raise CannotSwapError("a LoRA with biases")
    refuse_dropout(dropout)
    return Projection(base.weight, base.bias, down.weight, up.weight, float(module.scaling[name]))


def refuse_dropout(module: nn.Module) -> None:
    """Raises: CannotSwapError for a dropout that would drop something now."""
    refuse_hooks(module)
    if isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and (module.p == 0 or not module.training)):
        return
    raise CannotSwapError(f"{type(module).__name__} is active")


def read_layer_norm(module: nn.Module) -> Norm:
    """The tensors of a LayerNorm over the last dimension.

    Raises: CannotSwapError for another norm.
    """
    refuse_hooks(module)
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
        raise CannotSwapError(f"{class_path(module)} is not a LayerNorm over the last dimension")
    return Norm(module.weight, module.bias, module.eps)


def check_group_norm(module: nn.Module) -> None:
    """Raises: CannotSwapError for anything but a plain GroupNorm."""
    refuse_hooks(module)
    if type(module) is not nn.GroupNorm:
        raise CannotSwapError(f"{class_path(module)} is not a GroupNorm")


def check_conv2d(module: nn.Module) -> None:
    """Raises: CannotSwapError for anything but a plain Conv2d padded with zeros."""
    refuse_hooks(module)
    if type(module) is not nn.Conv2d:
        raise CannotSwapError(f"{class_path(module)} is not a plain Conv2d")
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise CannotSwapError(f"padding {module.padding_mode} {module.padding}")


def check_silu(module: nn.Module) -> None:
    """Raises: CannotSwapError for another activation than SiLU."""
    refuse_hooks(module)
    if type(module) is not nn.SiLU:
        raise CannotSwapError(f"activation {class_path(module)}")


def tensors_of(layers: Sequence[Projection], norm: Norm) -> list[Tensor | None]:
    """Return the tensors whose dtypes must be the input's."""
    return [t for layer in layers for t in layer.tensors] + [norm.weight, norm.bias]
