"""Graphs of a device by its own functions: which they are, whether they can be trusted, and what a step puts into them.

On the fake NPU, whose graphs record the CPU tensors that run in them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.models import tiny_transformers as tiny
from fakes.models.graphed_denoisers import Run, fresh, same, two_levels
from fakes.npu.npu_module import NpuGraph, NpuModule
from fakes.npu.npu_streams import NpuStream
from fakes.recorded_graphs import Finding, RecordedGraphs
from lightning_aigc.precision.graph.device_graphs import DeviceGraphs, reason_against_graphs

Make = Callable[[], tuple[nn.Module, tiny.Given]]
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.max().item(),
    "bool": lambda x: bool(x.max() > 0),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "a mask as index": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "numbers of the host": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "random numbers": lambda x: torch.rand_like(x),
}
"""Operators that read the device, make sizes of numbers, copy from the host, or draw."""


class ReadingSiLU(nn.SiLU):
    """An activation that reads a number of the device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.detach().abs().max().item())


class NeverRuns(RecordedGraphs):
    """Graphs whose replay does nothing."""

    def record(self, function: Any, pool: int) -> Any:
        graph, results = super().record(function, pool)
        graph.operators = []
        return graph, results


class Refuses(RecordedGraphs):
    def record(self, function: Any, pool: int) -> Any:
        raise RuntimeError("graphs are not supported\nby this driver")


def test_a_small_graph_tells_whether_a_devices_graphs_can_be_trusted() -> None:
    cpu = torch.device("cpu")
    assert reason_against_graphs(RecordedGraphs(), cpu) == ""
    assert (
        reason_against_graphs(NeverRuns(), cpu) == "the replay of a small graph gave other numbers than eager operators"
    )
    assert reason_against_graphs(Refuses(), cpu) == "graphs are not supported"


def test_the_devices_own_functions_are_called_as_torch_npu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: NpuModule("torch.npu"))
    monkeypatch.setattr(NpuModule, "Stream", staticmethod(lambda _: NpuModule._default_stream))
    graphs = DeviceGraphs(torch.device("privateuseone"))
    x, weight = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    graphs.warm_up(lambda: x * weight)
    graph, y = graphs.record(lambda: (x * weight).sum(), graphs.pool())
    x.fill_(2.0)
    graph.replay()
    assert y == 12.0
    graph.reset()
    with pytest.raises(AssertionError, match="nothing was recorded"):
        graph.replay()


def test_a_record_that_fails_leaves_the_stream_and_says_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's exit of an invalid capture raises an error of its own, and restores nothing."""

    class Invalid(NpuGraph):
        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def reads() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch, "get_device_module", lambda _: NpuModule("torch.npu"))
    monkeypatch.setattr(NpuModule, "Stream", staticmethod(lambda _: NpuStream.__new__(NpuStream)))
    monkeypatch.setattr(NpuModule, "NPUGraph", Invalid)
    graphs = DeviceGraphs(torch.device("privateuseone"))
    before = graphs.backend.current_stream()
    with pytest.raises(RuntimeError, match="operation not permitted"):
        graphs.record(reads, graphs.pool())
    assert graphs.backend.current_stream() is before
    assert gc.isenabled()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[NpuGraph]:
    """The graphs that are made from now on."""
    found: list[NpuGraph] = []

    class Kept(NpuGraph):
        def __init__(self) -> None:
            found.append(self)

    monkeypatch.setattr(torch, "get_device_module", lambda _: NpuModule("torch.npu"))
    monkeypatch.setattr(NpuModule, "Stream", staticmethod(lambda _: NpuModule._default_stream))
    monkeypatch.setattr(NpuModule, "NPUGraph", Kept)
    return found


def recorded_by_torch_npu(make: Make, memory: Any) -> Run:
    run = Run(make, memory, "bf16-mixed")
    run.plugin.record_graphs(run.model, torch.device("cpu"), DeviceGraphs(torch.device("privateuseone")))
    (run.graphed,) = run.plugin._graphed
    run.warm_up()
    return run


def findings(made: list[NpuGraph]) -> list[Finding]:
    return [finding for graph in made if graph.recorded is not None for finding in graph.recorded.findings]


@pytest.mark.parametrize("memory", ["off", "balanced", "lean", "max"])
@pytest.mark.parametrize("make", [two_levels, tiny.sd3], ids=["U-Net", "transformer"])
def test_a_step_holds_operators_that_a_graph_takes(make: Make, memory: str, made: list[NpuGraph]) -> None:
    run = recorded_by_torch_npu(make, memory)
    given = fresh(run.given)
    assert same(run.step(given), run.eager_step(given)) and run.graphed.replays == 1
    assert findings(made) == []
    sizes = [len(graph.recorded.operators) for graph in made if graph.recorded is not None]
    assert len(sizes) == 2 and min(sizes) > 50, "forward and backward"


@pytest.mark.parametrize("make", [two_levels, tiny.sd3], ids=["U-Net", "transformer"])
def test_a_read_in_the_model_is_found(make: Make, made: list[NpuGraph]) -> None:
    def planted() -> tuple[nn.Module, tiny.Given]:
        model, given = make()
        name, _ = next((n, m) for n, m in model.named_modules() if type(m) is nn.SiLU)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, ReadingSiLU())
        return model, given

    run = recorded_by_torch_npu(planted, "lean")
    run.step(fresh(run.given))
    found = findings(made)
    assert [(f.kind, f.operator) for f in found] == [("sync", "aten._local_scalar_dense.default")]
    assert "test_device_graphs.py" in found[0].place


@pytest.mark.parametrize("name", REFUSED)
def test_each_refused_operator_is_found(name: str) -> None:
    graphs = RecordedGraphs()
    graphs.record(lambda: REFUSED[name](torch.tensor([1.0, -2.0, 3.0])), graphs.pool())
    assert len(graphs.findings) >= 1
