"""Check that a checkpoint's weights are exactly the trained weights of a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_aigc.errors import ModelError


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
