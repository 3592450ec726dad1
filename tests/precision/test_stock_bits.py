"""memory="off" is Lightning's own precision, bit for bit, steps that overflow included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.runs.trainings import WIDTH, ManualRegression, Regression, fit, make_batches
from lightning_aigc.precision import FusedBackwardPrecision

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip by norm": {"gradient_clip_val": 0.1},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation": {"accumulate_grad_batches": 2},
}


def stock(precision: str) -> Precision:
    if precision == "32-true":
        return Precision()
    return HalfPrecision(precision) if precision == "bf16-true" else MixedPrecision(precision, "cpu")


def assert_same_bits(ours: Regression, theirs: Regression) -> None:
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
        assert ours.state_dict()[name].dtype == value.dtype


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_off_trains_to_the_bits_of_the_stock_plugin(precision: str, trainer: str) -> None:
    # The fourth batch overflows float16: skipping it and looking into it must leave no trace either.
    batches = make_batches(6, huge=[3] if precision == "16-mixed" else [])
    ours, theirs = Regression(), Regression()
    run = fit(FusedBackwardPrecision(precision, memory="off"), ours, batches, **TRAINERS[trainer])
    reference = fit(stock(precision), theirs, batches, **TRAINERS[trainer])
    assert_same_bits(ours, theirs)
    assert run.callback_metrics["loss"] == reference.callback_metrics["loss"]
    assert torch.equal(ours.seen.compute(), theirs.seen.compute())
    assert ours.seen.update_count == theirs.seen.update_count == 6
    assert torch.rand(1) == stock_random_number(precision, trainer, batches)
    if precision == "16-mixed":
        assert run.scaler.get_scale() == reference.scaler.get_scale() <= 2.0**15


def stock_random_number(precision: str, trainer: str, batches: list[torch.Tensor]) -> torch.Tensor:
    fit(stock(precision), Regression(), batches, **TRAINERS[trainer])
    return torch.rand(1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_manual_optimization_trains_to_the_stock_bits(precision: str) -> None:
    ours, theirs = ManualRegression(), ManualRegression()
    fit(FusedBackwardPrecision(precision, memory="off"), ours, make_batches())
    fit(stock(precision), theirs, make_batches())
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightnings_weight_averaging_gives_the_stock_average(precision: str) -> None:
    ours, theirs = Regression(), Regression()
    fit(FusedBackwardPrecision(precision, memory="off"), ours, make_batches(), callbacks=[EMAWeightAveraging()])
    fit(stock(precision), theirs, make_batches(), callbacks=[EMAWeightAveraging()])
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_compiled_inner_model_trains_to_the_stock_bits(precision: str) -> None:
    ours, theirs = Regression(), Regression()
    for module in (ours, theirs):
        module.net = torch.compile(module.net, backend="aot_eager")
    batches = make_batches(4, huge=[2] if precision == "16-mixed" else [])
    fit(FusedBackwardPrecision(precision, memory="off"), ours, batches)
    fit(stock(precision), theirs, batches)
    assert_same_bits(ours, theirs)


def test_lbfgs_under_a_loss_scale_is_refused_as_by_the_stock_plugin() -> None:
    module = Regression(make_optimizer=torch.optim.LBFGS)
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        fit(FusedBackwardPrecision("16-mixed", memory="off"), module, make_batches())


def test_clipping_with_an_optimizer_that_unscales_by_itself_is_refused() -> None:
    module = Regression(make_optimizer=lambda p: torch.optim.Adam(p, 1e-2, fused=True))
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(FusedBackwardPrecision("16-mixed", memory="off"), module, make_batches(), gradient_clip_val=1.0)


def test_a_fused_optimizer_trains_to_the_stock_bits_and_tells_of_skips(lines: list[str]) -> None:
    ours, theirs = (Regression(make_optimizer=lambda p: torch.optim.Adam(p, 1e-2, fused=True)) for _ in range(2))
    fit(FusedBackwardPrecision("16-mixed", memory="off"), ours, make_batches(6, huge=[3]))
    fit(stock("16-mixed"), theirs, make_batches(6, huge=[3]))
    assert_same_bits(ours, theirs)
    assert "the loss scale fell from 65536 to 32768 by step 4" in lines[0]


def test_the_loss_scale_is_saved_and_restored_with_plain_types(tmp_path: Path) -> None:
    first = fit(FusedBackwardPrecision("16-mixed", memory="off"), Regression(), make_batches(4, huge=[1, 2]))
    path = tmp_path / "run.ckpt"
    first.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["FusedBackwardPrecision"]
    assert saved["scale"] == 2.0**14 and saved["_growth_tracker"] == 1
    assert all(isinstance(value, (int, float)) for value in saved.values())

    plugin = FusedBackwardPrecision("16-mixed", memory="off")
    fit_on(plugin, path)
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**14
    assert plugin.state_dict()["_growth_tracker"] == 3

    early = FusedBackwardPrecision("16-mixed", memory="off")
    early.load_state_dict(saved)  # before any device is known
    assert early.state_dict() == saved
    fit(early, Regression(), make_batches(1))
    assert early.state_dict()["scale"] == 2.0**14


def fit_on(plugin: FusedBackwardPrecision, checkpoint: Path) -> None:
    from torch.utils.data import DataLoader

    from fakes.runs.trainings import make_trainer

    trainer = make_trainer(plugin, max_epochs=2, limit_train_batches=2)
    trainer.fit(Regression(), DataLoader(make_batches(2), batch_size=None), ckpt_path=checkpoint, weights_only=True)


class HostWaits(TorchDispatchMode):
    """Counts the reads of a device value from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_healthy_steps_wait_for_the_device_no_more_often_than_the_stock_plugin(precision: str) -> None:
    with HostWaits() as ours:
        fit(FusedBackwardPrecision(precision, memory="off"), Regression([nn.Linear(WIDTH, WIDTH)]), make_batches(6))
    with HostWaits() as theirs:
        run = fit(stock(precision), Regression([nn.Linear(WIDTH, WIDTH)]), make_batches(6))
    assert run.scaler is None or run.scaler.get_scale() == 2.0**16
    assert ours.count == theirs.count > 0
