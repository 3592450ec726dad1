"""Check a checkpoint's trained weights, and keep trained weights in float32 under every precision.

A bfloat16 value has 8 significant bits, so AdamW's steps of 1e-4 round to nothing and the weights do not move, so
bf16-true computes in bfloat16 by autocast. Only `optimizer_in_backward`, which rounds stochastically, trains bfloat16
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_aigc._lightning import Trainer
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.devices import autocast_dtype
from lightning_aigc.errors import ConfigError, ModelError


def check_trained_weights(saved: Mapping[str, Tensor], trained: Mapping[str, Tensor], advice: str) -> None:
    """Raise ModelError, ending in `advice`, if a checkpoint's weights are not exactly this model's trained weights."""
    missing, foreign = trained.keys() - saved.keys(), saved.keys() - trained.keys()
    if missing or foreign:
        raise ModelError(
            f"the checkpoint holds {len(saved)} weights, this model trains {len(trained)}"
            f" ({len(missing)} missing, {len(foreign)} unknown, such as {sorted(missing | foreign)[0]}); {advice}"
        )
    for name, parameter in trained.items():
        if saved[name].shape != parameter.shape:
            raise ModelError(
                f"the checkpoint's {name} is {list(saved[name].shape)}, this model's {list(parameter.shape)}; {advice}"
            )


UNSUPPORTED = {
    "16-true": "float16 gradients underflow without a loss scale; use bf16-true or 16-mixed",
    "64-true": "the base and the autoencoder are computed in float32; use 32-true",
    "transformer-engine": "its layers replace those that a LoRA adapts; use bf16-mixed",
    "transformer-engine-float16": "its layers replace those that a LoRA adapts; use bf16-mixed",
}


def check_trainer(trainer: Any) -> None:
    """Check that the trainer's precision and callbacks suit a diffusion model. Raises: ConfigError."""
    reason = UNSUPPORTED.get(str(trainer.precision))
    if reason is not None:
        raise ConfigError(f"got precision {trainer.precision}, which does not train this model: {reason}")
    has_snapshots = any(isinstance(callback, ExactSnapshot) for callback in trainer.callbacks)
    for callback in trainer.callbacks if has_snapshots else ():
        if any(cls.__name__ == "WeightAveraging" for cls in type(callback).__mro__):
            raise ConfigError(
                f"{type(callback).__name__} averages a copy of the whole model, which snapshots do not hold; remove it"
                " and set model.init_args.use_ema: true, which averages the trained weights, or train without"
                " snapshots: trainer.enable_checkpointing: false"
            )


@contextmanager
def computed_in_half(trainer: Trainer | None, device: torch.device, *, keeps_half: bool) -> Iterator[None]:
    """Run the block under autocast where the trainer's precision is bf16-true and the trained weights are float32.

    keeps_half: the trained weights follow the precision to bfloat16.
    """
    if trainer is None or str(trainer.precision) != "bf16-true" or keeps_half:
        yield
        return
    default = torch.get_default_dtype()  # Lightning makes it bfloat16, in which random timesteps lose their bits
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast(device.type, dtype=autocast_dtype("bf16-true")):
            yield
    finally:
        torch.set_default_dtype(default)
