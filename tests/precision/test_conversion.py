"""convert_module hands everything on to the swaps once, and teardown puts the model's own forwards back."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.runs.trainings import WIDTH, Regression, fit, make_batches
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.plugin import SWAPPED

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class StandIn:
    """In place of the swaps: wraps every Linear, and keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.restored = 0

    def swap_forwards(self, model: nn.Module, **arguments: Any) -> StandIn.Swapped:
        self.calls.append(arguments)
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        for layer in layers:
            layer.forward = self.counted(layer.forward)
        return StandIn.Swapped(self, layers)

    @staticmethod
    def counted(forward: Any) -> Any:
        def wrapped(x: Tensor) -> Tensor:
            wrapped.calls += 1
            return forward(x)

        wrapped.calls = 0
        wrapped.inner = forward
        return wrapped

    class Swapped:
        planner = None  # a level, no budget

        def __init__(self, owner: StandIn, layers: list[nn.Linear]) -> None:
            self.owner, self.layers = owner, layers

        def restore(self) -> None:
            for layer in self.layers:
                vars(layer).pop("forward", None)
            self.owner.restored += 1

        def set_device(self, device: torch.device) -> None:
            self.device = device

        def summary(self) -> str:
            return f"swapped {len(self.layers)} blocks"


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in, module = StandIn(), ModuleType("lightning_aigc.precision.swaps")
    vars(module)["swap_forwards"] = stand_in.swap_forwards
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return stand_in


def depth(layer: nn.Linear) -> int:
    """Number of wrappers around a layer's forward."""
    forward, count = vars(layer).get("forward"), 0
    while hasattr(forward, "inner"):
        forward, count = forward.inner, count + 1
    return count


def test_every_argument_reaches_the_swaps(swaps: StandIn) -> None:
    plugin = FusedBackwardPrecision(
        "bf16-mixed", "max", ["vae.decoder"], strict=True, input_grad_density=0.5, attention_grad_density=0.25,
        offload=True,
    )  # fmt: skip
    plugin.convert_module(nn.Linear(2, 2))
    assert swaps.calls == [
        {
            "memory": "max",
            "protect": ("vae.decoder",),
            "strict": True,
            "grad_dtype": None,
            "input_grad_density": 0.5,
            "attention_grad_density": 0.25,
            "offload": True,
        }
    ]


def test_fp16_backward_asks_the_swaps_for_float16_products(swaps: StandIn) -> None:
    FusedBackwardPrecision("bf16-forward-fp16-backward").convert_module(nn.Linear(2, 2))
    assert swaps.calls[0]["grad_dtype"] is torch.float16
    assert swaps.calls[0]["memory"] == "lean"


def test_off_never_calls_the_swaps(swaps: StandIn) -> None:
    fit(FusedBackwardPrecision("bf16-mixed", memory="off"), Regression(), make_batches(1))
    assert swaps.calls == []


def test_without_a_trainer_the_same_module_comes_back_converted(swaps: StandIn, lines: list[str]) -> None:
    layer = nn.Linear(2, 2)
    names = list(layer.state_dict())
    plugin = FusedBackwardPrecision("bf16-true")
    assert plugin.convert_module(layer) is layer
    assert layer.weight.dtype is torch.bfloat16
    assert list(layer.state_dict()) == names and depth(layer) == 1
    with plugin.forward_context():
        assert torch.zeros(1).dtype is torch.bfloat16
    plugin.teardown()
    plugin.teardown()
    assert depth(layer) == 0
    assert lines == []


def test_without_a_trainer_the_context_takes_the_modules_device(swaps: StandIn) -> None:
    layer, plugin = nn.Linear(2, 2), FusedBackwardPrecision("bf16-mixed")
    plugin.convert_module(layer)
    with plugin.forward_context():
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
        assert layer(torch.randn(1, 2)).dtype is torch.bfloat16


def test_converting_twice_does_not_stack(swaps: StandIn) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    plugin = FusedBackwardPrecision("32-true")
    plugin.convert_module(model)
    plugin.convert_module(model)
    assert depth(model[0]) == 1
    FusedBackwardPrecision("32-true").convert_module(model)
    assert depth(model[0]) == 1
    FusedBackwardPrecision("32-true").convert_module(nn.Sequential(model))  # a part that was converted by itself
    assert depth(model[0]) == 1


def test_a_fit_says_what_was_swapped_in_one_line_and_restores(swaps: StandIn, lines: list[str]) -> None:
    module = Regression()
    fit(FusedBackwardPrecision("bf16-mixed"), module, make_batches(2))
    assert lines == ["swapped 2 blocks"]
    assert depth(module.net[0]) == 0
    assert len(swaps.calls) == swaps.restored == 1


def test_a_fit_that_fails_restores_too(swaps: StandIn) -> None:
    class Failing(Regression):
        def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
            raise OSError("gone")

    module = Failing()
    with pytest.raises(OSError, match="gone"):
        fit(FusedBackwardPrecision("bf16-mixed"), module, make_batches(2))
    assert depth(module.net[0]) == 0


def test_a_second_fit_works_with_the_same_plugin_and_with_another(swaps: StandIn, lines: list[str]) -> None:
    module, plugin = Regression(), FusedBackwardPrecision("16-mixed")
    fit(plugin, module, make_batches(2, huge=[0]))
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 2.0**15
    fit(plugin, module, make_batches(2))
    assert plugin.scaler.get_scale() <= 2.0**15  # goes on where it was, as the stock plugin's does
    fit(FusedBackwardPrecision("bf16-mixed"), module, make_batches(2))
    assert [line for line in lines if "swapped" in line] == ["swapped 2 blocks"] * 3
    assert depth(module.net[0]) == 0


def test_a_swapped_forward_is_what_the_fit_runs(swaps: StandIn) -> None:
    module = Regression([nn.Linear(WIDTH, WIDTH)])
    seen = []
    module.net[0].register_forward_hook(lambda m, *_: seen.append(vars(m)["forward"].calls))
    fit(FusedBackwardPrecision("bf16-mixed"), module, make_batches(3))
    assert seen == [1, 2, 3]


def test_bf16_forward_fp16_backward_autocasts_to_bfloat16_under_a_loss_scale(swaps: StandIn) -> None:
    dtypes = []
    module, plugin = Regression([nn.Linear(WIDTH, WIDTH)]), FusedBackwardPrecision("bf16-forward-fp16-backward")
    module.net[0].register_forward_hook(lambda m, given, output: dtypes.append(output.dtype))
    fit(plugin, module, make_batches(3, huge=[]))
    assert dtypes == [torch.bfloat16] * 3
    assert module.net[0].weight.dtype is torch.float32
    assert plugin.state_dict()["scale"] == 2.0**16


def test_the_swaps_learn_the_device_that_the_module_is_moved_to(swaps: StandIn) -> None:
    layer, plugin = nn.Linear(2, 2), FusedBackwardPrecision("32-true")
    plugin.convert_module(layer)
    plugin.connect(layer.to("meta"), [], [])
    assert vars(layer)[SWAPPED].device == torch.device("meta")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 1


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_compiled_before_the_conversion_runs_the_new_forwards_and_then_its_own(
    in_place: bool, swaps: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifting(forward: Any) -> Any:
        return lambda x: forward(x) + 100

    monkeypatch.setattr(swaps, "counted", shifting)
    block, x = Block(), torch.randn(3, 2)
    compiled = block
    if in_place:
        block.compile(backend="eager")
    else:
        compiled = torch.compile(block, backend="eager")
    plain = compiled(x)
    plugin = FusedBackwardPrecision("32-true")
    plugin.convert_module(nn.ModuleList([compiled]))
    assert torch.allclose(compiled(x), plain + 100, atol=1e-4)
    plugin.teardown()
    assert torch.equal(compiled(x), plain)
