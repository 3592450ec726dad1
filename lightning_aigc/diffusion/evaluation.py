"""EvaluatedModule: validate, test and predict of the model families, and validation while they train.

Legend: B batch, K timesteps of an example.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_aigc.callbacks.sampling.pairs import make_pairs, sample_on_all_ranks
from lightning_aigc.callbacks.sampling.png import write_png
from lightning_aigc.callbacks.sampling.sheet import draw_sheet
from lightning_aigc.checkpoint.lightning_loops import run_validation
from lightning_aigc.diffusion.half_precision import computed_in_half
from lightning_aigc.errors import ModelError

VALIDATION_TIMESTEPS = 8
"""Timesteps at which each held-out picture is denoised, one in each of as many equal parts of the noise schedule."""
NEVER = 10**15


class SeededNoise:
    """Noise and timesteps of a batch's examples, each from a generator of its own seed, drawn on the CPU."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def normal_like(self, tensor_B: Tensor) -> Tensor:
        """Gaussian noise of the tensor's shape, dtype and device."""
        rows = [torch.randn(tensor_B.shape[1:], generator=generator) for generator in self.generators]
        return torch.stack(rows).to(tensor_B.device, tensor_B.dtype)

    def timesteps(self, part: int, parts: int, count: int) -> Tensor:
        """A timestep of each example, int64 [B], in the given one of `parts` equal parts of `count` timesteps."""
        drawn_B = torch.stack([torch.rand((), generator=generator) for generator in self.generators])
        return ((part + drawn_B) * count / parts).long().clamp(max=count - 1)


class EvaluatedModule(LightningModule):
    """Adds the validation loss and sample sheets of `predict`; a family defines `validation_losses` and `sample`."""

    validation_prompts: list[str]
    _follows_steps = False
    _validated_step = 0

    def __init__(self) -> None:
        super().__init__()
        for without_pictures in (
            "You defined a `validation_step` but have no `val_dataloader`",
            "Total length of `list`",
        ):
            warnings.filterwarnings("ignore", without_pictures)  # holding none out is a choice, and the default

    @property
    def args(self) -> Any:
        """The arguments of `__init__` by name."""
        return self.hparams

    def validation_losses(self, batch: dict[str, Any], noise: SeededNoise) -> Tensor:
        """The loss of each example at the noise and timesteps of `noise`, float32 [B]."""
        raise NotImplementedError

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The weights to validate and sample with, for as long as it is open."""
        raise NotImplementedError

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log `val_loss`: the mean over all held-out pictures, equal for every batch size and number of ranks."""
        self._log_held_out("val_loss", batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log `test_loss`, which is `val_loss` of the test loader's pictures."""
        self._log_held_out("test_loss", batch)

    def _log_held_out(self, name: str, batch: dict[str, Any]) -> None:
        with self.averaged_weights(), computed_in_half(self):
            loss_B = self.validation_losses(batch, SeededNoise(example_seeds(batch)))
        counted_B = batch["is_counted"].to(loss_B.device) if "is_counted" in batch else torch.ones_like(loss_B).bool()
        count = int(counted_B.sum())
        mean = (loss_B * counted_B).sum() / max(count, 1)
        self.log(name, mean, on_step=False, on_epoch=True, batch_size=count, sync_dist=True, prog_bar=True)

    # While training -------------------------------------------------------------------------------------------------

    def schedule_validation(self) -> None:
        """Validate every `validation_steps` optimizer steps, unless the Trainer was given an interval of its own.

        Lightning counts batches; `on_train_batch_end` tells it which batch is due.
        """
        trainer = self.trainer
        self._follows_steps = trainer.val_check_interval in (None, 1.0) and trainer.check_val_every_n_epoch == 1
        if self._follows_steps:
            trainer.check_val_every_n_epoch = None
            trainer.val_check_interval = self.args.validation_steps * trainer.accumulate_grad_batches
            trainer.num_sanity_val_steps = 0  # the whole validation of step 0 is the check

    def validate_untrained(self) -> None:
        """Validate before the first step, so that the curve begins at the untrained model."""
        trainer = self.trainer
        self._validated_step = trainer.global_step
        is_quick = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if self._follows_steps and trainer.enable_validation and trainer.global_step == 0 and not is_quick:
            run_validation(trainer)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer = self.trainer
        if not self._follows_steps or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        step, every = trainer.global_step, self.args.validation_steps
        is_due = step // every > self._validated_step // every or step == trainer.max_steps
        if is_due and step > self._validated_step:
            trainer.val_check_batch = trainer.fit_loop.total_batch_idx + 1
            self._validated_step = step
        else:
            trainer.val_check_batch = NEVER

    # Sample sheets --------------------------------------------------------------------------------------------------

    def predict_dataloader(self) -> Any:
        """The sheet's prompts, once on each rank: the ranks share the pictures out among themselves.

        Raises: ModelError without validation_prompts.
        """
        if not self.validation_prompts:
            raise ModelError(
                "predict samples model.init_args.validation_prompts, and there are none; set some, or use"
                " `lightning sample --prompts`"
            )
        return DataLoader([list(self.validation_prompts)] * self.trainer.world_size, batch_size=None)  # type: ignore[arg-type]

    def predict_step(self, prompts: list[str], batch_idx: int) -> Tensor:
        """Sample every prompt with every seed, [N, 3, H, W]; rank 0 writes `<default_root_dir>/predict.png`."""
        args, trainer = self.args, self.trainer
        seeds = range(args.validation_seed, args.validation_seed + args.num_validation_images)
        pairs = make_pairs(prompts, seeds)
        images = sample_on_all_ranks(trainer, self, pairs).images
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / "predict.png"
            captions = [f"seed {seed}\n{prompt}" for prompt, seed in pairs]
            write_png(path, draw_sheet(images, captions, len(seeds)), {"prompts": prompts, "seeds": list(seeds)})
            print(f"wrote {path}")
        return images


def example_seeds(batch: dict[str, Any]) -> list[int]:
    """A seed for each example: the loader's `seeds`, or else of the example's own values."""
    if "seeds" in batch:
        return [int(seed) for seed in batch["seeds"].tolist()]
    values_B = (batch["latent_moments"] if "latent_moments" in batch else batch["pixel_values"]).float().cpu()
    return [int(sha256(value.numpy().tobytes()).hexdigest()[:15], 16) for value in values_B.contiguous()]
