"""ControlNetTraining through real Trainer fits: its losses, its files in diffusers, its protected edge path."""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ControlNetModel,
    DDIMScheduler,
    DDPMScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetPipeline,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fakes.pipelines import SIDE, make_batch, make_pipeline
from lightning_aigc.callbacks.health.parameter_names import zero_convolution_gates
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import ControlNetTraining, conditions
from lightning_aigc.diffusion.controlnet_model import EDGE_PATH, PREFIX, single_file_name
from lightning_aigc.diffusion.edge_reward import edge_losses, predict_latents
from lightning_aigc.diffusion.objectives import training_target
from lightning_aigc.errors import ModelError
from lightning_aigc.gradient_sync.flat_units import make_units
from lightning_aigc.gradient_sync.options import SyncOptions, check_protect
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.quantization.layers import PackedWeight
from lightning_aigc.tiny.embedded import resolve

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders

QUICK: dict[str, Any] = {"num_inference_steps": 2, "learning_rate": 1e-3, "max_train_steps": 3, "output_name": "edges"}


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sd")))


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sdxl"), sdxl=True))


class SeededSteps(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(1000 + trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def fit(
    module: ControlNetTraining, folder: Path, *callbacks: Callback, data: Any = None, **options: Any
) -> list[float]:
    seeds, ckpt = SeededSteps(), options.pop("ckpt", None)
    quiet: dict[str, Any] = {
        "default_root_dir": str(folder), "accelerator": "cpu", "devices": 1, "max_epochs": -1, "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks), "enable_progress_bar": False,
        "enable_model_summary": False, "callbacks": [seeds, *callbacks],
    }  # fmt: skip
    data = data or DataLoader([make_batch()], batch_size=None)  # type: ignore[arg-type]
    Trainer(**(quiet | options)).fit(module, data, ckpt_path=ckpt)
    return seeds.losses


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def cloned(module: torch.nn.Module | None) -> dict[str, Tensor]:
    assert module is not None
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


# Training -----------------------------------------------------------------------------------------------------------


def diffusers_losses(batch: dict[str, Any], condition: Tensor, steps: int) -> list[float]:
    """diffusers' train_controlnet.py: its loop, without a loader, accelerate and logging."""
    pipeline = StableDiffusionPipeline.from_pretrained(str(resolve("embedded:sd")), safety_checker=None)
    unet, vae = pipeline.unet.requires_grad_(False), pipeline.vae
    schedule = DDPMScheduler.from_config(pipeline.scheduler.config)
    torch.manual_seed(0)
    controlnet = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32, 96))
    optimizer = torch.optim.AdamW(controlnet.parameters(), lr=1e-3, weight_decay=1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 + step)
        latents = vae.encode(batch["pixel_values"]).latent_dist.sample() * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, schedule.config.num_train_timesteps, (len(latents),))
        noisy = schedule.add_noise(latents, noise, timesteps)
        tokens = pipeline.tokenizer(batch["captions"], padding="max_length", truncation=True, return_tensors="pt")
        hidden = pipeline.text_encoder(tokens.input_ids, return_dict=False)[0].detach()
        down, middle = controlnet(noisy, timesteps, hidden, controlnet_cond=condition, return_dict=False)
        shown = {"down_block_additional_residuals": list(down), "mid_block_additional_residual": middle}
        loss = F.mse_loss(unet(noisy, timesteps, hidden, return_dict=False, **shown)[0].float(), noise.float())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_losses_are_those_of_diffusers_own_loop(tmp_path: Path) -> None:
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    batch = make_batch(["a red mug", "a blue teapot"]) | {"pixel_values": pixels}
    module = ControlNetTraining("embedded:sd", **QUICK)
    torch.manual_seed(0)
    module.configure_model()
    made = module.make_conditions(pixels)
    assert made is not None and 0.01 < float((made > 0).float().mean()) < 0.5
    wanted = diffusers_losses(batch, made.float().expand(-1, 3, -1, -1) / 255, 3)
    data: Any = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    assert fit(module, tmp_path, data=data) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("family", ["sd", "sdxl"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_controlnet_alone_is_trained_and_diffusers_draws_the_same_picture(
    family: str, precision: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(family)
    module = ControlNetTraining(source, **QUICK | {"learning_rate": 0.05, "use_ema": precision == "32-true"})
    module.configure_model()
    start = cloned(module.controlnet)
    fit(module, tmp_path, precision=precision)
    assert module.components is not None
    base = StableDiffusionPipeline.load_config(source)["_class_name"]
    kind: Any = StableDiffusionXLControlNetPipeline if "XL" in base else StableDiffusionControlNetPipeline
    saved = ControlNetModel.from_pretrained(tmp_path / "edges")
    with module.averaged_weights():
        trained = cloned(module.controlnet)
    assert same(trained, cloned(saved)) and not same(start, trained)
    extra = {} if family == "sdxl" else {"safety_checker": None}
    pipeline = kind.from_pretrained(source, controlnet=saved, **extra)
    assert same(cloned(pipeline.unet), {k: v.float() for k, v in cloned(module.components.unet).items()}) or (
        precision != "32-true"
    )
    if precision == "32-true":
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
        pipeline.set_progress_bar_config(disable=True)
        shown = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
        options = {"num_inference_steps": 3, "guidance_scale": 3.0}
        seed = torch.Generator().manual_seed(5)
        theirs = pipeline("a red cup", image=shown, generator=seed, output_type="pt", **options).images
        ours = module.sample(["a red cup"], [5], conditions=shown, **options)
        assert torch.equal(ours, theirs)
        other = module.sample(["a red cup"], [5], conditions=1 - shown, **options)
        assert not torch.equal(ours, other)


def test_training_goes_on_from_a_saved_controlnet(sd: str, tmp_path: Path) -> None:
    first = ControlNetTraining(sd, **QUICK)
    fit(first, tmp_path)
    again = ControlNetTraining(sd, controlnet_model_name_or_path=str(tmp_path / "edges"), **QUICK)
    again.configure_model()
    assert same(cloned(first.controlnet), cloned(again.controlnet))
    assert all(p.requires_grad for p in again.controlnet.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("option", ["use_ema", "gradient_checkpointing", "optimizer_in_backward"])
def test_a_resumed_run_ends_in_the_same_bits_and_checkpoints_hold_the_controlnet(
    sd: str, tmp_path: Path, option: str
) -> None:
    def build(steps: int) -> ControlNetTraining:
        torch.manual_seed(0)
        module = ControlNetTraining(sd, **QUICK | {option: True, "max_train_steps": steps})
        module.configure_model()
        return module

    whole, half, again = build(4), build(2), build(4)
    losses = fit(whole, tmp_path / "whole")
    fit(half, tmp_path, ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="two"))
    names = torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"]
    assert names and all(name.startswith("controlnet.") for name in names)
    assert fit(again, tmp_path / "again", ckpt=str(tmp_path / "two.ckpt")) == losses[2:]
    assert same(cloned(whole.controlnet), cloned(again.controlnet))


# Files --------------------------------------------------------------------------------------------------------------


def test_the_single_file_has_lllyasviels_names_and_loads_in_diffusers(tmp_path: Path) -> None:
    """The hint embedding of a factor 8, whose last convolution diffusers looks for under one fixed number."""
    folder = make_pipeline(tmp_path / "sd")
    module = ControlNetTraining(str(folder), **QUICK)
    module.configure_model()
    assert module.unet is not None
    module.controlnet = ControlNetModel.from_unet(module.unet)
    torch.manual_seed(0)
    for parameter in module.controlnet.parameters():
        torch.nn.init.normal_(parameter)
    module.save_model(tmp_path / "edges.safetensors")
    found = load_file(tmp_path / "edges.safetensors")
    assert {"control_model.input_hint_block.14.weight", "control_model.zero_convs.0.0.bias"} <= found.keys()
    loaded = ControlNetModel.from_single_file(
        str(tmp_path / "edges.safetensors"), config=str(tmp_path / "edges"), local_files_only=True
    )
    assert same(cloned(module.controlnet), cloned(loaded))


@pytest.mark.parametrize("hint_blocks", [2, 4, 6])
def test_no_two_parameters_share_a_name_in_the_single_file(sd: str, hint_blocks: int) -> None:
    unet = StableDiffusionPipeline.from_pretrained(sd, safety_checker=None).unet
    channels = (4,) * (hint_blocks // 2 + 1)
    state = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=channels).state_dict()
    names = {PREFIX + single_file_name(name, 1, hint_blocks) for name in state}
    assert len(names) == len(state)


# The edge path ------------------------------------------------------------------------------------------------------


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
    assert whole >= {name for name in names if any(name.startswith(part) for part in EDGE_PATH)}
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
    """Which parameters' gradients are zero in the first two steps is what the monitor expects."""
    module = ControlNetTraining(sd, **QUICK)
    module.configure_model()
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gates = zero_convolution_gates(tuple(named))
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        module.example_losses(make_batch()).mean().backward()
        weights = {name: float(p.detach().norm()) for name, p in named.items()}
        zero = {name for name, p in named.items() if p.grad is None or not p.grad.any()}
        expected = {name for name, before in gates.items() if all(weights[gate] == 0 for gate in before)}
        if step == 0:
            assert zero >= expected and {n for n in zero - expected if not n.endswith("bias")} == set()
        hint = {name for name in named if "cond_embedding" in name and "conv_out" not in name}
        assert hint <= zero or step > 1
        optimizer.step()


# Conditions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "channels"), [("canny", 1), ("lineart", 1), ("tile", 3), ("inpaint", 4)])
def test_each_condition_trains(sd: str, tmp_path: Path, name: str, channels: int) -> None:
    module = ControlNetTraining(sd, conditions=name, **QUICK | {"max_train_steps": 1})
    module.configure_model()
    batch = make_batch()
    made = module.make_conditions(batch["pixel_values"])
    assert made is not None and made.dtype == torch.uint8 and made.shape == (2, channels, SIDE, SIDE)
    assert float(made.float().std()) > 0
    shown = module.conditioning(batch)
    assert shown.shape == (2, 3, SIDE, SIDE)
    assert torch.equal(module.conditioning({"conditioning": made}), shown)  # cached as bytes: the same values
    if name == "inpaint":
        hidden = shown[:, 0] == -1
        assert 0.05 < float(hidden.float().mean()) < 0.6
        assert torch.equal(shown, module.conditioning(batch))
    else:
        assert float(shown.min()) >= 0 and float(shown.max()) <= 1
    assert all(math.isfinite(loss) for loss in fit(module, tmp_path))


class Halved:
    """A condition by class path."""

    def __call__(self, pictures_B3HW: Tensor) -> Tensor:
        return pictures_B3HW / 2


class TooBright(Halved):
    def __call__(self, pictures_B3HW: Tensor) -> Tensor:
        return pictures_B3HW * 3


def test_a_class_path_makes_conditions(sd: str) -> None:
    module = ControlNetTraining(sd, conditions=f"{__name__}.Halved", **QUICK)
    module.configure_model()
    batch = make_batch()
    wanted = ((batch["pixel_values"] / 2 + 0.5) / 2 * 255).round() / 255
    torch.testing.assert_close(module.conditioning(batch), wanted)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cany", r"must be canny, lineart, tile, inpaint, folder or a class path such as my\.Depth, got 'cany'"),
        ("nowhere.Depth", "cannot be imported"),
        (f"{__name__}.TooBright", r"values outside 0\.\.1"),
    ],
)
def test_conditions_that_cannot_be_are_one_sentence(sd: str, name: str, said: str) -> None:
    def show() -> Tensor:
        module = ControlNetTraining(sd, conditions=name, **QUICK)
        module.configure_model()
        return module.conditioning(make_batch())

    with pytest.raises(ModelError, match=said) as raised:
        show()
    assert "\n" not in str(raised.value)


def test_thresholds_out_of_order_are_refused(sd: str) -> None:
    with pytest.raises(ModelError, match="two numbers 0 <= low <= high"):
        ControlNetTraining(sd, canny_thresholds=(0.3, 0.1))


def test_colour_where_one_channel_is_wanted_names_the_picture() -> None:
    grey = torch.randint(0, 255, (2, 1, 8, 8), dtype=torch.uint8).expand(-1, 3, -1, -1).clone()
    assert conditions.from_bytes(grey, 1).shape == (2, 1, 8, 8)
    grey[1, 0, 3, 3] ^= 255
    with pytest.raises(ModelError, match=r"the condition of b\.png is in colour"):
        conditions.from_bytes(grey, 1, ["a.png", "b.png"])


def test_cached_conditions_are_those_of_the_cached_latents_pictures(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "resolution": 64, "train_batch_size": 8, "num_workers": 0, "random_flip": True, "validation_split": 0.9,
        "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    module = ControlNetTraining("embedded:sd", **QUICK)
    module.configure_model()
    plain = ImageCaptionData("embedded:prior", **settings)
    cached = ImageCaptionData("embedded:prior", cache_latents=True, **settings)
    plain.prepare()
    cached.prepare(module)
    for first, second in zip(plain.loader(), cached.loader(), strict=True):
        assert first["names"] == second["names"] and "pixel_values" not in second
        assert second["conditioning"].dtype == torch.uint8 and second["conditioning"].shape[1] == 1
        assert torch.equal(module.conditioning(first), module.conditioning(second))
    other = ControlNetTraining("embedded:sd", canny_thresholds=(0.2, 0.4), **QUICK)
    other.configure_model()
    assert other.encoder_identity() != module.encoder_identity()


def test_conditions_that_are_files_need_the_word_folder_and_the_word_needs_files(tmp_path: Path, sd: str) -> None:
    data = ImageCaptionData("embedded:prior", resolution=64, num_workers=0, cache_dir=str(tmp_path))
    with pytest.raises(ModelError, match=r"conditions: folder needs data\.init_args\.conditioning_data_dir"):
        fit(ControlNetTraining(sd, conditions="folder", **QUICK), tmp_path, data=data)
    data = ImageCaptionData(
        "embedded:prior", resolution=64, num_workers=0, cache_dir=str(tmp_path),
        conditioning_data_dir=str(resolve("embedded:prior")),
    )  # fmt: skip
    with pytest.raises(ModelError, match="conditions is canny; set conditions: folder"):
        fit(ControlNetTraining(sd, **QUICK), tmp_path, data=data)
    losses = fit(
        ControlNetTraining("embedded:sd", conditions="folder", **QUICK | {"max_train_steps": 1}), tmp_path, data=data
    )
    assert all(math.isfinite(loss) for loss in losses)


# The reward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_one_step_finds_the_clean_latents_of_a_right_prediction(kind: str) -> None:
    schedule = DDPMScheduler(prediction_type=kind)
    latents, noise = torch.randn(3, 4, 8, 8), torch.randn(3, 4, 8, 8)
    timesteps = torch.tensor([0, 150, 900])
    noisy = schedule.add_noise(latents, noise, timesteps)
    target = training_target(schedule, latents, noise, timesteps)
    torch.testing.assert_close(predict_latents(schedule, noisy, target, timesteps), latents, atol=1e-4, rtol=1e-3)


def test_the_reward_counts_edges_at_low_timesteps_and_its_gradient_passes_the_decoder(sd: str) -> None:
    module = ControlNetTraining(sd, **QUICK)
    module.configure_model()
    vae, clean = module.loaded().vae, torch.randn(3, 4, 16, 16)
    drawn = (clean + 0.1 * torch.randn_like(clean)).requires_grad_(True)
    timesteps = torch.tensor([10, 200, 201])
    losses = edge_losses(vae, clean, drawn, timesteps, 200)
    assert (losses[:2] > 0).all() and losses[2] == 0
    assert edge_losses(vae, clean, clean, timesteps, 200).abs().max() == 0
    assert edge_losses(vae, clean, drawn, timesteps, 5).abs().max() == 0
    losses.sum().backward()
    assert drawn.grad is not None and drawn.grad[:2].abs().amax() > 0 and drawn.grad[2].abs().amax() == 0
    assert all(p.grad is None for p in vae.parameters())


def test_without_weight_or_before_its_step_the_reward_changes_no_bit(sd: str, tmp_path: Path) -> None:
    results = []
    for options in (
        {},
        {"reward_weight": 5.0, "reward_start_step": 9},
        {"reward_weight": 5.0, "reward_max_timestep": 999},
    ):
        torch.manual_seed(0)
        module = ControlNetTraining(sd, **QUICK | options)
        results.append(fit(module, tmp_path))
    assert results[0] == results[1] != results[2]
    assert results[2][0] > results[0][0]
    with pytest.raises(ModelError, match="reward_weight must not be negative"):
        ControlNetTraining(sd, reward_weight=-1.0)


# What does not fit --------------------------------------------------------------------------------------------------


def test_a_controlnet_of_another_family_or_autoencoder_is_one_sentence(sd: str, sdxl: str, tmp_path: Path) -> None:
    fit(ControlNetTraining(sd, **QUICK | {"max_train_steps": 1}), tmp_path / "run")
    of_sd = str(tmp_path / "run" / "edges")
    with pytest.raises(ModelError, match="is a ControlNet of another family: its cross_attention_dim is 16"):
        ControlNetTraining(sdxl, controlnet_model_name_or_path=of_sd).configure_model()
    unet = StableDiffusionPipeline.from_pretrained(sd, safety_checker=None).unet
    ControlNetModel.from_unet(unet).save_pretrained(tmp_path / "eight")
    with pytest.raises(ModelError, match=r"shrinks conditions by 8, and the autoencoder of .* pictures by 2"):
        ControlNetTraining(sd, controlnet_model_name_or_path=str(tmp_path / "eight")).configure_model()
    with pytest.raises(ModelError, match="does not load as a ControlNet"):
        ControlNetTraining(sd, controlnet_model_name_or_path=str(tmp_path)).configure_model()


def test_without_conditions_to_show_a_sample_is_refused(sd: str) -> None:
    with pytest.raises(ModelError, match="draws what it is shown"):
        ControlNetTraining(sd, **QUICK).sample(["a red cup"], [0])
