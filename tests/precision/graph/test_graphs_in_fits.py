"""A Trainer's fit with graphs ends with the weights of one without, beside each option that a user would combine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.models.pipelines import make_pipeline
from fakes.models.transformer_pipelines import make_sd3_pipeline
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


def trained(
    kind: Any, base: str, folder: Path, graph: Any, precision: dict[str, Any], options: Any, trainer: Any, **more: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = kind(base, **(QUICK | options))
    losses = fit(
        module, folder, plugins=[FusedBackwardPrecision(**precision, graph=graph)], **trainer,
        **({"callbacks": [GradientHealthMonitor()]} if more.get("monitor") else {}),
    )  # fmt: skip
    return losses, {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


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
}


AUTO = "accumulated"
"""The fit with `graph: auto`."""
SHORT = ("max, bf16", "accumulated", "transformer", "ControlNet")


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in FITS])
def test_a_fit_ends_with_the_same_bits(
    request: pytest.FixtureRequest, tmp_path: Path, recorded: list[RecordedGraphs], name: str
) -> None:
    kind, base, precision, options, trainer = FITS[name]
    base = request.getfixturevalue(base)
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
