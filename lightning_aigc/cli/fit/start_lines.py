"""StartLines: lines before the first step, on what is trained, and on learning rates and prompts that no one wants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_aigc._lightning import Callback, LightningModule, Trainer, rank_zero_info, rank_zero_warn
from lightning_aigc.cli.quantities import with_scale
from lightning_aigc.protocols import CountsTokens, HasValidationPrompts

USUAL = {
    "Prodigy": (1e-2, 10.0, 1.0),  # they multiply a rate that they find
    "DAdapt": (1e-2, 10.0, 1.0),
    "SGD": (1e-7, 10.0, 1e-2),
    "Lion": (1e-8, 1e-3, 2e-5),
    "Muon": (1e-6, 1.0, 1e-3),
    "": (1e-7, 1e-2, 1e-4),
}
"""The least rate, the most, and one to begin with, by the beginning of the optimizer's name; the last are for Adam and
its kind. A step of Adam moves a weight by about the rate: 1e-2 moves the matrices of a LoRA, some 0.02 large, by half
of themselves, and 1e-7 moves them by a ten-thousandth in 20 steps."""


def strange_rates(optimizers: list[Any]) -> Iterator[str]:
    """A sentence for each rate outside the usual range of its optimizer."""
    for optimizer in optimizers:
        name = type(getattr(optimizer, "optim", optimizer)).__name__
        least, most, usual = next(limits for begin, limits in USUAL.items() if name.startswith(begin))
        for rate in sorted({float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}):
            if not least <= rate <= most:
                effect = "the model hardly changes" if rate < least else "the first steps destroy the model"
                yield (
                    f"learning rate: {rate:g} is {'below' if rate < least else 'above'} what {name} takes, {least:g} to"
                    f" {most:g}: {effect}; set model.init_args.learning_rate to {usual:g}, which is usual"
                )


class StartLines(Callback):
    """Prints how many of the model's parameters are trained, instead of Lightning's table of modules, and warns."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameters = list(pl_module.parameters())
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in parameters)
        rank_zero_info(f"model: {with_scale(trained)} of {with_scale(total)} parameters are trained")
        for sentence in unwanted_settings(trainer, pl_module):
            rank_zero_warn(sentence)


def unwanted_settings(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    """A sentence for each setting that no one wants, once there are optimizers."""
    yield from strange_rates(trainer.optimizers)
    yield from cut_prompts(module)


def cut_prompts(module: LightningModule) -> Iterator[str]:
    """A sentence on prompts that the text encoder cuts off."""
    if not isinstance(module, CountsTokens) or not isinstance(module, HasValidationPrompts):
        return
    yield from of_long_prompts("validation_prompts", module.count_tokens(module.validation_prompts))


def of_long_prompts(name: str, counted: tuple[Sequence[int], int] | None) -> Iterator[str]:
    """A sentence on prompts with more tokens than the text encoder reads.

    Args: counted: as `protocols.CountsTokens` gives it.
    """
    tokens, most = counted or ((), 0)
    if long := sum(count > most for count in tokens):
        yield (
            f"{long} of {len(tokens)} {name} have more than {most} tokens, and the text encoder cuts off the rest; put"
            " what matters first"
        )
