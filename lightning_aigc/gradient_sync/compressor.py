"""GradientCompressor: compressed gradient sync for plain torch loops under DistributedDataParallel."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.cluster.modes import Mode
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.base import Sync
from lightning_aigc.gradient_sync.factory import make_sync
from lightning_aigc.gradient_sync.options import (
    FIELDS,
    SyncOptions,
    check_protect,
    refuse_sparse_gradients,
    resolve_mode,
    trained_parameters,
    unused_options,
)
from lightning_aigc.gradient_sync.transport.process_groups import DEFAULT_TIMEOUT
from lightning_aigc.gradient_sync.watch.replica_check import check_equal
from lightning_aigc.gradient_sync.watch.stall_watchdog import StallWatchdog, default_after_s
from lightning_aigc.gradient_sync.watch.step_report import StepReport, describe
from lightning_aigc.setting_checks import as_timedelta

log = logging.getLogger(__name__)


class GradientCompressor:
    """Gradient sync of a DistributedDataParallel that sends a fraction of the bytes.

    Every rank makes the same compressor. With one rank nothing is sent, a log line says so, and the loop is unchanged.
    With a loss scaler, pass it to `hook_into_model(ddp, optimizer, scaler)` and call `scaler.step(optimizer)` and
    `scaler.update()` instead of `optimizer.step()`; call `scaler.unscale_(optimizer)` before anything reads gradients.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.AdamW(ddp.parameters())
        >>> compressor = GradientCompressor(protect_layers=[])
        >>> compressor.hook_into_model(ddp, optimizer)
        >>> compressor.enable_gradient_accumulation(steps=4)
        >>> for _ in range(8):
        ...     (ddp(torch.ones(2, 8)).square().mean() / 4).backward()
        ...     if compressor.finish_step():  # the window is complete, and finite on every rank
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> compressor.close()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        strategy: Literal["layer_wise_adaptive", "uniform"] | None = None,
        sparsity_target: float | None = None,
        protect_layers: Sequence[str] | None = None,
        *,
        mode: Mode | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        stall_after_s: float | None = None,
        stall_folder: str | Path | None = None,
        **options: Any,
    ) -> None:
        """Args:
            strategy: division of a sparse mode's values among layers: by the size of their gradients (None too), or
                evenly.
            sparsity_target: sparse modes: share of the gradient that waits for a later step; None is 0.75.
            protect_layers: name patterns of parameters that are sent uncompressed; None protects `vae.decoder` and
                `mid_block.attentions` where the model has them.
            mode: None is `sparse` where `strategy` or `sparsity_target` is given, and else the default, `int3`, which
                loses less; a warning names the mode.
            options: other fields of `SyncOptions`.
            timeout: how long a rank waits for the others before it stops with an error; a number is seconds.
            stall_after_s: seconds without a finished step before each rank writes where it waits; None is a third of
                the timeout, 0 never.
            stall_folder: folder of these reports; None is stderr.

        Raises: ConfigError for a value outside what is accepted.
        """
        if strategy not in (None, "layer_wise_adaptive", "uniform"):
            raise ConfigError(f"strategy must be layer_wise_adaptive or uniform, got {strategy!r}")
        written = {}
        if sparsity_target is not None:
            written["sparsity"] = f"sparsity_target: {sparsity_target}"
        if strategy is not None:
            written["layer_wise_adaptive"] = f"strategy: {strategy}"
        mode, self._notes = resolve_mode(mode, written)
        try:
            self.options = SyncOptions(
                mode=mode,
                sparsity=0.75 if sparsity_target is None else sparsity_target,
                layer_wise_adaptive=strategy != "uniform",
                protect=protect_layers,
                **options,
            )
        except TypeError as error:
            known = ", ".join(FIELDS)
            raise ConfigError(f"{str(error).partition(' ')[2]}; SyncOptions has {known}") from None
        self._notes += unused_options(self.options, written)
        self.timeout = as_timedelta(timeout, "timeout") or DEFAULT_TIMEOUT
        self._stall_after_s = default_after_s(self.timeout) if stall_after_s is None else stall_after_s
        self._stall_folder = None if stall_folder is None else Path(stall_folder)
        self._watchdog: StallWatchdog | None = None
        self.mode: Mode = mode
        self._sync: Sync | None = None
        self._why = "not hooked into a model yet"
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._scaler: torch.amp.GradScaler | None = None
        self._is_synced = False
        self._finite_steps = 0
        self._removable: list[Any] = []

    @property
    def last_step(self) -> StepReport | None:
        """The last finished step's bytes and times."""
        return None if self._sync is None else self._sync.report

    def hook_into_model(
        self,
        ddp_model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Replace the gradient sync of this model. Collective.

        Args:
            optimizer: its steps trigger the parameters' average in mode local, which needs it.
            scaler: the loss scaler of the loop, if it has one. Residuals are kept without its scale, which changes from
                step to step; it is read when the step's first gradients are ready.
        Raises: ConfigError for a model that is not DistributedDataParallel or has sparse gradients, and for a pattern
            that covers nothing.
        """
        if not isinstance(ddp_model, DistributedDataParallel):
            raise ConfigError(
                "hook_into_model wants a torch.nn.parallel.DistributedDataParallel, got "
                f"{type(ddp_model).__name__}; wrap the model first: DistributedDataParallel(model)"
            )
        if self.options.mode == "local" and optimizer is None:
            raise ConfigError("mode local averages parameters after optimizer steps: hook_into_model(ddp, optimizer)")
        if self._sync is not None:
            raise ConfigError("this GradientCompressor has a model already; make one for each")
        self._ddp = ddp_model
        self._parameters = trained_parameters(ddp_model)
        check_protect(self.options, [name for name, _ in self._parameters])  # in modes that protect nothing too
        refuse_sparse_gradients(ddp_model)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._removable.append(ddp_model.register_forward_pre_hook(self._note_whether_synced))
        if dist.get_rank() == 0:
            for sentence in self._notes:
                warnings.warn(f"GradientCompressor: {sentence}", stacklevel=2)
        if dist.get_world_size() == 1:
            self._why = "one rank: nothing to send, gradients are left alone"
            log.info("GradientCompressor: %s", self._why)
            return
        self._watchdog = self._watch()
        self._sync, self.mode, self._why = make_sync(
            self._parameters,
            self.options,
            timeout=self.timeout,
            find_unused=ddp_model.find_unused_parameters or ddp_model.static_graph,
            loss_scale=self._loss_scale,
        )
        log.info("GradientCompressor: %s", self._why)
        if self._sync is not None:
            self._sync.attach(ddp_model)
            self._average_after_steps(self._sync, optimizer)
        self._watchdog.progress()

    def enable_gradient_accumulation(self, steps: int = 4, sync_mode: Literal["overlap", "plain"] = "overlap") -> None:
        """Sync once every `steps` forward passes in training; call it after `hook_into_model`.

        Gradients accumulate locally meanwhile, and `finish_step` is False: divide the loss by `steps`, and set
        gradients to zero only after a step. In sparse modes `overlap` selects blocks by the sum so far while the last
        micro-batch runs, `plain` by the step before.
        """
        if steps < 1 or sync_mode not in ("overlap", "plain"):
            raise ConfigError(
                f"wanted steps of at least 1 and sync_mode overlap or plain, got {steps} and {sync_mode!r}"
            )
        if not self._parameters:
            raise ConfigError("call hook_into_model(ddp_model) before enable_gradient_accumulation")
        passes = 0

        def before_forward(ddp: nn.Module, _: Any) -> None:
            nonlocal passes
            if ddp.training and torch.is_grad_enabled():
                passes += 1
                ddp.require_backward_grad_sync = passes % steps == 0  # type: ignore[assignment]  # what no_sync sets

        self._removable.append(self._ddp.register_forward_pre_hook(before_forward, prepend=True))
        if self._sync is not None:
            self._sync.set_early_selection(sync_mode == "overlap")

    def finish_step(self) -> bool:
        """End the sync of the backward pass. Collective; call it after each backward.

        Returns: whether to step. False while gradients accumulate locally: after micro-batches that were not synced, by
        `enable_gradient_accumulation` or DDP's `no_sync`. False too if a rank's gradients were not finite: then they
        are dropped on all ranks, and the next backward starts a new window. With a loss scaler, which skips such a step
        and lowers the scale, it is True, and every rank's scaler finds NaN in every gradient. With one rank, and where
        `auto` chose dense, gradients are plain DDP's, and are not checked.

        Raises: RanksDivergedError, every `checksum_every_n_steps`, when the parameters of the step before are not the
            same on all ranks; SyncError when a rank is gone.
        """
        if not self._is_synced:
            return False
        report = None if self._sync is None else self._sync.end_step()
        finite = report is None or report.finite
        if not finite and self._scaler is None:
            for _, parameter in self._parameters:
                parameter.grad = None
        elif not finite:  # one bucket has the NaN, and an optimizer may have the parameters of another
            torch._foreach_mul_(self._gradients(), torch.nan)
        else:
            self._finite_steps += 1
            every = self.options.checksum_every_n_steps
            ranks_differ = self._sync is not None and self._sync.has_rank_local_parameters
            if every and self._finite_steps % every == 0 and not ranks_differ:
                check_equal(self._parameters)
        if self._watchdog is not None:
            self._watchdog.progress(self._finite_steps)
        return finite or self._scaler is not None

    def _average_after_steps(self, sync: Sync, optimizer: torch.optim.Optimizer | None) -> None:
        if sync.has_rank_local_parameters and optimizer is not None:
            self._removable.append(optimizer.register_step_post_hook(lambda *_: sync.after_optimizer_step()))

    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for _, parameter in self._parameters if parameter.grad is not None]

    def _note_whether_synced(self, ddp: nn.Module, _: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.progress()
        if torch.is_grad_enabled():  # DDP decides in its forward, by the same two values
            self._is_synced = bool(ddp.require_backward_grad_sync)

    def _watch(self) -> StallWatchdog:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        watchdog = StallWatchdog(
            self._stall_after_s, self._stall_folder, rank, ranks, self.timeout, self._describe_wait
        )
        watchdog.start()
        watchdog.progress(doing=f"setting up mode {self.mode}")
        return watchdog

    def _describe_wait(self) -> list[str]:
        return [f"mode {self.mode}"] if self._sync is None else self._sync.describe_wait()

    def report(self) -> str:
        """Return a few lines on the last step: bytes by kind, and time."""
        if self._sync is not None:
            self._notes += self._sync.take_notes()
        lines = [f"gradient sync: {self._why}", *self._notes]
        if self._sync is not None:
            lines.append(describe(self._sync.report, self._sync.step, self._sync.skipped_steps))
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for each rank to save: CPU tensors and numbers, loadable with weights_only=True."""
        return {} if self._sync is None else self._sync.state_dict()

    def load_state_dict(self, *states: dict[str, Any]) -> list[str]:
        """Resume a run from this rank's state, or from those of all ranks that saved, in their order.

        Returns: sentences on what cannot be exact.
        """
        if self._sync is None or not states or not states[0]:
            return []
        if len(states) == 1 and self._sync.groups.world_size > 1:
            states = states * self._sync.groups.world_size
        return self._sync.load_state_dict(states)

    def close(self) -> None:
        """Stop the thread, destroy the process groups, and remove the hooks on optimizer and model.

        DDP keeps its communication hook: continue training with a new DistributedDataParallel.
        """
        for handle in self._removable:
            handle.remove()
        self._removable.clear()
        if self._watchdog is not None:
            self._watchdog.close()
        if self._sync is not None:
            self._sync.close()
