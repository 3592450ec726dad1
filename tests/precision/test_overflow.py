"""An overflow skips the step, halves the loss scale, and one line names the module where it began."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from fakes.runs.trainings import WIDTH, ManualRegression, Regression, fit, make_batches
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.nan import overflow, replay
from lightning_aigc.precision.nan.non_finite import NonFinite, first_non_finite

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def off(precision: str = "16-mixed") -> FusedBackwardPrecision:
    return FusedBackwardPrecision(precision, memory="off")


class Steep(torch.autograd.Function):
    """Its input as it is; a gradient too large for float16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e9


class SteepInBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Steep.apply(x)


class LargeInForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half() * 1e4 * 1e4


def plain_layers(count: int = 5) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_the_first_module_with_a_bad_gradient_is_named(place: int, lines: list[str]) -> None:
    layers = plain_layers()
    layers[place] = SteepInBackward()
    fit(off(), Regression(layers), make_batches(1))
    assert lines == [
        f"step 1 skipped: the backward pass of net.{place} (SteepInBackward) computed a gradient that is not finite;"
        " the weights stay as they were, the loss scale goes from 65536 to 32768, training continues"
    ]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_the_first_module_with_a_bad_output_is_named(place: int, lines: list[str]) -> None:
    layers = plain_layers()
    layers[place] = LargeInForward()
    fit(off(), Regression(layers), make_batches(1))
    assert len(lines) == 1
    assert lines[0].startswith(
        f"step 1 skipped: net.{place} (LargeInForward) computed values in its forward pass that are not finite;"
    )
    assert lines[0].endswith("A smaller loss scale does not help here: look at the batch, or use precision: bf16-mixed")


def layers_with_a_large_weight() -> list[nn.Module]:
    """Values stay near 1; the gradient that net.2 sends back is 1e4 times the one that it gets."""
    layers = plain_layers()
    with torch.no_grad():
        layers[1].weight.mul_(1e-4)
        layers[1].bias.zero_()
        layers[2].weight.mul_(1e4)
    return layers


def test_a_float16_product_that_overflows_in_backward_is_named(lines: list[str]) -> None:
    fit(off(), Regression(layers_with_a_large_weight()), make_batches(1))
    assert "the backward pass of net.2 (Linear) computed" in lines[0]


def test_a_module_of_modules_is_not_blamed_for_its_child(lines: list[str]) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), SteepInBackward()), nn.Linear(WIDTH, 8)]
    fit(off(), Regression(layers), make_batches(1))
    assert "net.1.1 (SteepInBackward)" in lines[0]


@pytest.mark.filterwarnings("ignore:Encountered `nan` values")
def test_a_batch_with_a_nan_is_said_to_be_given(lines: list[str]) -> None:
    batches = make_batches(1)
    batches[0][0, 0] = torch.nan
    fit(off(), Regression(plain_layers()), batches)
    assert "net.0 (Linear) was given values that are not finite, by the batch or by code between" in lines[0]


def test_a_loss_that_overflows_by_itself_is_named_as_such(lines: list[str]) -> None:
    class Dividing(Regression):
        def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch_NC, batch_idx) / torch.zeros(())

    fit(off(), Dividing(plain_layers()), make_batches(1))
    assert "the loss is not finite, though what every module computed is" in lines[0]


def test_a_gradient_that_overflows_between_the_modules_and_the_loss_is_not_blamed_on_a_module(lines: list[str]) -> None:
    fit(off(), Regression(plain_layers()), make_batches(1, huge=[0]))
    assert "the backward pass of code outside the modules (the loss, for one) computed a gradient" in lines[0]


def test_an_infinite_value_that_never_reaches_the_loss_is_no_finding() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full_like(x, -torch.inf)

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.steep, self.linear = Masked(), SteepInBackward(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(torch.ones_like(x) > 0, self.steep(self.linear(x).half()), self.mask(x).half()).float()

    model = Attending()
    found = first_non_finite(model, lambda: model(torch.randn(2, WIDTH)).sum(), 2.0**10)
    assert found == NonFinite("backward", "steep (SteepInBackward)")


def test_finite_values_give_no_finding_and_leave_no_gradient_and_no_hook() -> None:
    model = nn.Sequential(*plain_layers())
    fired = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    assert first_non_finite(model, lambda: model(torch.randn(2, WIDTH)).sum(), 1.0) is None
    assert not fired
    assert all(p.grad is None for p in model.parameters())
    assert not module_hooks._has_any_global_hook()


def test_a_skipped_step_keeps_the_weights_and_the_next_one_trains() -> None:
    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append((module.net[0].weight.detach().clone(), trainer.scaler.get_scale()))

    seen: list[tuple[Tensor, float]] = []
    fit(off(), Regression(plain_layers()), make_batches(4, huge=[1]), callbacks=[Watch()])
    assert torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[1][0], seen[2][0])
    assert [scale for _, scale in seen] == [2.0**16, 2.0**15, 2.0**15, 2.0**15]


def test_after_many_skips_in_a_row_the_line_says_what_to_change(lines: list[str]) -> None:
    layers = plain_layers()
    layers[1] = SteepInBackward()
    fit(off(), Regression(layers), make_batches(6))
    assert len(lines) == 6
    assert [line.partition("training continues")[2] for line in lines[:4]] == [""] * 4
    assert lines[4].endswith("5 steps in a row now; if it does not stop, use precision: bf16-mixed")
    assert "from 4096 to 2048" in lines[4]


def test_a_step_that_is_taken_ends_the_row_of_skips(lines: list[str]) -> None:
    fit(off(), Regression(plain_layers()), make_batches(7, huge=[0, 1, 2, 3, 5, 6]))
    assert len(lines) == 6
    assert not any("in a row" in line for line in lines)


def test_the_second_run_draws_the_random_numbers_of_the_first(lines: list[str]) -> None:
    class SteepAtRandom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            draws.append((torch.rand(()).item(), random.random(), float(np.random.rand())))
            return Steep.apply(x)

    draws: list[tuple[float, float, float]] = []
    layers = plain_layers()
    layers[2] = SteepAtRandom()
    fit(off(), Regression(layers), make_batches(1))
    assert len(draws) == 2 and draws[0] == draws[1]
    assert "net.2 (SteepAtRandom)" in lines[0]


def test_healthy_steps_are_not_run_again_and_have_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch(Callback):
        def on_before_zero_grad(self, trainer: Any, module: Any, *_: Any) -> None:
            hooks.append(module_hooks._has_any_global_hook() or any(m._forward_hooks for m in module.modules()))

    def refuse(*_: Any) -> None:
        raise AssertionError

    hooks: list[bool] = []
    monkeypatch.setattr(replay, "first_non_finite", refuse)
    fit(off(), Regression(plain_layers()), make_batches(3), callbacks=[Watch()])
    assert hooks == [False] * 3


def test_an_overflow_in_an_earlier_accumulated_batch_is_not_blamed_on_the_last(lines: list[str]) -> None:
    fit(off(), Regression(plain_layers()), make_batches(4, huge=[0]), accumulate_grad_batches=2)
    assert lines == [
        "step 1 skipped: the gradient of net.4.bias and 9 more is not finite, since an earlier one of the accumulated"
        " batches; the weights stay as they were, the loss scale goes from 65536 to 32768, training continues"
    ]


def test_manual_optimization_names_the_parameter_nearest_to_the_loss(lines: list[str]) -> None:
    layers = plain_layers()
    layers[2] = SteepInBackward()
    fit(off(), ManualRegression(layers), make_batches(1))
    assert len(lines) == 1
    assert "step 1 skipped: the gradient of net.1.bias and 3 more is not finite; the weights" in lines[0]


def test_a_second_run_that_fails_does_not_end_the_training(lines: list[str]) -> None:
    class OnlyOnce(Regression):
        runs = 0

        def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
            self.runs += 1
            if self.runs == 2 and isinstance(self.trainer.precision_plugin, FusedBackwardPrecision):
                raise OSError("the file is gone")
            return super().training_step(batch_NC, batch_idx)

    module, reference = OnlyOnce(), OnlyOnce()
    trainer = fit(off(), module, make_batches(3, huge=[0]))
    fit(MixedPrecision("16-mixed", "cpu"), reference, make_batches(3, huge=[0]))
    assert trainer.global_step == 3
    assert all(map(torch.equal, module.parameters(), reference.parameters()))  # the dropout after it is the same
    assert len(lines) == 1
    assert "(running the step again to see where: OSError: the file is gone)" in lines[0]


def test_a_user_closure_that_is_not_lightnings_is_called_once(lines: list[str]) -> None:
    class Wrapping(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=lambda: optimizer_closure())

    fit(off(), Wrapping(plain_layers()), make_batches(1, huge=[0]))
    assert "step 1 skipped: the gradient of net.4.bias and 9 more is not finite" in lines[0]


@pytest.mark.filterwarnings("ignore:.*training_step` returned `None`")  # which Lightning says once a process
def test_a_step_without_a_loss_is_no_overflow(lines: list[str]) -> None:
    class Skipping(Regression):
        def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
            return None if batch_idx == 1 else super().training_step(batch_NC, batch_idx)

    fit(off(), Skipping(plain_layers()), make_batches(3))
    assert lines == []


def test_a_compiled_model_is_named_as_the_user_knows_it(lines: list[str]) -> None:
    module = Regression(layers_with_a_large_weight())
    module.net = torch.compile(module.net, backend="aot_eager")
    fit(off(), module, make_batches(2))
    assert "the backward pass of net.2 (Linear) computed" in lines[0]


def test_checkpointed_blocks_are_looked_into(lines: list[str]) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), SteepInBackward())

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    fit(off(), Regression([nn.Linear(WIDTH, WIDTH), Checkpointed(), nn.Linear(WIDTH, WIDTH)]), make_batches(1))
    assert "the backward pass of net.1.block.1 (SteepInBackward) computed" in lines[0]


def test_a_fused_optimizer_that_skips_by_itself_is_noticed_in_the_same_step(lines: list[str]) -> None:
    module = Regression(plain_layers(), lambda parameters: torch.optim.Adam(parameters, 1e-2, fused=True))
    fit(off(), module, make_batches(4, huge=[0]))
    assert lines == [
        "the loss scale fell from 65536 to 32768 by step 1: a step was skipped because a gradient was not finite; to"
        " see which module, use an optimizer with fused=False"
    ]


def test_on_a_device_the_scale_is_read_when_its_copy_has_come(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scale:
        """A scale on a card: it can be copied, and not read."""

        device = torch.device("cuda")

        def __init__(self, value: float) -> None:
            self.value = value

        def to(self, device: str, non_blocking: bool) -> Tensor:
            assert (device, non_blocking) == ("cpu", True)
            return torch.tensor(self.value)

    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            return arrived

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    skipped, model = overflow.SkippedSteps(nullcontext), SimpleNamespace(trainer=SimpleNamespace(global_step=7))
    for value, arrived in [(4.0, True), (2.0, False), (2.0, True), (2.0, True)]:  # noqa: B007 - read by the event
        skipped.check_scale(model, SimpleNamespace(_scale=Scale(value), _init_scale=4.0))  # type: ignore[arg-type]
    assert [line.partition(":")[0] for line in lines] == ["the loss scale fell from 4 to 2 by step 8"]
