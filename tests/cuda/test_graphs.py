"""CUDA graphs of a denoiser's forward and backward, and streamed weights, compared with eager and resident runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.models import tiny_transformers as tiny
from fakes.models.graphed_denoisers import Run, fresh, sd15, two_levels
from fakes.models.pipelines import make_pipeline
from fakes.models.transformer_pipelines import make_sd3_pipeline
from fakes.runs.seeded_fits import fit
from lightning_aigc.diffusion import DiffusionControlNet, DiffusionFineTuning, DiffusionLoRA
from lightning_aigc.diffusion.training.native_attention import avoid_misread_gradients
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.graph.graphed_root import GraphedRoot
from lightning_aigc.precision.memory.streamed_blocks import StreamedBlocks, blocks_of, has_skips
from lightning_aigc.strategies import NPUSparseStrategy

pytestmark = pytest.mark.filterwarnings("ignore")  # advice on loaders, and operators without a deterministic kernel

CASES: list[tuple[Any, Any, str, str | None]] = [
    *((sd15, memory, "bf16-mixed", None) for memory in ("off", "balanced", "lean", "max", {"kept": 0.3})),
    *((two_levels, memory, "32-true", None) for memory in ("off", "lean", "max")),
    *((two_levels, "lean", "bf16-true", base) for base in ("int8", "nf4", "fp8")),
    *((make, memory, "bf16-mixed", None)
      for make in (tiny.sd3, tiny.flux, tiny.flux2, tiny.qwen, tiny.z_image, tiny.krea2)
      for memory in ("off", "lean", "max")),
    (tiny.sd3, "max", "bf16-true", "nf4"), (tiny.flux, "lean", "bf16-true", "int8"),
    (tiny.flux, "lean", "bf16-true", "fp8"),
]  # fmt: skip


LIMITS = {"32-true": 1e-5, "bf16-mixed": 5e-3, "bf16-true": 1e-2}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that repeat their bits: others differ from themselves between two eager runs."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def difference(found: list[Tensor | None], wanted: list[Tensor | None]) -> float:
    """Relative difference of all numbers together."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    return float(
        sum((a - b).square().sum() for a, b in pairs).sqrt() / sum(b.square().sum() for _, b in pairs).sqrt()  # type: ignore[union-attr]
    )


@pytest.mark.parametrize(("make", "memory", "precision", "base"), CASES)
def test_a_graph_gives_eagers_outputs_and_gradients(make: Any, memory: Any, precision: str, base: Any) -> None:
    run = Run(make, memory, precision, base, device="cuda")
    avoid_misread_gradients(run.model, torch.device("cuda"))
    run.warm_up()
    for number in range(2):
        given = fresh(run.given)
        graphed, eager, again = run.step(given), run.eager_step(given), run.eager_step(given)
        assert run.graphed.replays == number + 1, "the capture was refused"
        figures = [difference(graphed, eager), difference(again, eager)]
        assert figures[0] <= max(3 * figures[1], LIMITS[precision]), figures
        run.change_weights()
    run.plugin.teardown()


def test_gradients_accumulate_over_replays() -> None:
    run = Run(two_levels, "lean", "bf16-mixed", device="cuda")
    run.warm_up()
    first, second = fresh(run.given), fresh(run.given)
    wanted = [run.eager_step(given)[1:] for given in (first, second)]
    for given in (first, second):
        run.outputs(given)[0].float().square().mean().backward()
    found = [parameter.grad for parameter in run.trained]
    assert difference(found, [a + b for a, b in zip(*wanted, strict=True)]) < 1e-3  # type: ignore[operator]
    assert run.graphed.replays == 2


def test_five_shapes_in_turn_keep_their_numbers() -> None:
    """Graphs of one pool overwrite each other's memory; results and gradients must outlive the next replay."""
    run = Run(two_levels, "max", "bf16-mixed", device="cuda")
    shapes = [fresh(run.given) | {"encoder_hidden_states": torch.randn(2, 7 + i, 32, device="cuda")} for i in range(5)]
    for _ in range(4):
        found = [run.step(given) for given in shapes]
    assert run.graphed.replays == 10
    assert max(difference(one, run.eager_step(given)) for one, given in zip(found, shapes, strict=True)) < 1e-3


class Reads(nn.SiLU):
    """An activation that reads a number of the card."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.detach().abs().max().item())


def test_a_refused_capture_leaves_the_card_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(two_levels, "off", device="cuda")
    run.model.conv_act = Reads()
    run.warm_up()
    with caplog.at_level("INFO"):
        run.step(run.given)
    assert "runs eagerly: " in caplog.text and "not permitted when stream is capturing" in caplog.text
    assert run.graphed.replays == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    state = torch.cuda.get_rng_state()
    drawn = torch.randn(8, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(8, device="cuda"), drawn)
    other = Run(two_levels, "off", device="cuda")
    other.warm_up()
    assert difference(other.step(other.given), other.eager_step(other.given)) < 1e-2
    assert other.graphed.replays == 1


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bases")
    return {"sd": str(make_pipeline(folder / "sd")), "sd3": str(make_sd3_pipeline(folder / "sd3"))}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The replays of each graphed module, when its fit ends."""
    found: list[int] = []
    remove = GraphedRoot.remove
    monkeypatch.setattr(GraphedRoot, "remove", lambda self: (found.append(self.replays), remove(self))[1])
    return found


def test_a_strategy_that_keeps_autograds_nodes_goes_with_graphs(
    bases: dict[str, str], tmp_path: Path, replays: list[int]
) -> None:
    for strategy in ("ddp", NPUSparseStrategy(mode="int3")):
        replays.clear()
        module = DiffusionLoRA(bases["sd"], num_inference_steps=2, max_train_steps=6)
        plugins = [FusedBackwardPrecision("bf16-mixed", memory="lean", graph=True)]
        fit(module, tmp_path, accelerator="cuda", devices=1, plugins=plugins, strategy=strategy)
        assert max(replays) >= 3, f"no step was replayed under {strategy}"


def test_a_fit_records_graphs_unless_told_otherwise(bases: dict[str, str], tmp_path: Path, replays: list[int]) -> None:
    module = DiffusionLoRA(bases["sd"], num_inference_steps=2, max_train_steps=6)
    fit(module, tmp_path, accelerator="cuda", devices=1, plugins=[FusedBackwardPrecision("bf16-mixed")])
    assert max(replays) >= 3, "graph: auto recorded nothing"


FITS: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lean": (DiffusionLoRA, "sd", {"precision": "32-true", "memory": "lean"}, {}, {}),
    "accumulated, clipped": (DiffusionLoRA, "sd", {"precision": "bf16-mixed", "memory": "max"}, {},
                             {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "loss scale": (DiffusionLoRA, "sd", {"precision": "16-mixed", "memory": "lean"}, {}, {}),
    "average": (DiffusionLoRA, "sd", {"precision": "bf16-mixed"}, {"use_ema": True}, {}),
    "text encoder": (DiffusionLoRA, "sd", {"precision": "bf16-mixed"}, {"train_text_encoder": True}, {}),
    "int8 base": (DiffusionLoRA, "sd", {"precision": "bf16-mixed"}, {"base_quantization": "int8"}, {}),
    "transformer": (DiffusionLoRA, "sd3", {"precision": "bf16-mixed", "memory": "lean"}, {}, {}),
    "whole U-Net": (DiffusionFineTuning, "sd", {"precision": "bf16-mixed", "memory": "lean"}, {}, {}),
    "ControlNet": (DiffusionControlNet, "sd", {"precision": "bf16-mixed", "memory": "lean"}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_a_fit_with_graphs_ends_as_one_without(
    name: str, bases: dict[str, str], tmp_path: Path, replays: list[int]
) -> None:
    kind, base, precision, options, trainer = FITS[name]

    def trained(graph: bool) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        given = {"num_inference_steps": 2, "learning_rate": 1e-3, "max_train_steps": 6} | options
        module = kind(bases[base], **given)
        plugins = [FusedBackwardPrecision(**precision, graph=graph)]
        losses = fit(module, tmp_path / str(graph), accelerator="cuda", devices=1, plugins=plugins, **trainer)
        return losses, {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}

    eager, graphed = trained(False), trained(True)
    assert max(replays) >= 4, "no step was replayed"
    assert graphed[0] == pytest.approx(eager[0], rel=1e-2)
    assert difference([*graphed[1].values()], [*eager[1].values()]) < 1e-2


@pytest.mark.parametrize("base", [None, "int8"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_streamed_blocks_give_the_resident_blocks_gradients(share: float, base: str | None) -> None:
    run = Run(tiny.flux, "lean", "bf16-true", base, device="cuda")
    wanted = run.eager_step(run.given)
    repeated = difference(run.eager_step(run.given), wanted)
    run.plugin._remove_graphs()
    streamed = StreamedBlocks(blocks_of(run.model), share, torch.device("cuda"), has_skips=has_skips(run.model))
    assert streamed.host_bytes > 0
    figures = [difference(run.step(run.given), wanted) for _ in range(3)]
    assert max(figures) <= 1e-3, (figures, repeated)
