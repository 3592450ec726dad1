"""`check` in a plain torch loop."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_aigc.callbacks.health import Alert, check, parameter_names, standalone
from lightning_aigc.callbacks.health.checks.gradients import YOUNG_LORA
from lightning_aigc.errors import ConfigError


def trained_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
    net(torch.randn(32, 8)).square().mean().backward()
    return net


def brief(alerts: list[Alert]) -> list[tuple[str, str, str]]:
    return [(a.check, a.layer, a.level) for a in alerts]


def test_a_healthy_net_has_no_alert() -> None:
    assert check(trained_net().named_parameters()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: g * 1e-9, ("vanishing", "2.weight", "warning")),
        (lambda g: g * 1e9, ("exploding", "2.weight", "warning")),
        (lambda g: torch.full_like(g, 0.1), ("saturated", "2.weight", "warning")),
        (lambda g: None, ("no_gradient", "2.weight", "error")),
        (torch.zeros_like, ("no_gradient", "2.weight", "warning")),
        (lambda g: g / 0, ("non_finite", "2.weight", "error")),
    ],
)
def test_a_fault_is_named_with_its_parameter(
    change: Callable[[Tensor], Tensor | None], said: tuple[str, str, str]
) -> None:
    net = trained_net()
    weight = net.get_parameter("2.weight")
    assert weight.grad is not None
    weight.grad = change(weight.grad)
    found = check(net.named_parameters())
    assert brief(found) == [said]
    assert not any(key in found[0].remedy for key in ("trainer", "gradient_clip", "precision:", "learning_rate"))


def lora(b: float) -> list[tuple[str, nn.Parameter]]:
    named = [
        ("q.lora_A.weight", nn.Parameter(torch.ones(4, 8))),
        ("q.lora_B.weight", nn.Parameter(torch.ones(8, 4) * b)),
    ]
    named[0][1].grad, named[1][1].grad = torch.randn(4, 8) * b, torch.randn(8, 4)
    return named


def test_a_lora_may_begin_with_b_at_zero_and_must_not_stay_there() -> None:
    assert check(lora(0.0), step=1) == []
    assert brief(check(lora(0.0), step=10)) == [("lora_b_zero", "q.lora_B.weight", "error")]


def test_a_of_a_lora_may_have_a_tiny_gradient_only_while_b_is_tiny() -> None:
    young, grown = lora(YOUNG_LORA / 2), lora(YOUNG_LORA * 2)
    for named in (young, grown):
        assert named[0][1].grad is not None
        named[0][1].grad *= 1e-8
    assert check(young) == []
    assert brief(check(grown)) == [("vanishing", "q.lora_A.weight", "warning")]


def test_a_bias_that_a_norm_takes_out_is_no_warning() -> None:
    """A bias in front of a norm has no gradient but rounding; the weight beside it does."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    bias = net.get_parameter("0.bias")
    net(torch.randn(16, 8)).square().mean().backward()
    bias.grad = torch.full_like(bias, 1e-9) * torch.randn(8)
    assert brief([a for a in check(net.named_parameters()) if a.layer == "0.bias"]) == [("vanishing", "0.bias", "info")]


def test_frozen_parameters_are_left_out_and_none_at_all_is_an_error() -> None:
    net = trained_net()
    net.get_parameter("0.weight").requires_grad_(False).grad = None
    assert check(net.named_parameters()) == []
    with pytest.raises(ConfigError, match="check got no trainable parameter"):
        check(net.requires_grad_(False).named_parameters())


@pytest.mark.parametrize("module", [standalone, parameter_names])
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
