"""protect_edges: the edge path stays dense and in full precision through every lossy option."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel
from torch import Tensor

from fakes.models.pipelines import make_batch
from fakes.runs.seeded_fits import cloned, fit, same
from fakes.runs.training_losses import example_losses
from lightning_aigc.callbacks.health.parameter_names import zero_convolution_gates
from lightning_aigc.diffusion import ControlNetTraining
from lightning_aigc.diffusion.families.sd import EDGE_PATH
from lightning_aigc.gradient_sync.options import SyncOptions, check_protect
from lightning_aigc.gradient_sync.units import make_units
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.quantization.layers import PackedWeight

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]

QUICK: dict[str, Any] = {"num_inference_steps": 2, "learning_rate": 1e-3, "max_train_steps": 3, "output_name": "edges"}


def lossy_gradients(protect: bool, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the ControlNet's blocks for one given gradient of each block's output: dense, and lossy."""
    found = []
    for lossy in (False, True):
        torch.manual_seed(0)
        module = ControlNetTraining(folder, protect_edges=protect, **QUICK)
        module.configure_model()
        densities = {"input_grad_density": 0.05, "attention_grad_density": 0.05} if lossy else {}
        plugin = FusedBackwardPrecision("32-true", memory="balanced", **densities)  # type: ignore[arg-type]
        plugin.convert_module(module)
        assert module.controlnet is not None
        generator = torch.Generator().manual_seed(1)
        gradients = {}
        for name, width, context in (("down_blocks.0", 8, False), ("down_blocks.1", 8, True)):
            block = module.controlnet.get_submodule(name)
            hidden = torch.randn(2, width, 16, 16, generator=generator)
            time = torch.randn(2, 32, generator=generator)
            arguments = {"encoder_hidden_states": torch.randn(2, 12, 16, generator=generator)} if context else {}
            output = block(hidden, time, **arguments)[0]
            output.backward(torch.randn(output.shape, generator=generator))
            gradients |= {f"{name}.{n}": p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
        plugin.teardown()
        found.append(gradients)
    return found[0], found[1]


@pytest.mark.parametrize("protect", [True, False])
def test_the_first_block_keeps_its_dense_gradient_under_lossy_densities(sd: str, protect: bool) -> None:
    dense, lossy = lossy_gradients(protect, sd)
    first = {n for n in dense if n.startswith("down_blocks.0")}
    others = {n for n in dense if n.startswith("down_blocks.1")}
    assert first and others
    assert all(torch.equal(dense[n], lossy[n]) for n in first) == protect
    assert not all(torch.equal(dense[n], lossy[n]) for n in others)  # the lossy path is on


LOSSY: dict[str, tuple[str, dict[str, float]]] = {
    "input_grad_density": ("bf16-mixed", {"input_grad_density": 0.05}),
    "attention_grad_density": ("bf16-mixed", {"attention_grad_density": 0.05}),
    "float16 products in backward": ("bf16-forward-fp16-backward", {}),
}
"""One lossy option of the precision plugin each, with its precision."""


def with_attention_in_its_first_block(module: ControlNetTraining) -> ControlNetModel:
    """The module's ControlNet made anew, with a first block as in Stable Diffusion 1.5: SDXL's has no attention."""
    torch.manual_seed(0)
    module.controlnet = ControlNetModel(
        block_out_channels=(8, 16), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), layers_per_block=1,
        attention_head_dim=2, norm_num_groups=4, cross_attention_dim=16, conditioning_embedding_out_channels=(4, 8),
    )  # fmt: skip
    module.method.network = module.controlnet
    return module.controlnet


def first_blocks_gradients(
    folder: str, protect: bool, precision: Any, densities: dict[str, float]
) -> dict[str, Tensor]:
    """Gradients of `down_blocks.0` for one given gradient of its output."""
    module = ControlNetTraining(folder, protect_edges=protect, **QUICK)
    module.configure_model()
    block = with_attention_in_its_first_block(module).down_blocks[0]
    plugin = FusedBackwardPrecision(precision, memory="lean", **densities)  # type: ignore[arg-type]
    plugin.convert_module(module)
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 8, 16, 16), (2, 32), (2, 12, 16))
    hidden, time, words = (torch.randn(shape, generator=generator) for shape in shapes)
    with plugin.forward_context():
        output = block(hidden, time, encoder_hidden_states=words)[0]
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    plugin.teardown()
    return {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("path", LOSSY)
def test_each_lossy_path_alone_leaves_a_protected_first_block_as_it_is(sd: str, path: str) -> None:
    precision, densities = LOSSY[path]
    dense = first_blocks_gradients(sd, False, "bf16-mixed", {})
    protected = first_blocks_gradients(sd, True, precision, densities)
    assert dense.keys() == protected.keys() and all(torch.equal(dense[name], protected[name]) for name in dense)
    lossy = first_blocks_gradients(sd, False, precision, densities)
    assert not all(torch.equal(dense[name], lossy[name]) for name in dense)  # the lossy path is on


@pytest.mark.parametrize("path", LOSSY)
def test_a_controlnet_trains_under_each_lossy_path(sd: str, tmp_path: Path, path: str) -> None:
    """Losses are finite, the hint embedding moves, and the protection shows in them once its gradients are used."""
    precision, densities = LOSSY[path]
    found = {}
    for protect in (True, False):
        torch.manual_seed(0)
        module = ControlNetTraining(sd, protect_edges=protect, **QUICK | {"max_train_steps": 6, "learning_rate": 1e-2})
        module.configure_model()
        hint = with_attention_in_its_first_block(module).controlnet_cond_embedding
        start = cloned(hint)
        plugin: Any = FusedBackwardPrecision(precision, memory="lean", **densities)  # type: ignore[arg-type]
        found[protect] = fit(module, tmp_path, plugins=[plugin])
        assert all(math.isfinite(loss) for loss in found[protect])
        assert all(bool(p.isfinite().all()) for p in module.trainable_parameters())
        assert not same(start, cloned(hint))
    assert found[True][0] == found[False][0] and found[True] != found[False]


def test_the_blocks_of_the_controlnet_are_swapped_too(sd: str) -> None:
    module = ControlNetTraining(sd, **QUICK)
    module.configure_model()
    plugin = FusedBackwardPrecision("bf16-mixed", memory="lean")
    plugin.convert_module(module)
    assert module.controlnet is not None
    swapped = vars(module)["_fused_backward_swaps"]
    summary = swapped.summary()
    alone = FusedBackwardPrecision("bf16-mixed", memory="lean")
    plugin.teardown()
    alone.convert_module(module.unet)  # type: ignore[arg-type]
    of_unet = vars(module.unet)["_fused_backward_swaps"].summary()
    alone.teardown()
    assert int(summary.split("swapped ")[1].split()[0]) > int(of_unet.split("swapped ")[1].split()[0])


@pytest.mark.parametrize("mode", ["sparse", "int3", "ternary"])
def test_npu_sparse_sends_the_edge_path_whole(sd: str, mode: Any) -> None:
    module = ControlNetTraining(sd, **QUICK)
    module.configure_model()
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    names = [name for name, _ in named]
    options = SyncOptions(mode=mode).protecting(module.protected_gradients, names)
    check_protect(options, names)  # no default pattern that covers nothing here
    units = make_units(named, options, ranks=2)
    whole = {entry.name for unit in units if unit.uncompressed for entry in unit.entries}
    assert whole >= {name for name in names if any(name.startswith(f"controlnet.{part}") for part in EDGE_PATH)}
    assert not any(name.startswith("controlnet.down_blocks.1") for name in whole)
    assert SyncOptions(mode=mode).protecting((), names) == SyncOptions(mode=mode)


def test_a_quantized_base_leaves_the_controlnet_in_float32(sd: str, tmp_path: Path) -> None:
    module = ControlNetTraining(sd, base_quantization="int8", **QUICK)
    losses = fit(module, tmp_path)
    assert all(math.isfinite(loss) for loss in losses)
    assert module.controlnet is not None and module.unet is not None
    assert {p.dtype for p in module.controlnet.parameters()} == {torch.float32}
    assert not any(isinstance(p, PackedWeight) for p in module.controlnet.parameters())
    assert any(isinstance(p, PackedWeight) for p in module.unet.parameters())


def test_one_line_names_the_protected_modules(sd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(ControlNetTraining(sd, **QUICK | {"max_train_steps": 1}), tmp_path)
    (said,) = {r.message for r in caplog.records if r.message.startswith("protect_edges: ")}
    assert "controlnet_cond_embedding" in said and "npu_sparse" in said
    caplog.clear()
    fit(ControlNetTraining(sd, protect_edges=False, **QUICK | {"max_train_steps": 1}), tmp_path)
    assert not any(r.message.startswith("protect_edges: ") for r in caplog.records)


def test_gradients_begin_behind_the_zero_convolutions(sd: str) -> None:
    """The parameters with zero gradients in the first two steps are those that the monitor expects."""
    module = ControlNetTraining(sd, **QUICK)
    module.configure_model()
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gates = zero_convolution_gates(tuple(named))
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        example_losses(module, make_batch()).mean().backward()
        weights = {name: float(p.detach().norm()) for name, p in named.items()}
        zero = {name for name, p in named.items() if p.grad is None or not p.grad.any()}
        expected = {name for name, before in gates.items() if all(weights[gate] == 0 for gate in before)}
        if step == 0:
            assert zero >= expected and {n for n in zero - expected if not n.endswith("bias")} == set()
        hint = {name for name in named if "cond_embedding" in name and "conv_out" not in name}
        assert hint <= zero or step > 1
        optimizer.step()
