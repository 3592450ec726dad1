"""A training adapter on a few-step base: in the weights while it trains, out of samples and files, to the bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.models.pipelines import SIDE, make_batch
from fakes.runs.killed_trainings import KillAt, Killed
from fakes.runs.training_losses import example_losses
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.checkpoint import find_snapshots
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.errors import ModelError
from lightning_aigc_kernels.packed_weight import PackedWeight

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FAMILIES = ["z_image", pytest.param("flux", marks=pytest.mark.long)]
NAMES = {"z_image": "tiny-turbo", "flux": "tiny-schnell"}


@pytest.fixture(scope="module")
def turbo(transformers: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A family's tiny pipeline under the name of a few-step model."""

    def folder(family: str) -> str:
        path = tmp_path_factory.getbasetemp() / NAMES[family]
        if not path.exists():
            shutil.copytree(transformers(family), path)
        return str(path)

    return folder


@pytest.fixture(scope="module")
def adapters(turbo: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A training adapter's file, under the names that its trainers write."""
    folder = tmp_path_factory.mktemp("adapters")

    def file(family: str) -> str:
        path = folder / f"{family}.safetensors"
        if not path.exists():
            module = DiffusionLoRA(turbo(family), rank=2, training_adapter=str(dummy(folder, turbo(family), family)))
            layers = TRANSFORMERS[family].adapted_layers(module.loaded().denoiser, ["attention", "feed_forward"])
            state: dict[str, Tensor] = {}
            for number, name in enumerate(layers):
                torch.manual_seed(number)
                weight = module.loaded().denoiser.get_submodule(name).weight
                state[f"transformer.{name}.lora_A.weight"] = 0.2 * torch.randn(3, weight.shape[1])
                state[f"transformer.{name}.lora_B.weight"] = 0.2 * torch.randn(weight.shape[0], 3)
            safetensors.torch.save_file(state, path)
        return str(path)

    return file


def dummy(folder: Path, base: str, family: str) -> Path:
    """An adapter that changes nothing."""
    layer = {"z_image": "layers.0.attention.to_q", "flux": "transformer_blocks.0.attn.to_q"}[family]
    state = {f"transformer.{layer}.lora_{side}.weight": torch.zeros(shape) for side, shape in sides(base, layer)}
    safetensors.torch.save_file(state, folder / f"{family}-zero.safetensors")
    return folder / f"{family}-zero.safetensors"


def sides(base: str, layer: str) -> list[tuple[str, tuple[int, int]]]:
    state: dict[str, Tensor] = {}
    for file in Path(base, "transformer").glob("*.safetensors"):
        state |= safetensors.torch.load_file(file)
    rows, columns = state[f"{layer}.weight"].shape
    return [("A", (1, columns)), ("B", (rows, 1))]


def make_module(path: str, adapter: str | None, **options: Any) -> DiffusionLoRA:
    torch.manual_seed(0)
    given: dict[str, Any] = {"rank": 4, "learning_rate": 1e-2, "max_train_steps": 4, "sample_resolution": SIDE}
    module = DiffusionLoRA(path, training_adapter=adapter, **(given | options))
    module.configure_model()
    return module


def loss(module: DiffusionLoRA) -> Tensor:
    torch.manual_seed(3)
    return example_losses(module, make_batch()).detach()


def weights(network: nn.Module) -> dict[str, Tensor]:
    """The denoiser's frozen weights, packed ones as they compute."""
    return {
        name.replace(".base_layer", ""): p.dequantize() if isinstance(p, PackedWeight) else p.detach().clone()
        for name, p in network.named_parameters()
        if "lora_" not in name
    }


@pytest.mark.parametrize("base", [None, "int8", "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_leaving_the_adapter_gives_the_base_to_the_bit(
    family: str, base: str | None, turbo: Callable[[str], str], adapters: Callable[[str], str], tmp_path: Path
) -> None:
    path = turbo(family)
    plain = make_module(path, str(dummy(tmp_path, path, family)), base_quantization=base)
    module = make_module(path, adapters(family), base_quantization=base)
    wanted, merged = weights(plain.loaded().denoiser), weights(module.loaded().denoiser)
    with module.method.sampling_base():
        assert all(torch.equal(wanted[n], w) for n, w in weights(module.loaded().denoiser).items())
    again = weights(module.loaded().denoiser)
    assert all(torch.equal(merged[name], weight) for name, weight in again.items())
    changed = [name for name, weight in merged.items() if not torch.equal(weight, wanted[name])]
    assert len(changed) == sum(name.endswith("lora_A.weight") for name in safetensors.torch.load_file(adapters(family)))
    assert not torch.equal(loss(module), loss(plain))
    example_losses(module, make_batch()).mean().backward()
    assert {"lora_" in name for name, p in module.named_parameters() if p.grad is not None} == {True}
    images = [each.sample(["a red cup"], [1], num_inference_steps=2) for each in (plain, module)]
    assert torch.equal(*images)  # both LoRAs are zero


def fit(module: DiffusionLoRA, folder: Path, *callbacks: Callback, ckpt_path: str | None = None) -> None:
    trainer = Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, logger=False, max_steps=4, callbacks=list(callbacks),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(1)
    data = DataLoader([make_batch(seed=number) for number in range(4)], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=ckpt_path)


@pytest.mark.usefixtures("without_report_page")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_has_the_same_bits_and_its_file_draws_as_its_samples(
    family: str, turbo: Callable[[str], str], adapters: Callable[[str], str], tmp_path: Path
) -> None:
    path, adapter = turbo(family), adapters(family)
    options: dict[str, Any] = {"base_quantization": "int8", "checkpoints_total_limit": 0}
    module = make_module(path, adapter, **options)
    fit(module, tmp_path / "whole", ExactSnapshot(1))
    snapshots = ExactSnapshot(1)
    with pytest.raises(Killed):
        fit(make_module(path, adapter, **options), tmp_path, snapshots, KillAt(2))
    snapshots.abandon()  # the lock goes with a killed process; here the process lives on
    newest = next(iter(find_snapshots(tmp_path / "snapshots")))
    foreign = make_module(path, str(dummy(tmp_path, path, family)), **options)
    with pytest.raises(ModelError, match=r"trained with another training adapter.*model\.init_args\.training_adapter"):
        fit(foreign, tmp_path / "foreign", ExactSnapshot(1), ckpt_path=str(newest.path))
    resumed = make_module(path, adapter, **options)
    fit(resumed, tmp_path, ExactSnapshot(1), ckpt_path="latest")
    for (name, one), other in zip(module.named_parameters(), resumed.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one, other), name
    module.save_lora(tmp_path / "lora.safetensors")
    arguments = {"pretrained_model_name_or_path": path, "training_adapter": adapter, "sample_resolution": SIDE}
    sampler = LoRASampler(arguments, "32-true", "cpu", tmp_path / "lora.safetensors")
    drawn = sampler.sample([("a red cup", 1)], num_inference_steps=2, guidance_scale=1.0)
    with module.full_precision_base():
        samples = module.sample(["a red cup"], [1], num_inference_steps=2, guidance_scale=1.0)
    torch.testing.assert_close(drawn, samples, rtol=0, atol=5e-3)  # the file is float16


def test_a_few_step_base_without_an_adapter_says_where_adapters_are(turbo: Callable[[str], str]) -> None:
    with pytest.raises(
        ModelError,
        match=r"set model\.init_args\.training_adapter .*huggingface\.co/ostris/zimage_turbo_training_adapter",
    ):
        DiffusionLoRA(turbo("z_image"))


def test_samples_of_a_few_step_base_take_its_steps_unless_others_are_set(
    turbo: Callable[[str], str], adapters: Callable[[str], str]
) -> None:
    path, adapter, family = turbo("z_image"), adapters("z_image"), TRANSFORMERS["z_image"]
    module = DiffusionLoRA(path, training_adapter=adapter)
    assert module.method.sampling_choices(module.settings, family) == (8, 0.0)
    module = DiffusionLoRA(path, training_adapter=adapter, num_inference_steps=12, guidance_scale=2.0)
    assert module.method.sampling_choices(module.settings, family) == (12, 2.0)


def test_an_adapter_of_another_base_or_kind_is_refused(
    turbo: Callable[[str], str], transformers: Callable[[str], str], tmp_path: Path
) -> None:
    path = turbo("z_image")
    state = {f"transformer.layers.0.attention.to_q.lora_{s}.weight": torch.zeros(1, 8) for s in "A"}
    state["transformer.layers.0.attention.to_q.lora_B.weight"] = torch.zeros(8, 1)
    safetensors.torch.save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=r"training_adapter: .* is a LoRA of another base model"):
        make_module(path, str(tmp_path / "other.safetensors"))
    with pytest.raises(ModelError, match="there is no file /no/such"):
        make_module(path, "/no/such")
    name = "transformer.layers.0.attention.to_q"
    safetensors.torch.save_file(
        {f"{name}.lokr_w1": torch.ones(2, 2), f"{name}.lokr_w2": torch.ones(2, 2)}, tmp_path / "lokr.safetensors"
    )
    with pytest.raises(ModelError, match="is a LoKr or LoHa; wanted a plain LoRA"):
        make_module(path, str(tmp_path / "lokr.safetensors"))
