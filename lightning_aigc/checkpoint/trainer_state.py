"""What a Trainer's state between two micro-batches is made of, and how it goes back into a Trainer.

Lightning's own checkpoint has weights, optimizers, schedules, loss scale and callbacks. What it leaves out is here:
random states, the place in the data, gradients of an open accumulation window, what is logged, and buffers that no
state_dict holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.loop import _Loop
from torch import Tensor, nn

from lightning_aigc.checkpoint import loader as loaders
from lightning_aigc.checkpoint.epoch_metrics import restore_epoch_metrics, take_epoch_metrics
from lightning_aigc.rng import RandomStates, from_plain, random_states, restore_random_states, to_plain

State = dict[str, Any]
OF_EACH_RANK = ("callbacks",)
"""Keys of Lightning's checkpoint that ranks may have different values for, beside those of plugins and data modules."""


@dataclass
class Moment:
    """What changes with every micro-batch, taken at its end; cheap enough to take at each."""

    step: int
    loops: State
    random: RandomStates
    places: list[State | None]
    cycle: State
    metrics: State
    is_window_open: bool
    should_stop: bool = False
    """Whether a callback has asked for the end."""

    @classmethod
    def take(cls, trainer: Trainer) -> Moment:
        fit_loop: Any = trainer.fit_loop
        fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
        ahead = len(getattr(fetcher, "batches", ()))
        iterator = combined._iterator
        connector: Any = trainer._logger_connector
        return cls(
            trainer.global_step,
            fit_loop.state_dict(),
            random_states(trainer.strategy.root_device),
            [one.place(ahead) if isinstance(one, loaders.Resumable) else None for one in combined.flattened],
            {"index": iterator._idx - ahead, "consumed": list(getattr(iterator, "_consumed", ()))},
            {
                "callback": dict(connector._callback_metrics),
                "logged": dict(connector._logged_metrics),
                "progress_bar": dict(connector._progress_bar_metrics),
                "is_first": connector._first_loop_iter,
                "hook": connector._current_fx,
                "epoch": take_epoch_metrics(fit_loop.epoch_loop._results),
            },
            is_window_open(trainer),
            trainer.should_stop,
        )

    def to_plain(self) -> State:
        return {
            "step": self.step,
            "loops": self.loops,
            "random": to_plain(self.random),
            "places": [None if place is None else loaders.to_plain(place) for place in self.places],
            "cycle": self.cycle,
            "metrics": self.metrics,
            "is_window_open": self.is_window_open,
            "should_stop": self.should_stop,
        }

    @classmethod
    def from_plain(cls, plain: State, device: torch.device) -> Moment:
        places = [None if place is None else loaders.from_plain(place) for place in plain["places"]]
        values = plain | {"random": from_plain(plain["random"], device), "places": places}
        return cls(**values)

    def restore(self, trainer: Trainer) -> None:
        """Put all of it back, the random states last. To be called where the epoch's loop is about to ask for a batch,
        with its loaders made and their places given."""
        fit_loop: Any = trainer.fit_loop
        fit_loop.load_state_dict(self.loops)
        fit_loop._combined_loader_states_to_load = []
        _forget_restart(fit_loop)
        combined = fit_loop._combined_loader
        for one in combined.flattened:
            if isinstance(one, loaders.Resumable):
                one.arrive()
        fetcher = fit_loop._data_fetcher
        combined._iterator._idx = self.cycle["index"] + len(getattr(fetcher, "batches", ()))
        if self.cycle["consumed"]:
            combined._iterator._consumed = list(self.cycle["consumed"])
        connector: Any = trainer._logger_connector
        for name in ("callback", "logged", "progress_bar"):
            getattr(connector, f"_{name}_metrics").update(self.metrics[name])
        connector._first_loop_iter, connector._current_fx = self.metrics["is_first"], self.metrics["hook"]
        restore_epoch_metrics(fit_loop.epoch_loop._results, self.metrics["epoch"], trainer)
        restore_random_states(self.random)


def _forget_restart(loop: Any) -> None:
    """Lightning's own restart steps plateau schedules and counters once more in places; here nothing is to redo."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    if hasattr(loop, "_restart_stage"):
        loop._restart_stage = "none"
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            _forget_restart(inner)


def is_window_open(trainer: Trainer) -> bool:
    """Whether gradients wait for further micro-batches, or may: in manual optimization only the module knows."""
    return not trainer.lightning_module.automatic_optimization or trainer.fit_loop._should_accumulate()


def gradients(module: LightningModule) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def restore_gradients(module: LightningModule, saved: dict[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if name in saved:
            parameter.grad = (
                saved[name].to(parameter.device, parameter.dtype).clone(memory_format=torch.preserve_format)
            )


class OwnBuffers:
    """Buffers that training changes and that Lightning's checkpoint does not restore: those that no state_dict holds,
    and on other ranks than 0, whose running statistics are their own, all."""

    def __init__(self, module: LightningModule) -> None:
        self._start = {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}
        self._known: set[str] = set()

    def changed(self, module: LightningModule, saved: dict[str, Any]) -> dict[str, Tensor]:
        """Those not in `saved` that differ from the start of this fit, or did in the snapshot it went on from."""
        return {
            name: buffer
            for name, buffer in module.named_buffers()
            if name not in saved and (name in self._known or self._start.get(name) != (id(buffer), buffer._version))
        }

    def restore(self, module: LightningModule, values: dict[str, Tensor]) -> None:
        self._known |= values.keys()
        buffers = dict(module.named_buffers())
        for name, value in values.items():
            if name in buffers and buffers[name].shape == value.shape:
                with torch.no_grad():
                    buffers[name].copy_(value)


def checkpoint_of(trainer: Trainer) -> State:
    """Lightning's checkpoint, on all ranks, without its loops and without what is not plain in its hyperparameters."""
    checkpoint: State = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    del checkpoint["loops"]
    for key in [
        key
        for key in checkpoint
        if key.startswith(("hyper_parameters", "hparams_", "datamodule_hparams", "datamodule_hyper"))
    ]:
        checkpoint[key] = plain_part(checkpoint[key])
    return checkpoint


def plain_part(value: Any) -> Any:
    """A nested value without what is neither plain nor a tensor."""
    if isinstance(value, dict):
        kept = {k: plain_part(v) for k, v in value.items() if isinstance(k, (str, int))}
        return {k: v for k, v in kept.items() if v is not NOT_PLAIN}
    if isinstance(value, (list, tuple)):
        return [v for v in map(plain_part, value) if v is not NOT_PLAIN]
    return value if value is None or isinstance(value, (bool, int, float, str, Tensor)) else NOT_PLAIN


NOT_PLAIN = object()


def of_this_rank(trainer: Trainer, checkpoint: State) -> State:
    """The part of the checkpoint that is not on all ranks alike."""
    names = {
        type(one).__qualname__
        for one in (trainer.precision_plugin, getattr(trainer, "datamodule", None))
        if one is not None
    }
    return {key: value for key, value in checkpoint.items() if key in OF_EACH_RANK or key in names}


def training_modes(trainer: Trainer) -> list[str]:
    """Names of submodules in eval mode, the strategy's wrapper included: Lightning leaves it so after validation."""
    return [name for name, part in _wrapped(trainer).named_modules() if not part.training]


def restore_training_modes(trainer: Trainer, in_eval: list[str]) -> None:
    names = set(in_eval)
    for name, part in _wrapped(trainer).named_modules():
        part.training = name not in names


def _wrapped(trainer: Trainer) -> nn.Module:
    return trainer.strategy.model or trainer.lightning_module
