"""LoRALayer, the layout-independent form of a LoRA layer, and its extraction from peft models.

A layer adds (alpha / rank) * up @ down to its module's weight; DoRA then rescales each output row to its magnitude.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_aigc._lightning import rank_zero_warn
from lightning_aigc.diffusion.lora.names import COMPONENTS, DENOISERS, TEXT_ENCODER, TEXT_ENCODER_2, TRANSFORMER
from lightning_aigc.errors import ModelError


@dataclass(frozen=True)
class LoRALayer:
    """One adapted module."""

    component: str
    """unet, transformer, text_encoder or text_encoder_2."""
    module: str
    """Dotted name within the component, as in diffusers; text encoders start with `text_model.`."""
    down: Tensor
    """[rank, in], or [rank, in, height, width] on a convolution."""
    up: Tensor
    """[out, rank], or [out, rank, 1, 1]."""
    alpha: float
    """The layer's scale is alpha / rank."""
    magnitude: Tensor | None = None
    """DoRA's magnitude of each output row, [out], as peft trains it."""
    comfyui_magnitude: Tensor | None = None
    """The same as ComfyUI applies it, float32 [out]; None where it is not known."""
    base: Tensor | None = None
    """The base's own weight, of a DoRA that was just trained; no file holds it."""

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the layer's weight; a convolution's kernel is not counted."""
        return self.up.shape[0], self.down.shape[1]


def warn_of_rank(network: nn.Module, rank: int) -> None:
    """Warn of a rank above the sides of all adapted layers, where more of it adds parameters and no freedom."""
    from peft.tuners.lora import LoraLayer

    matrices = [
        (layer.lora_A[name].weight, layer.lora_B[name].weight)
        for layer in network.modules()
        if isinstance(layer, LoraLayer)
        for name in layer.lora_A
    ]
    most = max((min(down[0].numel(), len(up)) for down, up in matrices), default=rank)
    if rank > most:
        rank_zero_warn(
            f"model.init_args.rank: {rank} is above the sides of all layers, and a LoRA of rank {most} holds every"
            f" change of them; set model.init_args.rank: {most} or less, usually 4 to 64"
        )


def collect_layers(component: str, model: nn.Module, adapter_name: str = "default") -> list[LoRALayer]:
    """Collect a model's peft LoRA layers; rsLoRA's alpha / sqrt(rank) becomes the equal alpha / rank.

    Raises: ModelError if there are none, or if the adapter holds biases or whole modules, which a LoRA file cannot.
    """
    from peft import get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer

    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    config = getattr(model, "peft_config", {}).get(adapter_name)
    if config is None:
        raise ModelError(
            f"got a {component} without the LoRA adapter {adapter_name!r}; add one with "
            f"{component}.add_adapter(LoraConfig(...)), or omit {component}"
        )
    state = {
        key.removeprefix("base_model.model."): value
        for key, value in get_peft_model_state_dict(
            model, adapter_name=adapter_name, save_embedding_layers=False
        ).items()
    }
    layers = []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or adapter_name not in module.r:
            continue
        name = name.removeprefix("base_model.model.")
        rank, alpha = int(module.r[adapter_name]), float(module.lora_alpha[adapter_name])
        try:
            down, up = state.pop(f"{name}.lora_A.weight"), state.pop(f"{name}.lora_B.weight")
        except KeyError as error:
            raise ModelError(
                f"got a LoRA on {component}.{name}, a {type(module).__name__} layer; LoRA files hold linear and "
                "convolution layers only: take it out of target_modules"
            ) from error
        magnitude = state.pop(f"{name}.lora_magnitude_vector", None)
        layers.append(
            LoRALayer(
                component,
                canonical_module(component, name),
                down.detach(),
                up.detach(),
                alpha * math.sqrt(rank) if config.use_rslora else alpha,
                None if magnitude is None else magnitude.detach().flatten(),
                base=None if magnitude is None else module.get_base_layer().weight.detach(),
            )
        )
    if state:
        raise ModelError(
            f"got a {component} adapter that also trains {sorted(state)[:3]}; LoRA files cannot hold these: use "
            'bias="none", lora_bias=False and no modules_to_save'
        )
    if not layers:
        raise ModelError(f"got a {component} adapter without any LoRA layer; check LoraConfig's target_modules")
    return layers


def check_cast(place: str, trained: Sequence[Tensor], cast: Sequence[Tensor]) -> None:
    """Raise ModelError for a layer with values that are not finite, in a file's dtype or as they were trained."""
    if all(bool(tensor.isfinite().all()) for tensor in cast):
        return
    remedy = "the training diverged, so none is saved; lower model.init_args.learning_rate"
    if all(bool(tensor.isfinite().all()) for tensor in trained):
        largest = max(float(tensor.abs().max()) for tensor in trained if tensor.numel())
        raise ModelError(
            f"the LoRA of {place} has values of up to {largest:.3g}, which {cast[0].dtype} does not hold: {remedy}"
            " (in Python, dtype=torch.float32 saves them)"
        )
    raise ModelError(f"the LoRA of {place} has values that are not finite: {remedy}")


def canonical_module(component: str, module: str) -> str:
    """A module's name as written in files, always with CLIP's inner `text_model.`."""
    if component in DENOISERS or module.startswith(("text_model.", "text_projection")):
        return module
    return f"text_model.{module}"


def with_transformers_scale_one(layers: Iterable[LoRALayer]) -> list[LoRALayer]:
    """The same layers, those of a transformer with alpha equal to their rank; the scale is folded into `up`.

    ComfyUI reads diffusers' layout of a transformer without its header, and so with scale 1.
    """
    return [
        dataclasses.replace(
            layer, alpha=float(layer.rank), up=(layer.up.float() * (layer.alpha / layer.rank)).to(layer.up.dtype)
        )
        if layer.component == TRANSFORMER and layer.alpha != layer.rank
        else layer
        for layer in layers
    ]


def with_one_alpha(layers: Iterable[LoRALayer]) -> list[LoRALayer]:
    """The same layers with one common alpha per component; differing alphas are folded into `up`.

    diffusers 0.42 loses per-layer alphas of attention and text-encoder layers when they differ (get_peft_kwargs
    builds pattern names that match no module); a common alpha loads correctly everywhere. Drop this once that is fixed.
    """
    layers = list(layers)
    common = {}
    for component in COMPONENTS:
        counts = Counter(layer.alpha for layer in layers if layer.component == component and layer.alpha != 0)
        common[component] = counts.most_common(1)[0][0] if counts else 1.0
    return [
        layer
        if layer.alpha == common[layer.component]
        else dataclasses.replace(
            layer, alpha=common[layer.component], up=layer.up.float() * (layer.alpha / common[layer.component])
        )
        for layer in layers
    ]


def with_out_proj(layers: Iterable[LoRALayer]) -> list[LoRALayer]:
    """The same layers, plus a zero layer on `out_proj` in each text encoder that adapts attention without it.

    diffusers 0.42 detects a kohya text encoder by `out_proj` only: without it the file is refused or, with
    feed-forward layers, its attention is silently dropped. Drop this once that is fixed.
    """
    layers = list(layers)
    for component in (TEXT_ENCODER, TEXT_ENCODER_2):
        attention = [layer for layer in layers if layer.component == component and ".self_attn." in layer.module]
        if attention and not any(layer.module.endswith(".out_proj") for layer in attention):
            like = attention[0]
            layers.append(
                dataclasses.replace(
                    like,
                    module=like.module.rpartition(".")[0] + ".out_proj",
                    down=torch.zeros_like(like.down),
                    up=torch.zeros_like(like.up),
                    magnitude=None,
                )
            )
    return layers
