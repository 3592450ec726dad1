"""Pack a pipeline's frozen denoiser and text encoders; check that a checkpoint was trained with the same bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_aigc.diffusion.families import Components
from lightning_aigc.diffusion.pipeline.quantized_cache import Packing, packing_for
from lightning_aigc.errors import ConfigError, ModelError
from lightning_aigc.quantization.frozen import (
    PackedBase,
    frozen_bytes,
    pack_layers,
    weight_bytes,
)
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
from lightning_aigc.rng import isolate_rng
from lightning_aigc_kernels.packed_weight import Format, packed_bytes, packed_weights

CHECKPOINT_KEY = "base_quantization"


def check_base_quantization(kind: BaseQuantization | None, skip: list[str] | None) -> None:
    """Check the arguments before weights are read. Raises: ConfigError."""
    if kind is None:
        if skip is not None:
            raise ConfigError("model.init_args.base_quantization_skip does nothing without base_quantization; set both")
        return
    if target_mib(kind) is None:
        check_kind(kind)
    check_skip(skip)


def pack_base(
    components: Components,
    kind: BaseQuantization,
    skip: list[str] | None,
    outputs: Callable[[], Iterable[Tensor]],
    trainer: Trainer | None,
) -> PackedBase:
    """Pack the frozen weights of the denoiser and of the text encoders, whose linears stay int8 with `nf4`.

    A budget counts both, packs the text encoders in int8 and gives each weight of the denoiser its bits, chosen by
    rank 0. The autoencoder stays in full precision: it makes the latents and the images. Names are `unet.` or
    `transformer.`, and `text_encoders.0.`.

    Args:
        outputs: The denoiser's outputs on calibration images, for a budget.

    Raises: ConfigError for a pattern that covers nothing, a base that is packed already, or a budget that cannot be
        met.
    """
    holder = nn.Module()  # gives the names, for patterns and the digest
    setattr(holder, components.family.denoiser_name, components.denoiser)
    holder.text_encoders = nn.ModuleList(components.text_encoders)
    layers = frozen_layers(holder, skip)
    if skip is not None and components.stored_texts is not None:  # other patterns are for text encoders that were freed
        skip = [pattern for pattern in skip if not pattern.startswith("text_encoders")]
    check_patterns(skip, (layer.name for layer in layers))
    packing = packing_for(sum(layer.weight.numel() for layer in layers if not layer.why_not))
    target = target_mib(kind)
    formats: dict[str, Format | None]
    if target is None:
        formats = {layer.name: _format_of_kind(layer, str(kind)) for layer in layers}
    else:
        formats = _formats_within(trainer, outputs, holder, layers, target, packing)
    packed = pack_layers(holder, layers, lambda layer: formats[layer.name], packing)
    packed.kind = str(kind)
    return packed


def pack_text_encoders(components: Components, skip: list[str] | None) -> None:
    """Pack the text encoders of a pipeline without a denoiser in int8, as `pack_base` does."""
    holder = nn.Module()
    holder.text_encoders = nn.ModuleList(components.text_encoders)
    layers = [layer for layer in frozen_layers(holder, skip) if not layer.why_not]
    if layers:
        pack_layers(holder, layers, lambda layer: "int8", packing_for(sum(each.weight.numel() for each in layers)))


def _is_of_text(layer: Layer) -> bool:
    return layer.name.startswith("text_encoders")


def _format_of_kind(layer: Layer, kind: str) -> Format:
    linear, convolution = FORMATS[kind]
    if kind == "nf4" and _is_of_text(layer):
        return "int8"
    return linear if layer.is_linear else convolution


def _formats_within(
    trainer: Trainer | None,
    outputs: Callable[[], Iterable[Tensor]],
    holder: nn.Module,
    layers: list[Layer],
    target: float,
    packing: Packing | None,
) -> dict[str, Format | None]:
    """The formats that fit `target` MiB, by layer; measured and chosen on rank 0, so that all ranks have the same."""
    text = [layer for layer in layers if _is_of_text(layer) and not layer.why_not]
    open_to_choice = [layer for layer in layers if not _is_of_text(layer) and not layer.why_not]
    chosen: list[Format | None] | ConfigError = []
    if trainer is None or trainer.is_global_zero:
        rank_zero_info(f"base_quantization: measuring on real latents which of {len(open_to_choice)} weights need bits")
        text_saves = weight_bytes(text) - sum(packed_bytes(layer.weight.numel(), "int8") for layer in text)
        other = frozen_bytes(holder) - text_saves - weight_bytes(open_to_choice)
        try:
            with isolate_rng(torch.device("cpu")):
                errors = output_errors(open_to_choice, outputs(), packing)
            chosen = choose_formats(open_to_choice, errors, target * MIB, other)
        except ConfigError as error:
            chosen = error
    if trainer is not None:
        chosen = trainer.strategy.broadcast(chosen)
    if isinstance(chosen, ConfigError):
        raise chosen
    formats: dict[str, Format | None] = {layer.name: kind for layer, kind in zip(open_to_choice, chosen, strict=True)}
    return {**formats, **{layer.name: "int8" for layer in layers if _is_of_text(layer)}}


@contextlib.contextmanager
def with_full_precision(components: Components, source: Components) -> Iterator[None]:
    """Compute with the whole weights of `source`, freshly loaded, instead of the packed ones until the block ends.

    They move to the packed weights' devices in turn, and `source` gives its own away.
    """
    swapped: list[tuple[nn.Module, nn.Parameter]] = []
    try:
        for module, whole in zip(
            (components.denoiser, *components.text_encoders), (source.denoiser, *source.text_encoders), strict=True
        ):
            for name, weight in list(packed_weights(module)):
                layer = module.get_submodule(name.rpartition(".")[0])
                original = whole.get_submodule(name.replace(".base_layer", "").rpartition(".")[0])
                full = original._parameters.pop("weight")
                assert full is not None
                full = nn.Parameter(full.to(weight.device, weight.dtype), requires_grad=False)
                swapped.append((layer, layer._parameters.pop("weight")))
                layer.register_parameter("weight", full)
        yield
    finally:
        for layer, packed in swapped:
            del layer._parameters["weight"]
            layer.register_parameter("weight", packed)


def checkpoint_entry(packed: PackedBase) -> dict[str, str]:
    """A checkpoint's entry about the base that its weights were trained with."""
    return {"kind": packed.kind, "digest": packed.digest}


def check_same_base(checkpoint: Mapping[str, Any], packed: PackedBase | None) -> None:
    """Raise ModelError if a checkpoint was trained with a base of the same kind with other bytes."""
    saved = checkpoint.get(CHECKPOINT_KEY)
    if saved and packed is not None and saved["kind"] == packed.kind and saved["digest"] != packed.digest:
        raise ModelError(
            f"the checkpoint was trained on another base: packed as {packed.kind}, its bytes differ from this one's;"
            " use the pretrained_model_name_or_path, base_dtype and base_quantization_skip that it was trained with"
        )
