"""LoRA on a packed base through real fits: it learns, saves and resumes as on a whole base."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader

from fakes.models.pipelines import SIDE, assemble, make_batch
from fakes.processes.ranks import run_ranks
from fakes.runs.killed_trainings import KillAt, Killed
from lightning_aigc.callbacks import ExactSnapshot, GradientHealthMonitor, RunReport
from lightning_aigc.checkpoint import find_snapshots
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.diffusion.lora.merge import merge_into_pipeline
from lightning_aigc.diffusion.pipeline import quantized_base
from lightning_aigc.errors import ConfigError, ModelError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.report.record import read_run
from lightning_aigc_kernels.packed_weight import PackedWeight, packed_weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*in eval mode at the start"),  # the frozen parts, on purpose
]
STEPS = 4


def make_wide_pipeline(folder: Path, sdxl: bool = False) -> Path:
    """A random pipeline whose U-Net has layers large enough to pack."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "sample_size": SIDE // 2, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": 2,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 16,
    }  # fmt: skip
    if sdxl:
        shape |= {
            "cross_attention_dim": 32, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 16 + 6 * 8, "use_linear_projection": True,
        }  # fmt: skip
    assemble(folder, UNet2DConditionModel(**shape), sdxl).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_wide_pipeline(tmp_path_factory.mktemp("sd")))


def make_module(pipeline: str, kind: Any = "nf4", **arguments: Any) -> StableDiffusionLoRA:
    torch.manual_seed(0)
    options = {"rank": 4, "learning_rate": 1e-2, "max_train_steps": STEPS, "num_inference_steps": 2} | arguments
    return StableDiffusionLoRA(pipeline, base_quantization=kind, **options)


def fit(
    module: StableDiffusionLoRA,
    folder: Path,
    *callbacks: Callback,
    memory: Any = "lean",
    precision: Any = "bf16-mixed",
    ckpt_path: Any = None,
    **options: Any,
) -> Trainer:
    module.configure_callbacks = lambda: []  # type: ignore[method-assign]
    trainer = Trainer(
        default_root_dir=str(folder), accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        plugins=[FusedBackwardPrecision(precision, memory=memory)], **options,
    )  # fmt: skip
    torch.manual_seed(1)
    batches = [make_batch(seed=seed) for seed in range(2)]
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    return trainer


def trained(module: StableDiffusionLoRA) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        *(("nf4", "off"), ("nf4", "lean"), ("nf4", "max"), ("int8", "lean"), ("nf4-all", "max")),
        *(pytest.param("int8", memory, marks=pytest.mark.long) for memory in ("off", "max")),
        *(pytest.param("nf4-all", memory, marks=pytest.mark.long) for memory in ("off", "lean")),
    ],
)
def test_a_lora_learns_beside_the_packed_base_and_fits_the_source_pipeline(
    kind: str, memory: str, sd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = make_module(sd, kind)
    watch = GradientHealthMonitor(every_n_steps=1, page=False)
    trainer = fit(module, tmp_path, watch, memory=memory)
    assert module.packed_base is not None and module.packed_base.packed > 20
    packed = dict(packed_weights(module))
    assert {w.kind for w in packed.values()} == (
        {"int8"} if kind == "int8" else {"nf4", "int8"} if kind == "nf4" else {"nf4"}
    )
    assert all(w.dtype == torch.bfloat16 for w in packed.values())
    assert any("lora_B" in name and value.abs().max() > 0 for name, value in trained(module).items())
    assert not [alert for alert in watch.alerts if alert.check == "frozen_moved"]
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
    assert all("lora_" in name for name in checkpoint["state_dict"])
    assert checkpoint["base_quantization"] == {"kind": kind, "digest": module.packed_base.digest}
    module.save_lora(tmp_path / "lora.safetensors")
    pipeline = StableDiffusionPipeline.from_pretrained(sd, safety_checker=None)
    pipeline.load_lora_weights(str(tmp_path / "lora.safetensors"))
    assert any("lora_A" in name for name, _ in pipeline.unet.named_parameters())


BUDGET = {"target_mib": 0.8}
"""Budget between 0.6 MiB in NF4 and 1.1 in int8."""


def test_a_budget_gives_each_weight_its_bits_and_resumes_to_the_same_bits(
    sd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed, resumed = (make_module(sd, BUDGET) for _ in range(3))
    fit(whole, tmp_path / "whole", ExactSnapshot(1))
    assert whole.packed_base is not None and whole.packed_base.bytes_after <= BUDGET["target_mib"] * 2**20
    assert {weight.kind for _, weight in packed_weights(whole)} == {"int8", "nf4"}
    assert {weight.kind for name, weight in packed_weights(whole) if "text" in name} <= {"int8"}
    snapshots = ExactSnapshot(1)
    with pytest.raises(Killed):
        fit(killed, tmp_path, snapshots, KillAt(2))
    snapshots.abandon()
    fit(resumed, tmp_path, ExactSnapshot(1), ckpt_path="latest")
    assert resumed.packed_base.digest == whole.packed_base.digest  # type: ignore[union-attr]
    assert all(torch.equal(value, trained(whole)[name]) for name, value in trained(resumed).items())


def test_a_budget_is_measured_on_the_pictures_of_the_data_module(sd: str, tmp_path: Path) -> None:
    asked: list[int] = []

    def example_batch(count: int) -> dict[str, Any]:
        asked.append(count)
        return make_batch(seed=1)

    trainer = SimpleNamespace(
        precision="32-true", is_global_zero=True, datamodule=SimpleNamespace(example_batch=example_batch),
        strategy=SimpleNamespace(broadcast=lambda value: value, root_device=torch.device("cpu")),
        state=SimpleNamespace(fn=TrainerFn.FITTING),
    )  # fmt: skip
    without, shown = make_module(sd, BUDGET), make_module(sd, BUDGET)
    shown._trainer = trainer  # type: ignore[assignment]
    states = [torch.get_rng_state()]
    for module in (without, shown):
        torch.set_rng_state(states[0])
        module.loaded()
        states.append(torch.get_rng_state())
    assert asked == [8]
    whole = make_module(sd, None)
    torch.set_rng_state(states[0])
    whole.loaded()
    assert all(torch.equal(state, torch.get_rng_state()) for state in states[1:])  # equal LoRAs, whatever is packed


@pytest.mark.parametrize(("free_mib", "wanted"), [(1000, "meta"), (1, "cpu")])
def test_a_budget_is_measured_on_the_device_that_trains_where_the_base_fits(
    free_mib: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(mem_get_info=lambda device: (free_mib * 2**20, 0))
    monkeypatch.setattr(torch, "get_device_module", lambda device: free)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("meta")))
    device = quantized_base._measuring_device([torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)], trainer)
    assert device.type == wanted


def test_sdxl_gets_its_bits_from_pictures_that_it_draws_itself(tmp_path: Path) -> None:
    module = make_module(str(make_wide_pipeline(tmp_path / "sdxl", sdxl=True)), {"target_mib": 1.1})
    module.loaded()
    assert {weight.kind for _, weight in packed_weights(module)} == {"int8", "nf4"}


def test_the_report_has_the_scores_of_the_packed_and_of_the_full_precision_base(sd: str, tmp_path: Path) -> None:
    module = make_module(sd, "nf4-all", validation_prompts=["a red cup"])
    report = RunReport(clip_model="embedded:clip", num_images=2)
    fit(module, tmp_path, report)
    scores = read_run(tmp_path).scores["full_base_clip_t"]
    assert scores.before == read_run(tmp_path).scores["clip_t"].after and scores.before != scores.after
    assert report.summary["clip_t_on_full_precision_base"] == pytest.approx(sum(scores.after) / 2, abs=1e-4)
    assert "CLIP-T, packed → full-precision base" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(list(packed_weights(module))) == module.packed_base.packed  # type: ignore[union-attr]
    whole = make_module(sd, None)
    fit(whole, tmp_path / "whole")
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(trained(module)[name])
    with module.full_precision_base():
        assert not list(packed_weights(module))
        assert torch.equal(module.sample(["a red cup"], [3]), whole.sample(["a red cup"], [3]))


def test_a_source_that_is_gone_costs_the_score_and_not_the_run(tmp_path: Path) -> None:
    pipeline = make_wide_pipeline(tmp_path / "sd")
    module = make_module(str(pipeline), "int8", validation_prompts=["a red cup"])
    report = RunReport(clip_model="embedded:clip", num_images=1)

    class Vanish(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            (pipeline / "unet" / "diffusion_pytorch_model.safetensors").unlink()

    with pytest.warns(UserWarning, match="no score on the full-precision base: .* one of its parts does not load"):
        fit(module, tmp_path / "run", report, Vanish())
    assert "clip_t_on_full_precision_base" not in report.summary and report.summary["clip_t_after"] is not None
    assert len(list(packed_weights(module))) == module.packed_base.packed  # type: ignore[union-attr]


def test_exporting_merges_into_the_source_and_never_into_the_packed_base(sd: str, tmp_path: Path) -> None:
    module = make_module(sd, "nf4-all", learning_rate=1e-6)
    fit(module, tmp_path)
    module.save_lora(tmp_path / "lora.safetensors")
    merged = merge_into_pipeline(tmp_path / "lora.safetensors", sd, tmp_path / "merged")
    source, after = (UNet2DConditionModel.from_pretrained(Path(p) / "unet").state_dict() for p in (sd, merged))
    for name, value in source.items():  # steps of 1e-6: what moved is far less than a rounding to four bits
        assert (after[name] - value).abs().max() < 1e-4, name
    with pytest.raises(RuntimeError, match="would change a packed weight"):
        next(layer for layer in module.unet.modules() if hasattr(layer, "merge")).merge()  # type: ignore[union-attr]


def test_sampling_and_validation_run_on_the_packed_base_and_leave_it_packed(sd: str, tmp_path: Path) -> None:
    module = make_module(sd, "nf4")
    fit(module, tmp_path)
    before = {name: w.packed.clone() for name, w in packed_weights(module)}
    pictures = module.sample(["a red cup"], [0])
    assert pictures.isfinite().all()
    whole = make_module(sd, None)
    fit(whole, tmp_path)
    assert not torch.equal(whole.sample(["a red cup"], [0]), pictures)
    after = dict(packed_weights(module))
    assert after.keys() == before.keys() and all(torch.equal(after[n].packed, before[n]) for n in before)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "bf16-forward-fp16-backward"])
def test_every_precision_trains_and_none_unpacks(precision: str, sd: str, tmp_path: Path) -> None:
    module = make_module(sd, "nf4", gradient_checkpointing=precision == "16-mixed")
    fit(module, tmp_path, precision=precision)
    assert len(list(packed_weights(module))) == module.packed_base.packed  # type: ignore[union-attr]
    found = trained(module)
    assert all(value.isfinite().all() for value in found.values())
    assert any("lora_B" in name and value.abs().max() > 0 for name, value in found.items())


def test_sdxl_and_trained_text_encoders_are_packed_too(tmp_path: Path) -> None:
    pipeline = str(make_wide_pipeline(tmp_path / "sdxl", sdxl=True))
    module = make_module(pipeline, "nf4", train_text_encoder=True)
    fit(module, tmp_path)
    assert any(isinstance(w, PackedWeight) for w in module.unet.parameters())  # type: ignore[union-attr]
    module.save_lora(tmp_path / "lora.safetensors")
    StableDiffusionXLPipeline.from_pretrained(pipeline).load_lora_weights(str(tmp_path / "lora.safetensors"))


def test_resuming_gives_the_same_bits_and_another_base_is_refused(sd: str, tmp_path: Path) -> None:
    whole, killed, resumed = make_module(sd), make_module(sd), make_module(sd)
    fit(whole, tmp_path / "whole", ExactSnapshot(1))
    snapshots = ExactSnapshot(1)
    with pytest.raises(Killed):
        fit(killed, tmp_path, snapshots, KillAt(2))
    snapshots.abandon()  # the lock goes with a killed process; here the process lives on
    (snapshot, *_) = find_snapshots(tmp_path / "snapshots")
    assert snapshot.step < STEPS and snapshot.shared()["base_quantization"]["kind"] == "nf4"
    fit(resumed, tmp_path, ExactSnapshot(1), ckpt_path="latest")
    assert resumed.packed_base.digest == whole.packed_base.digest  # type: ignore[union-attr]
    assert all(torch.equal(value, trained(whole)[name]) for name, value in trained(resumed).items())
    assert not torch.equal(*(torch.cat([p.flatten() for p in trained(m).values()]) for m in (whole, killed)))
    other = make_wide_pipeline(tmp_path / "other")
    unet = UNet2DConditionModel.from_pretrained(other / "unet")
    unet.mid_block.resnets[0].conv1.weight.data[0, 0, 0, 0] += 1
    unet.save_pretrained(other / "unet")
    with pytest.raises(ModelError, match="was trained on another base: quantized as nf4, its bytes differ"):
        make_module(str(other)).on_load_checkpoint(snapshot.shared())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "int4"},
         "base_quantization must be null, one of int8, fp8, nf4, nf4-all, or .target_mib: 1500., got 'int4'"),
        ({"use_dora": True},
         "use_dora reads the base's weights .* set model.init_args.use_dora: false for plain LoRA, or"),
        ({"kind": None, "base_quantization_skip": ["conv_in"]},
         "base_quantization_skip does nothing without base_quantization"),
        ({"base_quantization_skip": "conv_in"},
         r"base_quantization_skip: got 'conv_in'; wanted a list of strings or None; write"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_one_sentence_before_weights_are_read(
    arguments: dict[str, Any], message: str, sd: str
) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        make_module(sd, **arguments)


def test_a_pattern_that_covers_nothing_is_named_when_the_base_is_loaded(sd: str) -> None:
    with pytest.raises(ConfigError, match="'conv_inn' covers no frozen layer; close names: conv_in"):
        make_module(sd, base_quantization_skip=["conv_inn"]).loaded()


def on_two_ranks(rank: int, pipeline: str, folder: str, strategy: str) -> tuple[dict[str, Tensor], int, int]:
    """The trained weights, and the bytes of frozen and of trained weights that DDP broadcast at its start."""
    import torch.distributed as dist
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_aigc.strategies import NPUSparseStrategy

    sent: list[Tensor] = []
    broadcast = dist._broadcast_coalesced

    def note(group: Any, tensors: list[Tensor], *rest: Any) -> None:
        sent.extend(tensors)
        broadcast(group, tensors, *rest)

    dist._broadcast_coalesced = note
    module = make_module(pipeline, "nf4")
    made = (DDPStrategy if strategy == "ddp" else NPUSparseStrategy)(process_group_backend="gloo")
    fit(module, Path(folder), strategy=made, devices=2, use_distributed_sampler=False)
    assert not any(isinstance(tensor, PackedWeight) for tensor in sent)
    packed = sum(weight.numel() for _, weight in packed_weights(module))
    return trained(module), sum(tensor.numel() for tensor in sent), packed


@pytest.mark.parametrize("strategy", ["ddp", "npu_sparse"])
def test_two_ranks_do_not_broadcast_packed_weights_and_agree(strategy: str, sd: str, tmp_path: Path) -> None:
    (mine, sent, packed), (theirs, *_) = run_ranks(on_two_ranks, 2, tmp_path, sd, str(tmp_path), strategy, gloo=False)
    trained_numbers = sum(value.numel() for value in mine.values())
    assert trained_numbers < sent < trained_numbers + 0.2 * packed  # norms, biases and the layers left whole
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
