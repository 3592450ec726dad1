"""Optimizers by a short name: their classes and rates, what to install, and what they refuse."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fakes.models.pipelines import make_batch
from fakes.processes.ranks import run_ranks
from fakes.runs.seeded_fits import fit, same
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.training import optimization
from lightning_aigc.diffusion.training.named_optimizers import OPTIMIZERS, named_optimizer
from lightning_aigc.errors import ModelError
from lightning_aigc.strategies import NPUSparseStrategy


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_named_optimizer_lowers_a_loss_at_its_usual_rate(name: str) -> None:
    pytest.importorskip(OPTIMIZERS[name].class_path.partition(".")[0])
    torch.manual_seed(0)
    net = nn.Linear(8, 8, bias=False)
    inputs, outputs = torch.randn(64, 8), torch.randn(64, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages themselves
        optimizer = named_optimizer(name)([{"params": list(net.parameters())}])
        if hasattr(optimizer, "train"):
            optimizer.train()
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (net(inputs) - outputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert optimizer.param_groups[0]["lr"] == OPTIMIZERS[name].rate
    assert type(optimizer).__name__ == OPTIMIZERS[name].class_path.rpartition(".")[2]


def test_a_learning_rate_replaces_the_usual_one_and_prodigys_small_one_is_said(sd: str) -> None:
    module = DiffusionLoRA(sd, rank=4, optimizer="Prodigy", learning_rate=1e-4, max_train_steps=1)
    module.configure_model()
    with pytest.warns(UserWarning, match=r"Prodigy finds its rate itself .* 0\.0001, .* set learning_rate: 1\.0"):
        module.configure_optimizers()
    module = DiffusionLoRA(sd, rank=4, optimizer="prodigy", max_train_steps=1)
    optimizer = module.build_optimizer([nn.Parameter(torch.zeros(1))])
    assert optimizer.param_groups[0]["lr"] == 1.0


def stepped(optimizer: torch.optim.Optimizer, net: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adam_steps_by_one_kernel_on_a_device_that_has_it(
    kind: type[torch.optim.AdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(8, 8)

    plain, fused, scaled = net(), net(), net()
    wanted = stepped(kind(plain.parameters(), lr=1e-2), plain)
    monkeypatch.setattr(optimization, "FUSED_DEVICES", ("cpu",))
    optimizer = kind(fused.parameters(), lr=1e-2)
    optimization.step_by_one_kernel_(optimizer)
    assert optimizer.param_groups[0]["fused"] is True
    assert not getattr(optimizer, "_step_supports_amp_scaling", False), "Lightning would refuse to clip"
    for ours, theirs in zip(stepped(optimizer, fused), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    resumed = kind(scaled.parameters(), lr=1e-2)
    scaled.load_state_dict(fused.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(map(torch.equal, stepped(resumed, scaled), stepped(optimizer, fused)))


@pytest.mark.parametrize("is_to_fused", [True, False])
def test_a_checkpoint_of_another_device_steps_by_this_devices_kernel(
    is_to_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(net: nn.Module, fused: bool) -> torch.optim.Optimizer:
        monkeypatch.setattr(optimization, "FUSED_DEVICES", ("cpu",) if fused else ())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        optimization.step_by_one_kernel_(optimizer)
        return optimizer

    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    saved = made(first, not is_to_fused)
    stepped(saved, first)
    second = copy.deepcopy(first)
    resumed = made(second, is_to_fused)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert resumed.param_groups[0]["fused"] is (True if is_to_fused else None)
    assert saved.state_dict()["param_groups"][0]["fused"] is (None if is_to_fused else True)
    for ours, theirs in zip(stepped(resumed, second), stepped(saved, first), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def fit_on_two_ranks(rank: int, base: str, folder: str) -> dict[tuple[str, bool], dict[str, torch.Tensor]]:
    """The trained weights, by strategy and by whether the optimizer steps by one kernel."""
    found = {}
    for strategy in ("ddp", "npu_sparse", "zero_1"):
        for fused in (False, True):
            optimization.FUSED_DEVICES = ("cpu",) if fused else ()
            torch.manual_seed(0)
            module = DiffusionLoRA(base, max_train_steps=3, learning_rate=1e-3)
            options: dict[str, Any] = {
                # int3 rounds to few values: a gradient that differs in its last bit can become another of them.
                "strategy": NPUSparseStrategy(mode="dense") if strategy == "npu_sparse" else strategy,
                "devices": 2,
                "use_distributed_sampler": False,
                "gradient_clip_val": 0.1,
            }
            fit(module, Path(folder), batch=make_batch(seed=rank), max_steps=3, **options)
            assert all(group["fused"] is (fused or None) for group in module.optimizers().param_groups)  # type: ignore[union-attr]
            weights = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
            found[strategy, fused] = weights
    return found


def test_one_kernel_steps_under_each_strategy(sd: str, tmp_path: Path) -> None:
    first, second = run_ranks(fit_on_two_ranks, 2, tmp_path, sd, str(tmp_path / "run"), gloo=False)
    for (strategy, fused), weights in first.items():
        assert same(weights, second[strategy, fused])
        for name, weight in weights.items():
            # As a whole: Adam turns a gradient near 0 into a whole step of either sign, whatever its last bits are.
            apart = (weight - first[strategy, False][name]).norm()
            assert apart <= 0.01 * weight.norm(), (strategy, name, float(apart))


def test_a_choice_of_the_user_or_another_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters())
    optimization.step_by_one_kernel_(optimizer)
    assert optimizer.param_groups[0]["fused"] is None
    monkeypatch.setattr(optimization, "FUSED_DEVICES", ("cpu",))
    for chosen in ({"foreach": True}, {"foreach": False}, {"fused": False}):
        optimizer = torch.optim.AdamW(net.parameters(), **chosen)
        optimization.step_by_one_kernel_(optimizer)
        assert not optimizer.param_groups[0]["fused"]
    optimization.step_by_one_kernel_(torch.optim.SGD(net.parameters()))


def test_a_misspelt_name_is_answered_with_the_nearest_before_weights_are_read() -> None:
    with pytest.raises(ModelError, match=r"optimizer must be one of adamw, .* got 'prodigi'; did you mean prodigy\?"):
        DiffusionLoRA("embedded:sd", optimizer="prodigi")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "bitsandbytes.optim"):  # imported before where it is installed
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelError, match=r"adamw8bit is bitsandbytes\.optim\.AdamW8bit.*pip install bitsandbytes$"):
        named_optimizer("AdamW-8bit")


def test_muon_refuses_convolutions(sd: str) -> None:
    module = DiffusionLoRA(sd, rank=4, optimizer="muon", lora_targets=["convolutions"], max_train_steps=1)
    module.configure_model()
    with pytest.raises(ModelError, match="muon trains matrices, and a trained weight has the shape"):
        module.configure_optimizers()
