"""The first bad module is found whatever `training_step` looks like; what cannot run again says why."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from fakes.models.denoisers import fit
from lightning_aigc.callbacks.health import Alert, GradientHealthMonitor
from lightning_aigc.precision.nan.replay import arguments_for

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:(?s).*`dataloader_iter`")
WIDTH = 4


class Division(nn.Module):
    """Divides by zero while it is on."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 0


class Net(nn.Module):
    """Three layers, and code between the second and the third."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()))
        self.head = nn.Linear(WIDTH, 1)
        self.between: Callable[[Tensor], Tensor] = lambda y: y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body[1](self.body[0](x))
        return self.head(self.between(y))


class Step(LightningModule):
    """A step whose second argument is called `batch_idx`."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net or Net()

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Underscore(Step):
    def training_step(self, batch: Tensor, _: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)


class BatchAlone(Step):
    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(batch)


class Anything(Step):
    def training_step(self, *given: Any) -> Tensor:  # type: ignore[override]
        assert isinstance(given[1], int)
        return self.loss(given[0])


def decorated(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(step)
    def run(*given: Any) -> Tensor:
        return step(*given)

    return run


class Decorated(Step):
    @decorated
    def training_step(self, batch: Tensor, number: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)


class Drawing(Step):
    """Draws its batches itself."""

    draws = 1

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batches = [next(dataloader_iter)[0] for _ in range(self.draws)]
        self.seen = [*getattr(self, "seen", []), *(float(b.sum()) for b in batches)]
        return self.loss(torch.cat(batches))


class DrawingTwice(Drawing):
    draws = 2


class Manual(Step):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class Consuming(Step):
    """Cannot run twice on one batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch.pop("x"))


STEPS: list[type[Step]] = [Step, Underscore, BatchAlone, Anything, Decorated, Drawing]


def tensors(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(count)]


def alerts_of(module: Step, folder: Path, data: Any = None, **arguments: Any) -> list[Alert]:
    monitor = GradientHealthMonitor(page=False)
    fit(module, [monitor], steps=1, data=data or tensors(), default_root_dir=str(folder), **arguments)
    return monitor.alerts


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.__name__)
def test_the_first_bad_module_is_named_however_the_step_takes_its_arguments(kind: type[Step], tmp_path: Path) -> None:
    module = kind()
    module.net.body[1][1] = Division()  # type: ignore[union-attr, index]
    [alert] = alerts_of(module, tmp_path)
    assert (alert.check, alert.layer, alert.level) == ("non_finite", "net.body.1.1", "error")


@pytest.mark.parametrize("kind", [kind for kind in STEPS if kind is not Drawing], ids=lambda kind: kind.__name__)
def test_a_step_gets_what_lightning_gives_it(kind: type[Step]) -> None:
    module = kind()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    given = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), "batch", 7)
    assert arguments_for(module, "batch", 7) == list(given.values())


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_second_run_takes_no_batch_away_from_a_step_that_draws_them(precision: Any, tmp_path: Path) -> None:
    """With 16-mixed the precision plugin runs it again too."""
    from lightning_aigc.precision import FusedBackwardPrecision

    module = Drawing()
    module.net.body[1][1] = Division()  # type: ignore[union-attr, index]
    plugin = FusedBackwardPrecision(precision, memory="off")
    fit(module, [GradientHealthMonitor(page=False)], 3, tensors(), plugins=[plugin], default_root_dir=str(tmp_path))
    drawn = list(dict.fromkeys(module.seen))
    assert drawn == [float(b.sum()) for b in tensors()[:3]]
    assert len(module.seen) > len(drawn)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            DrawingTwice,
            "RuntimeError: training_step draws more than one batch from its dataloader_iter, and one is kept",
        ),
        (Manual, "under manual optimization a step moves the weights itself"),
        (Consuming, "KeyError: 'x'"),
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else "",
)
def test_a_second_run_that_cannot_be_had_says_why(kind: type[Step], why: str, tmp_path: Path) -> None:
    module = kind()
    module.net.body[0] = Division()  # type: ignore[union-attr, index]
    data = [{"x": batch} for batch in tensors()] if kind is Consuming else tensors()
    [alert] = alerts_of(module, tmp_path, data)
    assert alert.check == "non_finite"
    assert alert.message.endswith(f"no second run shows where: {why}")
    assert "run again gave finite" not in alert.message and "hooks and callbacks" not in alert.remedy


def test_of_a_long_window_it_says_which_batches_were_not_run_again(tmp_path: Path) -> None:
    class FirstBatch(Step):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) / min(batch_idx, 1)

    [alert] = alerts_of(FirstBatch(), tmp_path, tensors(10), accumulate_grad_batches=10)
    assert alert.message.endswith("no second run shows where: of the 10 accumulated batches the last 8 are kept")


@pytest.mark.parametrize(
    ("between", "precision"), [(lambda y: y / 0, "32-true"), (lambda y: y * 1e30 * 1e30, "bf16-mixed")]
)
def test_code_between_modules_is_placed_between_them(
    between: Callable[[Tensor], Tensor], precision: Any, tmp_path: Path
) -> None:
    module = Step()
    module.net.between = between  # type: ignore[assignment]
    [alert] = alerts_of(module, tmp_path, precision=precision)
    assert (alert.layer, alert.level) == ("between net.body.1 and net.head", "error")
    assert alert.message == (
        "code in the forward of net (Net), between net.body.1 and net.head, made values that are not finite;"
        " the last module whose output was finite is net.body.1.1 (SiLU)"
    )


def test_code_between_modules_whose_backward_fails_is_placed_too(tmp_path: Path) -> None:
    module = Step()
    module.net.between = lambda y: y + (y - y.detach()).abs().sqrt()  # type: ignore[assignment]
    [alert] = alerts_of(module, tmp_path)
    assert alert.layer == "between net.body.1 and net.head"
    assert alert.message == (
        "the backward pass of code in the forward of net (Net), between net.body.1 and net.head,"
        " computed a gradient that is not finite"
    )


class TwoParts(Step):
    """Its step calls two modules, and code of its own before and between."""

    def __init__(self, before: float = 1, between: float = 1) -> None:
        super().__init__(nn.ModuleDict({"one": Outer(), "two": nn.Linear(WIDTH, WIDTH)}))
        self.before, self.between = before, between

    def loss(self, batch: Tensor) -> Tensor:
        y = self.net["one"](batch / self.before)  # type: ignore[index]
        return self.net["two"](y / self.between).square().mean()  # type: ignore[index, no-any-return]


class Outer(nn.Module):
    """Hands on what it is given, after some code of its own."""

    def __init__(self, divisor: float = 1) -> None:
        super().__init__()
        self.inner, self.divisor = nn.Sequential(nn.Linear(WIDTH, WIDTH)), divisor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x / self.divisor)
        return y


def test_code_of_the_step_itself_is_placed(tmp_path: Path) -> None:
    [alert] = alerts_of(TwoParts(between=0), tmp_path)
    assert alert.layer == "between net.one and net.two"
    assert alert.message.startswith(
        "code in training_step, between net.one and net.two, made values that are not finite"
    )


def test_a_bad_batch_is_said_to_be_given_to_the_first_layer(tmp_path: Path) -> None:
    [alert] = alerts_of(TwoParts(before=0), tmp_path)
    assert alert.layer == "net.one.inner.0"
    assert alert.message.startswith("net.one.inner.0 (Linear) was given values that are not finite, by the batch or")


def test_code_before_the_first_module_of_a_forward_is_that_forwards(tmp_path: Path) -> None:
    module = TwoParts()
    module.net["one"] = Outer(divisor=0)  # type: ignore[index, operator]
    [alert] = alerts_of(module, tmp_path)
    assert alert.layer == "net.one"
    assert alert.message.startswith("code in the forward of net.one (Outer), before net.one.inner, made values")


def test_an_additive_mask_is_not_blamed_for_a_value_that_was_made_beside_it(tmp_path: Path) -> None:
    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(WIDTH, WIDTH).masked_fill(torch.ones(WIDTH, WIDTH).triu(1) > 0, -torch.inf)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.values, self.root = Mask(), nn.Linear(WIDTH, WIDTH), Division()

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.mask(x), -1) @ self.root(self.values(x)[:WIDTH])

    [alert] = alerts_of(Step(Attention()), tmp_path)
    assert alert.layer == "net.root"


def test_a_hook_after_backward_is_still_told_apart(tmp_path: Path) -> None:
    class Spoil(Callback):
        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            gradient = pl_module.get_parameter("net.head.bias").grad
            assert gradient is not None
            gradient.fill_(torch.nan)

    monitor = GradientHealthMonitor(page=False)
    fit(Underscore(), [Spoil(), monitor], 1, tensors(), default_root_dir=str(tmp_path))
    [alert] = monitor.alerts
    assert alert.layer == "net.head.bias"
    assert alert.message == "its gradient is not finite; the same batch run again gave finite values"
    assert alert.remedy == "look at the hooks and callbacks that change gradients"


@pytest.mark.parametrize("since", [0, 12])
def test_a_second_run_draws_what_the_step_drew_from_python_and_numpy(since: int, tmp_path: Path) -> None:
    """Their states are taken at every batch only once a step was seen to draw from them."""
    draws: list[tuple[float, float]] = []

    class Drawn(nn.Module):
        is_bad = False

        def forward(self, x: Tensor) -> Tensor:
            if len(draws) >= since:
                random.random(), np.random.rand()
            draws.append((random.getstate()[1][-1], float(np.random.get_state()[2])))  # type: ignore[arg-type]
            return x / 0 if self.is_bad else x

    class Late(Step):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.net.body[1][1].is_bad = batch_idx == 24  # type: ignore[union-attr, index]
            return super().training_step(batch, batch_idx)

    module = Late()
    module.net.body[1][1] = Drawn()  # type: ignore[union-attr, index]
    monitor = GradientHealthMonitor(page=False)
    fit(module, [monitor], 25, tensors(25), default_root_dir=str(tmp_path))
    assert [a.layer for a in monitor.alerts if a.check == "non_finite"] == ["net.body.1.1"]
    assert len(draws) == 26 and draws[-1] == draws[-2]
