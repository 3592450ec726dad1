"""Read the parameters of layers that the fused ops support: plain linear, convolution and norm layers, peft's LoRA.

peft and diffusers are not imported: a class is recognised by its exact dotted name, so that a subclass with another
forward is not mistaken for its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_aigc.precision.context import SWAP, SwapState
from lightning_aigc.sharding.local_parts import original_class
from lightning_aigc_kernels import LoRAProjection, NormParameters

PEFT_LINEAR = "peft.tuners.lora.layer.Linear"
ATTENTION = "diffusers.models.attention_processor.Attention"
FEED_FORWARD = "diffusers.models.attention.FeedForward"
RESNET = "diffusers.models.resnet.ResnetBlock2D"
TRANSFORMER = "diffusers.models.transformers.transformer_2d.Transformer2DModel"
TRANSFORMER_BLOCK = "diffusers.models.attention.BasicTransformerBlock"


class CannotSwapError(Exception):
    """Error for a module that cannot be swapped; the message is the reason in lower case, without the module's name."""


def class_path(module: object) -> str:
    """Return the dotted path of an object's class, `module.path.ClassName`; sharding does not change it."""
    cls = original_class(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def refuse_hooks(module: nn.Module) -> None:
    """Raise CannotSwapError for a layer with hooks, parametrizations or a replaced forward, which a fused op bypasses.

    kohya's and LyCORIS's LoRA, and accelerate's hooks, replace a layer's forward.
    """
    attributes = module.__dict__
    if _has_no_hooks(attributes):
        return
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise CannotSwapError("a layer inside has hooks")
    if "parametrizations" in module._modules:
        raise CannotSwapError("a layer inside is parametrized")
    if not is_installed(module):
        raise CannotSwapError("a layer inside has a forward that other code replaced")


def is_installed(module: nn.Module) -> bool:
    """Whether the module's forward is the one that a swap installed."""
    state: SwapState | None = module.__dict__.get(SWAP)
    return state is not None and module.__dict__.get("forward") is state.forward


def read_projection(module: Any) -> LoRAProjection:
    """Read the tensors of a linear layer and of its active LoRA.

    Raises: CannotSwapError for any other layer, several active LoRAs, LoRA dropout, DoRA and other LoRA variants.
    """
    return _read_plain(module) or _read_checked(module)


def _read_plain(module: Any) -> LoRAProjection | None:
    """`read_projection` of the usual cases, out of the modules' dictionaries; None for others.

    A step reads some hundred layers, and nn.Module's `__getattr__` and peft's properties take ten times as long.
    """
    kind: type = type(module)
    attributes = module.__dict__
    if not _has_no_hooks(attributes):
        return None
    if kind is nn.Linear:
        parameters = attributes["_parameters"]
        return LoRAProjection(parameters["weight"], parameters["bias"])
    if not _is_peft_linear(kind) or attributes.get("_disable_adapters") or attributes.get("merged_adapters"):
        return None
    active = attributes.get("_active_adapter")
    (name,) = active if isinstance(active, list) and len(active) == 1 else (active,)
    children = attributes["_modules"]
    if not isinstance(name, str) or name in module.lora_variant or name not in children["lora_A"]._modules:
        return None
    base, down, up = children["base_layer"], children["lora_A"]._modules[name], children["lora_B"]._modules[name]
    dropout = children["lora_dropout"]._modules[name]
    if not (type(base) is type(down) is type(up) is nn.Linear and type(dropout) is nn.Identity):
        return None
    if not all(_has_no_hooks(layer.__dict__) for layer in (base, down, up, dropout)):
        return None
    parameters, down_parameters, up_parameters = (layer.__dict__["_parameters"] for layer in (base, down, up))
    if down_parameters["bias"] is not None or up_parameters["bias"] is not None:
        return None
    scale = float(attributes["scaling"][name])
    return LoRAProjection(
        parameters["weight"], parameters["bias"], down_parameters["weight"], up_parameters["weight"], scale
    )


def _has_no_hooks(attributes: dict[str, Any]) -> bool:
    """Whether `refuse_hooks` accepts the module with these attributes; False also for a forward that a swap set."""
    return not (
        attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"] or "parametrizations" in attributes["_modules"] or "forward" in attributes
    )  # fmt: skip


def _is_peft_linear(kind: type) -> bool:
    return kind.__qualname__ == "Linear" and f"{kind.__module__}.Linear" == PEFT_LINEAR


def _read_checked(module: Any) -> LoRAProjection:
    """`read_projection`, with the reason for a layer that cannot be read."""
    refuse_hooks(module)
    if type(module) is nn.Linear:
        return LoRAProjection(module.weight, module.bias)
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
        return LoRAProjection(base.weight, base.bias)
    if len(active) > 1:
        raise CannotSwapError("several LoRAs active at once")
    (name,) = active
    if name in module.lora_variant:
        raise CannotSwapError(f"{type(module.lora_variant[name]).__name__} instead of plain LoRA")
    down, up, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    for layer in (down, up):
        refuse_hooks(layer)
        if type(layer) is not nn.Linear:
            raise CannotSwapError(f"a LoRA made of {class_path(layer)}")
    if down.bias is not None or up.bias is not None:
        raise CannotSwapError("a LoRA with biases")
    refuse_dropout(dropout)
    return LoRAProjection(base.weight, base.bias, down.weight, up.weight, float(module.scaling[name]))


def refuse_dropout(module: nn.Module) -> None:
    """Raise CannotSwapError for an active dropout."""
    refuse_hooks(module)
    if isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and (module.p == 0 or not module.training)):
        return
    raise CannotSwapError(f"{original_class(module).__name__} is active")


def read_layer_norm(module: nn.Module) -> NormParameters:
    """Read the tensors of a LayerNorm over the last dimension.

    Raises: CannotSwapError for any other norm.
    """
    refuse_hooks(module)
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
        raise CannotSwapError(f"{class_path(module)} is not a LayerNorm over the last dimension")
    return NormParameters(module.weight, module.bias, module.eps)


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


def tensors_of(layers: Sequence[LoRAProjection], norm: NormParameters) -> list[Tensor | None]:
    """Return the tensors whose dtypes must equal the input's."""
    return [t for layer in layers for t in layer.tensors] + [norm.weight, norm.bias]


def check_same_dtype(x: Tensor, *tensors: Tensor | None) -> None:
    """Raise CannotSwapError if dtypes differ outside autocast, where torch's promotion rules apply."""
    if torch.is_autocast_enabled(x.device.type):
        return
    dtype = x.dtype
    for tensor in tensors:
        if tensor is not None and tensor.dtype is not dtype:
            raise CannotSwapError(f"input {dtype} with {tensor.dtype} without autocast")
