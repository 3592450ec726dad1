"""Small denoisers under FusedBackwardPrecision, run eagerly and by graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fakes.models import tiny_transformers as tiny
from fakes.recorded_graphs import RecordedGraphs
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.context import without_graphs
from lightning_aigc.precision.graph.graphed_root import EAGER_CALLS
from lightning_aigc.quantization import frozen

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "to_qkv_mlp_proj")


def sd15() -> tuple[nn.Module, tiny.Given]:
    """The blocks of Stable Diffusion 1.5, narrow."""
    unet = UNet2DConditionModel(
        sample_size=8, cross_attention_dim=32, block_out_channels=(32, 64, 64, 64), attention_head_dim=8
    )
    return unet, given_of_unet()


def given_of_unet(samples: int = 2, texts: int = 7) -> tiny.Given:
    return {
        "sample": torch.randn(samples, 4, 8, 8),
        "timestep": torch.randint(0, 1000, (samples,)),
        "encoder_hidden_states": torch.randn(samples, texts, 32),
    }


def two_levels() -> tuple[nn.Module, tiny.Given]:
    unet = UNet2DConditionModel(
        sample_size=8, cross_attention_dim=32, block_out_channels=(32, 64), attention_head_dim=8, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return unet, given_of_unet()


class Run:
    """A model with a LoRA under a plugin, run eagerly and by graphs: a device's own, or recorded ones on a CPU."""

    def __init__(
        self,
        make: Callable[[], tuple[nn.Module, tiny.Given]],
        memory: Any = "lean",
        precision: Any = "32-true",
        base: str | None = None,
        device: str = "cpu",
        **lora: Any,
    ) -> None:
        torch.manual_seed(0)
        model, given = make()
        model.to(device)
        self.given: tiny.Given = tree_map_only(Tensor, lambda x: x.to(device), given)
        model.requires_grad_(False)
        names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
        targets = [target for target in TARGETS if target.split(".")[0] in names]
        self.model: Any = inject_adapter_in_model(LoraConfig(**{"r": 4, "target_modules": targets} | lora), model)
        self.model.train()
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        if base is not None:
            frozen.quantize_frozen_(self.model, base)  # type: ignore[arg-type]
        self.plugin = FusedBackwardPrecision(precision, memory=memory)
        self.plugin.convert_module(self.model)
        if precision == "bf16-true":
            self.given = {
                k: v.bfloat16() if v.is_floating_point() and v.dim() > 1 else v for k, v in self.given.items()
            }
        self.graphs = RecordedGraphs()
        self.plugin.record_graphs(self.model, torch.device(device), self.graphs if device == "cpu" else None)
        (self.graphed,) = self.plugin._graphed
        self.trained = [p for p in self.model.parameters() if p.requires_grad]

    def outputs(self, given: tiny.Given) -> list[Tensor]:
        with self.plugin.forward_context():
            result = self.model(**given)
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def step(self, given: tiny.Given) -> list[Tensor | None]:
        """Outputs and gradients."""
        outputs = self.outputs(given)
        loss = torch.stack([y.float().square().mean() for y in outputs]).sum()
        return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, self.trained, allow_unused=True)]

    def eager_step(self, given: tiny.Given) -> list[Tensor | None]:
        with without_graphs():
            return self.step(given)

    def warm_up(self) -> None:
        for _ in range(EAGER_CALLS):
            self.step(self.given)

    def change_weights(self) -> None:
        """As an optimizer's step, in place."""
        with torch.no_grad():
            for parameter in self.trained:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def fresh(given: tiny.Given) -> tiny.Given:
    """Other numbers for latents, texts and times; positions and masks stay."""

    def moved(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or "ids" in name:
            return value
        return torch.randn_like(value) if value.is_floating_point() and value.dim() > 2 else value.roll(1, 0)

    return {name: moved(name, value) for name, value in given.items()}


def same(found: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    return len(found) == len(wanted) and all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in zip(found, wanted, strict=True)
    )
