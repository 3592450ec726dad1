"""Add LoKr and LoHa layers to a network by peft, with a LoKr forward that keeps no weight-sized tensor.

peft multiplies by the whole Kronecker product, a tensor of the weight's size that autograd keeps for each layer: 16 GiB
for the attention of FLUX.1. The factors in turn give the same output.

Legend: L K rows and M N columns of the two factors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoHaConfig, LoKrConfig
from peft.tuners.loha import layer as loha
from peft.tuners.lokr.layer import Conv2d, Linear
from torch import Tensor, nn

from lightning_aigc.diffusion.lora.lycoris import LOHA, LOKR, FactorLayer, kron_factors
from lightning_aigc.errors import ModelError


def add_lokr(network: Any, modules: Sequence[str], rank: int, alpha: float, factor: int) -> None:
    """Add a LoKr whose change is zero to these modules.

    Raises: ModelError for a factor that does not divide the sizes of a layer, which readers could not infer.
    """
    for name in modules:
        layer = network.get_submodule(name)
        sides = layer.weight.shape[:2]
        odd = next((int(side) for side in sides if side % factor), None)
        if odd is not None:
            raise ModelError(
                f"model.init_args.lokr_factor: {factor} does not divide {odd}, a side of {name} {list(sides)}; use a"
                " divisor of all, such as 2 or 4, or leave its kind out of model.init_args.lora_targets"
            )
    network.add_adapter(LoKrConfig(r=rank, alpha=alpha, decompose_factor=factor, target_modules=list(modules)))
    compute_by_factors(network)


def add_factors(network: Any, layers: Sequence[FactorLayer], adapter: str = "default") -> None:
    """Add the layers of a LoKr or LoHa file, with scale 1."""
    make = LoKrConfig if layers[0].kind == "LoKr" else LoHaConfig
    network.add_adapter(make(r=1, alpha=1, target_modules=[layer.module for layer in layers]), adapter)
    for layer in layers:
        module = network.get_submodule(layer.module)
        device = module.get_base_layer().weight.device
        for part in LOKR if layer.kind == "LoKr" else LOHA:
            held = getattr(module, part)
            if adapter in held:
                del held[adapter]
            if part in layer.parts:
                held[adapter] = nn.Parameter(layer.parts[part].float().to(device))
    compute_by_factors(network)


def compute_by_factors(network: nn.Module) -> None:
    """Let every LoKr layer of peft compute by its factors, and LoHa layers too without a draw."""
    classes: dict[type, type] = {
        Linear: FactoredLinear, Conv2d: FactoredConv2d, loha.Linear: LoHaLinear, loha.Conv2d: LoHaConv2d,
    }  # fmt: skip
    for module in network.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]


def target_modules(network: nn.Module, config: Any) -> list[str]:
    """Names of the linear layers and convolutions that a peft configuration covers."""
    excluded = set(config.exclude_modules or ())
    targets: set[str] = set(config.target_modules)
    return [
        name
        for name, module in network.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
        and name not in excluded
        and (name in targets or any(re.fullmatch(rf".*\.{re.escape(target)}", name) for target in targets))
    ]


class WithoutDraws:
    """The forward of peft's LoKr and LoHa layers, which draws a number for a dropout of modules, here never set.

    The draw would be frozen in a graph, and would take the place of others in the host's generator.
    """

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc, no-any-return]
        result: Tensor = self.base_layer(x, *args, **kwargs)
        for name in self.active_adapters:
            if name in self._available_adapters:
                result = result + self._get_delta_activations(name, x, *args, **kwargs)
        return result.to(x.dtype)


class LoHaLinear(WithoutDraws, loha.Linear):  # type: ignore[misc]  # peft has no types
    """A LoHa linear layer."""


class LoHaConv2d(WithoutDraws, loha.Conv2d):  # type: ignore[misc]
    """A LoHa convolution."""


class FactoredLinear(WithoutDraws, Linear):  # type: ignore[misc]
    """A LoKr linear layer that multiplies by its factors."""

    def _get_delta_activations(self, adapter_name: str, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        w1_LM, w2_KN = _factors(self, adapter_name)
        inputs = self._cast_input_dtype(input, w1_LM.dtype).unflatten(-1, (w1_LM.shape[1], w2_KN.shape[1]))
        products = nn.functional.linear(inputs, w2_KN)
        change: Tensor = torch.einsum("lm,...mk->...lk", w1_LM, products).flatten(-2) * self.scaling[adapter_name]
        return change


class FactoredConv2d(WithoutDraws, Conv2d):  # type: ignore[misc]
    """A LoKr convolution that convolves with its second factor, then mixes groups of channels by the first."""

    def _get_delta_activations(self, adapter_name: str, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        w1_LM, w2 = _factors(self, adapter_name)
        base = self.get_base_layer()
        inputs = self._cast_input_dtype(input, w1_LM.dtype)
        batch, groups = inputs.shape[0], w1_LM.shape[1]
        w2_KNhw = w2.reshape(w2.shape[0], inputs.shape[1] // groups, *base.kernel_size)
        folded = inputs.reshape(batch * groups, -1, *inputs.shape[2:])
        made = nn.functional.conv2d(folded, w2_KNhw, None, base.stride, base.padding, base.dilation)
        made = made.reshape(batch, groups, *made.shape[1:])
        change: Tensor = torch.einsum("lm,bmkhw->blkhw", w1_LM, made).flatten(1, 2) * self.scaling[adapter_name]
        return change


def _factors(layer: Any, adapter: str) -> tuple[Tensor, Tensor]:
    return kron_factors({part: getattr(layer, part)[adapter] for part in LOKR if adapter in getattr(layer, part)})
