"""Z-Image's ControlNet, which runs modules of its transformer and holds none of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import ZImageControlNetModel
from safetensors import safe_open

from fakes.models.pipelines import SIDE, make_batch
from fakes.models.transformer_controlnets import CAPTIONS, load_pipeline, make_module, stirred
from fakes.runs.seeded_fits import cloned, fit, same
from fakes.runs.training_losses import example_losses
from lightning_aigc.diffusion.families import CONTROLLED
from lightning_aigc.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders

Z_IMAGE = CONTROLLED["z_image"]


@pytest.fixture
def folder(transformers: Callable[[str], str]) -> str:
    return transformers("z_image")


def shown(width: int = SIDE) -> torch.Tensor:
    return torch.rand(1, 3, SIDE, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("count", "places"), [(6, [0, 5, 10, 15, 20, 25]), (15, list(range(0, 30, 2))), (1, [0]), (30, list(range(30)))]
)
def test_its_blocks_stand_at_equal_distances_as_in_the_published_ones(count: int, places: list[int]) -> None:
    transformer = SimpleNamespace(config=SimpleNamespace(n_layers=30, in_channels=16))
    assert Z_IMAGE.control.control_config(transformer, {"num_layers": count})["control_layers_places"] == places
    assert count in Z_IMAGE.control.control_counts(30)


def test_each_block_begins_as_the_layer_that_it_adds_to_and_the_condition_is_read_as_the_picture(folder: str) -> None:
    module = make_module(folder)
    transformer, controlnet = module.transformer, module.controlnet
    assert controlnet.config.control_layers_places == [0, 1]
    for mine, theirs in zip(controlnet.control_layers, transformer.layers, strict=True):  # type: ignore[union-attr, arg-type]
        own = cloned(mine)
        assert same(cloned(theirs), {name: own[name] for name in cloned(theirs)})
        assert not mine.after_proj.weight.any()
    assert same(cloned(controlnet.control_noise_refiner), cloned(transformer.noise_refiner))  # type: ignore[union-attr, arg-type]
    assert same(cloned(controlnet.control_all_x_embedder), cloned(transformer.all_x_embedder))  # type: ignore[union-attr, arg-type]


def test_what_it_borrows_is_not_its_own_before_or_after_it_draws(folder: str, tmp_path: Path) -> None:
    module = make_module(folder)
    names = set(module.controlnet.state_dict())
    assert all(name.startswith("control_") for name in names)
    fit(module, tmp_path, batch=make_batch(CAPTIONS))
    module.sample(["a red cup"], [5], conditions=shown())
    assert set(module.controlnet.state_dict()) == names
    assert {name.split(".")[0] for name, _ in module.controlnet.named_modules() if name} == {
        "control_layers", "control_all_x_embedder", "control_noise_refiner",
    }  # fmt: skip
    for file in (tmp_path / "edges" / "diffusion_pytorch_model.safetensors", tmp_path / "edges.safetensors"):
        with safe_open(file, "pt") as held:
            assert set(held.keys()) == names


def test_it_reads_the_transformers_modules_that_are_there_now(folder: str) -> None:
    """A strategy may put other parameters in their place after the ControlNet was made."""
    module, batch = stirred(make_module(folder)), make_batch(CAPTIONS)
    losses = []
    for factor in (1.0, 2.0):
        module.transformer.cap_pad_token = torch.nn.Parameter(torch.full((1, 64), factor), requires_grad=False)  # type: ignore[union-attr]
        torch.manual_seed(0)
        losses.append(float(example_losses(module, batch).mean()))
    assert losses[0] != losses[1]
    assert module.controlnet.cap_pad_token is module.transformer.cap_pad_token  # type: ignore[union-attr]


def test_gradients_reach_every_weight_at_the_third_step(folder: str, tmp_path: Path) -> None:
    """Through the projections behind the blocks first, then through the one that the condition enters by."""
    module = make_module(folder)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(named.values(), lr=0.5)
    still = []
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        example_losses(module, make_batch(CAPTIONS)).mean().backward()
        still.append({name for name, p in named.items() if p.grad is None or not p.grad.any()})
        optimizer.step()
    assert still[0] == {name for name in named if "after_proj" not in name}
    assert still[1] == {name for name in named if "control_all_x_embedder" in name or "control_noise_refiner" in name}
    assert not still[2]


def test_gradient_checkpointing_gives_the_same_loss(folder: str, tmp_path: Path) -> None:
    losses = [
        fit(stirred(make_module(folder, gradient_checkpointing=on)), tmp_path / str(on), batch=make_batch(CAPTIONS))
        for on in (False, True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["control_noise_refiner", "control_layers"])
def test_a_controlnet_of_a_later_version_trains_on_and_draws_what_diffusers_draws(
    kind: str, folder: str, tmp_path: Path
) -> None:
    """Versions 2.0 and 2.1 add to the refiner too, and read 33 channels, of which diffusers leaves 17 at zero."""
    config: dict[str, Any] = {
        **make_module(folder).controlnet.config, "_use_default_values": [], "control_in_dim": 9,
        "add_control_noise_refiner": kind, "control_refiner_layers_places": [0],
    }  # fmt: skip
    torch.manual_seed(3)
    ZImageControlNetModel.from_config(config).save_pretrained(tmp_path / "given")
    module = make_module(folder, controlnet_model_name_or_path=str(tmp_path / "given"), learning_rate=0.05)
    assert all(name in dict(module.named_modules()) for name in module.protected_gradients)
    before = cloned(module.controlnet)
    fit(module, tmp_path, batch=make_batch(CAPTIONS))
    after = cloned(module.controlnet)
    assert before.keys() == after.keys() and all(not torch.equal(before[name], after[name]) for name in before)
    ours = module.sample(["a red cup"], [5], guidance_scale=3.0, conditions=shown())
    pipeline = load_pipeline("z_image", folder, controlnet=ZImageControlNetModel.from_pretrained(tmp_path / "edges"))
    theirs = pipeline(
        prompt="a red cup", control_image=shown() * 2 - 1, height=SIDE, width=SIDE, num_inference_steps=2,
        generator=torch.Generator().manual_seed(5), output_type="pt", controlnet_conditioning_scale=1.0,
        guidance_scale=3.0,
    ).images.float().clamp(0, 1)  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"control_layers_places": [0, 5]}, "adds to layer 5 of a transformer that has layers 0 to 1; use one that"),
        ({"control_in_dim": 3}, "reads conditions of 3 channels, and this autoencoder's latents have 4"),
        ({"dim": 32}, "its dim is 32, that of .* 64"),
    ],
)
def test_a_controlnet_of_another_transformer_is_one_sentence(
    change: dict[str, Any], said: str, folder: str, tmp_path: Path
) -> None:
    config = {**make_module(folder).controlnet.config, "_use_default_values": []} | change
    ZImageControlNetModel.from_config(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=said):
        make_module(folder, controlnet_model_name_or_path=str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_layers": 3}, "num_layers: the transformer's 2 blocks do not read 3 of a .* use one of 1, 2"),
        ({"num_single_layers": 1}, "num_single_layers: ZImagePipeline has no such blocks"),
    ],
)
def test_a_number_of_blocks_that_cannot_be_is_one_sentence(options: dict[str, int], said: str, folder: str) -> None:
    with pytest.raises(ModelError, match=said):
        make_module(folder, **options)
