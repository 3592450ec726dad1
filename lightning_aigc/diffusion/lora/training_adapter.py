"""TrainingAdapter: a LoRA that is part of a few-step base while another one is trained on it, and absent in samples.

Trained directly, a few-step model loses its few steps. The adapter takes the distillation out of the weights for the
training. Both versions of each weight are kept, and packed from whole numbers: subtracting what was added changes 7 %
of the weights in bfloat16.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_aigc.diffusion.families import Components
from lightning_aigc.diffusion.lora.continued import check_fits
from lightning_aigc.diffusion.lora.file import read_lora
from lightning_aigc.diffusion.lora.names import DENOISERS
from lightning_aigc.diffusion.pipeline.denoiser_file import find_file
from lightning_aigc.errors import ModelError
from lightning_aigc_kernels.packed_weight import PackedWeight

KEY = "model.init_args.training_adapter"


class TrainingAdapter:
    """Both versions of the weights that an adapter changes; the training's are in the network.

    Args:
        name: The adapter's file, as `find_file` takes it.
        components: The pipeline, before a LoRA is added and before the base is packed.

    Raises: ModelError for a file that is no LoRA of this denoiser.
    """

    def __init__(self, name: str, components: Components) -> None:
        path, family = find_file(name, KEY), components.family
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        file = read_lora(path)
        if file.has_factors:
            raise ModelError(f"{KEY}: {name} is a LoKr or LoHa; wanted a plain LoRA")
        layers = file.layers(family.name if family.is_flow else None)
        if any(layer.component not in DENOISERS or layer.magnitude is not None for layer in layers):
            raise ModelError(f"{KEY}: {name} adapts a text encoder, or is a DoRA; wanted a plain LoRA of the denoiser")
        try:
            check_fits(path, layers, components)
        except ModelError as error:
            raise ModelError(f"{KEY}: {error}") from error
        self.network: nn.Module = components.denoiser
        self._own: dict[str, Tensor] = {}
        with torch.no_grad():
            for layer in layers:
                weight: Any = self.network.get_submodule(layer.module).weight
                change = (layer.up.float().flatten(1) @ layer.down.float().flatten(1)) * (layer.alpha / layer.rank)
                whole = weight.float() + change.reshape(weight.shape).to(weight.device)
                self._own[layer.module] = weight.detach()
                self._put(layer.module, nn.Parameter(whole.to(weight.dtype), requires_grad=False))

    def pack(self) -> None:
        """Pack the base's own weights in the formats that the network's have now."""
        for name, own in self._own.items():
            now = self._layer(name).weight
            if isinstance(now, PackedWeight) and not isinstance(own, PackedWeight):
                self._own[name] = PackedWeight.pack(own, now.kind)

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Compute with the base as users have it until the block ends.

        A layer whose weight something else has replaced for the time, such as a packed one by its full precision, is
        left alone.
        """
        trained_with: dict[str, nn.Parameter] = {}
        try:
            for name, own in self._own.items():
                now: nn.Parameter = self._layer(name).weight
                if isinstance(now, PackedWeight) == isinstance(own, PackedWeight):
                    trained_with[name] = now
                    self._put(name, nn.Parameter(own.to(now.device), requires_grad=False))
            yield
        finally:
            for name, weight in trained_with.items():
                self._put(name, weight)

    def _layer(self, name: str) -> Any:
        layer: Any = self.network.get_submodule(name)
        return getattr(layer, "base_layer", layer)

    def _put(self, name: str, weight: nn.Parameter) -> None:
        layer = self._layer(name)
        del layer._parameters["weight"]
        layer.register_parameter("weight", weight)
