"""Concurrency: the order between streams, tensors that outlive it, and the times that are reported."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.npu.deferred_streams import Device
from fakes.processes.echoing_groups import EchoingGroup, EchoingGroups
from lightning_aigc.gradient_sync.executors import StreamExecutor
from lightning_aigc.gradient_sync.hook import BucketFuture
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.sync import GradientSync

SHAPES = {"first": (40, 30), "second": (64, 48), "bias": (40,)}
STEPS = 4
COLLECTIVE_MS = 6.0


@pytest.fixture(params=[True, False], ids=["side stream at once", "side stream late"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(side_runs_at_once=request.param)
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


def make_sync(
    device: Device | None,
    *,
    inside: int = 1,
    groups: EchoingGroups | None = None,
    find_unused: bool = False,
    **options: Any,
) -> Any:
    """A sync without DDP, each parameter a unit of its own; without a device it runs inline, and is what is right."""
    parameters = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
    options = {"bucket_mb": 0.0001, "overlap": False} | options
    groups = groups or EchoingGroups(2, inside)
    sync = GradientSync(parameters, SyncOptions(**options), groups, find_unused=find_unused)
    if device is not None:
        sync.reducer.on_cpu = False
        sync.executor = StreamExecutor(sync._explain, sync.device)
    return sync


def arrive(sync: GradientSync, gradients: dict[str, Tensor], names: Sequence[str], *, last: bool) -> None:
    parameters = dict(sync.parameters)
    waiting = BucketFuture(next(iter(gradients.values())))
    sync.gradients_ready([parameters[n] for n in names], [gradients[n] for n in names], waiting, last=last)


def train(sync: GradientSync, device: Device | None) -> list[Tensor]:
    """The gradients as the optimizer finds them right after each backward pass."""
    given = [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]
    found = []
    with torch.no_grad(), device or contextlib.nullcontext():
        buckets = {name: torch.empty(shape) for name, shape in SHAPES.items()}
        for gradients in given:
            for name in reversed(SHAPES):
                buckets[name].copy_(gradients[name] * 2)
                arrive(sync, buckets, [name], last=name == next(iter(SHAPES)))
            found += [bucket.clone() for bucket in buckets.values()]
            sync.end_step()
    if device is not None:
        device.main.run()
    return found


NODES_FIRST = [(mode, inside) for mode in ("bf16", "int3", "sparse", "sparse_int8") for inside in (1, 2)]


@pytest.mark.parametrize(("mode", "inside"), NODES_FIRST)
def test_streams_wait_for_each_other(mode: Any, inside: int, device: Device) -> None:
    """And what one of them still reads stays where it is: else a number here is NaN, or of another step."""
    options = {"mode": mode, "inside": inside}
    torch.manual_seed(0)
    expected = train(make_sync(None, **options), None)
    torch.manual_seed(0)
    found = train(make_sync(device, **options), device)
    for wanted, got in zip(expected, found, strict=True):
        assert torch.equal(wanted, got)
    assert expected[-1].any()


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("mode", ["bf16", "int3", "sparse_int8", "two_four"])
def test_the_host_waits_for_nothing_before_the_step_is_drained(
    mode: Any, find_unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(side_runs_at_once=False)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    sync = make_sync(device, mode=mode, find_unused=find_unused)
    gradients = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    with torch.no_grad(), device:
        for _ in range(3):
            before = [stream.done for stream in device.streams]
            arrive(sync, gradients, list(SHAPES), last=True)
            assert [stream.done for stream in device.streams] == before
            assert sync.end_step().finite


@pytest.mark.parametrize("mode", ["bf16", "int3", "sparse"])
def test_the_residual_of_an_unused_parameter_waits_without_the_host_looking(mode: Any, device: Device) -> None:
    residuals, found = {}, {}
    for on in (None, device):
        torch.manual_seed(0)
        sync = make_sync(on, mode=mode, find_unused=True, bucket_mb=1.0)
        given = [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(4)]
        given[2]["second"] = torch.zeros(SHAPES["second"])
        residuals[on], found[on] = [], []
        with torch.no_grad(), on or contextlib.nullcontext():
            for gradients in given:
                arrive(sync, gradients, list(SHAPES), last=True)
                sync.end_step()
                residuals[on].append(sync.state_dict()["residuals"]["second"]["values"].clone())
                found[on] += [gradients[name].clone() for name in SHAPES]
        device.main.run()
    for one, other in zip([*residuals[None], *found[None]], [*residuals[device], *found[device]], strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(residuals[None][1], residuals[None][2]) and residuals[None][1].any()
    assert not torch.equal(residuals[None][2], residuals[None][3])


class Lasting(EchoingGroup):
    """Each collective takes the side stream a while."""

    def __init__(self, device: Device) -> None:
        super().__init__(2)
        self.device = device

    def all_reduce(self, tensor: Tensor, kind: str = "values") -> Any:
        self.device.busy(COLLECTIVE_MS)
        return super().all_reduce(tensor, kind)


@contextlib.contextmanager
def lasting(device: Device, **options: Any) -> Iterator[GradientSync]:
    groups = EchoingGroups()
    groups.between = groups.everyone = Lasting(device)
    with torch.no_grad(), device:
        yield make_sync(device, groups=groups, mode="bf16", **options)


@pytest.mark.parametrize(
    ("backward_ms", "exposed_ms", "hidden"),
    [(0.0, 3 * COLLECTIVE_MS, 0.0), (COLLECTIVE_MS, COLLECTIVE_MS, 2 / 3), (100.0, COLLECTIVE_MS, 2 / 3)],
)
def test_the_report_says_what_backward_hid(
    backward_ms: float, exposed_ms: float, hidden: float, device: Device
) -> None:
    with lasting(device) as sync:
        gradients = {name: torch.ones(shape) for name, shape in SHAPES.items()}
        for _ in range(2):
            arrive(sync, gradients, ["bias"], last=False)
            device.busy(backward_ms)
            arrive(sync, gradients, ["second"], last=False)
            device.busy(backward_ms)
            arrive(sync, gradients, ["first"], last=True)
            report = sync.end_step()
            assert report is not None
            assert report.exposed_ms == pytest.approx(exposed_ms)
            assert report.share_hidden == pytest.approx(hidden)
            device.busy(50)  # the next step's forward is no one's wait


def test_the_thread_starts_to_send_before_the_last_gradient_has_come() -> None:
    groups = EchoingGroups()
    sync = make_sync(None, groups=groups, mode="bf16", overlap=True)
    gradients = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    with torch.no_grad():
        arrive(sync, gradients, ["bias"], last=False)
        deadline = time.monotonic() + 10
        while not groups.between.started and time.monotonic() < deadline:
            time.sleep(0.001)
        assert groups.between.started == ["all_reduce"]
        arrive(sync, gradients, ["second", "first"], last=True)
        assert sync.end_step().finite
    assert groups.between.started == ["all_reduce"] * 3
    sync.close()
