"""AdaptiveLR takes back a raised rate where the model gets worse: held-out loss, images, size of the LoRA."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_aigc.callbacks.adaptive_lr import LARGEST_ADAPTER, AdaptiveLR, HarmWatch
from lightning_aigc.callbacks.fine_tune.ranks import adapter_size
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.report.paired_scores import Check
from lightning_aigc.schedulers.adaptive_rate import AdaptiveRate
from lightning_aigc.schedulers.rate_control import RateControl, RateSettings
from lightning_aigc.schedulers.step_statistics import LastStep


def raised(factor: float = 4.0) -> RateControl:
    """A control whose search ended at `factor` times the configured rate."""
    control = RateControl(RateSettings())
    control.search, control.found, control.top, control.factor = None, factor, factor, factor
    return control


def seen(step: int, loss: float | None = None, guard: Any = None) -> Any:
    """A trainer after a validation or a check."""
    metrics = {} if loss is None else {"val_loss": torch.tensor(loss)}
    return SimpleNamespace(callback_metrics=metrics, global_step=step, callbacks=[guard] if guard else [])


def test_harm_takes_back_half_of_a_raise_and_ends_at_the_configured_rate() -> None:
    control = raised(3.0)
    factors = []
    for _ in range(4):
        assert control.heed("x") is not None or control.top == 1.0
        factors.append(control.factor)
        control._steps_since_lowered = control.settings.recovery_steps
    assert factors == [1.5, 1.0, 1.0, 1.0]
    assert control.heed("x") is None  # there is nothing left to take back


def test_harm_is_heeded_once_in_the_steps_of_a_recovery_and_never_below_the_configured_rate() -> None:
    control = raised()
    assert control.heed("val_loss is above") == "the raised rate does harm: val_loss is above"
    assert control.heed("again") is None and control.top == 2.0
    lowered = raised(0.3)
    assert lowered.heed("x") is None and lowered.factor == 0.3


def test_harm_ends_a_search_that_is_above_the_configured_rate() -> None:
    control = RateControl(RateSettings(max_raise=30.0))
    for _ in range(20):
        control.update(1.0, LastStep(agreement=0.2, update_ratio=0.001))
        if control.factor > 3:
            break
    rate = control.factor
    assert control.is_searching and rate > 1
    assert control.heed("x") is not None
    assert not control.is_searching and control.factor == pytest.approx(max(1.0, rate / 2))


def test_a_held_out_loss_above_the_untrained_one_is_harm() -> None:
    watch = HarmWatch()
    assert watch.held_out(seen(10, 0.5)) is None  # of a run that validates nothing at step 0
    assert watch.held_out(seen(0, 0.20)) is None
    assert watch.held_out(seen(50, 0.19)) is None
    assert watch.held_out(seen(100, 0.21)) == "val_loss 0.21 is above the untrained model's 0.2"
    again = HarmWatch()
    again.load_state_dict(watch.state_dict())
    assert again.held_out(seen(150, 0.22)) is not None


def test_images_that_score_clearly_below_step_0_are_harm_once_a_check() -> None:
    guard = SimpleNamespace(checks=[Check(0, {"clip_t": [0.3, 0.32, 0.31], "clip_i": [math.nan] * 3})], metric="clip_t")
    watch = HarmWatch()
    assert watch.scores(seen(0, guard=guard)) is None
    guard.checks.append(Check(50, {"clip_t": [0.29, 0.33, 0.31], "clip_i": [math.nan] * 3}))
    assert watch.scores(seen(50, guard=guard)) is None  # within the noise
    guard.checks.append(Check(100, {"clip_t": [0.1, 0.15, 0.12], "clip_i": [math.nan] * 3}))
    assert watch.scores(seen(100, guard=guard)) == "the images of step 100 score 0.187 below the untrained model's"
    assert watch.scores(seen(101, guard=guard)) is None


def test_the_size_of_a_lora_is_that_of_its_product() -> None:
    module = StableDiffusionLoRA("embedded:sd", rank=4, lora_alpha=2.0, lora_targets=["attention", "convolutions"])
    module.configure_model()
    assert adapter_size(module, {}) == 0.0  # B begins at zero
    change = base = 0.0
    for layer in module.modules():
        if hasattr(layer, "lora_A") and len(layer.lora_A):
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
            change += float(layer.get_delta_weight("default").detach().square().sum())
            base += float(layer.base_layer.weight.detach().square().sum())
    assert adapter_size(module, {}) == pytest.approx((change / base) ** 0.5, rel=1e-4)
    watch = HarmWatch()
    said = watch.adapter(module)
    assert (said is not None) == ((change / base) ** 0.5 > LARGEST_ADAPTER)
    assert watch.adapter(module) is None or said is None  # told once
    assert adapter_size(torch.nn.Linear(2, 2), {}) is None


def test_a_run_tells_and_keeps_what_it_took_back(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    adaptive = AdaptiveLR()
    rate = AdaptiveRate(torch.optim.SGD([weight], lr=0.1), adaptive.settings)
    rate.control = raised()
    adaptive._rates = [rate]
    adaptive.on_validation_end(seen(0, 0.2), torch.nn.Module())  # type: ignore[arg-type]
    adaptive.on_validation_end(seen(40, 0.3), torch.nn.Module())  # type: ignore[arg-type]
    assert [(change.factor, change.reason) for change in adaptive.changes] == [
        (2.0, "the raised rate does harm: val_loss 0.3 is above the untrained model's 0.2")
    ]
    assert adaptive.state_dict()["harm"]["untrained_loss"] == pytest.approx(0.2)
