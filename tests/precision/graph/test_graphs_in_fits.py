"""A Trainer's fit with graphs ends with the weights of one without, with each option that a user would combine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree

from fakes.models.pipelines import make_batch, make_pipeline
from fakes.models.transformer_pipelines import make_sd3_pipeline
from fakes.processes.ranks import run_ranks
from fakes.recorded_graphs import RecordedGraphs
from fakes.runs.seeded_fits import fit, same
from lightning_aigc.callbacks import ExactSnapshot, GradientHealthMonitor
from lightning_aigc.diffusion import DiffusionControlNet, DiffusionFineTuning, DiffusionLoRA
from lightning_aigc.precision import FusedBackwardPrecision, plugin
from lightning_aigc.precision.graph import device_graphs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders

QUICK: dict[str, Any] = {"num_inference_steps": 2, "learning_rate": 1e-3, "max_train_steps": 5}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraphs]:
    """Graphs on the CPU, as on a card."""
    made: list[RecordedGraphs] = []

    def on_cpu(_: torch.device) -> RecordedGraphs:
        made.append(RecordedGraphs())
        return made[-1]

    monkeypatch.setattr(device_graphs, "DeviceGraphs", on_cpu)
    monkeypatch.setattr(plugin, "KERNEL_DEVICES", ("cpu",))
    return made


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sd") / "sd"))


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_sd3_pipeline(tmp_path_factory.mktemp("sd3") / "sd3"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, sd3: str) -> Path:
    """A LoRA of `sd3` that changes its outputs."""
    torch.manual_seed(2)
    module = DiffusionLoRA(sd3, rank=2, max_train_steps=1)
    module.configure_model()
    for parameter in module.trainable_parameters():
        parameter.data = 0.2 * torch.randn_like(parameter)
    file = tmp_path_factory.mktemp("adapter") / "adapter.safetensors"
    module.save_lora(file)
    return file


def trained(
    kind: Any, base: str, folder: Path, graph: Any, precision: dict[str, Any], options: Any, trainer: Any, **more: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = kind(base, **(QUICK | options))
    batch = make_batch() | ({"preserved_captions": ["a blue cup", ""]} if "preserve" in options else {})
    losses = fit(
        module, folder, batch=batch, plugins=[FusedBackwardPrecision(**precision, graph=graph)], **trainer,
        **({"callbacks": [GradientHealthMonitor()]} if more.get("monitor") else {}),
    )  # fmt: skip
    return losses, {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


SAMPLES: dict[str, Any] = {"validation_prompts": ["a cup"], "validation_steps": 2, "num_validation_images": 1}
FITS: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lean": (DiffusionLoRA, "sd", {"precision": "32-true", "memory": "lean"}, {}, {}),
    "max, bf16": (DiffusionLoRA, "sd", {"precision": "bf16-mixed", "memory": "max"}, {}, {}),
    "budget": (DiffusionLoRA, "sd", {"precision": "32-true", "memory": {"kept": 0.4}}, {}, {}),
    "accumulated": (DiffusionLoRA, "sd", {"precision": "32-true"}, {}, {"accumulate_grad_batches": 2}),
    "clipped": (DiffusionLoRA, "sd", {"precision": "bf16-mixed"}, {}, {"gradient_clip_val": 0.1}),
    "loss scale": (DiffusionLoRA, "sd", {"precision": "16-mixed", "memory": "lean"}, {}, {}),
    "average": (DiffusionLoRA, "sd", {"precision": "32-true"}, {"use_ema": True}, {}),
    "text encoder": (DiffusionLoRA, "sd", {"precision": "32-true"}, {"train_text_encoder": True}, {}),
    "int8 base": (DiffusionLoRA, "sd", {"precision": "32-true"}, {"base_quantization": "int8"}, {}),
    "transformer": (DiffusionLoRA, "sd3", {"precision": "bf16-mixed", "memory": "lean"}, {}, {}),
    "whole U-Net": (DiffusionFineTuning, "sd", {"precision": "32-true", "memory": "lean"}, {}, {}),
    "ControlNet": (DiffusionControlNet, "sd", {"precision": "32-true", "memory": "lean"}, {}, {}),
    "preservation": (
        DiffusionLoRA, "sd", {"precision": "32-true"}, {"preserve": "class", "class_word": "blue"}, {}),
    "half of preservation": (
        DiffusionLoRA, "sd3", {"precision": "32-true"}, {"preserve": "blank", "preserve_share": 0.5}, {}),
    "LoKr": (
        DiffusionLoRA, "sd", {"precision": "32-true", "memory": "lean"}, {"lora_type": "lokr", "lokr_factor": 2}, {}),
    "DoRA": (DiffusionLoRA, "sd", {"precision": "32-true", "memory": "lean"}, {"use_dora": True}, {}),
    "training adapter": (DiffusionLoRA, "sd3", {"precision": "32-true"}, SAMPLES, {}),
    "samples": (DiffusionLoRA, "sd", {"precision": "32-true", "memory": "max"}, SAMPLES, {}),
    "schedule-free": (
        DiffusionLoRA, "sd", {"precision": "32-true"}, 
        {"optimizer": lambda p: AdamWScheduleFree(p, lr=1e-3)} | SAMPLES, {}),
}  # fmt: skip


AUTO = "accumulated"
"""The fit with `graph: auto`."""
SHORT = ("max, bf16", "accumulated", "transformer", "ControlNet")


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in FITS])
def test_a_fit_ends_with_the_same_bits(
    request: pytest.FixtureRequest, tmp_path: Path, recorded: list[RecordedGraphs], name: str
) -> None:
    kind, base, precision, options, trainer = FITS[name]
    base = request.getfixturevalue(base)
    if name == "training adapter":
        options = options | {"training_adapter": str(request.getfixturevalue("adapter"))}
    eager = trained(kind, base, tmp_path / "eager", False, precision, options, trainer)
    graphed = trained(kind, base, tmp_path / "graphed", "auto" if name == AUTO else True, precision, options, trainer)
    assert graphed[0] == eager[0]
    assert same(graphed[1], eager[1])
    graphs = recorded[-1]
    assert len(recorded) == 1 + (name == AUTO), "auto tries a small graph first"
    assert graphs.findings == []
    assert len(graphs.graphs) == (4 if name == "ControlNet" else 2)
    assert graphs.pools == (2 if name == "ControlNet" else 1)


def test_a_resumed_fit_ends_with_the_same_bits(tmp_path: Path, recorded: list[RecordedGraphs], sd: str) -> None:
    def run(folder: Path, steps: int, *callbacks: Any, **options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = DiffusionLoRA(sd, **(QUICK | {"max_train_steps": steps}))
        precision = FusedBackwardPrecision("32-true", graph=True)
        fit(module, folder, *callbacks, plugins=[precision], **options)
        return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}

    whole = run(tmp_path / "whole", 8)
    run(tmp_path / "half", 4, ExactSnapshot(every_n_steps=4))
    resumed = run(tmp_path / "half", 8, ExactSnapshot(every_n_steps=4), ckpt="latest")
    assert same(whole, resumed)
    assert len(recorded) == 3


def test_the_monitor_sees_the_gradients_of_graphs(tmp_path: Path, recorded: list[RecordedGraphs], sd: str) -> None:
    def norms(graph: bool) -> Any:
        torch.manual_seed(0)
        monitor = GradientHealthMonitor()
        fit(DiffusionLoRA(sd, **QUICK), tmp_path / str(graph), monitor,
            plugins=[FusedBackwardPrecision("32-true", graph=graph)])  # fmt: skip
        return monitor.state_dict()

    assert str(norms(True)) == str(norms(False))


def on_two_ranks(rank: int, base: str, folder: str, strategy: str) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and weights of an eager fit and of one with graphs, whose gradients are exchanged after the replay."""
    made: list[RecordedGraphs] = []
    device_graphs.DeviceGraphs = lambda _: made.append(RecordedGraphs()) or made[-1]  # type: ignore[assignment, misc, func-returns-value]
    plugin.KERNEL_DEVICES = ("cpu",)  # type: ignore[assignment]
    found = []
    for graph in (False, True):
        torch.manual_seed(0)
        module = DiffusionLoRA(base, **QUICK)
        options = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False, "max_steps": 5}
        precision = FusedBackwardPrecision("32-true", memory="lean", graph=graph)
        losses = fit(module, Path(folder) / str(graph), batch=make_batch(seed=rank), plugins=[precision], **options)
        found.append((losses, {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}))
    assert [len(graphs.graphs) for graphs in made] == [2]
    return found


@pytest.mark.parametrize("strategy", ["ddp", "npu_sparse"])
def test_two_ranks_end_with_the_same_bits(strategy: str, sd: str, tmp_path: Path) -> None:
    ranks = run_ranks(on_two_ranks, 2, tmp_path, sd, str(tmp_path), strategy, gloo=False)
    for eager, graphed in ranks:
        assert graphed[0] == eager[0] and same(graphed[1], eager[1])
    assert same(ranks[0][1][1], ranks[1][1][1])
