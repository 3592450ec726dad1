"""OptimizerInBackward: step each parameter as soon as its gradient is complete, and free the gradient.

No two gradients exist at once, so a whole model's are never in memory; on one card this saves as much as sharding them
over many. bfloat16 weights are stepped in float32 and rounded stochastically, because a step below their resolution
would otherwise be lost every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_aigc.diffusion.training.averaging import is_schedule_free
from lightning_aigc.errors import ConfigError

KEY = "model.init_args.optimizer_in_backward"
Build = Callable[[Any], Optimizer]


class OptimizerInBackward(Optimizer):
    """One instance of an optimizer per parameter, each stepped by a hook in backward.

    `step(closure)` runs the closure, whose backward steps the parameters. Groups, rates and states are those of the
    optimizer that `build` makes, so schedules and checkpoints see an ordinary optimizer; a group's values are copied to
    its parameters' instances before each step. An optimizer that looks at all parameters together, such as Prodigy,
    looks at each alone here.

    Args:
        build: Makes the optimizer from parameter groups.
        groups: Parameter groups, as the optimizer takes them.

    Raises: ConfigError for a schedule-free optimizer, which swaps weights between steps.
    """

    def __init__(self, build: Build, groups: list[dict[str, Any]]) -> None:
        whole = build(groups)
        if is_schedule_free(whole):
            raise ConfigError(
                f"{KEY}: {type(whole).__name__} swaps its average in and out of all weights at once; use another"
                " optimizer, or optimizer_in_backward: false"
            )
        super().__init__(whole.param_groups, whole.defaults)
        self.name = type(whole).__name__
        self._steppers: dict[nn.Parameter, _Stepper] = {}
        self._hooks = []
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                self._steppers[parameter] = _Stepper(build, parameter, options)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(group)))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure; its backward has stepped the parameters when it returns."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            parameter = parameters[int(number)]
            self.state[parameter] = self._steppers[parameter].load(state)

    def remove_hooks(self) -> None:
        """Leave the parameters to another optimizer."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, group: dict[str, Any]) -> Callable[[Tensor], None]:
        def step(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            self.state[parameter] = self._steppers[parameter].step(group)
            parameter.grad = None

        return step


class _Stepper:
    """The optimizer of one parameter; a bfloat16 parameter's works on a float32 copy that exists during its step."""

    def __init__(self, build: Build, parameter: nn.Parameter, options: dict[str, Any]) -> None:
        self.parameter = parameter
        self.is_rounded = parameter.dtype == torch.bfloat16
        self.stepped = nn.Parameter(torch.empty(0, device=parameter.device)) if self.is_rounded else parameter
        self.optimizer = build([{"params": [self.stepped]} | options])

    def step(self, group: dict[str, Any]) -> Any:
        """Step with the group's present values; returns the parameter's state."""
        self.optimizer.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
        if self.is_rounded:
            assert self.parameter.grad is not None
            self.stepped.data = self.parameter.data.float()
            self.stepped.grad = self.parameter.grad.float()
        self.optimizer.step()
        if self.is_rounded:
            round_stochastically_(self.parameter.data, self.stepped.data)
            self.stepped.grad = None
            self.stepped.data = self.stepped.data.new_empty(0)
        return self.optimizer.state[self.stepped]

    def load(self, state: dict[str, Any]) -> Any:
        """Load the parameter's state; returns the one that is stepped."""
        if self.stepped.device != self.parameter.device:
            self.stepped.data = self.stepped.data.to(self.parameter.device)
        described = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": {0: state}, "param_groups": described})
        return self.optimizer.state[self.stepped]


def round_stochastically_(target: Tensor, value: Tensor) -> None:
    """Write float32 values into a bfloat16 tensor, up or down with probabilities that keep the mean.

    Source: Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192; the bits as in Dettmers' bitsandbytes: a
    random number below one unit of the kept bits is added before the others are cut off.
    """
    bits = value.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    rounded = (bits + noise).bitwise_and_(-65536).view(torch.float32)
    # Adding to the bits of infinity would make NaN.
    target.copy_(torch.where(value.isfinite(), rounded, value))


def check_trainer(trainer: Any) -> None:
    """Check that a Trainer leaves the gradients alone until each is complete. Raises: ConfigError."""
    advice = "or set optimizer_in_backward: false"
    if trainer.world_size > 1:
        raise ConfigError(
            f"{KEY} steps before ranks have averaged their gradients, and there are {trainer.world_size} ranks; train"
            f" on one device, {advice}"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"{KEY} steps after every batch, got accumulate_grad_batches: {trainer.accumulate_grad_batches}; use 1 and"
            f" a larger train_batch_size, {advice}"
        )
    if trainer.gradient_clip_val:
        raise ConfigError(
            f"{KEY} has stepped before the norm of all gradients is known, got gradient_clip_val:"
            f" {trainer.gradient_clip_val}; use 0, {advice}"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigError(
            f"{KEY} steps before a loss scale could be taken out, and precision {trainer.precision} has one; use"
            f" bf16-mixed, bf16-true or 32-true, {advice}"
        )
    for callback in trainer.callbacks:
        if type(callback).__name__ in ("GradientHealthMonitor", "AdaptiveLR"):
            raise ConfigError(
                f"{KEY} frees each gradient before {type(callback).__name__} could look at it; remove the callback,"
                f" {advice}"
            )
