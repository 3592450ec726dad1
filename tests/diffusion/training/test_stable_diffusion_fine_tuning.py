"""StableDiffusionFineTuning through real Trainer fits: what is trained, what is saved, and that diffusers agrees."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F

from fakes.models.pipelines import make_batch, make_pipeline
from fakes.runs.seeded_fits import fit, same
from lightning_aigc.callbacks import GradientHealthMonitor
from lightning_aigc.diffusion import StableDiffusionFineTuning, StableDiffusionLoRA
from lightning_aigc.diffusion.pipeline.tensor_stream import DeferredTensor, write_tensors
from lightning_aigc.diffusion.training.full_fine_tuning import covers
from lightning_aigc.diffusion.training.optimizer_in_backward import round_stochastically_
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ConfigError, ModelError

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]

QUICK = {"num_inference_steps": 2, "learning_rate": 1e-3, "max_train_steps": 3}


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sd")))


@pytest.fixture(scope="module")
def sd2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With the text encoder's activation that tells OpenCLIP's from CLIP's."""
    folder = make_pipeline(tmp_path_factory.mktemp("sd2"))
    file = folder / "text_encoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "gelu"}))
    return str(folder)


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sdxl"), sdxl=True, second_width=24))


def trained(module: LightningModule) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def diffusers_losses(folder: str, batch: dict[str, Any], steps: int) -> list[float]:
    """diffusers' train_text_to_image.py: its loop, without a loader, accelerate and logging."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    unet, vae, encoder = pipeline.unet, pipeline.vae, pipeline.text_encoder
    schedule = DDPMScheduler.from_config(pipeline.scheduler.config)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3, weight_decay=1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 + step)
        latents = vae.encode(batch["pixel_values"]).latent_dist.sample() * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, schedule.config.num_train_timesteps, (len(latents),))
        noisy = schedule.add_noise(latents, noise, timesteps)
        tokens = pipeline.tokenizer(batch["captions"], padding="max_length", truncation=True, return_tensors="pt")
        hidden = encoder(tokens.input_ids, return_dict=False)[0].detach()
        loss = F.mse_loss(unet(noisy, timesteps, hidden, return_dict=False)[0].float(), noise.float())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_losses_are_those_of_diffusers_own_loop(tmp_path: Path) -> None:
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    batch = make_batch(["a red mug", "a zorp teapot"]) | {"pixel_values": pixels}
    module = StableDiffusionFineTuning("embedded:sd", **QUICK)
    wanted = diffusers_losses(str(resolve("embedded:sd")), batch, 3)
    assert fit(module, tmp_path, batch=batch) == pytest.approx(wanted, abs=1e-6)


# What is trained ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (["unet"], {"unet."}),
        (["text_encoder"], {"text_encoders."}),
        (["unet", "text_encoder"], {"unet.", "text_encoders."}),
        (["unet.*attn2*"], {"unet."}),
    ],
)
def test_only_the_parts_that_were_named_are_trained(
    sd: str, tmp_path: Path, patterns: list[str], wanted: set[str]
) -> None:
    module = StableDiffusionFineTuning(sd, trained_parts=patterns, **QUICK)
    module.configure_model()
    assert module.components is not None
    parts = {"unet": module.components.denoiser, "text_encoders.0": module.components.text_encoders[0]}
    before = {f"{part}.{n}": p.detach().clone() for part, m in parts.items() for n, p in m.named_parameters()}
    chosen = trained(module)
    assert {name[: name.index(".") + 1] for name in chosen} == wanted
    if "unet.*attn2*" in patterns:
        assert all("attn2" in name for name in chosen)
    fit(module, tmp_path)
    after = {f"{part}.{n}": p.detach() for part, m in parts.items() for n, p in m.named_parameters()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    unmoved = {name for name in chosen if "k_proj.bias" in name or "embedding" in name}  # softmax ignores a key's bias
    assert moved - chosen.keys() == set()
    assert chosen.keys() - unmoved - moved == set()


def test_sdxl_leaves_frozen_what_it_does_not_read(sdxl: str, tmp_path: Path) -> None:
    module = StableDiffusionFineTuning(sdxl, trained_parts=["text_encoder*"], **QUICK)
    fit(module, tmp_path)
    assert module.components is not None
    first = {n for n, p in module.components.text_encoders[0].named_parameters() if not p.requires_grad}
    assert first and all("layers.1." in name or "final_layer_norm" in name for name in first)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None or not parameter.requires_grad, name


def test_a_trained_text_encoder_is_read_in_autocast_without_gradients_too(sdxl: str) -> None:
    """`zero_3` gathers the trained layers in bfloat16, and the frozen last one stays in float32."""
    module = StableDiffusionFineTuning(sdxl, trained_parts=["text_encoder*"], **QUICK)
    for parameter in (p for encoder in module.loaded().text_encoders for p in encoder.parameters()):
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        texts = module.encoders.condition({"captions": ["a red cup"]}, with_gradients=False)
    assert texts["prompt_embeds"].isfinite().all() and not texts["prompt_embeds"].requires_grad


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["unet.atn2"], "'unet.atn2' covers no weight of"),
        (["text_encoder_3"], "text_encoder"),
        ("unet", r"wanted a list of strings or None; write \['unet'\]"),
        ([], "must be a list"),
    ],
)
def test_a_pattern_that_covers_nothing_is_one_sentence(sd: str, patterns: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said) as raised:
        StableDiffusionFineTuning(sd, trained_parts=patterns).configure_model()
    assert "\n" not in str(raised.value)


def test_a_pattern_matches_names_and_the_modules_above_them() -> None:
    name = "unet.down_blocks.0.attentions.1.attn2.to_k.weight"
    assert all(covers(p, name) for p in ("unet", "unet.*attn2*", "*to_k*", "unet.down_blocks.0", name))
    assert not any(covers(p, name) for p in ("une", "attn2", "unet.up_blocks*", "text_encoder*"))


def test_a_packed_base_is_refused(sd: str) -> None:
    with pytest.raises(ModelError, match=r"base_quantization: int8 .* DiffusionLoRA"):
        StableDiffusionFineTuning(sd, base_quantization="int8")


@pytest.mark.parametrize(("precision", "frozen"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_what_is_trained_starts_from_every_pretrained_bit(
    sd: str, tmp_path: Path, precision: str, frozen: torch.dtype
) -> None:
    module = StableDiffusionFineTuning(sd, learning_rate=1e-3, max_train_steps=1, lr_warmup_steps=10)
    fit(module, tmp_path, precision=precision)  # warm-up: the first step's rate is zero
    assert module.components is not None
    pretrained = StableDiffusionPipeline.from_pretrained(sd, safety_checker=None).unet.state_dict()
    assert same(pretrained, dict(module.components.denoiser.state_dict()))
    assert module.components.text_encoders[0].dtype == frozen
    assert bool(torch.isfinite(module.sample(["a red cup"], [0])).all())


# Files --------------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_a_base_is_one_sentence(sd: str, tmp_path: Path) -> None:
    module = StableDiffusionFineTuning(sd, trained_parts=["unet"], output_name="mine", **QUICK)
    fit(module, tmp_path)
    lora = StableDiffusionLoRA(sd, rank=2)
    lora.configure_model()
    lora.save_lora(tmp_path / "lora.safetensors")
    for file, words in (
        ("mine", "weights of other sizes than the published.*give the model's diffusers folder"),
        ("lora", "is a LoRA"),
    ):
        with pytest.raises(ModelError, match=words):
            StableDiffusionLoRA(str(tmp_path / f"{file}.safetensors")).configure_model()


@pytest.mark.parametrize(("family", "precision"), [("sd", "bf16-mixed"), ("sd2", "32-true"), ("sdxl", "32-true")])
def test_the_folder_and_the_single_file_load_in_diffusers_with_equal_bits(
    family: str, precision: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(family)
    patterns = ["unet"] + (["text_encoder*"] if precision == "32-true" else [])
    module = StableDiffusionFineTuning(source, trained_parts=patterns, use_ema=True, output_name="mine", **QUICK)
    fit(module, tmp_path, precision=precision)
    kind: Any = StableDiffusionXLPipeline if family == "sdxl" else StableDiffusionPipeline
    extra = {} if family == "sdxl" else {"safety_checker": None}
    before = kind.from_pretrained(source, **extra)
    folder = kind.from_pretrained(tmp_path / "mine", **extra)
    single = kind.from_single_file(
        str(tmp_path / "mine.safetensors"), config=str(tmp_path / "mine"), local_files_only=True
    )
    parts = module.loaded()
    with module.averaged_weights():
        unet = {name: tensor.clone() for name, tensor in parts.denoiser.state_dict().items()}
        encoders = [dict(encoder.state_dict()) for encoder in parts.text_encoders]
        for got in (folder, single):
            assert same(unet, dict(got.unet.state_dict()))
            for name, encoder in zip(("text_encoder", "text_encoder_2"), encoders, strict=False):
                wanted = encoder if precision == "32-true" else dict(getattr(before, name).state_dict())
                assert same(wanted, dict(getattr(got, name).state_dict()))
            assert same(dict(before.vae.state_dict()), dict(got.vae.state_dict()))
    assert not same(dict(before.unet.state_dict()), unet)
    assert not same(unet, dict(parts.denoiser.state_dict()))  # the file has the average


def test_files_can_be_saved_in_half_precision(sd: str, tmp_path: Path) -> None:
    module = StableDiffusionFineTuning(sd, save_dtype="float16", output_name="half", **QUICK)
    fit(module, tmp_path)
    from safetensors.torch import load_file

    assert {t.dtype for t in load_file(tmp_path / "half.safetensors").values()} == {torch.float16}
    folder = load_file(tmp_path / "half" / "unet" / "diffusion_pytorch_model.safetensors")
    assert module.unet is not None
    assert all(torch.equal(folder[n], t.half()) for n, t in module.unet.state_dict().items())


def test_a_file_is_written_with_one_tensor_in_memory(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def make(number: int) -> Tensor:
        nonlocal most
        tensor = torch.full((64, 64), float(number))
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    tensors = {
        str(n): DeferredTensor((64, 64), torch.float16 if n % 2 else torch.float32, lambda n=n: make(n))  # type: ignore[misc]
        for n in range(12)
    }
    write_tensors(tmp_path / "model.safetensors", tensors)
    from safetensors.torch import load_file

    loaded = load_file(tmp_path / "model.safetensors")
    assert {name: (t.dtype, float(t.mean())) for name, t in loaded.items()} == {
        name: (t.dtype, float(name)) for name, t in tensors.items()
    }
    assert most == 1


# Checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"use_ema": True}, {"optimizer_in_backward": True}])
def test_a_resumed_run_ends_in_the_same_bits(sd: str, tmp_path: Path, options: dict[str, Any]) -> None:
    arguments = QUICK | options | {"max_train_steps": 4, "trained_parts": ["unet.*attn*", "text_encoder"]}
    whole = StableDiffusionFineTuning(sd, **arguments)
    losses = fit(whole, tmp_path / "whole")
    half = StableDiffusionFineTuning(sd, **(arguments | {"max_train_steps": 2}))
    fit(half, tmp_path, ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="two"))
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
    assert same(saved["state_dict"], trained(half))
    again = StableDiffusionFineTuning(sd, **arguments)
    assert fit(again, tmp_path / "again", ckpt=str(tmp_path / "two.ckpt")) == losses[2:]
    assert same(trained(whole), trained(again))


def test_a_checkpoint_of_other_parts_is_refused(sd: str, tmp_path: Path) -> None:
    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="two")
    fit(StableDiffusionFineTuning(sd, **(QUICK | {"max_train_steps": 2})), tmp_path, keep)
    other = StableDiffusionFineTuning(sd, trained_parts=["text_encoder"], **QUICK)
    with pytest.raises(ModelError, match="use the trained_parts"):
        fit(other, tmp_path, ckpt=str(tmp_path / "two.ckpt"))


# The optimizer in backward ------------------------------------------------------------------------------------------


class MostGradients(Callback):
    """Counts how many gradients exist at once, and after the step."""

    def __init__(self) -> None:
        self.most = self.left = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameters = [p for p in pl_module.parameters() if p.requires_grad]

        def count(_: Any) -> None:
            self.most = max(self.most, sum(p.grad is not None for p in parameters))

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(count)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.left = max(self.left, sum(p.grad is not None for p in pl_module.parameters()))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
def test_the_step_in_backward_gives_the_bits_of_the_step_after_it(
    sd: str, tmp_path: Path, name: str, schedule: str
) -> None:
    results, counts = [], MostGradients()
    for in_backward in (False, True):
        module = StableDiffusionFineTuning(
            sd,
            optimizer=lambda p: getattr(torch.optim, name)(p, lr=1e-3),
            optimizer_in_backward=in_backward,
            lr_scheduler=schedule,
            **QUICK,
        )
        losses = fit(module, tmp_path, *([counts] if in_backward else []))
        results.append((losses, trained(module)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])
    assert counts.most == 0 and counts.left == 0  # hooks run in order: ours has freed it already


def test_bfloat16_weights_move_on_the_average_below_their_resolution(sd: str, tmp_path: Path) -> None:
    value = torch.full((20000,), 1.0 + 2.0**-9)  # a quarter of bfloat16's step above 1
    target = torch.empty(20000, dtype=torch.bfloat16)
    torch.manual_seed(0)
    round_stochastically_(target, value)
    assert set(target.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float(target.float().mean()) == pytest.approx(1.0 + 2.0**-9, abs=2e-4)
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    round_stochastically_(kept := torch.empty(4, dtype=torch.bfloat16), ends)
    assert torch.equal(kept.float().nan_to_num(7), ends.nan_to_num(7))

    small = {"learning_rate": 1e-6, "max_train_steps": 3, "num_inference_steps": 2}
    moved = []
    for in_backward in (False, True):
        module = StableDiffusionFineTuning(sd, optimizer_in_backward=in_backward, **small)  # type: ignore[arg-type]
        fit(module, tmp_path, precision="bf16-true")
        assert module.unet is not None
        dtype = torch.bfloat16 if in_backward else torch.float32  # only stochastic rounding trains bfloat16 weights
        start = StableDiffusionPipeline.from_pretrained(sd, safety_checker=None, dtype=dtype).unet
        weights = dict(start.named_parameters())["conv_in.weight"]
        now = module.unet.conv_in.weight
        assert now.dtype == dtype
        moved.append(float((now != weights).float().mean()))
    assert moved[0] > 0.9 and 0 < moved[1] < 0.9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches: 2"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val: 1.0"),
        ({"callbacks": [GradientHealthMonitor(every_n_steps=1)]}, "GradientHealthMonitor"),
    ],
)
def test_what_needs_all_gradients_is_refused_in_one_sentence(
    sd: str, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    module = StableDiffusionFineTuning(sd, optimizer_in_backward=True, **QUICK)
    with pytest.raises(ConfigError, match=said) as raised:
        fit(module, tmp_path, **options)
    assert "\n" not in str(raised.value) and "optimizer_in_backward: false" in str(raised.value)


def test_several_ranks_are_refused(sd: str) -> None:
    module = StableDiffusionFineTuning(sd, optimizer_in_backward=True, **QUICK)
    module.configure_model()
    module._trainer = Trainer(devices=2, accelerator="cpu", strategy="ddp", logger=False)
    with pytest.raises(ConfigError, match="there are 2 ranks"):
        module.configure_optimizers()
