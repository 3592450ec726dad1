"""GradientCompressor: compressed gradient sync for plain torch loops under DistributedDataParallel."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.checksum import check_equal
from lightning_aigc.gradient_sync.factory import AnySync, make_sync
from lightning_aigc.gradient_sync.groups import DEFAULT_TIMEOUT
from lightning_aigc.gradient_sync.layout import check_protect
from lightning_aigc.gradient_sync.options import DEFAULT_MODE, Mode, SyncOptions
from lightning_aigc.gradient_sync.plain import LocalSteps
from lightning_aigc.gradient_sync.sync import GradientSync, StepReport

log = logging.getLogger(__name__)


class GradientCompressor:
    """Makes DDP send a fraction of its gradients' bytes.

    ```python
    ddp = DistributedDataParallel(model)
    compressor = GradientCompressor(protect_layers=["vae.decoder"])
    compressor.hook_into_model(ddp, optimizer)
    for batch in loader:
        loss(ddp(batch)).backward()
        if compressor.settle():  # every rank's gradients were finite
            optimizer.step()
        optimizer.zero_grad()
    print(compressor.report())
    ```

    Every rank makes the same one. With one rank it does nothing, and says so.
    """

    def __init__(
        self,
        strategy: Literal["layer_wise_adaptive", "uniform"] = "layer_wise_adaptive",
        sparsity_target: float = 0.75,
        protect_layers: Sequence[str] | None = None,
        *,
        mode: Mode = DEFAULT_MODE,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **options: Any,
    ) -> None:
        """Args:
            strategy: how layers share what a sparse mode sends: by their gradients' size, or evenly.
            sparsity_target: share that waits, in the sparse modes.
            protect_layers: name patterns of parameters that are sent whole; None protects `vae.decoder` and
                `mid_block.attentions` where the model has them.
            mode, options: the other fields of `SyncOptions`.

        Raises: ConfigError for a value outside what is accepted.
        """
        if strategy not in ("layer_wise_adaptive", "uniform"):
            raise ConfigError(f"strategy must be layer_wise_adaptive or uniform, got {strategy!r}")
        try:
            self.options = SyncOptions(
                mode=mode,
                sparsity=sparsity_target,
                layer_wise_adaptive=strategy == "layer_wise_adaptive",
                protect=protect_layers,
                **options,
            )
        except TypeError as error:
            known = ", ".join(SyncOptions.__dataclass_fields__)
            raise ConfigError(f"{str(error).partition(' ')[2]}; SyncOptions has {known}") from None
        self.timeout = timeout
        self.mode: Mode = mode
        self._sync: AnySync | None = None
        self._why = "not hooked into a model yet"
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._optimizer_steps = 0
        self._removable: list[Any] = []

    @property
    def last_step(self) -> StepReport | None:
        """The last settled step's bytes and times."""
        return None if self._sync is None else self._sync.report

    def hook_into_model(
        self, ddp_model: DistributedDataParallel, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Replace the gradient sync of this model. Collective.

        Args: optimizer: its steps trigger the parameters' average in mode local, which needs it, and the comparison of
            the ranks' parameters every `checksum_every_n_steps`.
        Raises: ConfigError for a model that is not DistributedDataParallel or a pattern that covers nothing.
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
        if dist.get_world_size() == 1:
            self._why = "one rank: nothing to send, gradients are left alone"
            log.info("GradientCompressor: %s", self._why)
            return
        self._sync, self.mode, self._why = make_sync(
            self._parameters,
            self.options,
            timeout=self.timeout,
            find_unused=ddp_model.find_unused_parameters or ddp_model.static_graph,
        )
        log.info("GradientCompressor: %s", self._why)
        if self._sync is not None:
            self._sync.attach(ddp_model)
        if optimizer is not None:
            self._removable.append(optimizer.register_step_post_hook(lambda *_: self._after_step()))

    def enable_gradient_accumulation(self, steps: int = 4, sync_mode: Literal["overlap", "plain"] = "overlap") -> None:
        """Sync once every `steps` forward passes in training; call it after `hook_into_model`.

        Gradients add up locally meanwhile: divide the loss by `steps`, and step the optimizer after the last. In sparse
        modes `overlap` chooses what to send from the sum so far while the last micro-batch runs, `plain` from the step
        before.
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
        if isinstance(self._sync, GradientSync):
            self._sync.choose_early = sync_mode == "overlap"

    def settle(self) -> bool:
        """End the step's sync: whether every rank's gradients were finite, and the optimizer should step."""
        report = None if self._sync is None else self._sync.settle()
        return report is None or report.finite

    def _after_step(self) -> None:
        if isinstance(self._sync, LocalSteps):
            self._sync.settle()
            self._sync.after_optimizer_step()
        self._optimizer_steps += 1
        every = self.options.checksum_every_n_steps
        if every and self._optimizer_steps % every == 0 and not isinstance(self._sync, LocalSteps):
            check_equal(self._parameters)

    def report(self) -> str:
        """What the last step sent, by kind, and what that cost, in a few lines."""
        lines = [f"gradient sync: {self._why}"]
        if self._sync is not None:
            lines.append(describe(self._sync.report, self._sync.step, self._sync.skipped_steps))
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for each rank to save: plain CPU tensors and numbers, loadable with weights_only=True."""
        return {} if self._sync is None else self._sync.state_dict()

    def load_state_dict(self, *states: dict[str, Any]) -> list[str]:
        """Take up a run: this rank's own state, or those of all ranks that saved, in their order.

        Returns: what cannot be exact, in sentences.
        """
        if self._sync is None or not states or not states[0]:
            return []
        if len(states) == 1 and self._sync.groups.world_size > 1:
            states = states * self._sync.groups.world_size
        return self._sync.load_state_dict(states)

    def close(self) -> None:
        """Stop the thread and the hooks on optimizer and model; DDP keeps its communication hook."""
        for handle in self._removable:
            handle.remove()
        if self._sync is not None:
            self._sync.close()


def trained_parameters(ddp: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """The parameters that DDP syncs, under their names in the module it wraps."""
    ignored = ddp.parameters_to_ignore
    return [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]


def describe(report: StepReport | None, steps: int, skipped: int) -> str:
    """One line on a step's bytes and times."""
    if report is None:
        return "no step yet"
    parts = ", ".join(f"{kind} {sent / 1e6:.2f} MB" for kind, sent in report.sent_bytes.items() if sent)
    return (
        f"step {steps}: sent {parts or 'nothing'}; {report.ratio:.3f} of a dense float32 ring; "
        f"{report.exposed_ms:.0f} ms exposed, {100 * report.share_hidden:.0f} % hidden"
        + (f"; {skipped} steps skipped for values that are not finite" if skipped else "")
    )
