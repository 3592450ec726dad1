"""The plugin around a real U-Net with LoRA: every precision and memory level trains, and nothing stays behind."""

from __future__ import annotations

import copy
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.models.pipelines import SIDE, make_batch, make_pipeline
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*in eval mode at the start"),  # the frozen parts, on purpose
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo's own look at every tensor
]
STEPS = 3
CLIPPED = 1e-4
"""A norm that every step's gradient exceeds."""
LEVELS = ("balanced", "lean", "max")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "bf16-forward-fp16-backward")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sd")))


def make_module(pipeline: str, **arguments: Any) -> StableDiffusionLoRA:
    torch.manual_seed(0)
    return StableDiffusionLoRA(pipeline, rank=4, learning_rate=1e-3, max_train_steps=STEPS, **arguments)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"]))


def fit(
    module: StableDiffusionLoRA, plugin: FusedBackwardPrecision, folder: Path, **options: Any
) -> tuple[Trainer, list[float]]:
    losses = Losses()
    module.configure_callbacks = lambda: []  # type: ignore[method-assign]  # a report would take a third of the time
    trainer = Trainer(
        **{
            "default_root_dir": str(folder),
            "accelerator": "cpu",
            "max_epochs": -1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [losses],
            "plugins": [plugin],
        }
        | options
    )
    torch.manual_seed(1)
    trainer.fit(module, DataLoader([make_batch(seed=seed) for seed in range(2)], batch_size=None))  # type: ignore[arg-type]
    return trainer, losses.values


def trained(module: StableDiffusionLoRA) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def with_own_forward(module: nn.Module) -> list[str]:
    """Names of the modules whose forward was replaced."""
    return [name for name, m in module.named_modules() if "forward" in vars(m)]


@pytest.mark.parametrize(
    ("precision", "memory"),
    [*((precision, "lean") for precision in PRECISIONS), ("bf16-mixed", "balanced"), ("16-mixed", "max")],
)
def test_every_precision_and_level_trains_close_to_off_and_leaves_no_forward_behind(
    precision: str, memory: str, pipeline: str, tmp_path: Path, lines: list[str]
) -> None:
    module, reference = make_module(pipeline), make_module(pipeline)
    _, losses = fit(module, FusedBackwardPrecision(precision, memory=memory), tmp_path)
    stock = "bf16-mixed" if precision == "bf16-forward-fp16-backward" else precision
    _, expected = fit(reference, FusedBackwardPrecision(stock, memory="off"), tmp_path)
    # Relative error of one rounding, 2^-8 in bfloat16 and 2^-11 in float16, through a U-Net of a few layers.
    tolerance = {"32-true": 1e-5, "16-mixed": 1e-2}.get(precision, 4e-2)
    assert losses == pytest.approx(expected, rel=tolerance)
    assert list(module.state_dict()) == list(reference.state_dict())
    ours, theirs = trained(module), trained(reference)
    assert any("lora_B" in name and value.abs().max() > 0 for name, value in ours.items())  # they begin at zero
    assert all(torch.isfinite(value).all() and value.dtype == theirs[name].dtype for name, value in ours.items())
    assert with_own_forward(module) == []
    assert len(lines) == 1
    assert lines[0].startswith(f"memory={memory}: swapped ")


def test_our_own_average_works_and_is_saved(pipeline: str, tmp_path: Path) -> None:
    module = make_module(pipeline, use_ema=True)
    trainer, _ = fit(module, FusedBackwardPrecision("bf16-mixed"), tmp_path)
    current = trained(module)
    with module.averaged_weights():
        averaged = trained(module)
    assert any(not torch.equal(current[name], averaged[name]) for name in current)
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    assert "ema" in torch.load(path, weights_only=True)


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")  # it cannot shard; nor do we
def test_lightnings_weight_averaging_averages_a_swapped_module(pipeline: str, tmp_path: Path) -> None:
    averages = []
    for memory in ("lean", "off"):
        module = make_module(pipeline)
        plugin = FusedBackwardPrecision("32-true", memory=memory)
        fit(module, plugin, tmp_path, callbacks=[EMAWeightAveraging(decay=0.5)])
        # Lightning leaves the average in the module at the end.
        averages.append(list(trained(module).values()))
        assert with_own_forward(module) == []
    assert close(*averages, 1e-2)  # AdamW's first steps are signs: an entry near zero may go either way


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("16-mixed", 1e-2)])
def test_accumulation_and_clipping_give_the_gradients_that_off_gives(
    precision: str, tolerance: float, pipeline: str, tmp_path: Path
) -> None:
    """AdamW's steps would show the signs alone; what it got of the only step is still there after the fit.

    Measured: 9e-7 and 2.5e-3.
    """
    found = []
    for memory in ("lean", "off"):
        module = make_module(pipeline)
        trainer, losses = fit(
            module, FusedBackwardPrecision(precision, memory=memory), tmp_path, accumulate_grad_batches=2,
            gradient_clip_val=CLIPPED, max_steps=1,
        )  # fmt: skip
        assert trainer.global_step == 1 and len(losses) == 2
        found.append([p.grad for p in module.parameters() if p.grad is not None])
        assert torch.cat([g.flatten() for g in found[-1]]).norm().item() == pytest.approx(CLIPPED, rel=1e-2)
    assert close(*found, tolerance)


def test_pictures_can_be_sampled_in_the_middle_of_a_fit(pipeline: str, tmp_path: Path) -> None:
    class Draw(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            with torch.no_grad():
                pictures.extend(pl_module.sample(["a red cup"], [0]))

    pictures: list[Any] = []
    module = make_module(pipeline, num_inference_steps=2)
    fit(module, FusedBackwardPrecision("bf16-mixed"), tmp_path, callbacks=[Draw()])
    assert len(pictures) == STEPS


def test_a_fit_resumes_its_loss_scale_with_plain_types(pipeline: str, tmp_path: Path) -> None:
    trainer, _ = fit(make_module(pipeline), FusedBackwardPrecision("bf16-forward-fp16-backward"), tmp_path)
    buffer = io.BytesIO()
    torch.save(trainer._checkpoint_connector.dump_checkpoint(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert saved["FusedBackwardPrecision"]["scale"] > 0


def make_unet(lora: bool = True) -> UNet2DConditionModel:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=SIDE // 2,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=2,
        norm_num_groups=4,
        cross_attention_dim=16,
    )
    if lora:
        unet.requires_grad_(False)
        config = LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
        unet = inject_adapter_in_model(config, unet)
    return unet.train()


def call(unet: Any, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(2, 4, SIDE // 2, SIDE // 2, generator=generator)
    text = torch.randn(2, 7, 16, generator=generator)
    return unet(latents, torch.tensor([10, 500]), text).sample


def gradients(unet: Any) -> list[Tensor]:
    unet.zero_grad()
    call(unet).square().mean().backward()
    return [p.grad.clone() for p in unet.parameters() if p.requires_grad]


def close(found: list[Tensor], wanted: list[Tensor], relative: float) -> bool:
    """Whether the whole gradient is as near as that, in the Euclidean norm."""
    flat = torch.cat([g.flatten() for g in found]), torch.cat([g.flatten() for g in wanted])
    return bool((flat[0] - flat[1]).norm() <= relative * flat[1].norm())


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_gradients_are_those_of_the_unconverted_unet(memory: str, lora: bool) -> None:
    unet = make_unet(lora)
    wanted = gradients(unet)
    plugin = FusedBackwardPrecision("32-true", memory=memory)
    plugin.convert_module(unet)
    assert with_own_forward(unet)
    # Measured 1e-7 to 4e-7 relative; float32 has 6e-8.
    assert close(gradients(unet), wanted, 5e-6)
    plugin.teardown()
    assert all(torch.equal(a, b) for a, b in zip(gradients(unet), wanted, strict=True))


def flat_gradient(precision: str, memory: str, seed: int = 0, scale: float = 2.0**10) -> Tensor:
    """The gradient under this precision, its loss scale taken out again."""
    unet, plugin = make_unet(), FusedBackwardPrecision(precision, memory=memory)
    plugin.convert_module(unet)
    with plugin.forward_context():
        loss = call(unet, seed).square().mean()
    (loss * scale).backward()
    return torch.cat([p.grad.flatten() for p in unet.parameters() if p.requires_grad]) / scale


@pytest.mark.parametrize(
    ("precision", "stock"),
    [("bf16-mixed", "bf16-mixed"), ("16-mixed", "16-mixed"), ("bf16-forward-fp16-backward", "bf16-mixed")],
)
def test_half_precision_gradients_are_no_farther_from_float32_than_the_stock_plugins(
    precision: str, stock: str
) -> None:
    ratios = []
    for seed in range(9):  # rounding is random: single seeds give 0.2 to 2.4
        truth = flat_gradient("32-true", "off", seed)
        ours, theirs = flat_gradient(precision, "lean", seed), flat_gradient(stock, "off", seed)
        ratios.append(((ours - truth).norm() / (theirs - truth).norm()).item())
    assert statistics.median(ratios) < 1.3  # measured 0.95 for bf16-mixed, 1.01 for 16-mixed, 1.05 for fp16 backward


def test_fp16_backward_computes_other_products_than_bf16() -> None:
    ours, theirs = flat_gradient("bf16-forward-fp16-backward", "lean"), flat_gradient("bf16-mixed", "lean")
    assert not torch.equal(ours, theirs)
    assert not flat_gradient("bf16-forward-fp16-backward", "lean", scale=1e30).isfinite().all()
    assert flat_gradient("bf16-mixed", "lean", scale=1e30).isfinite().all()


@pytest.mark.parametrize("memory", LEVELS)
def test_a_disabled_adapter_stays_disabled(memory: str) -> None:
    unet = make_unet()
    with_lora = call(unet).detach()
    adapters = [m for m in unet.modules() if isinstance(m, BaseTunerLayer)]
    FusedBackwardPrecision("32-true", memory=memory).convert_module(unet)
    for layer in adapters:
        layer.enable_adapters(False)
    without = call(unet).detach()
    plain = make_unet()
    for layer in (m for m in plain.modules() if isinstance(m, BaseTunerLayer)):
        layer.enable_adapters(False)
    assert torch.allclose(without, call(plain), atol=1e-5)
    assert not torch.allclose(without, with_lora, atol=1e-3)


@pytest.mark.parametrize("memory", ["lean", *(pytest.param(m, marks=pytest.mark.long) for m in ("balanced", "max"))])
def test_a_converted_unet_can_be_compiled(memory: str) -> None:
    unet = make_unet()
    wanted = gradients(unet)
    FusedBackwardPrecision("32-true", memory=memory).convert_module(unet)
    compiled = torch.compile(unet, backend="aot_eager", fullgraph=True)
    assert close(gradients(compiled), wanted, 5e-6)


def test_a_converted_unet_of_the_right_dtype_is_not_cast_again() -> None:
    class Refusing(nn.Linear):
        def to(self, *_: Any, **__: Any) -> Any:
            raise AssertionError

    FusedBackwardPrecision("bf16-true").convert_module(Refusing(2, 2, dtype=torch.bfloat16))


def test_a_copy_of_a_converted_unet_is_one_of_its_own() -> None:
    unet = make_unet()
    plugin = FusedBackwardPrecision("32-true")
    plugin.convert_module(unet)
    other = copy.deepcopy(unet)
    with torch.no_grad():
        for p in unet.parameters():
            p.zero_()
    plugin.teardown()
    assert call(other).abs().sum() > 0
    assert with_own_forward(other) and not with_own_forward(unet)
    FusedBackwardPrecision("32-true", memory="off").convert_module(other)
    assert not with_own_forward(other)


def test_converting_again_or_inside_another_module_does_not_stack() -> None:
    unet = make_unet()
    wanted = gradients(unet)
    once = FusedBackwardPrecision("32-true").convert_module(unet)
    names = with_own_forward(once)
    FusedBackwardPrecision("32-true").convert_module(unet)
    assert with_own_forward(unet) == names
    outer = nn.ModuleDict({"unet": unet})
    plugin = FusedBackwardPrecision("32-true")
    plugin.convert_module(outer)
    assert with_own_forward(unet) == names
    assert close(gradients(unet), wanted, 5e-6)
    plugin.teardown()
    assert with_own_forward(unet) == []


def test_a_protect_pattern_that_covers_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="vae"):
        FusedBackwardPrecision("32-true", protect=["vae.decoder"]).convert_module(make_unet())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch's, where the first step is skipped
def test_an_overflow_inside_a_swapped_block_names_the_block(pipeline: str, tmp_path: Path, lines: list[str]) -> None:
    module = make_module(pipeline)

    class Poison(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            with torch.no_grad():
                name, block = next((n, m) for n, m in pl_module.named_modules() if type(m).__name__ == "ResnetBlock2D")
                poisoned.append(name)
                block.conv1.weight.fill_(6e4)

    poisoned: list[str] = []
    fit(module, FusedBackwardPrecision("16-mixed"), tmp_path, callbacks=[Poison()], max_steps=1)
    skipped = [line for line in lines if "skipped" in line and "swapped" not in line]
    assert len(skipped) == 1
    assert f"{poisoned[0]} (ResnetBlock2D) computed values in its forward pass that are not finite" in skipped[0]


def test_the_line_at_fit_start_is_plain_text(pipeline: str, tmp_path: Path, lines: list[str]) -> None:
    with pytest.warns(UserWarning, match=r"protect changes nothing where no gradient .* or remove protect"):
        fit(make_module(pipeline), FusedBackwardPrecision("bf16-mixed", protect=["*.mid_block"]), tmp_path)
    assert "\n" not in lines[0] and json.dumps(lines[0])
    assert "of" in lines[0] and "cpu" in lines[0]
