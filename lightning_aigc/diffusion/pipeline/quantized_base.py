"""Quantize a pipeline's frozen denoiser and text encoders; check that a checkpoint was trained on the same base.

A budget's bits are chosen by the denoiser's outputs on calibration images, over all parts of the noise schedule.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_aigc._lightning import Trainer, rank_zero_info
from lightning_aigc.cache_folder import cache_folder
from lightning_aigc.data.cache.cache import CorruptEntryError, TensorCache
from lightning_aigc.diffusion.families import Components
from lightning_aigc.diffusion.objectives import SeededNoise
from lightning_aigc.diffusion.pipeline.encoders import FrozenEncoders
from lightning_aigc.diffusion.pipeline.generate import on_device
from lightning_aigc.errors import ConfigError, DataError, ModelError
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.gradient_sync.transport.process_groups import errors_of_all_ranks
from lightning_aigc.protocols import HasExampleBatch
from lightning_aigc.quantization.frozen import PackedBase, quantize_frozen_, quantize_layers, stored_bytes
from lightning_aigc.quantization.layers import (
    BaseQuantization,
    Layer,
    Packing,
    check_kind,
    check_skip,
    frozen_layers,
    target_mib,
)
from lightning_aigc.rng import isolate_rng
from lightning_aigc_kernels.packed_weight import Format, PackedWeight, packed_weights

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
    network: nn.Module,
    components: Components,
    kind: BaseQuantization,
    skip: list[str] | None,
    outputs: Callable[[torch.device], Iterable[Tensor]],
    trainer: Trainer | None,
) -> PackedBase:
    """Quantize the frozen weights of the denoiser and of the text encoders, which stay int8 with `nf4` and a budget.

    A budget counts both; rank 0 chooses the format of each of the denoiser's weights. The autoencoder stays in full
    precision: it computes the latents and the images. Names are `unet.` or `transformer.`, and `text_encoders.0.`.

    Args:
        network: The module that is trained, which holds the denoiser.
        outputs: The denoiser's outputs on calibration images, for a budget, computed on the device of the argument.

    Raises: ConfigError for a pattern that covers nothing, a base that is quantized already, or a budget that cannot be
        met.
    """
    if kind == "fp8" and trainer is not None and trainer.strategy.root_device.type == "npu":
        raise ConfigError(
            "base_quantization: fp8 needs a device with float8 numbers, which Ascend NPUs lack; set"
            " model.init_args.base_quantization: int8"
        )
    holder = nn.Module()  # gives the names, for patterns and the digest
    setattr(holder, components.family.denoiser_name, components.denoiser)
    holder.text_encoders = nn.ModuleList(components.text_encoders)
    if skip is not None and components.stored_texts is not None:  # other patterns are for text encoders that were freed
        skip = [pattern for pattern in skip if not pattern.startswith("text_encoders")]

    def text_format(layer: Layer) -> Format | None:
        return "int8" if layer.name.startswith("text_encoders") and kind != "nf4-all" else None

    modules = [network, components.vae, *components.text_encoders]
    device = torch.device("cpu") if target_mib(kind) is None else _measuring_device(modules, trainer)

    def lazy_outputs() -> Iterator[Tensor]:
        yield from outputs(device)

    def on_rank_zero(count: int, choose: Callable[[], list[Format | None]]) -> list[Format | None]:
        chosen: list[Format | None] = []
        with errors_of_all_ranks():
            if trainer is None or trainer.is_global_zero:
                rank_zero_info(f"base_quantization: measuring on real latents which of {count} weights need bits")
                # Lightning makes new tensors on the device that trains; a step, as here, says where it makes one.
                with isolate_rng(torch.device("cpu")), torch.device("cpu"):
                    chosen = choose()
        return chosen if trainer is None else trainer.strategy.broadcast(chosen)

    with on_device(device, *modules) if target_mib(kind) is not None else contextlib.nullcontext():
        return quantize_frozen_(
            holder, kind, skip, lazy_outputs(), format_of=text_format, packing_for=packing_for, decide=on_rank_zero
        )


def _measuring_device(modules: Sequence[nn.Module], trainer: Trainer | None) -> torch.device:
    """The device that trains, where a backward through the whole base fits its free memory; else the CPU."""
    cpu = torch.device("cpu")
    device = cpu if trainer is None else trainer.strategy.root_device
    if device.type == "cpu":
        return cpu
    free, _ = torch.get_device_module(device).mem_get_info(device)
    held = {id(p): stored_bytes(p) for module in modules for p in module.parameters() if p.device.type == "cpu"}
    if MEASURING_SHARE * sum(held.values()) <= free:
        return device
    rank_zero_info(f"base_quantization: measuring on the CPU, as the base in full precision does not fit {device}")
    return cpu


def pack_text_encoders(components: Components, skip: list[str] | None) -> None:
    """Quantize the text encoders of a pipeline without a denoiser to int8, as `pack_base` does."""
    holder = nn.Module()
    holder.text_encoders = nn.ModuleList(components.text_encoders)
    layers = [layer for layer in frozen_layers(holder, skip) if not layer.skip_reason]
    if layers:
        quantize_layers(holder, layers, lambda layer: "int8", packing_for(layers))


@contextlib.contextmanager
def with_full_precision(components: Components, source: Components) -> Iterator[None]:
    """Compute with the full-precision weights of `source`, freshly loaded, until the block ends.

    Each weight moves to its packed weight's device, and is removed from `source`.
    """
    swapped: list[tuple[nn.Module, nn.Parameter]] = []
    try:
        for module, unquantized in zip(
            (components.denoiser, *components.text_encoders), (source.denoiser, *source.text_encoders), strict=True
        ):
            for name, weight in list(packed_weights(module)):
                layer = module.get_submodule(name.rpartition(".")[0])
                original = unquantized.get_submodule(name.replace(".base_layer", "").rpartition(".")[0])
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
    """Return the checkpoint's entry about the base that its weights were trained on."""
    return {"kind": packed.kind, "digest": packed.digest}


def check_same_base(checkpoint: Mapping[str, Any], packed: PackedBase | None) -> None:
    """Raise ModelError if a checkpoint was trained on a base of the same kind with other bytes."""
    saved = checkpoint.get(CHECKPOINT_KEY)
    if saved and packed is not None and saved["kind"] == packed.kind and saved["digest"] != packed.digest:
        raise ModelError(
            f"the checkpoint was trained on another base: quantized as {packed.kind}, its bytes differ from this one's;"
            " use the pretrained_model_name_or_path, base_dtype and base_quantization_skip that it was trained with"
        )


FORMAT = 2
"""Version of the packed bytes; increase it when weights are packed differently."""
MIN_NUMBERS = 100_000_000
"""Numbers of a base from which packing takes longer than reading the cache."""


class PackedCache:
    """Packs layers, or reads the weights that an earlier run packed from the same numbers.

    Ranks and runs may share the folder: files are written atomically, and a damaged one is replaced. If the folder
    cannot be written, a warning says so and weights are packed again in each run.
    """

    def __init__(self, folder: Path) -> None:
        self.cache = TensorCache(folder)
        self.hits = self.misses = 0
        self._is_writable = True

    def pack(self, layer: Layer, kind: Format) -> PackedWeight:
        """Return the layer's packed weight. Raises: ValueError for NaN or infinity."""
        weight = layer.weight.detach()
        if kind == "int8":  # packing is as fast as hashing
            return PackedWeight.pack(weight, kind)
        key = content_key(weight, kind)
        try:
            entry = self.cache.read(key)
        except CorruptEntryError:
            entry = None
        if entry is not None:
            self.hits += 1
            parts = (entry[name].to(weight.device) for name in ("packed", "scales"))
            return PackedWeight(*parts, kind, weight.shape, (weight.dtype,))
        packed = PackedWeight.pack(weight, kind)
        self.misses += 1
        if self._is_writable:
            try:
                self.cache.write(key, {"packed": packed.packed.cpu(), "scales": packed.scales.cpu()})
            except DataError as error:
                self._is_writable = False
                warnings.warn(f"packed weights are not cached: {error}", stacklevel=2)
        return packed


def content_key(weight: Tensor, kind: Format) -> str:
    """Hash the weight's numbers, shape and dtype, and the packed format."""
    digest = sha256(f"{FORMAT} {kind} {tuple(weight.shape)} {weight.dtype}".encode())
    digest.update(weight.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def packing_for(layers: Iterable[Layer]) -> Packing | None:
    """Return the cache's `pack`, or None for layers that are too small for the cache to be faster."""
    numbers = sum(layer.weight.numel() for layer in layers)
    return PackedCache(cache_folder() / "packed").pack if numbers >= MIN_NUMBERS else None


MEASURING_SHARE = 1.5
"""Free memory that measuring needs, over the weights: a backward keeps activations, and one weight's gradient."""
IMAGES = 8
OWN_PROMPTS = ("a photograph", "a drawing of an animal")
OWN_STEPS = 20

Noised = Callable[[Tensor, SeededNoise, int, int], tuple[Tensor, Tensor, Tensor]]
Predict = Callable[[Tensor, Tensor, dict[str, Tensor], dict[str, Any]], Tensor]


def calibration_outputs(
    network: nn.Module,
    encoders: FrozenEncoders,
    datamodule: object,
    generate: Callable[[Sequence[str], Sequence[int]], Tensor],
    noised: Noised,
    predict: Predict,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """The denoiser's output for `IMAGES` images in turn, each at another part of the noise schedule.

    The images are the data module's; without one, the model generates them. Noise and timesteps come from fixed seeds.

    Args:
        network: The module that is trained, set to eval mode meanwhile.
        generate: Generates images, float32 [N, 3, H, W] in 0..1, from prompts and seeds.
        noised: Noisy latents, their timesteps and target, from latents, noise, part and number of parts.
        predict: The denoiser's output for noisy latents, timesteps, condition and batch.
        dtype: Of the frozen denoiser; a ControlNet with full training is float32 next to it.
    """
    if isinstance(datamodule, HasExampleBatch):
        batch = datamodule.example_batch(IMAGES)
        latents_NCHW = encoders.latents(batch, SeededNoise(range(len(batch["captions"]))).normal_like)
    else:
        batch = _generated_batch(generate)
        latents_NCHW = encoders.latents(batch, SeededNoise(range(len(OWN_PROMPTS))).normal_like)
    condition = encoders.condition(batch, with_gradients=False)
    images = len(latents_NCHW)
    for part in range(IMAGES):
        row = slice(part % images, part % images + 1)
        example = {key: value[row] for key, value in batch.items() if isinstance(value, (Tensor, list))}
        noisy, timesteps, _ = noised(latents_NCHW[row], SeededNoise([part]), part, IMAGES)
        autocast = torch.autocast(encoders.device.type, dtype=dtype, enabled=dtype != torch.float32)
        with evaluating(network), torch.enable_grad(), autocast:
            yield predict(noisy, timesteps, {key: value[row] for key, value in condition.items()}, example)


def _generated_batch(generate: Callable[[Sequence[str], Sequence[int]], Tensor]) -> dict[str, Any]:
    """A batch of images that the model generates for `OWN_PROMPTS`."""
    count = len(OWN_PROMPTS)
    images_N3HW = generate(OWN_PROMPTS, range(count))
    size = torch.tensor([list(images_N3HW.shape[-2:])] * count)
    return {
        "pixel_values": images_N3HW * 2 - 1, "captions": list(OWN_PROMPTS), "original_size": size,
        "target_size": size, "crop_top_left": size * 0,
    }  # fmt: skip
