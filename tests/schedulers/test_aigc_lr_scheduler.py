"""AIGCLRScheduler in plain torch loops."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_aigc.errors import ConfigError
from lightning_aigc.schedulers import AIGCLRScheduler

WIDTH = 16


def batches(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))
    while True:
        x = torch.randn(8, WIDTH, generator=generator)
        yield x, x @ target + 0.5 * torch.randn(8, WIDTH, generator=generator)


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, data: Iterator[Any], steps: int
) -> list[float]:
    losses = []
    for _ in range(steps):
        x, y = next(data)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def last_losses(times: float, **arguments: Any) -> float:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    arguments = {"base_lr": 1e-2 * times, "warmup_steps": 10, "total_steps": 200} | arguments
    losses = train(net, optimizer, AIGCLRScheduler(optimizer, **arguments), batches(), 200)
    return sum(losses[-20:]) / 20


def make_regression(steps: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A small regression whose gradient norm is above 1.5 nearly throughout."""
    torch.manual_seed(0)
    target = torch.randn(WIDTH, WIDTH)
    x = torch.randn(steps, 32, WIDTH)
    batches = [(one, 2.0 * one @ target + 1.5 * torch.randn(32, WIDTH)) for one in x]
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)), batches


@pytest.mark.parametrize("rate", [1e-4, 1e-2])  # the article's, and the best for this regression
@pytest.mark.parametrize("search", [True, False])
def test_the_article_s_own_arguments_end_as_well_as_adamw_alone_on_norms_that_stay_above_the_threshold(
    search: bool, rate: float
) -> None:
    ends, above = {}, 0
    for name in ("alone", "article"):
        net, data = make_regression(600)
        optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
        scheduler: Any = None
        if name == "article":
            scheduler = AIGCLRScheduler(
                optimizer,
                base_lr=rate,
                warmup_steps=100,
                adaptive_mode=True,
                grad_norm_threshold=1.5,
                recovery_factor=0.5,
                search=search,
            )
        losses = []
        for x, y in data:
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            above += nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]).item() > 1.5
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        ends[name] = sum(losses[-50:]) / 50
    assert above > 0.9 * 1200
    assert scheduler.factor > 0.5
    assert ends["article"] < 1.2 * ends["alone"]  # there is no decay, where a higher rate ends in more noise


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=200))
@settings(max_examples=30, deadline=None)
def test_the_article_s_own_arguments_never_take_more_than_recovery_factor_whatever_the_norms(
    norms: list[float],
) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = AIGCLRScheduler(
        optimizer, base_lr=1e-4, warmup_steps=100, grad_norm_threshold=1.5, recovery_factor=0.5, search=False
    )
    for norm in [*norms, *[1.0] * 160]:
        parameter.grad = torch.tensor([norm])
        optimizer.step()
        scheduler.step()
        assert scheduler.factor >= 0.5
    assert scheduler.factor == 1.0


def test_a_loss_among_the_metrics_that_diverges_lowers_the_rate() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = AIGCLRScheduler(optimizer, warmup_steps=0, search=False)
    scheduler.enable_convergence_monitor(metric="clip_similarity")  # its score comes now and then, the loss always
    for step in range(100):
        parameter.grad = torch.ones(1)
        optimizer.step()
        scheduler.step(metrics={"loss": 0.1 if step < 50 else 3.0})
    assert scheduler.factor == 0.5
    assert "the run diverges" in scheduler.changes[-1].reason


def test_a_rate_thirty_times_too_high_is_brought_down() -> None:
    assert last_losses(30) < 0.2 * last_losses(30, adaptive_mode=False)
    assert last_losses(30) < last_losses(1, adaptive_mode=False)


def test_on_a_regression_from_scratch_it_is_near_the_best_rate_from_any() -> None:
    best = min(last_losses(times, adaptive_mode=False) for times in (1, 3, 10, 30))
    assert max(last_losses(times) for times in (0.1, 1, 3, 10, 30)) < 1.5 * best


def test_a_rate_ten_times_too_low_is_raised() -> None:
    assert last_losses(0.1) < 0.1 * last_losses(0.1, adaptive_mode=False)


@pytest.mark.parametrize(("decay", "half_way"), [("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)])
def test_without_adaption_it_is_warm_up_and_decay(decay: Any, half_way: float) -> None:
    net = make_net()
    optimizer = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[2].parameters()}], lr=1.0)  # type: ignore[index]
    scheduler = AIGCLRScheduler(optimizer, [0.1, 0.2], 4, adaptive_mode=False, total_steps=24, decay=decay)
    rates = []
    for _ in range(24):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert [first for first, _ in rates[:5]] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert rates[14] == pytest.approx([0.1 * half_way, 0.2 * half_way])
    assert scheduler.get_last_lr() == pytest.approx([0.0, 0.0] if decay != "constant" else [0.1, 0.2])


def test_steps_beyond_the_end_of_the_decay_are_named_once() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    schedule = AIGCLRScheduler(optimizer, adaptive_mode=False, warmup_steps=0, total_steps=3)
    for _ in range(3):  # the last call comes after the last step
        optimizer.step()
        schedule.step()

    def go_on() -> None:
        for _ in range(3):
            optimizer.step()
            schedule.step()

    with pytest.warns(UserWarning, match=r"beyond total_steps=3, where the rate is 0; give all steps") as found:
        go_on()
    assert len(found) == 1


def test_no_rate_given_keeps_the_groups_own() -> None:
    net = make_net()
    optimizer = torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.3}, {"params": net[2].parameters()}], lr=0.1)  # type: ignore[index]
    scheduler = AIGCLRScheduler(optimizer, warmup_steps=0, adaptive_mode=False)
    assert scheduler.get_last_lr() == [0.3, 0.1]


def test_a_gradient_norm_above_the_threshold_halves_the_rate_of_that_very_step_and_it_recovers() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = AIGCLRScheduler(optimizer, 0.1, warmup_steps=0, grad_norm_threshold=1.5, search=False)
    moved = []
    for gradient in (1.0, 2.0, *[1.0] * 60):
        before = parameter.item()
        parameter.grad = torch.tensor([gradient])
        optimizer.step()
        scheduler.step()
        moved.append((before - parameter.item()) / gradient)
        assert optimizer.param_groups[0]["lr"] == 0.1  # what a second scheduler would see
    assert moved[:2] == pytest.approx([0.1, 0.05])
    assert moved[2:50] == sorted(moved[2:50])
    assert moved[-1] == pytest.approx(0.1)
    assert "2 is above 1.5" in scheduler.changes[0].reason


def test_resumed_in_the_middle_of_the_search_and_after_it_ends_in_the_same_weights() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, AIGCLRScheduler]:
        net = make_net()
        optimizer = torch.optim.AdamW(net.parameters())
        return net, optimizer, AIGCLRScheduler(optimizer, 1e-2, warmup_steps=5, total_steps=60)

    for stop in (7, 40):
        net, optimizer, scheduler = made()
        data = batches()
        train(net, optimizer, scheduler, data, stop)
        file = io.BytesIO()
        torch.save([net.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
        train(net, optimizer, scheduler, data, 60 - stop)
        again, again_optimizer, again_scheduler = made()
        file.seek(0)
        states = torch.load(file, weights_only=True)
        for part, state in zip((again, again_optimizer, again_scheduler), states, strict=True):
            part.load_state_dict(state)  # type: ignore[attr-defined]
        data = batches()
        for _ in range(stop):
            next(data)
        train(again, again_optimizer, again_scheduler, data, 60 - stop)
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
        assert again_scheduler.changes == scheduler.changes


def monitored(**settings: Any) -> tuple[nn.Parameter, torch.optim.Optimizer, AIGCLRScheduler]:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = AIGCLRScheduler(optimizer, adaptive_mode=False, warmup_steps=0)
    options: dict[str, Any] = {"metric": "clip_similarity", "patience": 3} | settings
    scheduler.enable_convergence_monitor(**options)
    return parameter, optimizer, scheduler


def score(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, scheduler: AIGCLRScheduler, value: float) -> bool:
    optimizer.step()
    with torch.no_grad():
        parameter.fill_(value)
    scheduler.step(metrics={"clip_similarity": value, "loss": 1.0})
    return scheduler.should_stop_early()


def test_it_stops_when_the_score_has_not_risen_for_patience_steps_and_gives_the_best_weights_back() -> None:
    parts = monitored()
    stops = [score(*parts, value) for value in (0.1, 0.5, 0.4, 0.5, 0.3)]
    assert stops == [False, False, False, False, True]
    assert parts[2].best_metric == 0.5
    parts[2].restore_best()
    assert parts[0].tolist() == [0.5, 0.5]


def test_a_score_that_is_not_a_number_never_counts_and_is_told() -> None:
    parts = monitored()
    score(*parts, 0.2)
    with pytest.warns(UserWarning, match=r"clip_similarity is nan at step 2 and does not count"):
        score(*parts, float("nan"))
    assert parts[2].best_metric == 0.2


def test_metrics_without_the_one_that_is_followed_name_both() -> None:
    _, optimizer, scheduler = monitored()
    optimizer.step()
    with pytest.raises(ConfigError, match="got metrics clip_sim; wanted clip_similarity"):
        scheduler.step(metrics={"clip_sim": 0.3})


def test_a_metric_that_never_comes_is_told_once() -> None:
    _, optimizer, scheduler = monitored(patience=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(8):
            optimizer.step()
            scheduler.step()
    assert [str(w.message).startswith("no clip_similarity in 2 steps") for w in said] == [True]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base_lr": 0.0}, "base_lr must be a rate above 0"),
        ({"base_lr": [0.1, 0.1]}, "one for each of 1 groups"),
        ({"warmup_steps": 10, "total_steps": 10}, "warmup_steps < total_steps"),
        ({"decay": "cosin"}, "decay must be cosine, linear or constant"),
        ({"recovery_factor": 2.0}, "recovery_factor must be"),
    ],
)
def test_a_wrong_argument_says_what_is_wanted(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AIGCLRScheduler(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), **settings)


def test_optimizers_whose_rate_must_not_be_searched_are_refused_with_the_reason() -> None:
    from prodigyopt import Prodigy
    from schedulefree import AdamWScheduleFree

    net = make_net()
    for optimizer, says in (
        (Prodigy(net.parameters()), "Prodigy finds its own rate"),
        (AdamWScheduleFree(net.parameters()), "AdamWScheduleFree weighs its average by rates"),
        (torch.optim.LBFGS(net.parameters()), "LBFGS takes several evaluations"),
    ):
        with pytest.raises(ConfigError, match=says):
            AIGCLRScheduler(optimizer)
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    with pytest.raises(ConfigError, match="SGD has no parameter that requires a gradient"):
        AIGCLRScheduler(torch.optim.SGD([frozen]))
    assert AIGCLRScheduler(Prodigy(net.parameters()), 1.0, search=False).factor == 1.0


def test_asking_for_what_no_monitor_followed_says_how_to_follow_it() -> None:
    scheduler = AIGCLRScheduler(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    assert scheduler.best_metric is None
    with pytest.raises(ConfigError, match="call enable_convergence_monitor"):
        scheduler.should_stop_early()
