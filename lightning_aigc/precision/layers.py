"""Read the parameters of layers that the fused ops support: plain linear, convolution and norm layers, peft's LoRA.

Nothing here imports peft or diffusers: classes are recognised by their exact dotted name, so that a subclass with
another forward is never taken for its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_aigc.sharding.original_class import original_class
from lightning_aigc_kernels import Norm, Projection

PEFT_LINEAR = "peft.tuners.lora.layer.Linear"
INSTALLED = "_fused_forward"
"""Attribute of a swapped module with its fused forward, to distinguish it from other replacements."""


class CannotSwapError(Exception):
    """A module cannot be swapped; the message is the reason, in lower case and without the module's name."""


def class_path(module: object) -> str:
    """The dotted path of an object's class, `module.path.ClassName`, under sharding too."""
    cls = original_class(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def refuse_hooks(module: nn.Module) -> None:
    """Raise CannotSwapError for a layer with hooks, parametrizations or a replaced forward, which a fused op bypasses.

    kohya's and LyCORIS's LoRA, and accelerate's hooks, replace a layer's forward.
    """
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise CannotSwapError("a layer inside has hooks")
    if "parametrizations" in module._modules:
        raise CannotSwapError("a layer inside is parametrized")
    own = module.__dict__
    if "forward" in own and own["forward"] is not own.get(INSTALLED):
        raise CannotSwapError("a layer inside has a forward that somebody else replaced")


def read_projection(module: Any) -> Projection:
    """The tensors of a linear layer and of its active LoRA.

    Raises: CannotSwapError for any other layer, several active LoRAs, LoRA dropout, DoRA and other LoRA variants.
    """
    refuse_hooks(module)
    if type(module) is nn.Linear:
        return Projection(module.weight, module.bias)
    if class_path(module) != PEFT_LINEAR:
        raise CannotSwapError(f"{class_path(module)} is not a linear layer that a fused op supports")
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
    """Raise CannotSwapError for an active dropout."""
    refuse_hooks(module)
    if isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and (module.p == 0 or not module.training)):
        return
    raise CannotSwapError(f"{original_class(module).__name__} is active")


def read_layer_norm(module: nn.Module) -> Norm:
    """The tensors of a LayerNorm over the last dimension.

    Raises: CannotSwapError for any other norm.
    """
    refuse_hooks(module)
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
        raise CannotSwapError(f"{class_path(module)} is not a LayerNorm over the last dimension")
    return Norm(module.weight, module.bias, module.eps)


def check_group_norm(module: nn.Module) -> None:
    """Raise CannotSwapError unless the module is a plain GroupNorm."""
    refuse_hooks(module)
    if type(module) is not nn.GroupNorm:
        raise CannotSwapError(f"{class_path(module)} is not a GroupNorm")


def check_conv2d(module: nn.Module) -> None:
    """Raise CannotSwapError unless the module is a plain Conv2d with zero padding."""
    refuse_hooks(module)
    if type(module) is not nn.Conv2d:
        raise CannotSwapError(f"{class_path(module)} is not a plain Conv2d")
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise CannotSwapError(f"padding {module.padding_mode} {module.padding}")


def check_silu(module: nn.Module) -> None:
    """Raise CannotSwapError unless the module is a SiLU."""
    refuse_hooks(module)
    if type(module) is not nn.SiLU:
        raise CannotSwapError(f"activation {class_path(module)}")


def tensors_of(layers: Sequence[Projection], norm: Norm) -> list[Tensor | None]:
    """The tensors whose dtypes must equal the input's."""
    return [t for layer in layers for t in layer.tensors] + [norm.weight, norm.bias]
