"""WholeModelTraining: base class of the families that train a network's own weights and save it whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from torch.optim import Optimizer

from lightning_aigc.callbacks import SaveModel
from lightning_aigc.devices import dtype_named
from lightning_aigc.diffusion.denoiser_training import DenoiserTraining
from lightning_aigc.diffusion.optimizer_in_backward import OptimizerInBackward, check_trainer


class WholeModelTraining(DenoiserTraining):
    """Base class of the families that train a network's own weights; files are as large as the network.

    Stands before `UNetTraining` or `TransformerTraining` among a class's bases.

    Args:
        optimizer_in_backward: Step each weight as soon as its gradient is complete and free the gradient; on one card
            this saves the memory of all gradients. With precision bf16-true the weights are rounded stochastically.
            Excludes several ranks, accumulation, clipping and a loss scale.
        save_dtype: Dtype of the saved files: float32, float16 or bfloat16; unset keeps the weights' own.
        save_every_n_steps: Optimizer steps between saved models on the way; 0 saves the last only.
        kwargs: Arguments of the base that follows.
    """

    saved_kind = "pipeline"
    snapshot_ignored_arguments = DenoiserTraining.snapshot_ignored_arguments | {"save_dtype", "save_every_n_steps"}

    def __init__(
        self,
        optimizer_in_backward: bool = False,
        save_dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        save_every_n_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)

    @property
    def save_dtype(self) -> torch.dtype | None:
        """The dtype of saved weights; None keeps theirs."""
        return None if self.args.save_dtype is None else dtype_named(self.args.save_dtype)

    def result_saver(self) -> Callback:
        return SaveModel(every_n_steps=self.args.save_every_n_steps)

    def save_model(self, path: str | Path) -> Sequence[Path]:
        """Write `path`, a single file, and beside it a diffusers folder; averaged weights if any."""
        raise NotImplementedError

    def loading_dtype(self) -> torch.dtype:
        return torch.float32  # what is trained starts from every bit of the pretrained weights

    def make_optimizer(self) -> Optimizer:
        if not self.args.optimizer_in_backward:
            return super().make_optimizer()
        if self._trainer is not None:
            check_trainer(self.trainer)
        return OptimizerInBackward(self.build_optimizer, self.parameter_groups())
