"""KeepsTrainedWeights: checkpoints of the trained and averaged weights alone, and averages swapped in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from diffusers.training_utils import EMAModel
from lightning.pytorch import LightningModule
from torch import nn

from lightning_aigc.diffusion.arguments import check_trained_weights
from lightning_aigc.diffusion.averaging import averaged, follow_shards, loaded_averages
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.packed_base import CHECKPOINT_KEY, check_same_base, checkpoint_entry
from lightning_aigc.errors import ModelError
from lightning_aigc.quantization import PackedBase


class KeepsTrainedWeights(LightningModule):
    """A DiffusionModule's part that knows which weights are trained, averages them and writes them to checkpoints."""

    deferred_snapshot_keys = ("ema",)  # written only in `optimizer_step`
    same_weights_advice = "use the rank, lora_targets, use_dora and train_text_encoder that it was trained with"
    """What to do about a checkpoint of other weights."""
    ema: EMAModel | None
    packed_base: PackedBase | None
    build_optimizer: Any
    _loaded_optimizers: list[Any]

    def loaded(self) -> Components:
        """The pipeline's components."""
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        raise NotImplementedError

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    @property
    def strict_loading(self) -> bool:
        """False: checkpoints hold only trained weights, and `on_load_checkpoint` checks that they are complete."""
        return False

    @strict_loading.setter
    def strict_loading(self, value: bool) -> None:
        raise ModelError(f"{type(self).__name__} checks its own checkpoints; strict_loading cannot be set")

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Swap in averaged weights, from an EMA or a schedule-free optimizer, until the block ends."""
        optimizers = self._trainer.optimizers if self._trainer is not None else []
        return averaged(self.trainable_parameters(), self.ema, optimizers or self._loaded_optimizers)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = {name for name, p in self.named_parameters() if p.requires_grad}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}
        if self.ema is not None:
            checkpoint["ema"] = self.ema.state_dict()
        if self.packed_base is not None:
            checkpoint[CHECKPOINT_KEY] = checkpoint_entry(self.packed_base)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded()
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        check_trained_weights(checkpoint["state_dict"], trained, self.same_weights_advice)
        check_same_base(checkpoint, self.packed_base)
        if self.ema is not None and "ema" in checkpoint:
            self.ema.load_state_dict(checkpoint["ema"])
            follow_shards(self.ema, self.trainable_parameters())
        if self._trainer is not None and not self._trainer.optimizers:  # not in fit, which builds its own
            self._loaded_optimizers = loaded_averages(self.build_optimizer(self.parameter_groups()), checkpoint)
