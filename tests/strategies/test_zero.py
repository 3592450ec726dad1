"""Trainer(strategy="zero_1" ... "zero_3") on gloo ranks: DDP's steps, stored bytes, skips, resumes, refusals."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.models.small_lightning import WIDTH, Small, make_batches
from fakes.processes.given_gradients import refusal
from fakes.processes.ranks import run_ranks
from lightning_aigc.callbacks import AdaptiveLR, ExactSnapshot, GradientHealthMonitor
from lightning_aigc.errors import ConfigError
from lightning_aigc.sharding.local_parts import local_part
from lightning_aigc.sharding.stored_bytes import StoredBytes, stored_bytes
from lightning_aigc.strategies import ZeROStrategy, finite_step

STAGES = {"ddp": 0, "zero_1": 1, "zero_2": 2, "zero_3": 3}
STEPS = 8
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
"""Read when a rank starts: Lightning removes the variable after a fit."""


class Four(Small):
    """Four layers, and what each step left."""

    def __init__(self, bad: Any = (), factor: float = torch.nan) -> None:
        super().__init__(bad, factor)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH))  # type: ignore[assignment]
        self.losses: list[float] = []
        self.gradient_bytes = 0

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch_NC, batch_idx)
        self.losses.append(float(loss))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.after.append(self.flat())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        storages = {
            local_part(p.grad).untyped_storage()._cdata: local_part(p.grad)
            for p in self.parameters()
            if p.grad is not None
        }
        self.gradient_bytes = sum(part.untyped_storage().nbytes() for part in storages.values())

    def flat(self) -> Tensor:
        return torch.cat([whole(p).reshape(-1) for p in self.parameters()])


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()


def fit(rank: int, module: Four | None = None, *, ckpt_path: Any = None, steps: int = STEPS, **arguments: Any) -> Any:
    """The module and the trainer; all ranks together see one batch at every step, whatever their number."""
    module = Four() if module is None else module
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "devices": RANKS, "max_steps": steps, "max_epochs": 9, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "use_distributed_sampler": False,
    }  # fmt: skip
    trainer = Trainer(**(quiet | arguments))
    batch = torch.cat([make_batches(k, 1)[0] for k in range(4)])
    trainer.fit(module, DataLoader([batch.chunk(RANKS)[rank]] * STEPS, batch_size=None), ckpt_path=ckpt_path)
    return module, trainer


def measured(module: Four, trainer: Trainer) -> StoredBytes:
    optimizer: Any = trainer.optimizers[0]
    states = getattr(optimizer, "optim", optimizer).state.values()
    parameters = [local_part(p.detach()).untyped_storage().nbytes() for p in module.parameters()]
    return StoredBytes(
        sum(parameters), module.gradient_bytes, sum(local_part(v).nbytes for of_one in states for v in of_one.values())
    )


def work(rank: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name in STAGES:
        module, trainer = fit(rank, strategy=name)
        results[name] = {"after": module.after, "losses": module.losses, "bytes": measured(module, trainer)}
        results[name]["shapes"] = [tuple(p.shape) for p in module.parameters()]
        results[name]["clipped"] = fit(rank, strategy=name, gradient_clip_val=0.1)[0].after
        results[name]["accumulated"] = fit(rank, strategy=name, accumulate_grad_batches=2)[0].after
    if RANKS == 4:
        return results
    for name in ("zero_1", "zero_2", "zero_3"):
        results[name]["said"] = said = []
        finite_step.rank_zero_info = finite_step.rank_zero_warn = said.append
        results[name]["NaN"] = fit(rank, Four([(3, 1)]), strategy=name)[0].after
        fit(rank, Four([(k, 1) for k in range(STEPS)]), strategy=name)
    callbacks = [GradientHealthMonitor(every_n_steps=2, page=False, dirpath=folder), AdaptiveLR()]
    watched, trainer = fit(rank, Four([(3, 1)]), strategy="zero_3", callbacks=callbacks, default_root_dir=folder)
    results["watched"] = [watched.after, [a.check for a in callbacks[0].alerts], trainer.logged_metrics]  # type: ignore[attr-defined]
    for name, run in REFUSED.items():
        results[name] = refusal(lambda run=run: run(rank))
    return results


class Tied(Four):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head[0].weight = self.net[2].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))  # type: ignore[index]
        self.net[0] = nn.Linear(WIDTH, WIDTH)


class Unused(Four):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class ReadsWeights(Four):
    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.linear(batch_NC, self.net[0].weight).square().mean()


class Frozen(Four):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(list(Small().parameters()), 1e-2)


REFUSED: dict[str, Callable[[int], Any]] = {
    "tied": lambda rank: fit(rank, Tied(), strategy="zero_3"),
    "unused": lambda rank: fit(rank, Unused(), strategy="zero_3"),
    "read": lambda rank: fit(rank, ReadsWeights(), strategy="zero_3"),
    "frozen": lambda rank: fit(rank, Frozen(), strategy="zero_3"),
    "16-mixed": lambda rank: fit(rank, strategy="zero_3", plugins=[scaled()]),
}


def scaled() -> Any:
    from lightning_aigc.precision import FusedBackwardPrecision

    return FusedBackwardPrecision("16-mixed", memory="off")


Ranks = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Results of these ranks, which run once."""

    @functools.cache
    def run(count: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("zero")
        return run_ranks(work, count, folder, str(folder), gloo=False)

    return run


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest, trained: Ranks) -> list[dict[str, Any]]:
    return trained(request.param)


@pytest.fixture
def two(trained: Ranks) -> list[dict[str, Any]]:
    return trained(2)


@pytest.mark.parametrize("name", ["zero_1", "zero_2", "zero_3"])
@pytest.mark.parametrize("run", ["after", "clipped", "accumulated"])
def test_every_stage_takes_ddps_steps(ranks: list[dict[str, Any]], name: str, run: str) -> None:
    for of_rank in ranks:
        for here, there in zip(of_rank[name][run], of_rank["ddp"][run], strict=True):
            # Adam divides by its gradient: where four ranks cancel, the order of their sum is 0.3 % of a step of 1e-3
            torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)
    losses = torch.tensor([[of_rank[name]["losses"], of_rank["ddp"]["losses"]] for of_rank in ranks])
    torch.testing.assert_close(losses[:, 0], losses[:, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", STAGES)
def test_a_rank_stores_what_the_formula_says_to_the_byte(ranks: list[dict[str, Any]], name: str) -> None:
    for rank, of_rank in enumerate(ranks):
        found = of_rank[name]
        assert found["bytes"] == stored_bytes(found["shapes"], STAGES[name], len(ranks), rank)


@pytest.mark.parametrize("name", ["zero_1", "zero_2", "zero_3"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(two: list[dict[str, Any]], name: str) -> None:
    for of_rank in two:
        before, skipped, later = of_rank[name]["NaN"][2:5]
        assert torch.equal(before, skipped)
        assert not torch.equal(skipped, later) and later.isfinite().all()
        some, all_of_them, warning = of_rank[name]["said"][:3]
        assert some == f"{name}: 1 of {STEPS} steps skipped for gradients that are not finite"
        assert all_of_them.startswith(f"{name}: {STEPS} of {STEPS} steps skipped")
        assert warning.startswith(f"{name}: no step was taken")


def test_the_monitor_and_the_adaptive_rate_read_shards_on_all_ranks(two: list[dict[str, Any]]) -> None:
    after, alerts, _ = two[0]["watched"]
    assert after[-1].isfinite().all() and torch.equal(after[-1], two[1]["watched"][0][-1])
    assert "nan" in alerts or "non_finite" in alerts


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("tied", "are one weight in two blocks"),
        ("unused", "the loss does not depend on spare.weight, spare.bias"),
        ("read", "were read without calling the module"),
        ("frozen", "has no trainable parameter to shard"),
        ("16-mixed", "no loss scale over shards"),
    ],
)
def test_what_cannot_be_sharded_is_refused_in_a_sentence(two: list[dict[str, Any]], name: str, wanted: str) -> None:
    for of_rank in two:
        assert of_rank[name].startswith("ConfigError: ") and wanted in of_rank[name]
        assert "\n" not in of_rank[name]


def resume(rank: int, folder: str, name: str, path: str | None, steps: int, kind: str) -> list[Tensor]:
    warnings.simplefilter("ignore")
    callbacks = [ExactSnapshot(every_n_steps=3, directory=f"{folder}/snapshots")] if kind == "snapshot" else []
    module, trainer = fit(
        rank, strategy=name, ckpt_path=path, steps=steps, callbacks=callbacks, default_root_dir=folder
    )
    if kind == "stock":
        trainer.save_checkpoint(f"{folder}/stock.ckpt")
    return module.after


@pytest.mark.parametrize(
    ("name", "kind"),
    [("zero_3", "snapshot")]
    + [
        pytest.param(*of, marks=pytest.mark.long)
        for of in (("zero_1", "snapshot"), ("zero_1", "stock"), ("zero_3", "stock"))
    ],
)
def test_a_run_resumes_to_the_bit_and_on_other_numbers_of_ranks(
    tmp_path: Path, two: list[dict[str, Any]], name: str, kind: str
) -> None:
    def run(ranks: int, folder: str, path: str | None, steps: int) -> list[Tensor]:
        place = str(tmp_path / folder)
        after: list[Tensor] = run_ranks(resume, ranks, tmp_path / "ranks", place, name, path, steps, kind, gloo=False)[
            0
        ]
        return after

    expected = two[0][name]["after"][-1]
    run(2, "same", None, 3)
    latest = {"snapshot": "latest", "stock": str(tmp_path / "same" / "stock.ckpt")}[kind]
    assert torch.equal(run(2, "same", latest, STEPS)[-1], expected)
    run(2, "other", None, 3)
    latest = latest.replace("same", "other")
    run(4, "other", latest, 6)
    torch.testing.assert_close(run(2, "other", latest, STEPS)[-1], expected, rtol=1e-6, atol=1e-6)


def more_ranks_than_blocks(rank: int) -> str:
    warnings.simplefilter("ignore")
    module = Four()
    module.head = nn.Linear(WIDTH, WIDTH)
    return refusal(lambda: fit(rank, module, strategy="zero_3"))


def test_more_ranks_than_blocks_are_refused(tmp_path: Path) -> None:
    for sentence in run_ranks(more_ranks_than_blocks, 4, tmp_path, gloo=False):
        assert "got 3 block(s) in Four and 4 ranks" in sentence


def test_one_rank_and_wrong_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is one rank"):
        Trainer(accelerator="cpu", devices=1, strategy="zero_3", logger=False, max_steps=1).fit(
            Four(), DataLoader([torch.ones(1)])
        )
    with pytest.raises(ConfigError, match="stage must be 1, 2 or 3, got 4"):
        ZeROStrategy(stage=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="offload_optimizer wants stage 2 or 3"):
        ZeROStrategy(stage=1, offload_optimizer=True)
