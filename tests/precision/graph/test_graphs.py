"""Graphs of a denoiser's forward and backward: their bits, what they must notice, and what runs eagerly."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.models import tiny_transformers as tiny
from fakes.models.graphed_denoisers import Run, fresh, given_of_unet, same, sd15, two_levels
from fakes.recorded_graphs import RecordedGraphs
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.blocks import mmdit
from lightning_aigc.precision.context import without_graphs
from lightning_aigc.precision.graph.graphed_root import EAGER_CALLS, MOST_GRAPHS, GraphedRoot

U_NETS = [
    *((two_levels, memory, precision, None) for memory, precision in (
        ("off", "bf16-mixed"), ("balanced", "32-true"), ("lean", "bf16-mixed"), ("max", "bf16-mixed"),
        ({"kept": 0.3}, "32-true"))),
    *((two_levels, "lean", "bf16-true", base) for base in ("int8", "nf4")),
    *((two_levels, "max", "32-true", base) for base in ("int8", "nf4")),
    *(pytest.param(sd15, memory, precision, None, marks=pytest.mark.long)
      for memory in ("off", "balanced", "lean", "max", {"kept": 0.3}) for precision in ("32-true", "bf16-mixed")),
]  # fmt: skip
TRANSFORMERS = [
    *((make, memory, "bf16-mixed", None) for make in (tiny.sd3, tiny.flux, tiny.flux2, tiny.qwen, tiny.z_image)
      for memory in ("lean", "max")),
    *(pytest.param(make, memory, precision, None, marks=pytest.mark.long)
      for make in (tiny.sd3, tiny.flux, tiny.flux2, tiny.qwen, tiny.z_image, tiny.krea2)
      for memory, precision in (("off", "bf16-mixed"), ({"kept": 0.4}, "bf16-mixed"), ("lean", "32-true"))),
    (tiny.sd3, "max", "32-true", "nf4"), (tiny.flux, "max", "32-true", "int8"),
]  # fmt: skip


def assert_equal_to_the_bit(run: Run) -> None:
    run.warm_up()
    for _ in range(2):
        given = fresh(run.given)
        assert same(run.step(given), run.eager_step(given))
        run.change_weights()
    assert run.graphed.replays == 2
    assert run.graphs.findings == []


@pytest.mark.parametrize(("make", "memory", "precision", "base"), U_NETS)
def test_a_unets_outputs_and_gradients_are_eagers_to_the_bit(make: Any, memory: Any, precision: Any, base: Any) -> None:
    assert_equal_to_the_bit(Run(make, memory, precision, base))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # FLUX.2's own, of torch's RMSNorm
@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.long), True], ids=["own", "fused"])
@pytest.mark.parametrize(("make", "memory", "precision", "base"), TRANSFORMERS)
def test_a_transformers_outputs_and_gradients_are_eagers_to_the_bit(
    make: Any, memory: Any, precision: Any, base: Any, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fused:
        monkeypatch.setattr(mmdit, "KERNEL_DEVICES", ("cpu",))
    assert_equal_to_the_bit(Run(make, memory, precision, base))


def test_two_records_of_a_call_are_the_same_operators() -> None:
    records = []
    for _ in range(2):
        run = Run(two_levels, "max", "bf16-mixed")
        run.warm_up()
        run.step(run.given)
        records.append([[operator.shape for operator in graph.operators] for graph in run.graphs.graphs])
    assert records[0] == records[1]


class Reads(nn.Module):
    """Reads a number of the device, sizes by numbers, and takes numbers of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return y / y.abs().max().item() + y[y > 0].sum() + torch.rand(4)


def test_the_recorder_finds_what_a_card_refuses() -> None:
    graphs = RecordedGraphs()
    graphs.record(lambda: Reads()(torch.randn(2, 4)), graphs.pool())
    assert {finding.kind for finding in graphs.findings} >= {"sync", "shape", "random", "host"}


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run(two_levels)
    made.warm_up()
    yield made
    made.plugin.teardown()


def test_gradients_accumulate_and_stay_over_a_replay(run: Run) -> None:
    first, second = fresh(run.given), fresh(run.given)
    wanted = [run.eager_step(given)[1:] for given in (first, second)]
    for given in (first, second):
        run.outputs(given)[0].float().square().mean().backward()
    for parameter, *parts in zip(run.trained, *wanted, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, sum(parts))  # type: ignore[arg-type]


def test_a_second_forward_before_the_backward_runs_eagerly(run: Run) -> None:
    first, second = fresh(run.given), fresh(run.given)
    outputs = run.outputs(first)[0], run.outputs(second)[0]
    assert run.graphed.replays == 1
    found = torch.autograd.grad((outputs[0] * outputs[1]).mean(), run.trained)
    with without_graphs():
        outputs = run.outputs(first)[0], run.outputs(second)[0]
        wanted = torch.autograd.grad((outputs[0] * outputs[1]).mean(), run.trained)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_hooks_of_trained_weights_run_outside_of_the_capture(run: Run) -> None:
    seen: list[Tensor] = []
    handle = run.trained[0].register_hook(lambda gradient: seen.append(gradient.clone()))
    for steps in (1, 2):
        found = run.step(run.given)
        assert run.graphed.replays == steps == len(seen)
        assert found[1] is not None and torch.equal(seen[-1], found[1])
    handle.remove()


def test_a_capture_reads_other_nodes_than_a_strategy_may_keep(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP keeps each weight's node in autograd's graph, of the stream on which DDP was made."""
    asked: list[Any] = []
    grad = torch.autograd.grad

    def noting(outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        asked.append(inputs)
        return grad(outputs, inputs, *rest, **options)

    monkeypatch.setattr(torch.autograd, "grad", noting)
    run.outputs(run.given)
    own = {id(parameter) for parameter in run.trained}
    assert len(asked) == 2, "the warm-up and the capture"
    assert not any(id(x) in own for inputs in asked for x in inputs)
    assert all(any(p is q for q in run.model.parameters()) for p in run.trained)


def test_a_dropped_loss_waits_for_no_backward(run: Run) -> None:
    run.outputs(run.given)
    gc.collect()
    run.step(run.given)
    assert run.graphed.replays == 2


def test_a_second_backward_is_one_sentence(run: Run) -> None:
    loss = run.outputs(run.given)[0].mean()
    torch.autograd.grad(loss, run.trained, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a graph's backward runs once, .* set graph: false"):
        torch.autograd.grad(loss, run.trained)


def change_scale(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 2 * scale for name, scale in module.scaling.items()}
            break


def change_scale_in_place(run: Run) -> None:
    module = next(m for m in run.model.modules() if isinstance(getattr(m, "scaling", None), dict))
    module.scaling["default"] *= 2


def replace_data(run: Run) -> None:
    run.trained[0].data = run.trained[0].data + 0.1


def disable_the_lora(run: Run) -> None:
    next(m for m in run.model.modules() if hasattr(m, "base_layer")).enable_adapters(False)
    run.trained = [p for p in run.model.parameters() if p.requires_grad]


def freeze(run: Run) -> None:
    run.trained.pop(0).requires_grad_(False)


def add_a_hook(run: Run) -> None:
    next(run.model.children()).register_forward_hook(lambda module, given, output: 2 * output)


@pytest.mark.parametrize(
    "change", [change_scale_in_place, replace_data, disable_the_lora, freeze, add_a_hook], ids=lambda c: c.__name__
)
def test_what_changes_the_module_is_recorded_again(run: Run, change: Callable[[Run], None]) -> None:
    run.step(run.given)
    change(run)
    assert same(run.step(run.given), run.eager_step(run.given))
    assert run.graphed.replays == 2
    assert len(run.graphs.graphs) == 4


@pytest.mark.parametrize("kwargs", [{"encoder_attention_mask": torch.ones(2, 7)}, {"return_dict": False}])
def test_a_call_of_another_kind_has_a_graph_of_its_own(run: Run, kwargs: Any) -> None:
    run.step(run.given)
    other = run.given | kwargs
    for _ in range(EAGER_CALLS + 1):
        assert same(run.step(other), run.eager_step(other))
    assert run.graphed.replays == 2
    assert run.graphs.pools == 1


def test_the_least_recently_used_graph_is_freed_and_shapes_in_turn_run_eagerly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(two_levels, "off")
    kinds = [given_of_unet(1, 3 + i) for i in range(MOST_GRAPHS + 1)]
    with caplog.at_level(logging.INFO):
        for _ in range(EAGER_CALLS + 3):
            for given in kinds:
                run.step(given)
    assert len(run.graphed._captured()) == MOST_GRAPHS
    assert sum("kinds of shapes in turn" in record.getMessage() for record in caplog.records) == 1
    assert same(run.step(kinds[0]), run.eager_step(kinds[0]))


def test_inputs_with_gradients_get_theirs(run: Run) -> None:
    def text_gradient() -> Tensor:
        text = run.given["encoder_hidden_states"].clone().requires_grad_()
        (y,) = run.outputs(run.given | {"encoder_hidden_states": text})
        return torch.autograd.grad(y.square().mean(), text)[0]

    found = [text_gradient() for _ in range(EAGER_CALLS + 2)]
    assert run.graphed.replays == 2
    assert all(torch.equal(gradient, found[0]) for gradient in found)


def test_calls_without_gradients_and_the_search_for_a_bad_step_run_eagerly(run: Run) -> None:
    with torch.no_grad():
        run.outputs(run.given)
    run.eager_step(run.given)
    assert run.graphed.replays == 0


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda model: model.enable_gradient_checkpointing(), "gradient_checkpointing .* use memory: max"),
        (lambda model: next(p for p in model.parameters() if p.requires_grad).register_post_accumulate_grad_hook(id),
         "set optimizer_in_backward: false"),
        (lambda model: vars(model).update(forward=model.forward), "its forward was replaced"),
    ],
)  # fmt: skip
def test_what_no_graph_can_hold_is_named_once_and_runs_eagerly(
    prepare: Callable[[Any], Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(two_levels, "off")
    run.plugin._remove_graphs()
    prepare(run.model)
    with caplog.at_level(logging.INFO):
        graphed = GraphedRoot(run.model, run.graphs)
        for _ in range(EAGER_CALLS + 2):
            run.outputs(run.given)
    assert graphed.replays == 0
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("graph:")]
    assert re.search(message, line)


def test_lora_dropout_is_refused_with_the_key_to_set(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run = Run(two_levels, "off", lora_dropout=0.1)
    assert "runs eagerly: a dropout draws random numbers in it; set lora_dropout: 0" in caplog.text
    run.warm_up()
    run.step(run.given)
    assert run.graphed.replays == 0


def test_a_failed_record_leaves_the_kind_eager_and_says_why(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(run.graphs, "record", fails)
    with caplog.at_level(logging.INFO):
        found = [run.step(run.given) for _ in range(2)]
    assert all(same(step, run.eager_step(run.given)) for step in found)
    lines = [record.getMessage() for record in caplog.records if "runs eagerly" in record.getMessage()]
    assert lines == [
        "graph: UNet2DConditionModel for [2, 4, 8, 8] runs eagerly: operation not permitted when stream is capturing"
        " (trainer.plugins.init_args.graph: false is without this attempt)"
    ]


def test_graphs_give_their_memory_to_samples_where_little_is_free(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.step(run.given)

    def sample() -> None:
        with torch.no_grad():
            run.outputs(run.given)

    sample()
    assert len(run.graphed._captured()) == 1, "enough is free"
    run.graphs.free = 0
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            sample()
    assert run.graphed._captured() == []
    assert caplog.text.count("GiB of graphs are freed for samples, and recorded again after them") == 1
    assert same(run.step(run.given), run.eager_step(run.given))
    assert run.graphed.replays == 2


def test_a_part_that_is_called_in_another_way_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """torch.compile and streamed blocks set what torch calls in place of a module's own call."""
    run = Run(two_levels, "off")
    run.plugin._remove_graphs()
    block = run.model.mid_block
    block._compiled_call_impl = block._call_impl
    with caplog.at_level(logging.INFO):
        graphed = GraphedRoot(run.model, run.graphs)
    assert graphed.reason == "a part of it is compiled, or its blocks wait in host memory"


def test_teardown_restores_the_forward(run: Run) -> None:
    run.step(run.given)
    run.plugin.teardown()
    assert "forward" not in vars(run.model)


def test_on_a_cpu_the_model_runs_eagerly_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(two_levels, "off")
    with caplog.at_level(logging.INFO):
        run.plugin.record_graphs(run.model, torch.device("cpu"))
    assert "graph: true, but cpu has no graphs; the model runs eagerly" in caplog.text
    assert run.plugin._graphed == []


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="graph must be auto, true or false, got 'yes'"):
        FusedBackwardPrecision(graph="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="set offload or graph to false"):
        FusedBackwardPrecision(memory="max", offload=True, graph=True)
