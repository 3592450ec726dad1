"""Validation while training, the held-out loss, and the sheet of samples that `predict` writes.

Legend: B batch, N images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_aigc._lightning import ModelCheckpoint, Trainer
from lightning_aigc.callbacks.sampling.pairs import make_pairs, sample_on_all_ranks
from lightning_aigc.callbacks.sampling.sheet import draw_sheet, write_png
from lightning_aigc.checkpoint.lightning_loops import run_validation
from lightning_aigc.errors import ModelError

VALIDATION_TIMESTEPS = 8
"""Timesteps at which each held-out image is denoised, one in each of as many equal parts of the noise schedule."""
NEVER = 10**15


class ValidationSchedule:
    """Validation every `every_n_steps` optimizer steps, unless the Trainer was given an interval of its own.

    Lightning counts batches; `after_batch` tells it which batch is due.
    """

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self._follows_steps = False
        self._validated_step = 0

    def begin(self, trainer: Trainer) -> None:
        """Take over the Trainer's interval, where the user gave none."""
        self._follows_steps = trainer.val_check_interval in (None, 1.0) and trainer.check_val_every_n_epoch == 1
        if self._follows_steps:
            trainer.check_val_every_n_epoch = None
            trainer.val_check_interval = self.every_n_steps * trainer.accumulate_grad_batches
            trainer.num_sanity_val_steps = 0  # the full validation of step 0 is the check
            for callback in trainer.checkpoint_callbacks:
                # Without a value it follows validation, which is not by epochs any more, or not there.
                if isinstance(callback, ModelCheckpoint) and callback.monitor is None:
                    callback._save_on_train_epoch_end = callback._save_on_train_epoch_end is not False

    def validate_untrained(self, trainer: Trainer) -> None:
        """Validate before the first step, so that the curve begins at the untrained model."""
        self._validated_step = trainer.global_step
        is_quick = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if self._follows_steps and trainer.enable_validation and trainer.global_step == 0 and not is_quick:
            run_validation(trainer)

    def after_batch(self, trainer: Trainer) -> None:
        """Let Lightning validate after this batch if that is due."""
        if not self._follows_steps or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        step, every = trainer.global_step, self.every_n_steps
        is_due = step // every > self._validated_step // every or step == trainer.max_steps
        if is_due and step > self._validated_step:
            trainer.val_check_batch = trainer.fit_loop.total_batch_idx + 1
            self._validated_step = step
        else:
            trainer.val_check_batch = NEVER


def counted_mean(loss_B: Tensor, batch: dict[str, Any]) -> tuple[Tensor, int]:
    """The mean loss of the examples that count, and their number; repeated examples of uneven ranks do not count."""
    counted_B = batch["is_counted"].to(loss_B.device) if "is_counted" in batch else torch.ones_like(loss_B).bool()
    count = int(counted_B.sum())
    return (loss_B * counted_B).sum() / max(count, 1), count


def prompt_loader(prompts: Sequence[str], world_size: int) -> Any:
    """A loader with the sheet's prompts, once for each rank: the ranks share the images.

    Raises: ModelError without prompts.
    """
    if not prompts:
        raise ModelError(
            "predict samples model.init_args.validation_prompts, and there are none; set some, or use"
            " `lightning sample --prompts`"
        )
    return DataLoader([list(prompts)] * world_size, batch_size=None)  # type: ignore[arg-type]


def write_prompt_sheet(trainer: Trainer, module: Any, prompts: list[str], seeds: Sequence[int]) -> Tensor:
    """Sample every prompt with every seed, [N, 3, H, W]; rank 0 writes `<default_root_dir>/predict.png`."""
    pairs = make_pairs(prompts, seeds)
    images = sample_on_all_ranks(trainer, module, pairs).images
    if trainer.is_global_zero:
        path = Path(trainer.default_root_dir) / "predict.png"
        captions = [f"seed {seed}\n{prompt}" for prompt, seed in pairs]
        write_png(path, draw_sheet(images, captions, len(seeds)), {"prompts": prompts, "seeds": list(seeds)})
        print(f"wrote {path}")
    return images
