"""AccumulationWindow in a plain loop: means, clipping, loss scale, epochs' ends, and its own state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_aigc.accumulation import AccumulationWindow
from lightning_aigc.errors import ConfigError

BATCHES = torch.randn(10, 4, 3, generator=torch.Generator().manual_seed(2))


def make(micro_batches: int = 4, **options: Any) -> tuple[nn.Linear, AccumulationWindow]:
    torch.manual_seed(5)
    model = nn.Linear(3, 2)
    return model, AccumulationWindow(torch.optim.AdamW(model.parameters(), 1e-2), micro_batches, **options)


def loss_of(model: nn.Module, batch_NC: Tensor) -> Tensor:
    return model(batch_NC).square().mean()


def gradients_seen(window: AccumulationWindow, model: nn.Linear, epochs: int = 1) -> list[Tensor]:
    """The gradient of each step, of ten micro-batches an epoch."""
    seen: list[Tensor] = []

    def keep() -> None:
        assert model.weight.grad is not None
        seen.append(model.weight.grad.clone())

    for _ in range(epochs):
        for batch in BATCHES:
            window.backward(loss_of(model, batch))
            window.step(keep)
        window.end_epoch(keep)
    return seen


def mean_gradient(model: nn.Linear, batches: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(torch.stack([loss_of(model, b) for b in batches]).mean(), model.weight)
    return gradient


def test_a_short_last_window_is_the_mean_of_its_own_micro_batches() -> None:
    model, window = make()
    window.optimizer.param_groups[0]["lr"] = 0.0
    wanted = [mean_gradient(model, part) for part in (BATCHES[:4], BATCHES[4:8], BATCHES[8:])]
    for one, other in zip(gradients_seen(window, model), wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert window.steps == 3 and window.count == 0


def test_a_full_window_has_the_bits_of_dividing_each_loss() -> None:
    model, window = make(5)
    other, _ = make(5)
    optimizer = torch.optim.AdamW(other.parameters(), 1e-2)
    for at, batch in enumerate(BATCHES):
        window.backward(loss_of(model, batch))
        window.step()
        (loss_of(other, batch) / 5).backward()
        if at % 5 == 4:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.weight, other.weight)


def test_clipping_comes_after_the_sum() -> None:
    model, window = make(max_norm=1e-3)
    norms: list[Tensor] = []

    def note() -> None:
        norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())

    for batch in BATCHES:
        window.backward(loss_of(model, batch))
        window.step(note)
    window.end_epoch(note)
    torch.testing.assert_close(torch.stack(norms), torch.full((3,), 1e-3), rtol=1e-2, atol=0)


def test_windows_may_cross_an_epochs_end() -> None:
    model, window = make(crosses_epochs=True)
    assert len(gradients_seen(window, model, epochs=2)) == 5
    assert window.count == 0


def test_the_loss_scale_is_fixed_within_a_window() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    model, window = make(scaler=scaler)
    scales = []
    for batch in BATCHES[:8]:
        scales.append(scaler.get_scale())
        window.backward(loss_of(model, batch))
        window.step()
    assert scales == [64.0] * 4 + [128.0] * 4


def test_a_window_goes_on_in_its_middle() -> None:
    model, window = make()
    whole, _ = make()
    for batch in BATCHES[:6]:
        window.backward(loss_of(model, batch))
        window.step()
    state, weights = window.state_dict(), model.state_dict()
    again, resumed = make()
    again.load_state_dict(weights)
    resumed.optimizer.load_state_dict(copy.deepcopy(window.optimizer.state_dict()))
    resumed.load_state_dict(state)
    for batch in BATCHES[6:8]:
        for one, two in ((model, window), (again, resumed)):
            two.backward(loss_of(one, batch))
            two.step()
    assert (
        resumed.count == 0 and torch.equal(model.weight, again.weight) and not torch.equal(whole.weight, again.weight)
    )


def test_ranks_exchange_gradients_once_a_window() -> None:
    synced: list[bool] = []

    class Wrapped(nn.Module):
        def no_sync(self) -> Any:
            synced[-1] = False
            return torch.enable_grad()

    model, window = make(3, module=Wrapped())
    for at, batch in enumerate(BATCHES[:5]):
        synced.append(True)
        with window.accumulating(is_last=at == 4) as ends:
            window.backward(loss_of(model, batch))
        assert ends == synced[-1]
        window.step()
    assert synced == [False, False, True, False, True]


def test_the_effective_batch_size_counts_ranks_too() -> None:
    _, window = make(8)
    assert window.describe(4, 2) == "64 samples a step: 4 in a batch x 8 batches x 2 rank(s)"


def test_a_full_window_must_step_first() -> None:
    model, window = make(1)
    window.backward(loss_of(model, BATCHES[0]))
    with pytest.raises(RuntimeError, match="step"):
        window.backward(loss_of(model, BATCHES[0]))


@pytest.mark.parametrize(
    ("arguments", "named"), [({"micro_batches": 0}, "micro_batches"), ({"max_norm": 0}, "max_norm")]
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(**arguments)
