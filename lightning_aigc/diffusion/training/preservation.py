"""Preservation without class images: what the base predicts on the batch's own noisy latents is held.

The base is the network with its adapter off. Its prediction is made first, in eval mode and without gradients, and the
adapter is on again before a graph is made, because backward may run blocks again.

  class  captions with the trigger word replaced by a class word (differential output preservation)
  blank  the empty caption
  own    the batch's own captions, outside the masks (masked prior preservation)

Legend: B batch, K examples that are held, C channels, H and W latent height and width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lightning_aigc.data.captions.captions import find_trigger_word
from lightning_aigc.diffusion.families import Components
from lightning_aigc.diffusion.objectives.losses import example_losses
from lightning_aigc.diffusion.objectives.settings import LossType
from lightning_aigc.diffusion.pipeline.encoders import FrozenEncoders
from lightning_aigc.errors import ModelError
from lightning_aigc.evaluation_mode import evaluating

Preserve = Literal["class", "blank", "own"]
SIZES = ("original_size", "crop_top_left", "target_size")
"""Entries of a batch that SDXL reads."""
PREFIX = "preserved_"
"""In front of the batch's entries for the captions that are held."""
KEY = "model.init_args.preserve"
MOST_OF_HELD = 1.7
"""Operations of holding a whole batch's predictions, over those of a plain step, at the most."""
MOST_OF_OWN = 1.6
"""Operations of a step that holds the batch's own captions, over those of a plain step, at the most."""


class TrainedNetwork(Protocol):
    """A module with a frozen base and an adapter."""

    @property
    def encoders(self) -> FrozenEncoders: ...

    def loaded(self) -> Components: ...

    def predict(
        self, noisy_BCHW: Tensor, timesteps_B: Tensor, condition: dict[str, Tensor], batch: dict[str, Any]
    ) -> Tensor: ...


@dataclass(frozen=True)
class Preservation:
    """Weight and kind of the preservation in the loss."""

    kind: Preserve
    class_word: str | None = None
    """Word instead of the trigger word; empty leaves it out."""
    weight: float = 1.0
    share: float = 1.0
    """Share of a batch's examples that are held, each counted 1 / share times."""

    def caption_maker(self, trigger_word: str | None, drops_captions: bool) -> Callable[[str], str] | None:
        """Return the function from a training caption to the one whose prediction is held; None for `own`.

        Raises: ModelError for settings with which it would hold back what is taught.
        """
        if self.kind == "own":
            return None
        if self.kind == "blank":
            if drops_captions:
                raise ModelError(
                    f"{KEY}: blank holds the empty caption, which data.init_args.caption_dropout_rate trains; set"
                    " caption_dropout_rate: 0"
                )
            return blank_caption
        if not trigger_word:
            raise ModelError(
                f"{KEY}: class replaces the trigger word, and there is none; set data.init_args.trigger_word, such as"
                " zorp"
            )
        assert self.class_word is not None
        if find_trigger_word(self.class_word, trigger_word):
            raise ModelError(
                f"model.init_args.class_word: {self.class_word!r} holds the trigger word {trigger_word!r}, so that"
                " what is taught would be held back; name the class in common words"
            )
        return functools.partial(class_caption, trigger_word=trigger_word, class_word=self.class_word)

    def figures(self, held_share: float | None = None) -> dict[str, float]:
        """The share of the examples that are held, the weight of their loss and the cost, by their names in the report.

        held_share: of a batch as it was trained, of which one example is held at the least.
        """
        share = self.share if held_share is None else held_share
        ratio = MOST_OF_OWN if self.kind == "own" else 1 + MOST_OF_HELD * share
        return {"preserve_share": share, "preserve_weight": self.weight, "preserve_step_ratio": round(ratio, 2)}

    def predict(
        self,
        module: TrainedNetwork,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: dict[str, Tensor],
        batch: dict[str, Any],
    ) -> tuple[Tensor, Held]:
        """The prediction for the batch [B, C, H, W], and what is held, in one call with gradients.

        Raises: ModelError for a batch without what is held.
        """
        count, network = len(noisy_BCHW), module.loaded().denoiser
        rows_K = self._rows(batch, count).to(noisy_BCHW.device)
        if self.kind == "own":
            if "mask" not in batch:
                raise ModelError(
                    f"{KEY}: own holds what is outside the masks, and there are none; set data.init_args.mask_dir, or"
                    f" {KEY}: class"
                )
            with evaluating(network), adapter_off(network):
                base_BCHW = module.predict(noisy_BCHW, timesteps_B, condition, batch)
            predicted_BCHW = module.predict(noisy_BCHW, timesteps_B, condition, batch)
            outside_K1HW = 1 - batch["mask"][rows_K.to(batch["mask"].device)].to(noisy_BCHW.device)
            return predicted_BCHW, Held(predicted_BCHW[rows_K], base_BCHW[rows_K], rows_K, self.weight, outside_K1HW)
        if f"{PREFIX}captions" not in batch:
            raise ModelError(
                f"{KEY}: {self.kind} needs the captions as ImageCaptionData makes them; train with it, or leave"
                f" {KEY} unset"
            )
        batch_K = _held_batch(batch, rows_K)
        condition_K = module.encoders.condition(batch_K, with_gradients=False)
        noisy_K, timesteps_K = noisy_BCHW[rows_K], timesteps_B[rows_K]
        with evaluating(network), adapter_off(network):
            base_KCHW = module.predict(noisy_K, timesteps_K, condition_K, batch_K)
        both = module.predict(
            torch.cat([noisy_BCHW, noisy_K]),
            torch.cat([timesteps_B, timesteps_K]),
            {name: _cat(value, condition_K[name]) for name, value in condition.items()},
            {name: torch.cat([batch[name], batch_K[name]]) for name in SIZES if name in batch},
        )
        return both[:count], Held(both[count:], base_KCHW, rows_K, self.weight)

    def _rows(self, batch: Mapping[str, Any], count: int) -> Tensor:
        """The rows [K] that are held: the first `share` of the user's images, which a batch has in front."""
        users = count - sum(batch["is_prior"]) if "is_prior" in batch else count
        return torch.arange(min(users, max(1, round(self.share * users))))


@dataclass(frozen=True)
class Held:
    """The predictions that are held of one batch."""

    predicted: Tensor
    """[K, C, H, W], with gradients."""
    base: Tensor
    rows: Tensor
    """Rows [K] of the batch."""
    weight: float
    outside: Tensor | None = None
    """Mask [K, 1, H, W] of the pixels that are held; None is all."""

    def loss(self, loss_type: LossType, huber_c: float, weights_B: Tensor) -> Tensor | None:
        """The mean distance to the base's prediction, weighted; None for a batch of class images alone."""
        if not len(self.rows):
            return None
        loss_K = example_losses(self.predicted, self.base, loss_type, huber_c, self.outside)
        return self.weight * (loss_K * weights_B[self.rows]).mean()


def class_caption(caption: str, trigger_word: str, class_word: str) -> str:
    """The caption with the class word instead of each trigger word; case and punctuation do not matter.

    Raises: ModelError for a caption without the trigger word, which would be held back as it is taught.

    >>> class_caption("a Zorp, red", "zorp", "mug"), class_caption("a zorp cup", "zorp", "")
    ('a mug, red', 'a cup')
    """
    kept, found = caption, find_trigger_word(caption, trigger_word)
    if found is None:
        raise ModelError(
            f"{KEY}: class holds captions without the trigger word, and {caption!r} has no {trigger_word!r}, so that"
            " what it teaches would be held back; put the word into the caption"
        )
    while found is not None:
        kept = f"{kept[: found.start()]}{class_word}{kept[found.end() :]}"
        found = find_trigger_word(kept, trigger_word)
    return " ".join(kept.split()).replace(" ,", ",").strip(" ,") if not class_word else " ".join(kept.split())


def blank_caption(caption: str) -> str:
    """The empty caption, whatever the caption."""
    return ""


@contextlib.contextmanager
def adapter_off(network: nn.Module) -> Iterator[None]:
    """Compute without the adapter until the block ends; which weights take gradients stays as it is.

    peft's own `disable_adapters` also changes `requires_grad`, which strategies have read.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in network.modules() if isinstance(layer, BaseTunerLayer)]
    were = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was in zip(layers, were, strict=True):
            layer._disable_adapters = was


def _held_batch(batch: Mapping[str, Any], rows_K: Tensor) -> dict[str, Any]:
    """The sizes and the captions, or their embeddings, of the rows that are held."""
    held: dict[str, Any] = {name: batch[name][rows_K.to(batch[name].device)] for name in SIZES if name in batch}
    for name, value in batch.items():
        if name.startswith(PREFIX):
            held[name.removeprefix(PREFIX)] = value[: len(rows_K)]
    return held


def _cat(first: Tensor, second: Tensor) -> Tensor:
    """Both along the batch, with zeros behind the shorter texts."""
    if first.ndim > 2 and first.shape[1] != second.shape[1]:
        longest = max(first.shape[1], second.shape[1])
        first, second = (
            nn.functional.pad(each, (0, 0) * (each.ndim - 2) + (0, longest - each.shape[1])) for each in (first, second)
        )
    return torch.cat([first, second])
